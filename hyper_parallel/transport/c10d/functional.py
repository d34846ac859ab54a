"""``torch.distributed``'s functional collectives, agreed upon before they start.

They are operators of PyTorch, and are called as such from Python, from backward passes and by compiled graphs: only the
dispatcher sees them all. So what a device runs is wrapped there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.transport.c10d.statements import OPERATIONS, Statement

__all__ = ["guard_operators"]

_NAMESPACE = "_c10d_functional"
_LIBRARY = torch.library.Library(_NAMESPACE, "IMPL")  # wraps while it lives
_KEYS = ("CPU", "CUDA", "PrivateUse1")

Given = Mapping[str, Any]


def guard_operators(agree: Callable[[Any, Statement], None]) -> None:
    """Let every functional collective in this process be agreed upon first.

    Args:
        agree: called with the group and the statement, before the collective starts.
    """
    for name, said in _OPERATORS.items():
        for key in _KEYS:
            _LIBRARY.impl(name, _guarded(name, key, said, agree), key, with_keyset=True)


def _guarded(
    name: str, key: str, said: Callable[[Given], Statement], agree: Callable[[Any, Statement], None]
) -> Callable[..., Any]:
    kernel: Any = torch.library.get_kernel(f"{_NAMESPACE}::{name}", key)
    names = [one.name for one in getattr(getattr(torch.ops, _NAMESPACE), name).default._schema.arguments]  # noqa: SLF001 - no public spelling

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        group = given.pop("group_name")
        if isinstance(group, str):
            group = distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined,arg-type]  # noqa: SLF001
        agree(group, said({**given, "group": group}))
        return kernel.call_boxed(keys, *args, **kwargs)

    return call


def _as(name: str, **named: str) -> Callable[[Given], Statement]:
    """What the function ``name`` says, whose arguments are those of the operator by these names."""

    def said(given: Given) -> Statement:
        return OPERATIONS[name]({**given, **{theirs: given[ours] for theirs, ours in named.items()}})

    return said


def _reduce_scatter(given: Given) -> Statement:
    x = given["input"]
    piece = x[: x.shape[0] // dist.get_world_size(given["group"])]
    return OPERATIONS["reduce_scatter_tensor"]({**given, "output": piece, "op": given["reduce_op"]})


def _all_to_all(given: Given) -> Statement:
    x, splits = given["input"], given["output_split_sizes"]
    output = x.new_empty((sum(splits), *x.shape[1:]), device="meta")
    return OPERATIONS["all_to_all_single"]({**given, "output": output})


def _broadcast(given: Given) -> Statement:
    return OPERATIONS["broadcast"]({**given, "tensor": given["input"], "src": None, "group_src": given["src"]})


_all_reduce = _as("all_reduce", tensor="input", op="reduce_op")
_all_reduce_coalesced = _as("all_reduce_coalesced", tensors="inputs", op="reduce_op")
_all_gather = _as("all_gather_into_tensor", input_tensor="input")
_OPERATORS: dict[str, Callable[[Given], Statement]] = {
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "all_reduce_coalesced_": _all_reduce_coalesced,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_out": _all_gather,
    "all_gather_into_tensor_coalesced": _as("all_gather_coalesced", input_tensor_list="inputs"),
    "reduce_scatter_tensor": _reduce_scatter,
    "reduce_scatter_tensor_out": _reduce_scatter,
    "reduce_scatter_tensor_coalesced": _as("reduce_scatter", input_list="inputs", op="reduce_op"),
    "all_to_all_single": _all_to_all,
    "broadcast": _broadcast,
    "broadcast_": _broadcast,
}
