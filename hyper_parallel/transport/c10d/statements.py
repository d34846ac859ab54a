"""What a rank says about a collective of ``torch.distributed`` before it starts it, by the function's arguments.

What may differ between members is left out. Chunks of all-to-all are told by their numbers of elements, since PyTorch
counts those and lets members shape them as they like.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import Shape

__all__ = ["OPERATIONS", "Statement", "group_of"]

Given = Mapping[str, Any]
Facts = tuple[tuple[str, Any], ...]
Chunks = tuple[Shape, ...]


@dataclass(frozen=True)
class Statement:
    """What all members must say alike, and the chunks of which what one sends must be what another expects.

    Attributes:
        operation: name of the function, whatever its spelling.
        facts: named values on which all members must agree.
        sends, expects: shapes of what goes to each member and what is to come from each; None where ``facts`` say it.
    """

    operation: str
    facts: Facts = ()
    sends: Chunks | None = None
    expects: Chunks | None = None


def group_of(given: Given) -> Any:
    """The group that is meant by None, too."""
    group = given.get("group")
    return dist.group.WORLD if group is None else group


def _tensor(x: torch.Tensor) -> Facts:
    return (("shape", tuple(x.shape)), ("dtype", str(x.dtype)))


def _tensors(parts: Sequence[torch.Tensor]) -> Facts:
    return (
        ("dtype", " ".join(sorted({str(one.dtype) for one in parts}))),
        ("shapes", tuple(tuple(one.shape) for one in parts)),
    )


def _reduction(given: Given) -> Facts:
    return (("reduction", str(given["op"]).rpartition(".")[2].upper()),)


def _root(given: Given, name: str) -> Facts:
    """Global rank of the root, which may be given within the group; rank 0 without either."""
    inside = given.get(f"group_{name}")
    return ((name, int(given[name] or 0 if inside is None else dist.get_global_rank(group_of(given), inside))),)


def _whole(operation: str, tensor: str, *more: Callable[[Given], Facts]) -> Callable[[Given], Statement]:
    """Of a collective in which the same shape goes in, or comes out, everywhere."""

    def said(given: Given) -> Statement:
        return Statement(operation, sum((one(given) for one in more), _tensor(given[tensor])))

    return said


def _listed(operation: str, tensors: str, *more: Callable[[Given], Facts]) -> Callable[[Given], Statement]:
    """Of a collective to which every member gives the same shapes."""

    def said(given: Given) -> Statement:
        return Statement(operation, sum((one(given) for one in more), _tensors(given[tensors])))

    return said


def _objects(operation: str, *more: Callable[[Given], Facts]) -> Callable[[Given], Statement]:
    """Of a collective of anything."""
    return lambda given: Statement(operation, sum((one(given) for one in more), ()))


def _src(given: Given) -> Facts:
    return _root(given, "src")


def _dst(given: Given) -> Facts:
    return _root(given, "dst")


def _all_to_all(given: Given) -> Statement:
    sends, expects = given["input_tensor_list"], given["output_tensor_list"]
    return _exchange(
        "all_to_all", given, sends[0].dtype, [one.numel() for one in sends], [one.numel() for one in expects]
    )


def _all_to_all_single(given: Given) -> Statement:
    sends = _split(given["input"], given["input_split_sizes"], given)
    expects = _split(given["output"], given["output_split_sizes"], given)
    return _exchange("all_to_all_single", given, given["input"].dtype, sends, expects)


def _split(x: torch.Tensor, sizes: Sequence[int] | None, given: Given) -> list[int]:
    """Numbers of elements of the pieces of ``x``: its rows in even parts, or as they are told."""
    count = dist.get_world_size(group_of(given))
    row = math.prod(x.shape[1:])
    return [size * row for size in sizes] if sizes else [x.numel() // count] * count


def _exchange(operation: str, given: Given, dtype: torch.dtype, sends: list[int], expects: list[int]) -> Statement:
    count = dist.get_world_size(group_of(given))
    if len(sends) != count or len(expects) != count:
        msg = (
            f"{operation} over {count} ranks sends {len(sends)} chunks and expects {len(expects)}; both must be {count}"
        )
        raise CollectiveMismatchError(msg)
    facts = (("dtype", str(dtype)),)
    return Statement(operation, facts, tuple((one,) for one in sends), tuple((one,) for one in expects))


OPERATIONS: dict[str, Callable[[Given], Statement]] = {
    "all_reduce": _whole("all_reduce", "tensor", _reduction),
    "reduce": _whole("reduce", "tensor", _reduction, _dst),
    "broadcast": _whole("broadcast", "tensor", _src),
    "all_gather": _whole("all_gather", "tensor"),
    "all_gather_into_tensor": _whole("all_gather_into_tensor", "input_tensor"),
    "all_gather_single": _whole("all_gather_into_tensor", "input_tensor"),
    "_all_gather_base": _whole("all_gather_into_tensor", "input_tensor"),
    "reduce_scatter": _listed("reduce_scatter", "input_list", _reduction),
    "reduce_scatter_tensor": _whole("reduce_scatter_tensor", "output", _reduction),
    "reduce_scatter_single": _whole("reduce_scatter_tensor", "output", _reduction),
    "_reduce_scatter_base": _whole("reduce_scatter_tensor", "output", _reduction),
    "all_reduce_coalesced": _listed("all_reduce_coalesced", "tensors", _reduction),
    "all_gather_coalesced": _listed("all_gather_coalesced", "input_tensor_list"),
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "gather": _whole("gather", "tensor", _dst),
    "scatter": _whole("scatter", "tensor", _src),
    "all_gather_object": _objects("all_gather_object"),
    "broadcast_object_list": _objects("broadcast_object_list", _src),
    "gather_object": _objects("gather_object", _dst),
    "scatter_object_list": _objects("scatter_object_list", _src),
    "barrier": _objects("barrier"),
    "monitored_barrier": _objects("monitored_barrier"),
}
"""The statement of each function of ``torch.distributed``, by its arguments by name, defaults included."""
