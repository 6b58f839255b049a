"""Links of the pages, as they should read on the site.

On a code host a link to a file outside docs/ opens the file. The site has only the pages, so there
the file's path in the repository takes the place of the link; a file that does not exist is an
error. A link that is named by the file of another page is named by that page's title.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)\)")
PAGE = re.compile(r"\[([\w-]+\.md)\](?=\(\1[)#])")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return a page as mkdocs is to build it; mkdocs calls this."""
    return PAGE.sub(lambda link: f"[{_title(link[1])}]", OUTSIDE.sub(_path, markdown))


def _path(link: re.Match[str]) -> str:
    """Return the text of a link, and the file's path if the text does not say it."""
    text, path = link.groups()
    if not (ROOT / path).exists():
        raise FileNotFoundError(f"a page links to {path}, which does not exist")
    return f"`{path}`" if text == path else f"{text} (`{path}`)"


def _title(page: str) -> str:
    """Return the first heading of a page."""
    return (ROOT / "docs" / page).read_text().partition("\n")[0].removeprefix("# ")
