"""Estimates communication time, from the bandwidth and latency of each axis of a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hyper_parallel.verify.input_error import InputError

if TYPE_CHECKING:
    from hyper_parallel.verify.model_report import Traffic

__all__ = ["AxisTraffic", "Link", "axis_traffic", "links_of", "seconds_of"]

NODE = 8
"""Number of consecutive ranks that are assumed to be in one node."""


@dataclass(frozen=True)
class Link:
    """The connection of the ranks along one axis.

    Attributes:
        bandwidth: bytes per second that a rank receives.
        latency: seconds from the start of a collective until the first bytes arrive.
    """

    bandwidth: float
    latency: float

    def __str__(self) -> str:
        """Return the notation of the command's option."""
        return f"{self.bandwidth / 1e9:g} GB/s and {self.latency * 1e6:g} us"


INSIDE, BETWEEN = Link(200e9, 5e-6), Link(25e9, 15e-6)
"""Defaults within a node and between nodes."""


@dataclass(frozen=True)
class AxisTraffic:
    """The communication of one training step over one axis, or over a combination of axes.

    Attributes:
        axes: names of the axes.
        ranks: number of ranks that communicate with each other.
        count: number of collectives.
        bytes: largest number of bytes that a rank receives in all of these collectives.
        seconds: total time of the collectives without overlap; None if they cannot be priced.
    """

    axes: tuple[str, ...]
    ranks: int
    count: int
    bytes: int
    seconds: float | None


def links_of(shape: Sequence[int], names: Sequence[str], options: Sequence[str] = ()) -> dict[str, Link]:
    """Return the link of every axis.

    Args:
        shape: sizes of the axes.
        names: names of the axes.
        options: texts such as ``tp=300,4``: axis, GB/s and microseconds. Other axes have 200 GB/s and 5 us if their
            ranks are within eight consecutive ranks, else 25 GB/s and 15 us.

    Raises:
        InputError: (a ValueError) the axis of an option is not in the mesh or is repeated, or its values are not two
            positive numbers.
    """
    links = {}
    for number, name in enumerate(names):
        links[name] = INSIDE if math.prod(shape[number:]) <= NODE else BETWEEN
    for option in options:
        name, _, numbers = option.partition("=")
        if name not in links:
            msg = f"--link {option}: the mesh has no axis {name!r}; its axes are {', '.join(names)}"
            raise InputError(msg)
        if [other.partition("=")[0] for other in options].count(name) > 1:
            msg = f"--link {option}: axis {name} is given twice"
            raise InputError(msg)
        try:
            bandwidth, latency = map(float, numbers.split(","))
        except ValueError:
            bandwidth = latency = math.nan
        if not (0 < bandwidth < math.inf and 0 < latency < math.inf):
            msg = f"--link {option}: give GB/s and microseconds, both above 0, as in {name}=300,4"
            raise InputError(msg)
        links[name] = Link(bandwidth * 1e9, latency / 1e6)
    return links


def axis_traffic(traffic: Sequence[Traffic], sizes: Mapping[str, int], links: Mapping[str, Link]) -> list[AxisTraffic]:
    """Return the collectives of a step, summed per combination of axes, the longest time first.

    Args:
        traffic: collectives by module.
        sizes: sizes of the axes, by name.
        links: links of the axes, by name.
    """
    groups: dict[tuple[str, ...], list[Traffic]] = {}
    for row in traffic:
        groups.setdefault(row.axes, []).append(row)
    rows = [
        AxisTraffic(
            axes,
            math.prod(sizes[axis] for axis in axes),
            sum(row.count for row in own),
            sum(row.bytes for row in own),
            seconds_of(own, links),
        )
        for axes, own in groups.items()
    ]
    return sorted(rows, key=lambda row: -(math.inf if row.seconds is None else row.seconds))


def seconds_of(traffic: Sequence[Traffic], links: Mapping[str, Link]) -> float | None:
    """Return the total time of collectives without overlap; None if one runs over ranks that are not axes of the mesh.

    A collective over several axes is priced with the smallest bandwidth and the largest latency of these axes.
    """
    if not all(row.axes for row in traffic):
        return None
    return sum(
        row.count * max(links[axis].latency for axis in row.axes)
        + row.bytes / min(links[axis].bandwidth for axis in row.axes)
        for row in traffic
    )
