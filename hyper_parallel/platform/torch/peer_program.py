"""A finding about PyTorch's own DTensor as a program that needs nothing but PyTorch.

What an operator of this library calls is recorded on plain tensors, call by call, and written down again.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from hyper_parallel.core.dtensor.placements import Partial

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.placements import Placement

__all__ = ["Call", "Finding", "program"]

MOST_LINES = 15
_HEAD = """\
import torch, torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
dist.init_process_group("gloo")  # torchrun --nproc-per-node 2 THIS_FILE
mesh = dist.init_device_mesh("cpu", (2,))"""


class Call(NamedTuple):
    """An operator and what it was given.

    Attributes:
        run: the operator, as a function of its operands.
        arrays: the operands' values.
        pieces: what each rank holds of each operand.
        places: the operands' placements.
        wanted: which operands have a gradient.
    """

    run: Callable[[Sequence[Any]], Sequence[Any]]
    arrays: Sequence[Any]
    pieces: Sequence[Sequence[Any]]
    places: Sequence[Placement]
    wanted: Sequence[bool]


class Finding(NamedTuple):
    """One wrong result.

    Attributes:
        call: whose.
        seeds: cotangent per output, None where it has none.
        gradient: the wrong value is a gradient.
        which: of the outputs, or of the operands, whose gradient it is.
        right: what it should be.
    """

    call: Call
    seeds: Sequence[Any]
    gradient: bool
    which: int
    right: Any


class _Written(NamedTuple):
    """A call as lines, and its outputs with their names."""

    lines: list[str]
    outs: list[Any]
    names: list[str]


def program(finding: Finding, before: Call | None = None) -> str | None:
    """The program: it prints the wrong value beside the right one, and fails.

    Args:
        finding: what to show.
        before: a call to make first.

    Returns:
        None where it would be too long, or holds what cannot be written down.
    """
    earlier = _Written([], [], []) if before is None else _written(before, "a", "b")
    shown = _written(finding.call, "x", "y")
    if earlier is None or shown is None:
        return None
    lines = [*_HEAD.split("\n"), *earlier.lines, *shown.lines, *_shown(finding, shown)]
    return "\n".join(lines) if len(lines) <= MOST_LINES else None


def _written(call: Call, given: str, made: str) -> _Written | None:
    leaves = [
        torch.from_numpy(array).detach().requires_grad_(want)
        for array, want in zip(call.arrays, call.wanted, strict=True)
    ]
    recorder = _Recorder({id(leaf): f"{given}{index}" for index, leaf in enumerate(leaves)}, made)
    with recorder:
        outs = list(call.run(leaves))
    names = [recorder.names.get(id(one), "") for one in outs]
    if recorder.unwritable or not all(names):
        return None
    operands = [f"{given}{index} = {_operand(call, index)}" for index in range(len(leaves))]
    return _Written([*operands, *recorder.lines], outs, names)


def _operand(call: Call, index: int) -> str:
    place, leaf = call.places[index], ".requires_grad_()" if call.wanted[index] else ""
    if isinstance(place, Partial):
        pieces = ", ".join(_literal(torch.from_numpy(one)) for one in call.pieces[index])
        return f"DTensor.from_local([{pieces}][dist.get_rank()], mesh, [Partial({place.reduce_op!r})]){leaf}"
    return f"distribute_tensor({_literal(torch.from_numpy(call.arrays[index]))}, mesh, [{place!r}]){leaf}"


def _shown(finding: Finding, call: _Written) -> list[str]:
    lines, of = [], f"x{finding.which}.grad"
    if finding.gradient:
        pairs = [
            (name, f"distribute_tensor({_literal(torch.from_numpy(seed))}, mesh, [Replicate()])")
            for name, out, seed in zip(call.names, call.outs, finding.seeds, strict=True)
            if seed is not None and out.requires_grad
        ]
        roots, seeds = (", ".join(one) for one in zip(*pairs, strict=True))
        lines = [f"torch.autograd.backward([{roots}], [{seeds}])"]
        found = f"torch.tensor([]) if {of} is None else {of}.full_tensor()"
    else:
        found = f"{call.names[finding.which]}.full_tensor()"
    return [
        *lines,
        f"found = {found}",
        f"right = {_literal(torch.from_numpy(finding.right))}",
        'print(f"{found} should be {right}")',
        "torch.testing.assert_close(found, right, equal_nan=True)",
    ]


def _literal(tensor: torch.Tensor) -> str:
    values = repr(tensor.tolist()).replace("nan", "torch.nan").replace("inf", "torch.inf")
    shaped = f".reshape({tuple(tensor.shape)})" if 0 in tensor.shape else ""
    return f"torch.tensor({values}, dtype={tensor.dtype}){shaped}"


class _Recorder(TorchFunctionMode):
    """Writes down what is called inside, a line per call."""

    def __init__(self, names: dict[int, str], made: str) -> None:
        super().__init__()
        self.names, self.made = names, made
        self.lines: list[str] = []
        self.unwritable = False
        self._kept: list[Any] = []  # an id belongs to one object as long as that lives

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call, and write it down."""
        del types
        given = kwargs or {}
        found = func(*args, **given)
        self._kept.append(found)
        texts = [self._source(one) for one in args]
        texts += [f"{name}={self._source(value)}" for name, value in given.items()]
        several = isinstance(found, (list, tuple)) and all(isinstance(one, torch.Tensor) for one in found)
        if several or isinstance(found, torch.Tensor):
            made = list(found) if several else [found]
            for one in made:
                self.names.setdefault(id(one), f"{self.made}{len(self.names)}")
            targets = ", ".join(self.names[id(one)] for one in made) + ("," if several and len(made) == 1 else "")
            self.lines.append(f"{targets} = {self._called(func, texts)}")
        return found

    def _called(self, func: Callable[..., Any], texts: list[str]) -> str:
        name = resolve_name(func)
        if name is None:
            self.unwritable = True
            return ""
        if name.endswith(".__get__"):
            return f"{texts[0]}.{name.split('.')[-2]}"
        if name.startswith("torch.Tensor."):
            return f"{texts[0]}.{name.rpartition('.')[2]}({', '.join(texts[1:])})"
        return f"{'torch.ops.' if name.startswith('aten.') else ''}{name}({', '.join(texts)})"

    def _source(self, value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return self.names.get(id(value)) or _literal(value.detach())
        if isinstance(value, (list, tuple)):
            inner = "".join(f"{self._source(one)}, " for one in value)
            return f"[{inner[:-2]}]" if isinstance(value, list) else f"({inner[:-1]})"
        text = _number(value) if isinstance(value, (float, complex)) else repr(value)
        self.unwritable = self.unwritable or not isinstance(value, _WRITABLE)
        return "..." if value is ... else text


_WRITABLE = (
    slice, type(None), type(...), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout,
)  # fmt: skip


def _number(value: complex) -> str:
    finite = cmath.isfinite(value)
    return repr(value) if finite else f"{type(value).__name__}({str(value)!r})"
