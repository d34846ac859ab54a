"""PyTorch's platform: its facets, assembled."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import distributed
from torch.autograd import forward_ad

from hyper_parallel.platform.contract.differentiable import DifferentiableFacet
from hyper_parallel.platform.contract.groups import GroupsFacet
from hyper_parallel.platform.contract.launcher_env import unlaunched
from hyper_parallel.platform.contract.ledger import Gap
from hyper_parallel.platform.contract.platform import Platform
from hyper_parallel.platform.torch.memory import TorchMemory
from hyper_parallel.platform.torch.modules import TorchModules
from hyper_parallel.platform.torch.persistence import TorchPersistence
from hyper_parallel.platform.torch.runtime import TorchRuntime
from hyper_parallel.platform.torch.tensors import TorchTensors
from hyper_parallel.platform.torch.versions import (
    DisableTorchFunctionSubclass,
    force_original_view_tracking,
    inside_forward_ad,
    is_functorch_wrapped_tensor,
    pytree,
    will_engine_execute_node,
)
from hyper_parallel.transport.base import Ranks, Transport, active_transport, active_transport_of
from hyper_parallel.transport.frontends.c10d.rank_groups import current_rank
from hyper_parallel.transport.real.c10d import TorchOps, join_world
from hyper_parallel.transport.simulated.single_process import SingleTransport

__all__ = ["GAPS", "AsyncTensor", "TorchDifferentiable", "TorchGroups", "TorchPlatform", "async_tensor", "build"]


GAPS = (
    Gap(
        "get_symmetric_memory_handler",
        "PyTorch has symmetric memory on CUDA devices only",
        "use the collectives of the platform",
        devices=("cpu", "npu"),
    ),
)


class TorchDifferentiable(DifferentiableFacet):
    """Collectives with gradients, on PyTorch's tape."""

    def has_tangent(self, local: Any) -> bool:
        """Whether ``local`` is a dual tensor of ``forward_ad``, which ``torch.func.jvp`` makes as well."""
        return inside_forward_ad() and forward_ad.unpack_dual(local).tangent is not None

    def _awaited_on_use(self, output: Any, pending: Any) -> Any:
        """A tensor whose first use waits for the collective ``pending``."""
        return async_tensor(output, pending)


# -- outputs of collectives in flight ----------------------------------------------------------------------------------

# Attributes that may be read without waiting.
_METADATA = frozenset({"shape", "dtype", "device", "requires_grad", "grad_fn", "is_leaf", "ndim", "layout", "_version"})
_METADATA_METHODS = frozenset({"size", "dim", "numel", "is_floating_point", "is_complex", "element_size"})


class AsyncTensor(torch.Tensor):
    """A tensor over the output of a collective in flight; operations run on the plain tensor, once it is complete."""

    _plain: torch.Tensor
    _pending: Any

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait, unless only metadata is read; then continue with plain tensors."""
        del types
        name = getattr(func, "__name__", "")
        attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
        unwrap = _plain_of if attribute in _METADATA or name in _METADATA_METHODS else _completed
        args, kwargs = pytree.tree_map_only(AsyncTensor, unwrap, (tuple(args), kwargs or {}))
        return func(*args, **kwargs)


def async_tensor(output: torch.Tensor, pending: Any) -> torch.Tensor:
    """Return ``output``, on its graph, such that whatever reads it first waits for ``pending``."""
    tensor = output.as_subclass(AsyncTensor)
    with DisableTorchFunctionSubclass():  # the documented way to access a subclass' own state
        tensor._plain, tensor._pending = output, pending  # noqa: SLF001 - this module's own class
    return tensor


def _plain_of(tensor: AsyncTensor) -> torch.Tensor:
    return tensor.__dict__["_plain"]


def _completed(tensor: AsyncTensor) -> torch.Tensor:
    state = tensor.__dict__
    pending = state["_pending"]
    if pending is not None:
        state["_pending"] = None
        pending.wait()
    return state["_plain"]


class TorchGroups(GroupsFacet):
    """Process groups of ``torch.distributed``."""

    def mesh_group(self, ranks: Ranks) -> Any:
        """A ``ProcessGroup``, on simulated ranks as well."""
        rank = current_rank()
        if rank is not None and active_transport() is rank.transport:
            return rank.group_of(ranks)
        return super().mesh_group(ranks)

    def _join(self, asked: dict[str, Any]) -> None:
        """``torch.distributed.init_process_group``."""
        # Every optimizer of PyTorch imports torch._dynamo. If that happens after the world's group was made, the group
        # is never freed: threads of gloo then outlive the world, and may abort the process at its end.
        importlib.import_module("torch._dynamo")
        join_world(**{name: value for name, value in asked.items() if value is not None})

    def _choose_device(self, device_type: str) -> None:
        """``set_device(LOCAL_RANK)``, unless the process already uses a device."""
        devices: Any = getattr(torch, device_type)  # torch_npu adds torch.npu when PyTorch is imported
        if "LOCAL_RANK" in os.environ and not devices.is_initialized():
            devices.set_device(int(os.environ["LOCAL_RANK"]))

    def _barrier_tensor(self) -> Any:
        """A tensor for the world's engine: on the device for NCCL and HCCL (unless rehearsed on gloo), else on CPU."""
        device = {"nccl": "cuda", "hccl": "npu"}.get(self.transport().backend, "cpu")
        return torch.zeros(1, device=device if device == self.device_type() else "cpu")


class TorchPlatform(
    TorchTensors,
    TorchGroups,
    TorchModules,
    TorchDifferentiable,
    TorchRuntime,
    TorchMemory,
    TorchPersistence,
    Platform,
):
    """PyTorch's implementation of the platform contract."""

    platform_type = "torch"
    gaps = GAPS
    Tensor = torch.Tensor
    Parameter = torch.nn.Parameter
    Module = torch.nn.Module

    @cached_property
    def Function(self) -> Any:
        """PyTorch's class of custom autograd functions, without support for DTensors."""
        from hyper_parallel.platform.torch.autograd import LocalFunction

        return LocalFunction

    computes_on_meta = True

    @cached_property
    def DTensorBase(self) -> Any:
        """PyTorch's DTensor class."""
        from hyper_parallel.platform.torch.dtensor import TorchDTensor

        return TorchDTensor

    def transport(self) -> Transport:
        """Return the transport of the simulated rank, else of torch.distributed if initialised, else of one process."""
        active = active_transport_of("torch")
        if active is not None:
            return active
        world, engine = self._joined_world
        if world is not None and world is distributed.group.WORLD:
            return engine  # type: ignore[return-value] # with a world
        return self._connected() if _joined() else unlaunched(_ALONE)

    _joined_world: tuple[Any, Transport | None] = (None, None)

    def _connected(self) -> Transport:
        """Return the transport of the default group; a new one if the process has joined another world."""
        from hyper_parallel.transport.real.c10d import C10dTransport

        with _JOINING:
            world, engine = self._joined_world
            if engine is None or world is not distributed.group.WORLD:
                engine = C10dTransport()
                self._joined_world = (distributed.group.WORLD, engine)
            return engine

    def _leave(self, transport: Transport) -> None:
        transport.close()
        self._joined_world = (None, None)

    @cached_property
    def wrap(self) -> Callable[[Any, Any], Any]:
        """The DTensor class' own fast constructor; the class gets its methods before the first object exists."""
        from hyper_parallel.platform.torch import dtensor

        return dtensor.wrap

    def grad_enabled(self) -> bool:
        """Return the grad mode of this thread."""
        return torch.is_grad_enabled()

    def needs_grad(self, local: Any) -> bool:
        """``requires_grad``."""
        return local.requires_grad

    def passes_gradient(self, plain: Any) -> bool:
        """False for a leaf: gradients end in its ``grad``."""
        return not plain.is_leaf

    def is_parameter(self, tensor: Any) -> bool:
        """An ``nn.Parameter`` that is a leaf, so no write to it was recorded by autograd."""
        return isinstance(tensor, torch.nn.Parameter) and bool(tensor.is_leaf)

    def accumulates_grad(self, local: Any) -> bool:
        """False if the leaf has hooks, or ``torch.autograd.grad`` runs, which adds nothing to ``grad``."""
        if _has_hooks(local):
            return False
        try:
            return will_engine_execute_node(torch.autograd.graph.get_gradient_edge(local).node)
        except RuntimeError:  # PyTorch raises it inside torch.autograd.grad
            return False

    def accumulate_grad(self, local: Any, grad: Any) -> None:
        """Add a gradient to a leaf by a separate backward, or, if it is frozen or has hooks, directly to ``grad``."""
        if local.requires_grad and not _has_hooks(local):
            torch.autograd.backward(local, grad)
        elif local.grad is None:
            local.grad = grad
        else:
            with torch.no_grad():
                local.grad.add_(grad)

    def version(self, local: Any) -> int:
        """PyTorch's version counter (0 for inference tensors, which have none)."""
        try:
            version: int = local._version
        except RuntimeError:  # an inference tensor: asking each tensor whether it is one costs as much as the counter
            return 0
        return version

    def replaying_views(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Makes PyTorch repeat a written view's operator: an empty view recreated by strides has no second gradient."""

        def replaying(*args: Any) -> Any:
            with force_original_view_tracking(True):
                return call(*args)

        return replaying

    def may_cache_view(self, tensor: Any) -> bool:
        """Return False if the program has read ``.data``, because writes through it do not change the version."""
        return not tensor._data_taken  # noqa: SLF001 - the other half of the DTensor

    def follow_writes(self, view: Any, base: Any, *, is_copy: bool) -> None:
        """Invalidate ``view`` when ``base`` is written, by the version counter that aliases of the storage share."""
        from hyper_parallel.platform.torch.dtensor import invalidate_with

        del is_copy
        invalidate_with(view, base)

    def is_transformed(self, tensor: Any) -> bool:
        """Return whether ``torch.func`` has wrapped the tensor."""
        wrapped: bool = is_functorch_wrapped_tensor(tensor)
        return wrapped

    def from_torch(self, tensor: Any) -> Any:
        """Convert PyTorch's DTensor to one of this library over the same storage."""
        from hyper_parallel.platform.torch.interop import from_torch

        return self.wrap(*from_torch(tensor))

    def own_mesh(self, mesh: Any) -> Any:
        """Convert a mesh of ``torch.distributed.device_mesh`` to one with the same device, ranks and names."""
        from hyper_parallel.platform.torch.interop import own_mesh

        return own_mesh(mesh)

    def own_placement(self, placement: Any) -> Any:
        """Convert placements of ``torch.distributed.tensor``."""
        from hyper_parallel.platform.torch.interop import own_placement

        return own_placement(placement)

    def operator_entry(self, op: Any) -> Any:
        """Look up a function, a method, an operator overload, or the name of a function or method, in the registry."""
        from hyper_parallel.platform.torch.intercept import interception

        tables = interception()
        calls = [op]
        if isinstance(op, str):
            calls = [getattr(owner, op, None) for owner in (torch, torch.Tensor, torch.nn.functional)]
        entries = (tables.functions.get(call) or tables.overloads.get(call) for call in calls if call is not None)
        return next((entry for entry in entries if entry is not None), None)

    def local_op(self, op: str) -> Callable[..., Any]:
        """Look up the local operator in the registry."""
        from hyper_parallel.platform.torch.ops.registry import local_op

        return local_op(op)


_JOINING = threading.Lock()
_ALONE = SingleTransport(TorchOps())
_joined: Callable[[], bool] = distributed.is_initialized if distributed.is_available() else bool


def _has_hooks(local: Any) -> bool:
    return bool(local._backward_hooks or local._post_accumulate_grad_hooks)


def build() -> TorchPlatform:
    """Return the platform, after completing the DTensor class with it."""
    from hyper_parallel.platform.torch import autograd, dtensor, patches

    platform = TorchPlatform()
    dtensor.install(platform)
    autograd.install()
    patches.install()
    return platform
