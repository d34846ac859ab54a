"""Charts as inline pictures: line charts, and error charts with bounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from hyper_parallel.verify.pages import svg

__all__ = ["Dot", "bar", "curves", "dots", "polyline"]

_HEIGHT = 240.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 12.0, 30.0, 40.0
_ROW = 22.0
_CHARACTERS = 24  # characters of a label

# Colour, width, further style and radius of the points of each curve: the second is thin, so that both are visible.
_CURVES = (("one", 6.0, ";stroke-opacity:.45", 5), ("two", 2.0, ";stroke-dasharray:5 4", 2.5))


def curves(title: str, series: Mapping[str, Sequence[float]], *, x: str, y: str, width: float = svg.NARROW) -> Markup:
    """Return a chart of two curves, starting at x = 1: the first is broad, the second thin and dashed.

    Each line of the legend has the style of its curve. Hovering over a step shows its values. If no value is finite,
    the picture is a text that says so.

    Args:
        title: title for screen readers.
        series: values by name, at most two series; values that are not finite are omitted.
        x: name of the horizontal axis.
        y: name of the vertical axis.
        width: width of the picture in pixels.
    """
    numbers = "; ".join(f"{name}: {', '.join(f'{value:.6g}' for value in values)}" for name, values in series.items())
    finite = [value for values in series.values() for value in values if math.isfinite(value)]
    if not finite:
        return _without_values(title, numbers, f"no finite {y} to draw")
    low, high = min(finite), max(finite)
    if low == high:
        margin = abs(low) * 0.05 or 1.0
        low, high = low - margin, high + margin
    count = max(map(len, series.values()), default=1)
    frame = _Frame(count, low, high, width)
    parts = [*frame.grid(), svg.text(0, 14, y, fill="quiet"), frame.x_label(x)]
    legend_x = _LEFT + 10
    for (name, values), (hue, stroke, more, radius) in zip(series.items(), _CURVES, strict=False):
        points = [(frame.x(step), frame.y(value)) for step, value in enumerate(values) if math.isfinite(value)]
        style = f"stroke:{svg.colour(hue)};stroke-width:{stroke:g}{more}"
        parts.append(polyline(points, style))
        if count <= 50:
            parts += [svg.circle(*point, radius, hue) for point in points]
        parts += [
            polyline([(legend_x, 10), (legend_x + 24, 10)], style),
            svg.text(legend_x + 30, 14, name),
        ]
        legend_x += 54 + len(name) * svg.FONT * svg.CHARACTER
    parts += frame.hints(x, series)
    return svg.picture(width, _HEIGHT, title, numbers, parts, fit=True)


def _without_values(title: str, description: str, text: str) -> Markup:
    """Return a picture with a text that explains why nothing is drawn."""
    return svg.picture(svg.NARROW, _TOP, title, description, [svg.text(0, 18, text, fill="quiet")], fit=True)


def polyline(points: Sequence[tuple[float, float]], style: str) -> Markup:
    """Return a line through points, with a stroke style."""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return Markup('<polyline points="{}" style="fill:none;{};stroke-linejoin:round"/>').format(path, style)


class _Frame:
    """Axes of a chart."""

    def __init__(self, count: int, low: float, high: float, width: float) -> None:
        self.count, self.width = count, width
        self.ticks = _ticks(low, high)
        self.low, self.high = min(low, self.ticks[0]), max(high, self.ticks[-1])

    def x(self, step: int) -> float:
        """Return the horizontal position of a step, counted from 0."""
        return _LEFT + 10 + self._room() * (step / (self.count - 1) if self.count > 1 else 0.5)

    def _room(self) -> float:
        return self.width - _LEFT - _RIGHT - 20

    def hints(self, x: str, series: Mapping[str, Sequence[float]]) -> list[Markup]:
        """Return one strip per step; hovering over it shows the values of the step."""
        strip = self._room() / max(self.count - 1, 1)
        return [
            svg.rect(self.x(step) - strip / 2, _TOP, strip, _HEIGHT - _TOP - _BOTTOM, style="fill:transparent",
                     hint=f"{x} {step + 1}: " + ", ".join(f"{name} {values[step]:.9g}"
                                                         for name, values in series.items() if step < len(values)))
            for step in range(self.count)
        ]  # fmt: skip

    def y(self, value: float) -> float:
        """Return the vertical position of a value."""
        share = (value - self.low) / (self.high - self.low)
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * share

    def grid(self) -> list[Markup]:
        """Return grid lines with their values, and the numbers of the steps."""
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            parts += [svg.line(_LEFT, y, self.width - _RIGHT, y),
                      svg.text(_LEFT - 8, y + 4, f"{tick:g}", anchor="end", size=12, fill="quiet")]  # fmt: skip
        every = max(1, math.ceil(self.count / 12))
        parts += [svg.text(self.x(step), _HEIGHT - _BOTTOM + 18, step + 1, anchor="middle", size=12, fill="quiet")
                  for step in range(0, self.count, every)]  # fmt: skip
        return parts

    def x_label(self, name: str) -> Markup:
        """Return the name of the horizontal axis."""
        return svg.text((self.width + _LEFT - _RIGHT) / 2, _HEIGHT - 6, name, anchor="middle", fill="quiet")


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers that span a range."""
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10) if power * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


@dataclass(frozen=True)
class Dot:
    """One row of :func:`dots`.

    Attributes:
        label: name of the value that has the error.
        error: the error; may be 0 or infinite.
        bound: tolerance of the error.
        ok: the verdict, taken from the data.
        hint: text shown when hovering over the row.
    """

    label: str
    error: float
    bound: float
    ok: bool
    hint: str = ""


def dots(title: str, rows: Sequence[Dot], *, x: str = "relative error", width: float = svg.NARROW) -> Markup:
    """Return a chart of errors on a logarithmic axis, one row each, with a tick at the tolerance.

    Hovering over a row shows its error and tolerance. An error of 0 is drawn at the left edge and labelled ``equal``, a
    non-finite error at the right edge. Without rows, the picture is a text that says so.
    """
    if not rows:
        return _without_values(title, "", "no errors to draw")
    known = [value for row in rows for value in (row.error, row.bound) if value > 0 and math.isfinite(value)]
    low = math.floor(math.log10(min(known))) - 1 if known else -16
    high = math.ceil(math.log10(max(known))) + 1 if known else 0
    left = 8 + svg.FONT * svg.CHARACTER * max((len(_end_of(row.label)) for row in rows), default=0)
    axis = width - left - 70.0

    def position(value: float) -> float:
        if value <= 0:
            return left
        share = 1.0 if not math.isfinite(value) else (math.log10(value) - low) / (high - low)
        return left + 10 + (axis - 20) * min(max(share, 0.0), 1.0)

    bottom = len(rows) * _ROW + 8
    parts = [svg.text(left + axis / 2, bottom + 36, f"{x}, logarithmic", anchor="middle", size=12, fill="quiet")]
    for power in range(low, high + 1, max(1, math.ceil((high - low) / 5))):
        at = position(10.0**power)
        parts.append(svg.line(at, 0, at, bottom))
        parts.append(svg.text(at, bottom + 16, f"1e{power}", anchor="middle", size=11, fill="quiet"))
    for number, row in enumerate(rows):
        y = number * _ROW + _ROW / 2 + 4
        hue, bound = "good" if row.ok else "bad", position(row.bound)
        parts += [
            svg.rect(0, y - _ROW / 2, width, _ROW, style="fill:transparent", hint=_hint(row)),
            svg.text(left - 8, y + 4, _end_of(row.label), anchor="end", size=12, fill="text" if row.ok else "bad"),
            svg.line(bound, y - 8, bound, y + 8, stroke="text", width=2),
            svg.circle(position(row.error), y, 4.5, hue),
            svg.text(left + axis + 4, y + 4, _error_label(row.error), size=11, fill=hue),
        ]
    numbers = "; ".join(f"{row.label}: {row.error:.1e} of {row.bound:.1e} allowed" for row in rows)
    return svg.picture(width, bottom + 42, title, numbers, parts, fit=True)


def bar(share: float, hint: str) -> Markup:
    """Return a short horizontal bar for a cell of a table; ``share`` is from 0 to 1."""
    part = min(max(share, 0.0), 1.0)
    ground = svg.rect(0, 2, 90, 8, style=f"fill:{svg.colour('line')};fill-opacity:.5", radius=2)
    full = svg.rect(0, 2, 90 * part, 8, style=f"fill:{svg.colour('one')}", radius=2)
    return svg.picture(90, 12, hint, "", [ground, full])


def _hint(row: Dot) -> str:
    return f"{row.hint or row.label}: {_error_label(row.error)}, allowed {row.bound:.1e}"


def _error_label(error: float) -> str:
    if error == 0:
        return "equal"
    return f"{error:.1e}" if math.isfinite(error) else "differs"


def _end_of(label: str) -> str:
    """Return a label without its beginning if it is long: the end of a module's path is more informative."""
    return label if len(label) <= _CHARACTERS else "…" + label[1 - _CHARACTERS :]
