"""As much SVG as the pictures of the documentation need: boxes, words, arrows, bars.

Coordinates are pixels from the upper left corner. Everything returns elements as text; `document`
puts them into a file that any browser shows without fonts or scripts from elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from html import escape

INK, SOFT, PAPER = "#24292f", "#57606a", "#ffffff"
BLUE, GREEN, AMBER, GREY = "#0969da", "#1a7f37", "#9a6700", "#d0d7de"
_DARK = {
    INK: "#e6edf3",
    SOFT: "#9198a1",
    PAPER: "#0d1117",
    BLUE: "#4493f8",
    GREEN: "#3fb950",
    AMBER: "#d29922",
    GREY: "#656c76",
}
"""The same colours for readers who prefer a dark page."""
_FONT = "font-family='Helvetica, Arial, sans-serif'"
_CHAR_PX = 0.56
"""Width of a character on average, in font sizes."""


_RULES = "".join(f"[fill='{a}']{{fill:{b}}}[stroke='{a}']{{stroke:{b}}}" for a, b in _DARK.items())
_STYLE = f"<style>@media (prefers-color-scheme:dark){{{_RULES}}}</style>"


@dataclass(frozen=True)
class Box:
    """A rectangle around its centre."""

    x: float
    y: float
    width: float
    height: float

    def edge_towards(self, x: float, y: float, gap: float = 4.0) -> tuple[float, float]:
        """Where a line from the centre to (x, y) leaves the box, and a little further."""
        dx, dy = x - self.x, y - self.y
        reach = math.hypot(dx, dy) or 1.0
        sides = [
            half / abs(d)
            for half, d in ((self.width / 2, dx), (self.height / 2, dy))
            if abs(d) > 1e-9
        ]
        part = min(sides, default=0.0) + gap / reach
        return self.x + dx * part, self.y + dy * part


def document(width: float, height: float, title: str, *elements: str) -> str:
    """A whole file. title: what a screen reader says."""
    return "\n".join(
        (
            f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:g}' height='{height:g}' "
            f"viewBox='0 0 {width:g} {height:g}' role='img' {_FONT}>",
            f"<title>{escape(title)}</title>",
            _STYLE,
            f"<rect width='{width:g}' height='{height:g}' rx='6' fill='{PAPER}'/>",
            *elements,
            "</svg>",
            "",
        )
    )


def words(
    x: float, y: float, text: str, *, size: float = 13, color: str = INK, anchor: str = "middle"
) -> str:
    """Text whose middle is at the height y."""
    return (
        f"<text x='{x:.4g}' y='{y + size * 0.35:.4g}' font-size='{size:g}' fill='{color}' "
        f"text-anchor='{anchor}'>{escape(text)}</text>"
    )


def box(at: Box, *lines: str, color: str = BLUE, size: float = 13) -> str:
    """A box with lines of text: the first in ink, the others softer and smaller."""
    top = at.y - (len(lines) - 1) * size * 0.65
    said = [
        words(at.x, top + i * size * 1.3, line, size=size if i == 0 else size - 1,
              color=INK if i == 0 else SOFT)
        for i, line in enumerate(lines)
    ]  # fmt: skip
    frame = (
        f"<rect x='{at.x - at.width / 2:g}' y='{at.y - at.height / 2:g}' width='{at.width:g}' "
        f"height='{at.height:g}' rx='6' fill='{color}' fill-opacity='0.08' stroke='{color}'/>"
    )
    return "\n".join((frame, *said))


def arrow(
    begin: Box, end: Box, label: str = "", *, bend: float = 0.0, both: bool = False, at: float = 0.5
) -> str:
    """From box to box. bend: how far its middle is to the left of the straight way, in pixels.
    at: where on its way the label stands."""
    dx, dy = end.x - begin.x, end.y - begin.y
    reach = math.hypot(dx, dy) or 1.0
    # A quadratic curve passes half as far from the straight line as its control point lies.
    cx = (begin.x + end.x) / 2 + dy / reach * bend * 2
    cy = (begin.y + end.y) / 2 - dx / reach * bend * 2
    (x1, y1), (x2, y2) = begin.edge_towards(cx, cy), end.edge_towards(cx, cy)
    line = (
        f"<path d='M{x1:.4g} {y1:.4g} Q{cx:.4g} {cy:.4g} {x2:.4g} {y2:.4g}' fill='none' "
        f"stroke='{SOFT}'/>"
    )
    line += "\n" + _tip(cx, cy, x2, y2)
    if both:
        line += "\n" + _tip(cx, cy, x1, y1)
    if not label:
        return line
    left = 1 - at
    mx = left * left * x1 + 2 * left * at * cx + at * at * x2
    my = left * left * y1 + 2 * left * at * cy + at * at * y2
    return line + "\n" + tag(mx, my, label)


def _tip(from_x: float, from_y: float, x: float, y: float) -> str:
    """The head of an arrow that comes from there and ends here."""
    reach = math.hypot(x - from_x, y - from_y) or 1.0
    dx, dy = (x - from_x) / reach * 8, (y - from_y) / reach * 8
    left = f"{x - dx - dy * 0.45:.4g},{y - dy + dx * 0.45:.4g}"
    right = f"{x - dx + dy * 0.45:.4g},{y - dy - dx * 0.45:.4g}"
    return f"<polygon points='{x:.4g},{y:.4g} {left} {right}' fill='{SOFT}'/>"


def tag(x: float, y: float, text: str, *, size: float = 12, color: str = SOFT) -> str:
    """Text on a piece of paper, so that lines under it do not cross it."""
    width = len(text) * size * _CHAR_PX + 6
    paper = (
        f"<rect x='{x - width / 2:.4g}' y='{y - size * 0.7:.4g}' width='{width:.4g}' "
        f"height='{size * 1.4:.4g}' fill='{PAPER}'/>"
    )
    return paper + "\n" + words(x, y, text, size=size, color=color)
