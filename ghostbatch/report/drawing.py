"""Draws declared figures to files, and makes the script that draws them on a page."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import vl_convert

from ghostbatch.files import atomic_file

Data = dict[str, list[Any]]
"""The columns of a table of values, by name; all have the same length."""

VEGA_LITE = "6.4"
NAME = "rows"
"""What figures call their data."""
HOVER = "hover"
"""What figures call the layer and the selection for the mouse."""


def draw_svg(spec: dict[str, Any], data: Data) -> str:
    """Return a figure without its mouse layer as SVG."""
    rows = [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]
    still = {**_without_mouse(spec), "background": "white", "datasets": {NAME: rows}}
    return vl_convert.vegalite_to_svg(still, vl_version=VEGA_LITE)


def draw_files(spec: dict[str, Any], data: Data, target: Path) -> None:
    """Draw a figure without its mouse layer to ``target`` with the endings .svg and .png."""
    svg = draw_svg(spec, data)
    with atomic_file(target.with_name(f"{target.name}.svg")) as file:
        file.write(svg.encode())
    with atomic_file(target.with_name(f"{target.name}.png")) as file:
        file.write(vl_convert.svg_to_png(svg, scale=2))


def _without_mouse(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a declaration, maybe one of panels, without its mouse layer."""
    if "spec" in spec:
        spec = {**spec, "spec": _without_mouse(spec["spec"])}
    kept: dict[str, Any] = {
        part: [each for each in spec[part] if each.get("name") != HOVER]
        for part in ("layer", "params")
        if part in spec
    }
    return {**spec, **kept}


class VegaScript:
    """Vega, Vega-Lite and vega-embed as one script; another process makes it, in a second or two.

    It begins when the object is made.
    """

    def __init__(self) -> None:
        code = f"import vl_convert as v; print(v.javascript_bundle(vl_version={VEGA_LITE!r}))"
        self._process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)

    def __enter__(self) -> "VegaScript":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.__exit__(None, None, None)

    def text(self) -> str:
        """Wait for the script; return it as it may stand in a page."""
        script, _ = self._process.communicate()
        if self._process.returncode:
            raise RuntimeError("vl-convert cannot bundle the scripts")
        return script.decode().replace("</script", r"<\/script")
