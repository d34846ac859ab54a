"""Charts as inline pictures: curves over each other, and errors against what was allowed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hyper_parallel.verify.pages import svg
from hyper_parallel.verify.pages.markup import Html

__all__ = ["Dot", "bar", "curves", "dots"]

_WIDTH, _HEIGHT = 640.0, 240.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 12.0, 30.0, 40.0
_ROW = 22.0
_CHARACTERS = 44  # of a label


def curves(title: str, series: Mapping[str, Sequence[float]], *, x: str, y: str) -> Html:
    """Two curves over each other, from x = 1: the first broad, the second thin and dashed on top, so both are seen.

    Args:
        title: for those who do not see it.
        series: values by name, two at most; a value that is not finite is left out.
        x: name of the horizontal axis.
        y: name of the vertical one.
    """
    finite = [value for values in series.values() for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    if low == high:
        margin = abs(low) * 0.05 or 1.0
        low, high = low - margin, high + margin
    count = max(map(len, series.values()), default=1)
    frame = _Frame(count, low, high)
    parts = [*frame.grid(), svg.text(0, 14, y, fill="quiet"), frame.name_x(x)]
    right = _LEFT + 10
    for number, (name, values) in enumerate(series.items()):
        hue, width, dash = (("one", 6.0, ""), ("two", 2.0, ";stroke-dasharray:5 4"))[number]
        points = [(frame.x(step), frame.y(value)) for step, value in enumerate(values) if math.isfinite(value)]
        path = " ".join(f"{one:.1f},{two:.1f}" for one, two in points)
        faint = ";stroke-opacity:.45" if number == 0 else ""
        line = f"fill:none;stroke:{svg.colour(hue)};stroke-width:{width:g}{dash}{faint};stroke-linejoin:round"
        parts.append(f'<polyline points="{path}" style="{line}"/>')
        radius = 5 if number == 0 else 2.5
        if count <= 50:
            parts += [f'<circle cx="{one:.1f}" cy="{two:.1f}" r="{radius}" style="fill:{svg.colour(hue)}"/>'
                      for one, two in points]  # fmt: skip
        parts += [svg.line(right, 10, right + 24, 10, stroke=hue, width=width), svg.text(right + 30, 14, name)]
        right += 54 + len(name) * svg.FONT * svg.CHARACTER
    told = "; ".join(f"{name}: {', '.join(f'{value:.6g}' for value in values)}" for name, values in series.items())
    return svg.picture(_WIDTH, _HEIGHT, title, told, parts)


class _Frame:
    """Axes of a chart."""

    def __init__(self, count: int, low: float, high: float) -> None:
        self.count = count
        self.ticks = _ticks(low, high)
        self.low, self.high = min(low, self.ticks[0]), max(high, self.ticks[-1])

    def x(self, step: int) -> float:
        """Place of a step, from 0."""
        return _LEFT + 10 + (_WIDTH - _LEFT - _RIGHT - 20) * (step / max(self.count - 1, 1) if self.count > 1 else 0.5)

    def y(self, value: float) -> float:
        """Place of a value."""
        share = (value - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share

    def grid(self) -> list[str]:
        """Lines with their values, and numbers of the steps."""
        parts = []
        for tick in self.ticks:
            at = self.y(tick)
            parts += [svg.line(_LEFT, at, _WIDTH - _RIGHT, at),
                      svg.text(_LEFT - 8, at + 4, f"{tick:g}", anchor="end", size=12, fill="quiet")]  # fmt: skip
        every = max(1, math.ceil(self.count / 12))
        parts += [svg.text(self.x(step), _HEIGHT - _BOTTOM + 18, step + 1, anchor="middle", size=12, fill="quiet")
                  for step in range(0, self.count, every)]  # fmt: skip
        return parts

    def name_x(self, name: str) -> str:
        """The name of the horizontal axis."""
        return svg.text((_WIDTH + _LEFT - _RIGHT) / 2, _HEIGHT - 6, name, anchor="middle", fill="quiet")


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers that span a range."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * one for one in (1, 2, 2.5, 5, 10) if power * one >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


@dataclass(frozen=True)
class Dot:
    """One row of :func:`dots`.

    Attributes:
        label: whose error.
        error: found; may be 0 or infinite.
        bound: what was allowed.
        ok: the verdict, which the data brings.
        hint: shown when the row is pointed at.
    """

    label: str
    error: float
    bound: float
    ok: bool
    hint: str = ""


def dots(title: str, rows: Sequence[Dot]) -> Html:
    """Errors on a logarithmic axis, a row each, with a tick at what was allowed.

    An error of 0 stands at the left edge and says so, one that is no number at the right one.
    """
    known = [value for row in rows for value in (row.error, row.bound) if value > 0 and math.isfinite(value)]
    low = math.floor(math.log10(min(known))) - 1 if known else -16
    high = math.ceil(math.log10(max(known))) + 1 if known else 0
    label = 8 + svg.FONT * svg.CHARACTER * max((len(_short(row.label)) for row in rows), default=0)
    width, wide = label + 460.0, 380.0

    def place(value: float) -> float:
        if value <= 0:
            return label
        share = 1.0 if not math.isfinite(value) else (math.log10(value) - low) / (high - low)
        return label + 10 + (wide - 20) * min(max(share, 0.0), 1.0)

    bottom = len(rows) * _ROW + 8
    parts = []
    every = max(1, math.ceil((high - low) / 8))
    for power in range(low, high + 1, every):
        at = place(10.0**power)
        parts.append(svg.line(at, 0, at, bottom))
        parts.append(svg.text(at, bottom + 16, f"1e{power}", anchor="middle", size=11, fill="quiet"))
    for number, row in enumerate(rows):
        y = number * _ROW + _ROW / 2 + 4
        hue = "good" if row.ok else "bad"
        parts += [
            svg.rect(0, y - _ROW / 2, width, _ROW, style="fill:transparent", hint=row.hint),
            svg.text(label - 8, y + 4, _short(row.label), anchor="end", size=12, fill="text" if row.ok else "bad"),
            svg.line(place(row.bound), y - 8, place(row.bound), y + 8, stroke="text", width=2),
            f'<circle cx="{place(row.error):.1f}" cy="{y:.1f}" r="4.5" style="fill:{svg.colour(hue)}"/>',
            svg.text(label + wide + 4, y + 4, _told(row), size=11, fill=hue),
        ]
    told = "; ".join(f"{row.label}: {row.error:.1e} of {row.bound:.1e} allowed" for row in rows)
    return svg.picture(width, bottom + 22, title, told, parts)


def bar(share: float, hint: str) -> Html:
    """A short horizontal bar for a cell of a table; ``share`` is from 0 to 1."""
    part = min(max(share, 0.0), 1.0)
    ground = svg.rect(0, 2, 90, 8, style=f"fill:{svg.colour('line')};fill-opacity:.5", radius=2)
    full = svg.rect(0, 2, 90 * part, 8, style=f"fill:{svg.colour('one')}", radius=2)
    return svg.picture(90, 12, hint, "", [ground, full])


def _told(row: Dot) -> str:
    if row.error == 0:
        return "equal"
    if not math.isfinite(row.error):
        return "differs"
    return f"{row.error:.1e}"


def _short(label: str) -> str:
    """The end of a path tells more than its beginning."""
    return label if len(label) <= _CHARACTERS else "…" + label[1 - _CHARACTERS :]
