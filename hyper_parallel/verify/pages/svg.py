"""Parts of inline pictures. Colours are the page's where there is one, and those of the light page elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.verify.pages.markup import Html, escape
from hyper_parallel.verify.pages.palette import LIGHT

__all__ = ["colour", "line", "picture", "rect", "text"]

FONT = 13
"""Size of ordinary text in a picture."""

CHARACTER = 0.62
"""Width of a character, in font sizes: for how much room a text needs."""


def picture(width: float, height: float, title: str, description: str, parts: Sequence[str]) -> Html:
    """An ``<svg>`` with a title, and a description for those who do not see it."""
    return Html(
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="system-ui, sans-serif" font-size="{FONT}">\n'
        f"<title>{escape(title)}</title>\n<desc>{escape(description)}</desc>\n" + "\n".join(parts) + "\n</svg>"
    )


def colour(name: str) -> str:
    """A colour of the page by name."""
    return f"var(--{name}, {LIGHT[name]})"


def rect(x: float, y: float, width: float, height: float, *, style: str, hint: str = "", radius: float = 0) -> str:
    """A rectangle; ``hint`` is shown when it is pointed at."""
    inside = f"<title>{escape(hint)}</title>" if hint else ""
    rounded = f' rx="{radius:g}"' if radius else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{rounded} style="{style}">'
        f"{inside}</rect>"
    )


def line(x: float, y: float, to_x: float, to_y: float, *, stroke: str = "line", width: float = 1) -> str:
    """A straight line."""
    style = f"stroke:{colour(stroke)};stroke-width:{width:g}"
    return f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}" style="{style}"/>'


def text(
    x: float,
    y: float,
    shown: object,
    *,
    anchor: str = "start",
    fill: str = "text",
    size: float = FONT,
    bold: bool = False,
) -> str:
    """A line of text; ``anchor`` is ``start``, ``middle`` or ``end``."""
    style = f"fill:{colour(fill)};font-size:{size:g}px" + ";font-weight:600" * bold
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="{style}">{escape(str(shown))}</text>'
