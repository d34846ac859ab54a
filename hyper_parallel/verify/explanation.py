"""The layouts, memory and collectives of a parallel plan in one training step, and a comparison of candidate plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from hyper_parallel._text import byte_words
from hyper_parallel.verify.links import AxisTraffic, Link, axis_traffic, seconds_of
from hyper_parallel.verify.model_report import Traffic, aligned, table
from hyper_parallel.verify.repeated_layers import folded

if TYPE_CHECKING:
    from hyper_parallel.core.shard.op_plan import OpPlan
    from hyper_parallel.verify.explained_step import Memory
    from hyper_parallel.verify.parameter_layouts import ParameterLayout
    from hyper_parallel.verify.prove.table import ProvenCalls

__all__ = ["Explanation", "duration", "ranking", "ranking_text"]


@dataclass(frozen=True)
class Explanation:
    """The layouts, memory and collectives of one training step.

    Attributes:
        name: name of the model.
        platform: name of the framework.
        axes: sizes of the mesh's axes, by name.
        parameters: layouts of the parameters.
        dtypes: short dtypes of the parameters, by path.
        itemsizes: bytes of an element of each parameter, by path.
        traffic: collectives, per module.
        memory: memory on the first rank, which has the largest shards.
        links: links of the axes, by name.
        checked: descriptions of the checks that passed.
        wrong: descriptions of the checks that failed.
        notes: descriptions of probably unintended properties.
        with_values: the reason why tensors had values; empty if they had none, and so took no memory.
        plan: name of the plan.
        device: device of the step.
        peak: peak memory on the device in bytes; 0 if it was not measured.
        plans: plans of the operator calls on DTensors.
        proofs: number of these calls whose rule is proven for their placements; None if this was not determined.
    """

    name: str
    platform: str
    axes: dict[str, int]
    parameters: list[ParameterLayout]
    dtypes: dict[str, str]
    itemsizes: dict[str, int]
    traffic: list[Traffic]
    memory: Memory
    links: dict[str, Link]
    checked: list[str]
    wrong: list[str]
    notes: list[str]
    with_values: str = ""
    plan: str = ""
    device: str = "cpu"
    peak: int = 0
    plans: tuple[OpPlan, ...] = ()
    proofs: ProvenCalls | None = None

    @property
    def mesh(self) -> str:
        """Description of the mesh, such as ``dp=2 x tp=2``."""
        return " x ".join(f"{axis}={size}" for axis, size in self.axes.items())

    @property
    def seconds(self) -> float | None:
        """Total time of the collectives of a step, without overlap; None if a collective cannot be priced."""
        return seconds_of(self.traffic, self.links)

    @property
    def bytes(self) -> int:
        """Largest number of bytes that a rank receives in a step."""
        return sum(row.bytes for row in self.traffic)

    def unpriced(self) -> list[str]:
        """Return descriptions of the collectives that cannot be priced."""
        return [
            f"{row.module or '(model)'}: {row.collective} in {row.phase} runs over ranks that are no axes of the mesh"
            for row in self.traffic
            if not row.axes
        ]

    def over_axes(self) -> list[AxisTraffic]:
        """Return the collectives, summed per combination of axes."""
        return axis_traffic(self.traffic, self.axes, self.links)

    def folded_traffic(self) -> list[Traffic]:
        """Return the collectives, with those of repeated layers summed in one row."""
        return [
            replace(
                fold.rows[0],
                module=fold.path,
                count=sum(row.count for row in fold.rows),
                bytes=sum(row.bytes for row in fold.rows),
                implicit=sum(row.implicit for row in fold.rows),
            )
            for fold in folded((row.module, replace(row, module=""), row) for row in self.traffic)
        ]

    def text(self) -> str:
        """Return tables of parameters, memory, collectives and times; repeated layers are one row."""
        lines = [f"{self.name} on {self.platform}, mesh {self.mesh}", *aligned(self._parameter_rows(), text=2)]
        local, total = (sum(map(count, self.parameters)) for count in (self.local_bytes, self.whole_bytes))
        lines.append(f"    {len(self.parameters)} parameters, {local} of {total} bytes on a rank")
        if self.peak:
            lines.append(f"    {self.peak} bytes in use on {self.device} at most, measured on rank 0 in this step")
        lines += [f"    {note}" for note in self.empty_shards()]
        if self.with_values:
            reason = "" if self.peak else "without them: "
            lines.append(f"  built with values, because {reason}{self.with_values}")
        lines += self._memory_lines()
        lines += table(self.traffic, self.folded_traffic())
        lines += self._axis_lines()
        if self.proofs is not None:
            lines += [f"  {self.proofs.line()}", *(f"    {line}" for line in self.proofs.row_lines())]
        lines += [f"  checked: {line}" for line in self.checked]
        lines += [f"  WRONG: {line}" for line in self.wrong]
        return "\n".join([*lines, *(f"  plan: {note}" for note in self.notes)])

    def json(self) -> dict[str, Any]:
        """Return the same as a JSON object, with a row for every layer."""
        seconds = self.seconds
        return {
            "name": self.name,
            "plan": self.plan,
            "platform": self.platform,
            "mesh": self.mesh,
            "ok": not self.wrong,
            "parameters": [
                {
                    "path": parameter.path,
                    "layout": self.layout_text(parameter),
                    "bytes": self.local_bytes(parameter),
                    "of": self.whole_bytes(parameter),
                }
                for parameter in self.parameters
            ],
            "empty_shards": self.empty_shards(),
            "memory": {**asdict(self.memory), "total": self.memory.total},
            "collectives": [asdict(row) for row in self.traffic],
            "axes": [asdict(row) for row in self.over_axes()],
            "links": {name: asdict(link) for name, link in self.links.items()},
            "bytes": self.bytes,
            "seconds": seconds,
            "unpriced": self.unpriced(),
            "proofs": None if self.proofs is None else self.proofs.json(),
            "checked": self.checked,
            "wrong": self.wrong,
            "notes": self.notes,
            "with_values": self.with_values,
            "device": self.device,
            "peak_bytes": self.peak,
        }

    def empty_shards(self) -> list[str]:
        """Return descriptions of the parameters with fewer rows in a sharded dim than ranks."""
        notes: dict[str, list[str]] = {}
        for parameter in self.parameters:
            layout = parameter.layout
            if layout is None:
                continue
            for dim, axes in enumerate(layout.dim_axes):
                ranks = math.prod([layout.mesh.shape[axis] for axis in axes])
                if (size := parameter.shape[dim]) < ranks:
                    names = " and ".join(layout.mesh.names[axis] for axis in axes)
                    note = f"size {size} over {ranks} ranks of {names}, {ranks - size} of which hold nothing"
                    notes.setdefault(note, []).append(f"dim {dim} of {parameter.path}")
        return [
            f"{', '.join(subjects[:4])}{' and others' * (len(subjects) > 4)}: {note}"
            for note, subjects in notes.items()
        ]

    def layout_text(self, parameter: ParameterLayout) -> str:
        """Return the layout of a parameter in the notation of messages."""
        layout, dtype = parameter.layout, self.dtypes[parameter.path]
        return f"{dtype}{list(parameter.shape)} plain" if layout is None else layout.notation(dtype)

    def local_bytes(self, parameter: ParameterLayout) -> int:
        """Return the size in bytes of the largest local shard, which is the first rank's."""
        layout = parameter.layout
        shape = parameter.shape if layout is None else layout.local_shape
        return math.prod(shape) * self.itemsizes[parameter.path]

    def whole_bytes(self, parameter: ParameterLayout) -> int:
        """Return the size in bytes of the complete parameter."""
        return math.prod(parameter.shape) * self.itemsizes[parameter.path]

    def _parameter_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = [("parameter", "layout", "bytes on a rank", "of", "layers")]
        for fold in folded((each.path, self.layout_text(each), each) for each in self.parameters):
            counts = (self.local_bytes, self.whole_bytes)
            local, whole = (str(sum(map(count, fold.rows))) for count in counts)
            layers = str(len(fold.rows)) if len(fold.rows) > 1 else ""
            rows.append((fold.path, self.layout_text(fold.rows[0]), local, whole, layers))
        return rows if any(row[-1] for row in rows[1:]) else [row[:-1] for row in rows]

    def _memory_lines(self) -> list[str]:
        memory = self.memory
        kept = "unavailable" if memory.activations is None else str(memory.activations)
        rows = [
            ("weights", str(memory.weights)),
            ("gradients", str(memory.gradients)),
            ("optimizer", str(memory.optimizer)),
            ("kept for backward", kept),
            ("sum", f"{memory.total} ({byte_words(memory.total)})" if memory.total >= _LARGE else str(memory.total)),
        ]
        return ["  memory of a rank in bytes:", *aligned(rows, text=2)]

    def link_words(self, axes: Sequence[str]) -> str:
        """Return the links that messages over some axes may use, in words, without duplicates."""
        return " or ".join(dict.fromkeys(str(self.links[axis]) for axis in axes)) or "unknown"

    def _axis_lines(self) -> list[str]:
        if not self.traffic:
            return []
        rows = [("over", "a link of", "ranks", "count", "bytes", "time")]
        rows += [
            (",".join(row.axes) or "other ranks", self.link_words(row.axes), str(row.ranks), str(row.count),
             str(row.bytes), duration(row.seconds))
            for row in self.over_axes()
        ]  # fmt: skip
        lines = ["  time of these collectives, one after the other:", *aligned(rows, text=2)]
        lines += [f"    not priced: {line}" for line in self.unpriced()]
        return [*lines, f"    {duration(self.seconds)} a step"]


_LARGE = 1 << 27
"""A sum of at least this many bytes is printed with a unit too, such as GiB."""


def duration(seconds: float | None) -> str:
    """Return seconds in a suitable unit; ``not priced`` for None."""
    if seconds is None:
        return "not priced"
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def ranking(explanations: Sequence[Explanation]) -> list[Explanation]:
    """Return candidate plans of one model, fastest communication first, and those that cannot be priced last."""
    return sorted(
        explanations,
        key=lambda each: (bool(each.wrong), each.seconds is None, each.seconds or 0.0, each.bytes, each.memory.total),
    )


def ranking_text(explanations: Sequence[Explanation]) -> str:
    """Return a table of ranked candidate plans."""
    rows = [("plan", "time", "bytes received", "collectives", "bytes on a rank")]
    rows += [
        (each.plan, duration(each.seconds), str(each.bytes), str(sum(row.count for row in each.traffic)),
         str(each.memory.total))
        for each in explanations
    ]  # fmt: skip
    return "\n".join(["plans by the time of their collectives in a step:", *aligned(rows, text=1)])
