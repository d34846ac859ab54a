"""Elements of inline pictures, and the light and dark colours of all pages.

The colours are data, so that a test can compute their contrast.

A picture uses the colours of its page, or the light scheme outside a page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

__all__ = ["DARK", "LIGHT", "WIDE", "circle", "colour", "group", "line", "picture", "rect", "responsive", "text"]

LIGHT = {
    "page": "#ffffff",
    "panel": "#f5f7fa",
    "text": "#1b2430",
    "quiet": "#526070",
    "line": "#c9d1db",
    "link": "#0b57b7",
    "good": "#1b6b2e",
    "bad": "#b3201f",
    "warn": "#8a4b00",
    "one": "#0b57b7",  # series and bars
    "two": "#b3480a",
    "three": "#1b6b2e",
    "four": "#7a2fa0",
    "five": "#00686f",
    "six": "#a01a5b",
}

DARK = {
    "page": "#12161c",
    "panel": "#1b222b",
    "text": "#e4e9ef",
    "quiet": "#a3b0be",
    "line": "#3b4653",
    "link": "#8ab8ff",
    "good": "#86d79a",
    "bad": "#ff9a94",
    "warn": "#f0bd72",
    "one": "#8ab8ff",
    "two": "#ffae70",
    "three": "#86d79a",
    "four": "#d3a6f2",
    "five": "#6fd6dd",
    "six": "#ff9ec8",
}

FONT = 13
"""Size of normal text in a picture, in pixels."""

WIDE, NARROW = 960.0, 480.0
"""Widths of a chart in a window and on a phone, in pixels."""

CHARACTER = 0.62
"""Estimated width of a character, as a fraction of the font size."""


def picture(
    width: float, height: float, title: str, description: str, parts: Sequence[Markup], *, fit: bool = False
) -> Markup:
    """Return an ``<svg>`` with a title and a description for screen readers; with ``fit`` it shrinks to its window."""
    style = Markup(' style="max-width:100%;height:auto"') if fit else ""
    head = Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width:.0f}" height="{height:.0f}" '
        'viewBox="0 0 {width:.0f} {height:.0f}" font-family="system-ui, sans-serif" font-size="{font}"{style}>\n'
        "<title>{title}</title>\n<desc>{description}</desc>\n"
    ).format(width=width, height=height, font=FONT, style=style, title=title, description=description)
    return head + Markup("\n").join(parts) + Markup("\n</svg>")


def responsive(draw: Callable[[float], Markup]) -> Markup:
    """Return charts for a wide window and for a phone, with equal text sizes; the page shows one of them."""
    return Markup('<div class="wide">{}</div><div class="narrow">{}</div>').format(draw(WIDE), draw(NARROW))


def colour(name: str) -> str:
    """Return a colour of the page by name, for a style."""
    return f"var(--{name}, {LIGHT[name]})"


def group(x: float, y: float, parts: Sequence[Markup]) -> Markup:
    """Return elements translated by ``x`` and ``y``."""
    return Markup('<g transform="translate({:.1f} {:.1f})">\n{}\n</g>').format(x, y, Markup("\n").join(parts))


def rect(x: float, y: float, width: float, height: float, *, style: str, hint: str = "", radius: float = 0) -> Markup:
    """Return a rectangle; ``hint`` is shown on hover."""
    title = Markup("<title>{}</title>").format(hint) if hint else ""
    rounded = Markup(' rx="{:g}"').format(radius) if radius else ""
    return Markup('<rect x="{:.1f}" y="{:.1f}" width="{:.1f}" height="{:.1f}"{} style="{}">{}</rect>').format(
        x, y, width, height, rounded, style, title
    )


def circle(x: float, y: float, radius: float, fill: str, hint: str = "") -> Markup:
    """Return a filled circle; ``hint`` is shown on hover."""
    start = Markup('<circle cx="{:.1f}" cy="{:.1f}" r="{}" style="fill:{}"').format(x, y, radius, colour(fill))
    return start + (Markup("><title>{}</title></circle>").format(hint) if hint else Markup("/>"))


def line(x: float, y: float, to_x: float, to_y: float, *, stroke: str = "line", width: float = 1) -> Markup:
    """Return a straight line."""
    return Markup('<line x1="{:.1f}" y1="{:.1f}" x2="{:.1f}" y2="{:.1f}" style="stroke:{};stroke-width:{:g}"/>').format(
        x, y, to_x, to_y, colour(stroke), width
    )


def text(
    x: float,
    y: float,
    shown: object,
    *,
    anchor: str = "start",
    fill: str = "text",
    size: float = FONT,
    bold: bool = False,
) -> Markup:
    """Return a line of text; ``anchor`` is ``start``, ``middle`` or ``end``."""
    style = f"fill:{colour(fill)};font-size:{size:g}px" + ";font-weight:600" * bold
    return Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}" style="{}">{}</text>').format(
        x, y, anchor, style, str(shown)
    )
