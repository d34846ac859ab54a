"""Lets MindSpore's own communication functions use the world of :mod:`world`, in the process of a rank.

MindSpore's Python code is not changed: it checks arguments and calls operators. ``__call__`` is replaced in the
operators' classes, so that references that a program obtained earlier work too. Only functions that set up a connection
are replaced completely.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NoReturn

import mindspore
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.communication import GlobalComm, comm_func, management
from mindspore.mint.distributed import distributed
from mindspore.ops import Primitive
from mindspore.ops.function import comm_func as ops_comm_func

from hyper_parallel.errors import MeshError, UnsupportedOnBackend
from hyper_parallel.platform.mindspore.versions import (
    ExistingGroup,
    SyncBatchNorm,
    comm_helper,
    parse,
    primitive_cache,
    pynative_executor,
)
from hyper_parallel.transport.frontends.mindspore_comm.functional import OPERATORS
from hyper_parallel.transport.frontends.mindspore_comm.host import compiler_splits
from hyper_parallel.transport.frontends.mindspore_comm.primitives import CARRIED, REFUSED, carry
from hyper_parallel.transport.frontends.mindspore_comm.world import GroupManager, begin_world, current_world
from hyper_parallel.transport.simulated.endpoint import Endpoint

__all__ = ["VERSIONS", "begin", "begin_again", "normalize", "with_group"]


def with_group(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of ``nn.SyncBatchNorm``'s operator: pass the world's group, which MindSpore omits on CPU."""

    @wraps(init)
    def construct(self: Any, *args: Any, group: str | None = None, **kwargs: Any) -> None:
        init(self, *args, group=GlobalComm.WORLD_COMM_GROUP if group is None else group, **kwargs)

    return construct


def normalize(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call of ``nn.SyncBatchNorm``'s operator: compute statistics and gradients over all members' batches."""

    @wraps(plain)
    def call(self: Any, x: Tensor, scale: Tensor, offset: Tensor, mean: Parameter, variance: Parameter) -> Any:
        if type(x) not in (Tensor, Parameter):
            msg = (
                "nn.SyncBatchNorm takes each rank's batch as a plain tensor; for a DTensor use nn.BatchNorm2d, which "
                "computes the statistics of the global batch"
            )
            raise UnsupportedOnBackend(msg)
        return _normalized(self.init_attrs, x, scale, offset, (mean, variance))

    return call


def _normalized(
    attributes: dict[str, Any], x: Tensor, scale: Tensor, offset: Tensor, running: tuple[Parameter, Parameter]
) -> Any:
    """Return the normalized batch with the statistics; ``running`` statistics are updated."""
    reduce = ops.AllReduce(group=attributes["group"])
    wide = x.astype(mindspore.float32)
    dims = tuple(dim for dim in range(x.ndim) if dim != 1)
    shape = tuple(x.shape[1] if dim == 1 else 1 for dim in range(x.ndim))
    size = Tensor([x.size // x.shape[1]], mindspore.float32)
    summed = reduce(mint.cat([wide.sum(dims), size]))
    count = ops.stop_gradient(summed[-1:])
    mean = summed[:-1] / count
    centred = wide - mean.reshape(shape)
    variance = reduce((centred * centred).sum(dims)) / count
    out = centred * mint.rsqrt(variance + attributes["epsilon"]).reshape(shape)
    out = out * scale.reshape(shape) + offset.reshape(shape)
    momentum, unbiased = attributes["momentum"], variance * (count / mint.clamp(count - 1, min=1))
    for moving, batch in zip(running, (mean, unbiased), strict=True):
        value = ops.stop_gradient(moving) * (1 - momentum) + ops.stop_gradient(batch) * momentum
        moving.set_data(value.astype(moving.dtype))
    return out.astype(x.dtype), mean, variance, mean, variance


VERSIONS = ("2.10",)
"""The MindSpore releases that the replacements were tested with."""

_BACKENDS = ("hccl", "nccl", "mccl")
_CACHES = ("_GROPU_SIZE_CACHE", "_GROPU_RANK_CACHE", "_GROUP_SIZE_CACHE", "_GROUP_RANK_CACHE")
"""MindSpore's caches of groups in three modules; the spelling depends on the module and the version."""

_PLAIN = (Tensor, Parameter)


def begin(rank: int, size: int, endpoint: Endpoint) -> None:
    """Make this process a rank of a fresh world, without state of an earlier run.

    Args:
        rank: this rank's number.
        size: number of ranks.
        endpoint: connection to the coordinator.
    """
    begin_world(rank, size, endpoint)
    install()
    pynative_executor.clear_res()  # a cell that raised during differentiation leaves MindSpore in recording mode
    GlobalComm.INITED = True
    GlobalComm.BACKEND = "hccl"
    GlobalComm.WORLD_COMM_GROUP = management.HCCL_WORLD_COMM_GROUP
    # Clear MindSpore's caches of groups, and primitives that cache the size of their group.
    for remembered in (
        ExistingGroup.ITEMS,
        ExistingGroup.GROUP_RANKS,
        *(
            vars(module)[name]
            for module in (comm_func, ops_comm_func, distributed)
            for name in _CACHES
            if name in vars(module)
        ),
        primitive_cache,
    ):
        remembered.clear()
    ops_comm_func.set_comm_ops_inplace(True)


def begin_again() -> None:
    """Reset the same rank of the same world for the next run."""
    world = current_world()
    begin(world.rank, world.size, world.endpoint)


@functools.cache
def install() -> None:
    """Replace the functions that MindSpore calls; once per process."""
    for operator, run in OPERATORS.items():
        operator.__call__ = _operator(operator.__call__, run)  # type: ignore[method-assign]
    for primitive in CARRIED:
        primitive.__call__ = _primitive(primitive.__call__)  # type: ignore[method-assign]
    for primitive, instead in REFUSED.items():
        primitive.__call__ = _refused(f"ops.{primitive.__name__}", instead)  # type: ignore[method-assign]
    SyncBatchNorm.__init__ = with_group(SyncBatchNorm.__init__)
    SyncBatchNorm.__call__ = normalize(SyncBatchNorm.__call__)
    for kind in (Primitive, nn.Cell):
        kind.shard = _without_effect(kind.shard)
    for module in (parse, parse.parser):
        module.get_obj_type = _uncompiled(module.get_obj_type)
    for module in (comm_helper, ops_comm_func):
        module.CollectiveManager = GroupManager
    for module in (distributed, ops_comm_func):
        module._finalize_collective = _destroy  # noqa: SLF001
        module.TCPStoreClient = _refused(
            "TCPStore", "a rank that waits for a key would block the others; exchange objects with all_gather_object"
        )
        _replace(module.init_process_group, _init_process_group)
    _replace(management.init, _init)
    _replace(management.release, _release)
    _replace(
        management.get_comm_name, _refused("get_comm_name", "it names a communicator of HCCL, which ranks here lack")
    )


def _operator(plain: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(self: Any, *args: Any) -> Any:
        return plain(self, *args) if _has_own_class(args) else run(*args)

    return call


def _primitive(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(self: Any, *args: Any) -> Any:
        return plain(self, *args) if _has_own_class(args) else carry(self, *args)

    return call


def _has_own_class(values: Sequence[Any]) -> bool:
    """Whether a tensor is of a subclass. MindSpore lets the subclass handle the operator, and DTensors reject it."""
    return any(
        _has_own_class(value)
        if isinstance(value, (list, tuple))
        else isinstance(value, Tensor) and type(value) not in _PLAIN
        for value in values
    )


def _uncompiled(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap the function that the graph compiler calls for every operator."""

    @functools.wraps(plain)
    def ask(operator: Any) -> Any:
        if type(operator) in CARRIED or type(operator) in OPERATORS:
            _refused(
                f"{operator.name} in a function compiled by ms.jit, or in graph mode,",
                "the compiled code would call HCCL; run it uncompiled, with MS_JIT=0 in the environment",
            )()
        return plain(operator)

    return ask


def _without_effect(shard: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that declares the sharding of an operator, which the graph compiler would apply."""

    @functools.wraps(shard)
    def state(self: Any, *args: Any, **kwargs: Any) -> Any:
        if compiler_splits():
            warnings.warn(
                f"{type(self).__name__}.shard() has no effect on simulated or rehearsed ranks: MindSpore's graph "
                "compiler, which splits operators, does not run there, so every rank computes the complete operator; "
                "declare layouts with hyper_parallel.parallelize_module or distribute_tensor",
                stacklevel=2,
            )
        return shard(self, *args, **kwargs)

    return state


def _refused(name: str, instead: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        msg = f"{name} is not supported on simulated or rehearsed ranks: {instead}"
        raise UnsupportedOnBackend(msg)

    return refuse


def _replace(function: Any, replacement: Callable[..., Any]) -> None:
    """Replace a function in every module that references it, including the program's modules."""
    for module in list(sys.modules.values()):  # some entries are not modules
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is function:
                setattr(module, name, replacement)


def _init(backend_name: str | None = None) -> None:
    """``mindspore.communication.init``: the world exists already, and every backend name refers to it.

    Raises:
        ValueError: ``backend_name`` is not a backend of MindSpore.
    """
    if backend_name is not None and backend_name not in _BACKENDS:
        msg = f"init: backend_name is {backend_name!r}; it must be one of {', '.join(_BACKENDS)}, or None"
        raise ValueError(msg)
    current_world().initialised = True
    GlobalComm.INITED = True


def _init_process_group(
    backend: str = "hccl",
    init_method: str | None = None,
    timeout: Any = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    group_name: str = "",
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """``mint.distributed.init_process_group``: the world exists already; given size and rank must match it.

    Raises:
        MeshError: ``world_size`` or ``rank`` differ from this world's.
        UnsupportedOnBackend: ``group_name`` renames the world's group.
    """
    del init_method, timeout, store, pg_options, device_id
    world = current_world()
    for what, value, actual in (("world_size", world_size, world.size), ("rank", rank, world.rank)):
        if value not in (-1, actual):
            msg = f"init_process_group: {what} is {value}, but this rank runs in a world where it is {actual}"
            raise MeshError(msg)
    if group_name:
        msg = f"init_process_group: group_name={group_name!r} is not supported; the world's group keeps its usual name"
        raise UnsupportedOnBackend(msg)
    _init(backend)


def _destroy() -> bool:
    current_world().destroy_all()
    return True


def _release() -> None:
    """``mindspore.communication.release``."""
    _destroy()
