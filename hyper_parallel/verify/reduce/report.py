"""The report of a reduction: properties kept, values changed, blind spots, and cost."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from hyper_parallel._text import byte_words
from hyper_parallel.verify.reduce.costs import Cost, estimated_cost, parameters
from hyper_parallel.verify.reduce.keys import FORMATS, HEAD, WIDTHS
from hyper_parallel.verify.reduce.reduction import Reduction
from hyper_parallel.verify.report import Report

__all__ = ["ReductionReport"]

_TOKENS = 64
_NEEDS_MORE = {
    "tp": "sums over {big} ranks, and errors that need more than {small}",
    **dict.fromkeys(
        ("dp", "dp_replicate", "dp_shard"), "sums over {big} ranks, and errors that need more than {small}"
    ),
    "pp": "stages between the first and the last of {small}, as {big} have",
    "cp": "rings of {big} ranks",
    "ep": "exchanges of tokens among {big} ranks",
}
"""Blind spots of an axis with fewer ranks."""


@dataclass
class ReductionReport(Report):
    """A small configuration, compared with the large one.

    Attributes:
        reduction: the reduction.
        seconds: limit of the duration of a verification.
        written: the file of the small configuration; None if none was written.
    """

    reduction: Reduction
    seconds: float
    written: str | None = None

    @cached_property
    def cost(self) -> Cost | None:
        """The cost of verifying the small configuration here; None if its sizes are not in the file."""
        reduction = self.reduction
        if "hidden" not in reduction.sizes:
            return None
        document, tokens = reduction.structure.document, 4 * self.tokens
        return estimated_cost(document, reduction.sizes, reduction.pattern, self.ranks, tokens)

    @property
    def ranks(self) -> int:
        """Number of ranks of the small mesh; its axis ep is contained in the other axes."""
        axes = {axis: small for axis, (_, small) in self.reduction.structure.axes.items()}
        return max(math.prod(size for axis, size in axes.items() if axis != "ep"), axes["ep"])

    @property
    def tokens(self) -> int:
        """A sequence length that the positions of the small model permit."""
        changed, positions = self.reduction.changed, self.reduction.structure.positions
        return min(_TOKENS, max((changed.get(key, value) for key, value in positions.items()), default=_TOKENS))

    @property
    def ok(self) -> bool:
        """Whether the estimate is within the time limit."""
        return self.cost is None or self.cost.seconds <= self.seconds

    def kept(self) -> list[str]:
        """Return the properties that both configurations have, a sentence each."""
        structure, small = self.reduction.structure, self.reduction.sizes
        large, pattern = structure.sizes, self.reduction.pattern
        found = [f"axis {axis}: more than one rank" for axis, (_, size) in structure.axes.items() if size > 1]
        if 0 < large.get("kv_heads", 0) < large["heads"]:
            found.append(f"each key head serves {small['heads'] // small['kv_heads']} query heads")
        if "experts" in large and "top_k" in large:
            same = "as before" if small["top_k"] == large["top_k"] else f"instead of {large['top_k']}"
            found.append(f"experts: more than a token chooses, which is {small['top_k']} {same}")
        if pattern.period > 1 or pattern.irregular or pattern.dense:
            found.append(f"every kind of layer, in its order: {pattern.layers} of the {large['layers']} layers")
        if widths := sum(role in small for role in (*WIDTHS, *HEAD)):
            found.append(f"the order of {widths} widths; different ones differ")
            found.append("what an axis divides is divided, and more than one remains per rank where more than one did")
        if len(structure.positions) > 1:
            found.append("ratios of position limits and windows")
        return [*found, "all other keys: tied and fused weights, activations, norms, scaling"]

    def hidden(self) -> list[str]:
        """Return the blind spots of the small case, a sentence each."""
        structure, small = self.reduction.structure, self.reduction.sizes
        large = structure.sizes
        found = []
        for axis, (big, size) in structure.axes.items():
            if size < big:
                found.append(f"axis {axis}: {_NEEDS_MORE[axis].format(big=big, small=size)}")
        groups = {axis: size for axis, (_, size) in structure.axes.items() if axis not in {"pp", "ep"} and size > 1}
        if len(set(groups.values())) < len(groups):
            found.append(f"axes {', '.join(groups)}: some have one size, so a reduction over the wrong one may pass")
        if any(size == 2 for _, size in structure.axes.values()):
            found.append(
                "axes of 2: next and previous rank are one rank, so a ring in the wrong direction is unnoticed"
            )
        found += [
            f"{key}: ratios of heads and experts of {structure.document.values[key]}, which are in torchtitan's code"
            for key in self.reduction.changed
            if key.endswith("flavor")
        ]
        if small["layers"] < large.get("layers", 0):
            found.append(f"depth: range and rounding of half precision after {large['layers']} layers")
        if small.get("experts", 0) < large.get("experts", 0):
            found.append(f"experts: capacity and balance with {large['experts']} of them")
        if structure.positions:
            most = max(structure.positions.values())
            found.append(f"sequences: effects of more than {self.tokens} tokens, of at most {most}")
        if small.get("vocab", 0) < large.get("vocab", 0):
            found.append(f"tokens of the data above {small['vocab'] - 1}: take a small tokenizer, or random tokens")
        found.append("kernels that are chosen by size, or refuse small heads; speed, memory, time of communication")
        return [*found, "weights of a checkpoint of the large model, which do not fit"]

    def text(self) -> str:
        """Return the report for a terminal."""
        reduction = self.reduction
        document, structure = reduction.structure.document, reduction.structure
        axes = ", ".join(
            f"{axis} {big} -> {size}" + " (assumed)" * (axis in structure.assumed)
            for axis, (big, size) in structure.axes.items()
            if big > 1
        )
        lines = [f"{document.name}: {FORMATS[document.format]}, mesh {axes}"]
        lines += ["changed:", *(f"  {key}: {_short(document.values[key])} -> {_short(value)}"
                                for key, value in reduction.changed.items())]  # fmt: skip
        lines += ["kept:", *(f"  {sentence}" for sentence in self.kept())]
        lines += ["blind spots of the small case:", *(f"  {sentence}" for sentence in self.hidden())]
        if reduction.left:
            named = ", ".join(f"{key} {document.values[key]}" for key in reduction.left)
            lines.append(f"left as they are, though they look like sizes: {named}")
        lines.append(self._estimate())
        return "\n".join([*lines, *([f"wrote {self.written}"] if self.written else [])])

    def _estimate(self) -> str:
        """Return the line about the cost."""
        cost = self.cost
        if cost is None:
            return f"no estimate: the sizes of the model are not in the file; {self.ranks} simulated ranks"
        return (
            f"estimated: {_count(self._large())} -> {_count(cost.parameters)} parameters, {byte_words(cost.bytes)} "
            f"on {self.ranks} simulated ranks, {cost.seconds:.0f} s for three steps at the measured "
            f"{cost.rate / 1e9:.1f} GFLOP/s, {'within' if self.ok else 'error: more than'} {self.seconds:g} s"
        )

    def _large(self) -> int:
        structure = self.reduction.structure
        return parameters(structure.document, structure.sizes, structure.pattern)

    def json(self) -> dict[str, Any]:
        """Return the report as a JSON object."""
        reduction = self.reduction
        document = reduction.structure.document
        return {
            "ok": self.ok,
            "file": document.name,
            "format": document.format,
            "written": self.written,
            "mesh": {axis: list(sizes) for axis, sizes in reduction.structure.axes.items() if sizes[0] > 1},
            "assumed": list(reduction.structure.assumed),
            "changed": {key: [document.values[key], value] for key, value in reduction.changed.items()},
            "kept": self.kept(),
            "blind": self.hidden(),
            "left": list(reduction.left),
            "estimate": self.cost and {**asdict(self.cost), "parameters": [self._large(), self.cost.parameters]},
            "ranks": self.ranks,
            "budget": self.seconds,
        }


def _short(value: Any) -> str:
    """Return a value in about 40 characters at most."""
    if isinstance(value, list) and len(str(value)) > 40:
        return f"list of {len(value)}"
    return str(value)


def _count(number: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return str(number)
