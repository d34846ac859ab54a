"""Rejects the calls that NCCL or HCCL would reject, in runs without a device too.

Gloo and the simulation support more than NCCL and HCCL: any stride, more dtypes and reductions, tags, chunks of unequal
sizes. A program that uses these runs on CPU, but fails on an accelerator. With the variable
``HYPER_PARALLEL_ENGINE_RULES`` set to ``nccl`` or ``hccl``, calls that this engine would reject raise an error on CPU.

Sources: documentation and known behaviour of PyTorch's ``ProcessGroupNCCL`` and torch_npu's ``ProcessGroupHCCL``, and
the dtypes in the reference of ``HcclAllReduce``. Where versions differ, the older one decides. The rules have not been
confirmed on a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.transport.frontends.c10d.arguments import described, listed, op_of
from hyper_parallel.transport.processes import ENGINE_VARIABLE

__all__ = ["ENGINES", "OLDER_NAMES", "EngineRules", "rules_of", "tensors_in"]

OLDER_NAMES = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_to_all_single": "alltoall_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}
"""Methods of process groups, and the names of the same methods before PyTorch 2.13 and in gloo's groups."""

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_MOVED = _FLOATS | {torch.bool, torch.uint8, torch.int8, torch.int32, torch.int64}
_REDUCING = frozenset({
    "allreduce", "allreduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "_reduce_scatter_base",
})  # fmt: skip
_EQUAL = {
    "allgather": "the tensors of all members",
    "gather": "the tensors of all members",
    "scatter": "the tensors for all members",
    "reduce_scatter": "the tensors for all members",
}
_MESSAGES = frozenset({"send", "recv"})
_NEVER = {
    "recv_anysource": ("it has no receive from any rank", "name the rank"),
    "monitored_barrier": ("only gloo has it", "call barrier()"),
}


@dataclass(frozen=True)
class EngineRules:
    """The rules of one engine.

    Attributes:
        engine: name of the engine, ``nccl`` or ``hccl``.
        moved: dtypes that the engine transfers.
        reduced: dtypes that the engine reduces.
        reductions: names of the reductions that the engine supports.
        equal: operations on lists whose tensors must all be of one size.
    """

    engine: str
    moved: frozenset[torch.dtype]
    reduced: frozenset[torch.dtype]
    reductions: frozenset[str]
    equal: frozenset[str]

    def check(self, operation: str, arguments: Sequence[Any]) -> None:
        """Reject a process group's call that the engine would reject.

        Args:
            operation: name of the process group's method.
            arguments: arguments of the call, by position.

        Raises:
            UnsupportedOnBackend: the engine would reject the call; the message has the fix.
        """
        if operation in _NEVER:
            self._refuse(operation, *_NEVER[operation])
        if operation in _MESSAGES and len(arguments) > 2 and arguments[2]:
            fix = "send messages with tag 0, in the order in which they are received"
            self._refuse(operation, f"tag {arguments[2]} is ignored by it, so messages would be mixed up", fix)
        for x in tensors_in(arguments):
            self._check_tensor(operation, x)
        if operation in _REDUCING:
            self._check_reduction(operation, arguments)
        if operation in self.equal:
            self._check_sizes(operation, arguments)

    def _check_tensor(self, operation: str, x: torch.Tensor) -> None:
        if x.layout is not torch.strided:
            self._refuse(operation, f"{described(x)} is sparse", "call .to_dense() first")
        if not x.is_contiguous():
            fix = "call .contiguous() first, and copy a received buffer back"
            self._refuse(operation, f"{described(x)} with strides {list(x.stride())} is not contiguous", fix)
        if x.dtype not in self.moved:
            self._refuse(operation, f"{described(x)} has a dtype that it does not carry", _dtypes(self.moved))

    def _check_reduction(self, operation: str, arguments: Sequence[Any]) -> None:
        op = next((kind for kind in map(_reduction, arguments) if kind), "SUM")
        if op not in self.reductions:
            known = f"it has {', '.join(sorted(self.reductions))}"
            self._refuse(operation, f"it has no reduction {op}", f"{known}; platform.all_reduce serves every reduction")
        for x in tensors_in(arguments):
            if x.dtype not in self.reduced:
                self._refuse(operation, f"{described(x)} has a dtype that it does not reduce", _dtypes(self.reduced))

    def _check_sizes(self, operation: str, arguments: Sequence[Any]) -> None:
        sizes = {x.numel() for x in tensors_in(arguments)}
        if len(sizes) > 1:
            fix = "pad them to the largest, or use all_to_all_single with split sizes"
            self._refuse(operation, f"{_EQUAL[operation]} have {sorted(sizes)} elements; they must be equal", fix)

    def _refuse(self, operation: str, what: str, fix: str) -> None:
        msg = f"{operation}: {self.engine} would refuse this call: {what}; {fix}"
        raise UnsupportedOnBackend(msg)


ENGINES = {
    "nccl": EngineRules(
        "nccl", _MOVED, _MOVED, frozenset({"SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"}),
        frozenset({"gather", "scatter"}),
    ),
    "hccl": EngineRules(
        "hccl", _MOVED | {torch.int16},
        frozenset({torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int16, torch.int32, torch.int64}),
        frozenset({"SUM", "PRODUCT", "MIN", "MAX"}), frozenset(_EQUAL),
    ),
}  # fmt: skip
"""The rules of each engine. NCCL gathers lists of unequal sizes: PyTorch sends them one by one."""


def rules_of(name: str) -> EngineRules | None:
    """Return the rules of the engine ``name``; None if ``name`` is empty.

    Raises:
        ValueError: ``name`` is not an engine.
    """
    if not name:
        return None
    if name not in ENGINES:
        msg = f"{ENGINE_VARIABLE}={name!r} is not an engine; set {' or '.join(sorted(ENGINES))}, or unset it"
        raise ValueError(msg)
    return ENGINES[name]


def tensors_in(arguments: Iterable[Any]) -> list[torch.Tensor]:
    """All tensors among the arguments, those in lists and in lists of lists included."""
    tensors: list[torch.Tensor] = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            tensors += listed(argument)
        elif isinstance(argument, list | tuple):
            tensors += tensors_in(argument)
    return tensors


def _reduction(argument: Any) -> str:
    """Return the name of the reduction in one argument of a call; empty if the argument has no reduction."""
    op = op_of(argument) if argument is not None else None
    if isinstance(op, dist.ReduceOp | dist.ReduceOp.RedOpType):
        return str(getattr(op, "op", op)).rpartition(".")[2]
    return ""


def _dtypes(known: frozenset[torch.dtype]) -> str:
    names = sorted(str(dtype).removeprefix("torch.") for dtype in known)
    return f"cast to one of {', '.join(names)}"
