"""Checks the collectives that programs call on ``torch.distributed`` themselves, before they start.

The functions of ``torch.distributed`` are replaced. Functional collectives are operators, called by Python, backward
passes and compiled graphs. Only the dispatcher sees all of these calls, so a kernel that runs before the devices'
kernels checks them there.

A fingerprint omits facts that may differ between members. In all-to-all PyTorch counts elements and allows any shapes
of chunks, so the fingerprint has the chunks' numbers of elements.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.platform.torch.versions import DispatchKey, resolve_process_group, schema_arguments
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, Facts, call_site

__all__ = ["LIBRARY_FILES", "OPERATIONS", "guard_functions", "name_of", "replace_function"]

_Arguments = Mapping[str, Any]
_Fingerprint = Callable[[_Arguments], CollectiveFingerprint]

_TRANSPORT = "hyper_parallel.transport."  # calls from this library's transports are compared already
_TORCH_DIR = f"{Path(torch.__file__).absolute().parent}{os.sep}"
LIBRARY_FILES = (_TORCH_DIR, contextlib.__file__, functools.__file__, "<eval_with_key>")
"""Prefixes of file names in the stack between a user's line and a collective: PyTorch, decorators, generated code."""
_NAMESPACE = "_c10d_functional"
_LIBRARY = torch.library.Library(_NAMESPACE, "IMPL")  # the library object; it checks while it is alive
_KEY = DispatchKey.BackendSelect  # every call runs it, after autograd and before the devices' kernels
_META = DispatchKey.Meta


class Agree(Protocol):
    """Compares a fingerprint with the other members': see :meth:`GuardedTransport.agree`."""

    def __call__(self, fingerprint: CollectiveFingerprint, *, wait: bool) -> None: ...


def guard_functions(agree: Agree) -> None:
    """Compare every collective that this process calls on ``torch.distributed`` before it starts.

    Args:
        agree: called with the fingerprint of each; waits for the other members if the collective is blocking.
    """
    for name, fingerprint in OPERATIONS.items():
        if hasattr(distributed_c10d, name):  # all_gather_single and reduce_scatter_single are new in 2.13
            replace_function(
                name, functools.partial(_call_guarded, fingerprint, agree), (distributed_c10d.__name__, _TRANSPORT)
            )
    for name, fingerprint in _OPERATORS.items():
        if hasattr(getattr(torch.ops, _NAMESPACE), name):
            _LIBRARY.impl(name, _guarded_operator(name, fingerprint, agree), _KEY.name, with_keyset=True)


def replace_function(
    name: str, replacement: Callable[[Callable[..., Any], inspect.BoundArguments], Any], own_callers: tuple[str, ...]
) -> None:
    """Replace a function of ``torch.distributed`` for the rest of this process.

    Args:
        name: name of the function.
        replacement: called with the plain function and the arguments of a call, defaults included.
        own_callers: prefixes of the names of modules that continue to call the plain function.
    """
    plain = getattr(distributed_c10d, name)
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        here: Any = inspect.currentframe()
        if str(here.f_back.f_globals.get("__name__")).startswith(own_callers):
            return plain(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return replacement(plain, bound)

    setattr(distributed_c10d, name, call)
    setattr(dist, name, call)


def _call_guarded(
    fingerprint: _Fingerprint, agree: Agree, plain: Callable[..., Any], bound: inspect.BoundArguments
) -> Any:
    if _group(bound.arguments) is not dist.GroupMember.NON_GROUP_MEMBER:
        agree(fingerprint(bound.arguments), wait=not bound.arguments.get("async_op"))
    return plain(*bound.args, **bound.kwargs)


def _guarded_operator(name: str, fingerprint: _Fingerprint, agree: Agree) -> Callable[..., Any]:
    operator = getattr(getattr(torch.ops, _NAMESPACE), name).default
    names = [argument.name for argument in schema_arguments(operator)]

    def call(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not keys.has(_META):  # a tensor without data takes part in no collective
            arguments = {**dict(zip(names, args, strict=False)), **kwargs}
            group = arguments.pop("group_name")
            if isinstance(group, str):
                group = resolve_process_group(group)
            agree(fingerprint({**arguments, "group": group}), wait=False)
        # redispatch releases the interpreter lock, which gloo's threads take to free tensors: call_boxed deadlocked
        return operator.redispatch(keys.remove(_KEY), *args, **kwargs)

    return call


# -- fingerprints from arguments ---------------------------------------------------------------------------------------


def _group(arguments: _Arguments) -> Any:
    """Return the group of a call; None is the group of the world."""
    group = arguments.get("group")
    return dist.group.WORLD if group is None else group


def _fingerprint(
    operation: str,
    arguments: _Arguments,
    facts: Facts = (),
    sends: Sequence[int] | None = None,
    expects: Sequence[int] | None = None,
) -> CollectiveFingerprint:
    """The fingerprint of a call; ``sends`` and ``expects`` are numbers of elements per member."""
    group = _group(arguments)
    ranks = tuple(dist.get_process_group_ranks(group))
    sent, expected = (None if sizes is None else tuple((size,) for size in sizes) for sizes in (sends, expects))
    site = call_site(*LIBRARY_FILES)
    return CollectiveFingerprint(f"dist.{operation}", ranks, facts, site, sent, expected, name_of(group))


def name_of(group: Any) -> str:
    """The name that distinguishes a group from others of the same ranks; empty for the world."""
    return "" if group is dist.group.WORLD else str(group.group_name)


def _with_tensor(operation: str, name: str, *more: Callable[[_Arguments], Facts]) -> _Fingerprint:
    """The fingerprint of a collective whose argument ``name`` is a tensor, of the same shape on every member."""

    def fingerprint(arguments: _Arguments) -> CollectiveFingerprint:
        x: torch.Tensor = arguments[name]
        facts = (("shape", tuple(x.shape)), ("dtype", str(x.dtype)), *_device(x))
        return _fingerprint(operation, arguments, sum((fact(arguments) for fact in more), facts))

    return fingerprint


def _with_tensors(operation: str, name: str, *more: Callable[[_Arguments], Facts]) -> _Fingerprint:
    """The fingerprint of a collective whose argument ``name`` is a list of tensors, of equal shapes on all members."""

    def fingerprint(arguments: _Arguments) -> CollectiveFingerprint:
        tensors: Sequence[torch.Tensor] = arguments[name]
        dtypes = " ".join(sorted({str(x.dtype) for x in tensors}))
        devices = sorted({fact for x in tensors for fact in _device(x)})
        facts = (("dtype", dtypes), ("shapes", tuple(tuple(x.shape) for x in tensors)), *devices)
        return _fingerprint(operation, arguments, sum((fact(arguments) for fact in more), facts))

    return fingerprint


def _device(x: torch.Tensor) -> Facts:
    """Return the device unless it is the CPU: all members compute on the same type of device."""
    return () if x.is_cpu else (("device", x.device.type),)


def _with_objects(operation: str, *more: Callable[[_Arguments], Facts]) -> _Fingerprint:
    """The fingerprint of a collective of arbitrary objects, or without arguments."""
    return lambda arguments: _fingerprint(operation, arguments, sum((fact(arguments) for fact in more), ()))


def _reduction(arguments: _Arguments) -> Facts:
    op = arguments["op"]  # a ReduceOp, its kind, or its name in functional operators
    return (("reduction", str(getattr(op, "op", op)).rpartition(".")[2].upper()),)


def _src(arguments: _Arguments) -> Facts:
    return _root(arguments, "src")


def _dst(arguments: _Arguments) -> Facts:
    return _root(arguments, "dst")


def _root(arguments: _Arguments, name: str) -> Facts:
    """Global rank of the root, which callers may give as a group rank; rank 0 by default."""
    inside = arguments.get(f"group_{name}")
    root = arguments[name] or 0 if inside is None else dist.get_global_rank(_group(arguments), inside)
    return ((name, int(root)),)


def _all_to_all(arguments: _Arguments) -> CollectiveFingerprint:
    sends, expects = arguments["input_tensor_list"], arguments["output_tensor_list"]
    sizes = ([x.numel() for x in sends], [x.numel() for x in expects])
    return _exchange("all_to_all", arguments, sends[0], *sizes)


def _all_to_all_single(arguments: _Arguments) -> CollectiveFingerprint:
    sends = _split(arguments["input"], arguments["input_split_sizes"], arguments)
    expects = _split(arguments["output"], arguments["output_split_sizes"], arguments)
    return _exchange("all_to_all_single", arguments, arguments["input"], sends, expects)


def _split(x: torch.Tensor, sizes: Sequence[int] | None, arguments: _Arguments) -> list[int]:
    """Numbers of elements of the chunks of ``x``: ``sizes`` are numbers of rows; by default all chunks are equal."""
    count = dist.get_world_size(_group(arguments))
    row = math.prod(x.shape[1:])
    given = [] if sizes is None else [int(size) for size in sizes]  # a list or an array
    return [size * row for size in given] if given else [x.numel() // count] * count


def _exchange(
    operation: str, arguments: _Arguments, sent: torch.Tensor, sends: list[int], expects: list[int]
) -> CollectiveFingerprint:
    count = dist.get_world_size(_group(arguments))
    if len(sends) != count or len(expects) != count:
        msg = (
            f"{operation} over {count} ranks sends {len(sends)} chunks and expects {len(expects)}; both must be {count}"
        )
        raise CollectiveMismatchError(msg)
    return _fingerprint(operation, arguments, (("dtype", str(sent.dtype)), *_device(sent)), sends, expects)


OPERATIONS: dict[str, _Fingerprint] = {
    "all_reduce": _with_tensor("all_reduce", "tensor", _reduction),
    "reduce": _with_tensor("reduce", "tensor", _reduction, _dst),
    "broadcast": _with_tensor("broadcast", "tensor", _src),
    "all_gather": _with_tensor("all_gather", "tensor"),
    "all_gather_into_tensor": _with_tensor("all_gather_into_tensor", "input_tensor"),
    "all_gather_single": _with_tensor("all_gather_into_tensor", "input_tensor"),
    "_all_gather_base": _with_tensor("all_gather_into_tensor", "input_tensor"),
    "reduce_scatter": _with_tensors("reduce_scatter", "input_list", _reduction),
    "reduce_scatter_tensor": _with_tensor("reduce_scatter_tensor", "output", _reduction),
    "reduce_scatter_single": _with_tensor("reduce_scatter_tensor", "output", _reduction),
    "_reduce_scatter_base": _with_tensor("reduce_scatter_tensor", "output", _reduction),
    "all_reduce_coalesced": _with_tensors("all_reduce_coalesced", "tensors", _reduction),
    "all_gather_coalesced": _with_tensors("all_gather_coalesced", "input_tensor_list"),
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "gather": _with_tensor("gather", "tensor", _dst),
    "scatter": _with_tensor("scatter", "tensor", _src),
    "all_gather_object": _with_objects("all_gather_object"),
    "broadcast_object_list": _with_objects("broadcast_object_list", _src),
    "gather_object": _with_objects("gather_object", _dst),
    "scatter_object_list": _with_objects("scatter_object_list", _src),
    "barrier": _with_objects("barrier"),
    "monitored_barrier": _with_objects("monitored_barrier"),
}
"""Each collective of ``torch.distributed``: its fingerprint from the arguments by name, defaults included."""


# -- the functional operators, as calls of those functions -------------------------------------------------------------


def _like(name: str, **renamed: str) -> _Fingerprint:
    """Return the fingerprint function of ``name`` for an operator whose arguments are called ``renamed``."""

    def fingerprint(arguments: _Arguments) -> CollectiveFingerprint:
        return OPERATIONS[name]({**arguments, **{theirs: arguments[ours] for theirs, ours in renamed.items()}})

    return fingerprint


def _functional_reduce_scatter(arguments: _Arguments) -> CollectiveFingerprint:
    x = arguments["input"]
    output = x[: x.shape[0] // dist.get_world_size(arguments["group"])]
    return OPERATIONS["reduce_scatter_tensor"]({**arguments, "output": output, "op": arguments["reduce_op"]})


def _functional_all_to_all(arguments: _Arguments) -> CollectiveFingerprint:
    x, splits = arguments["input"], arguments["output_split_sizes"]
    output = x.new_empty((sum(splits), *x.shape[1:]), device="meta")
    return OPERATIONS["all_to_all_single"]({**arguments, "output": output})


def _functional_broadcast(arguments: _Arguments) -> CollectiveFingerprint:
    named = {"tensor": arguments["input"], "src": None, "group_src": arguments["src"]}
    return OPERATIONS["broadcast"]({**arguments, **named})


_all_reduce = _like("all_reduce", tensor="input", op="reduce_op")
_all_reduce_coalesced = _like("all_reduce_coalesced", tensors="inputs", op="reduce_op")
_all_gather = _like("all_gather_into_tensor", input_tensor="input")
_OPERATORS: dict[str, _Fingerprint] = {
    "all_reduce": _all_reduce,
    "all_reduce_": _all_reduce,
    "all_reduce_coalesced": _all_reduce_coalesced,
    "all_reduce_coalesced_": _all_reduce_coalesced,
    "all_gather_into_tensor": _all_gather,
    "all_gather_into_tensor_out": _all_gather,
    "all_gather_into_tensor_coalesced": _like("all_gather_coalesced", input_tensor_list="inputs"),
    "reduce_scatter_tensor": _functional_reduce_scatter,
    "reduce_scatter_tensor_out": _functional_reduce_scatter,
    "reduce_scatter_tensor_coalesced": _like("reduce_scatter", input_list="inputs", op="reduce_op"),
    "all_to_all_single": _functional_all_to_all,
    "broadcast": _functional_broadcast,
    "broadcast_": _functional_broadcast,
}
