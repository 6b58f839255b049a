"""Examples in docstrings as code blocks of the API reference.

A docstring shows an example after ``>>>``, which Markdown takes for a quotation.
"""

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


class ExamplesAsCode(griffe.Extension):
    """Puts the lines from ``>>>`` to the next empty line between fences."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object; griffe calls this."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)
