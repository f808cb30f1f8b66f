"""Draw docs/design/architecture.svg from architecture.toml; `make docs` runs it.

The source has boxes and arrows with their places. Nothing is laid out here, so equal sources
give equal bytes, and no tool is needed but Python.
"""

import tomllib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "design"
SOURCE = FOLDER / "architecture.toml"
PICTURE = FOLDER / "architecture.svg"
TEXT_PX, TITLE_PX, LINE_PX = 12, 14, 17
FILLS = {"process": "#e8f1fb", "objects": "#fdf3dd", "area": "#ffffff"}
CORNERS = {"process": 10, "objects": 0, "area": 4}
WIDTH_PER_PX = 0.58
"""About how wide a character of a sans-serif font is, as a part of its size."""

HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
width="{width}" height="{height}" font-family="Helvetica, Arial, sans-serif" fill="#222222">
<title>How rows move through Reef</title>
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" \
orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="#555555"/></marker></defs>
<rect width="{width}" height="{height}" fill="#ffffff"/>
"""


def load(source: Path = SOURCE) -> dict[str, Any]:
    """Return the boxes and arrows of a source."""
    return tomllib.loads(source.read_text())


def draw(picture: dict[str, Any]) -> str:
    """Return a picture as SVG: areas first, then arrows, then boxes, then labels."""
    boxes, arrows = picture["box"], picture["arrow"]
    areas = [box for box in boxes if box["kind"] == "area"]
    parts = [HEAD.format(width=picture["width"], height=picture["height"])]
    parts += [_box(box) for box in areas]
    parts += [_line(arrow) for arrow in arrows]
    parts += [_box(box) for box in boxes if box["kind"] != "area"]
    parts += [_label(arrow) for arrow in arrows if "label" in arrow]
    return "".join([*parts, "</svg>\n"])


def texts(box: dict[str, Any]) -> Iterator[tuple[str, int, int, int]]:
    """Yield each text of a box with its size and the place of its middle."""
    (x, y), (width, height) = box["at"], box["size"]
    lines = box.get("lines", [])
    if box["kind"] == "area":
        yield box["title"], TEXT_PX, *box["title_at"]
        return
    first = y + (height - LINE_PX * len(lines)) // 2 + TITLE_PX // 3
    yield box["title"], TITLE_PX, x + width // 2, first
    for number, line in enumerate(lines, start=1):
        yield line, TEXT_PX, x + width // 2, first + LINE_PX * number


def width_of(text: str, size: int) -> float:
    """Return about how wide a text is drawn."""
    return len(text) * size * WIDTH_PER_PX


def _box(box: dict[str, Any]) -> str:
    (x, y), (width, height), kind = box["at"], box["size"], box["kind"]
    dashes = ' stroke-dasharray="5 4"' if kind == "area" else ""
    rect = (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{CORNERS[kind]}" '
        f'fill="{FILLS[kind]}" stroke="#777777"{dashes}/>\n'
    )
    return rect + "".join(_text(*text) for text in texts(box))


def _text(text: str, size: int, middle: int, base: int) -> str:
    weight = ' font-weight="bold"' if size == TITLE_PX else ""
    place = f'x="{middle}" y="{base}" font-size="{size}" text-anchor="middle"{weight}'
    return f"<text {place}>{escape(text)}</text>\n"


def _line(arrow: dict[str, Any]) -> str:
    points = " ".join(f"{x},{y}" for x, y in arrow["points"])
    return f'<polyline points="{points}" fill="none" stroke="#555555" marker-end="url(#tip)"/>\n'


def _label(arrow: dict[str, Any]) -> str:
    x, y = arrow["label_at"]
    return f'<text x="{x}" y="{y}" font-size="{TEXT_PX}">{escape(arrow["label"])}</text>\n'


def main() -> None:
    """Draw the picture."""
    PICTURE.write_text(draw(load()))


if __name__ == "__main__":
    main()
