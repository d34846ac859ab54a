"""``torch.distributed``'s own collectives, agreed upon before they start: users call them beside ours."""

from __future__ import annotations

import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.transport.base import Shape

__all__ = ["guard_functions"]

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


_OURS = "hyper_parallel.transport.c10d."  # the transport's own calls are agreed upon before, as what they are part of
_BENEATH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep  # noqa: PTH100, PTH120 - compared with co_filename


def guard_functions(agree: Callable[..., None]) -> None:
    """Let ``torch.distributed``'s own collectives in this process be agreed upon first, too.

    Args:
        agree: called with what a rank is about to do, before the collective starts: see
            :meth:`hyper_parallel.transport.checks.guarded.GuardedTransport.agree`.
    """
    for name in OPERATIONS:
        guarded = _guarded(name, getattr(distributed_c10d, name), agree)
        setattr(distributed_c10d, name, guarded)
        setattr(dist, name, guarded)
    guard_operators(functools.partial(_agree, agree, wait=False))


def _guarded(name: str, plain: Callable[..., Any], agree: Callable[..., None]) -> Any:
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        caller = str(sys._getframe(1).f_globals.get("__name__"))  # noqa: SLF001 - the only cheap way to a caller
        if caller != distributed_c10d.__name__ and not caller.startswith(_OURS):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            group = group_of(bound.arguments)
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                _agree(agree, group, OPERATIONS[name](bound.arguments), wait=not bound.arguments.get("async_op"))
        return plain(*args, **kwargs)

    return call


def _agree(agree: Callable[..., None], group: Any, said: Statement, *, wait: bool) -> None:
    ranks = tuple(dist.get_process_group_ranks(group))
    agree(f"dist.{said.operation}", ranks, said.facts, said.sends, said.expects, wait=wait, beneath=_BENEATH)


_NAMESPACE = "_c10d_functional"
_LIBRARY = torch.library.Library(_NAMESPACE, "IMPL")  # wraps while it lives
_KEYS = ("CPU", "CUDA", "PrivateUse1")


def guard_operators(agree: Callable[[Any, Statement], None]) -> None:
    """Let every functional collective in this process be agreed upon first.

    Args:
        agree: called with the group and the statement, before the collective starts.
    """
    for name, said in _OPERATORS.items():
        for key in _KEYS:
            _LIBRARY.impl(name, _guarded_operator(name, key, said, agree), key, with_keyset=True)


def _guarded_operator(
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


def _functional_reduce_scatter(given: Given) -> Statement:
    x = given["input"]
    piece = x[: x.shape[0] // dist.get_world_size(given["group"])]
    return OPERATIONS["reduce_scatter_tensor"]({**given, "output": piece, "op": given["reduce_op"]})


def _functional_all_to_all(given: Given) -> Statement:
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
    "reduce_scatter_tensor": _functional_reduce_scatter,
    "reduce_scatter_tensor_out": _functional_reduce_scatter,
    "reduce_scatter_tensor_coalesced": _as("reduce_scatter", input_list="inputs", op="reduce_op"),
    "all_to_all_single": _functional_all_to_all,
    "broadcast": _broadcast,
    "broadcast_": _broadcast,
}
