"""PyTorch's platform: its facets, assembled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import distributed

from hyper_parallel.platform.contract.launched import unlaunched
from hyper_parallel.platform.contract.platform import Platform
from hyper_parallel.platform.torch.differentiable import TorchDifferentiable
from hyper_parallel.platform.torch.gaps import GAPS
from hyper_parallel.platform.torch.groups import TorchGroups
from hyper_parallel.platform.torch.memory import TorchMemory
from hyper_parallel.platform.torch.modules import TorchModules
from hyper_parallel.platform.torch.persistence import TorchPersistence
from hyper_parallel.platform.torch.runtime import TorchRuntime
from hyper_parallel.platform.torch.tensors import TorchTensors
from hyper_parallel.platform.torch.versions import (
    force_original_view_tracking,
    is_functorch_wrapped_tensor,
    will_engine_execute_node,
)
from hyper_parallel.transport.base import Transport, active_transport_of
from hyper_parallel.transport.real.c10d import TorchOps
from hyper_parallel.transport.simulated.single_process import SingleTransport

__all__ = ["TorchPlatform", "build"]


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
    """The members of the contract, on PyTorch."""

    platform_type = "torch"
    gaps = GAPS
    Tensor = torch.Tensor
    Parameter = torch.nn.Parameter
    Module = torch.nn.Module

    @cached_property
    def Function(self) -> Any:  # noqa: N802 - the contract fixes this name
        """PyTorch's custom function, as it is without DTensors."""
        from hyper_parallel.platform.torch.autograd import LocalFunction

        return LocalFunction

    computes_on_meta = True

    @cached_property
    def DTensorBase(self) -> Any:  # noqa: N802 - the contract fixes this name
        """PyTorch's DTensor class."""
        from hyper_parallel.platform.torch.dtensor import TorchDTensor

        return TorchDTensor

    def transport(self) -> Transport:
        """The surrounding simulated rank, else torch.distributed where it is initialised, else a world of one."""
        active = active_transport_of("torch")
        if active is not None:
            return active
        world, engine = self._joined_world
        if world is not None and world is distributed.group.WORLD:
            return engine  # type: ignore[return-value] # with a world
        return self._connected() if _joined() else unlaunched(_ALONE)

    _joined_world: tuple[Any, Transport | None] = (None, None)

    def _connected(self) -> Transport:
        """The transport of the default group, whose ranks change where a process joins another world."""
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
        """Grad mode of this thread."""
        return torch.is_grad_enabled()

    def needs_grad(self, local: Any) -> bool:
        """``requires_grad``."""
        return local.requires_grad

    def passes_gradient(self, plain: Any) -> bool:
        """Unless it is a leaf: a leaf's own ``grad`` is where gradients end."""
        return not plain.is_leaf

    def is_parameter(self, tensor: Any) -> bool:
        """``nn.Parameter``, while nothing was written into it on the tape."""
        return isinstance(tensor, torch.nn.Parameter) and bool(tensor.is_leaf)

    def accumulates_grad(self, local: Any) -> bool:
        """Unless the leaf has hooks, or ``torch.autograd.grad`` runs, which adds nothing to ``grad``."""
        if _has_hooks(local):
            return False
        try:
            return will_engine_execute_node(torch.autograd.graph.get_gradient_edge(local).node)
        except RuntimeError:  # PyTorch raises it inside torch.autograd.grad
            return False

    def accumulate_grad(self, local: Any, grad: Any) -> None:
        """By a backward of its own; added directly to a leaf that is frozen or has hooks (of later passes)."""
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
            version: int = local._version  # noqa: SLF001 - no public spelling
        except RuntimeError:  # an inference tensor: asking each tensor whether it is one costs as much as the counter
            return 0
        return version

    def replaying_views(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """PyTorch makes a view anew by strides when it is written, and of an empty one that has no second gradient."""

        def replaying(*args: Any) -> Any:
            with force_original_view_tracking(True):
                return call(*args)

        return replaying

    def may_cache_view(self, tensor: Any) -> bool:
        """Unless ``.data`` was handed out: other writes change the version, those through it do not."""
        return not tensor._data_taken  # noqa: SLF001 - the other half of the DTensor

    def invalidate_with(self, copy: Any, base: Any) -> None:
        """By the version of the base's storage, which aliases share."""
        from hyper_parallel.platform.torch.dtensor import invalidate_with

        invalidate_with(copy, base)

    def is_transformed(self, tensor: Any) -> bool:
        """Whether ``torch.func`` has wrapped it."""
        wrapped: bool = is_functorch_wrapped_tensor(tensor)
        return wrapped

    def from_torch(self, tensor: Any) -> Any:
        """Over the same storage."""
        from hyper_parallel.platform.torch.interop import from_torch

        return self.wrap(*from_torch(tensor))

    def own_mesh(self, mesh: Any) -> Any:
        """That of ``torch.distributed.device_mesh``, with its device, ranks and names."""
        from hyper_parallel.platform.torch.interop import own_mesh

        return own_mesh(mesh)

    def own_placement(self, placement: Any) -> Any:
        """Those of ``torch.distributed.tensor``."""
        from hyper_parallel.platform.torch.interop import own_placement

        return own_placement(placement)

    def operator_entry(self, op: Any) -> Any:
        """From the registry: a function, a method, an operator overload, or the name of a function or method."""
        from hyper_parallel.platform.torch.intercept import interception

        tables = interception()
        calls = [op]
        if isinstance(op, str):
            calls = [getattr(owner, op, None) for owner in (torch, torch.Tensor, torch.nn.functional)]
        entries = (tables.functions.get(call) or tables.overloads.get(call) for call in calls if call is not None)
        return next((entry for entry in entries if entry is not None), None)

    def local_op(self, op: str) -> Callable[..., Any]:
        """From the registry."""
        from hyper_parallel.platform.torch.ops.registry import local_op

        return local_op(op)


_JOINING = threading.Lock()
_ALONE = SingleTransport(TorchOps())
_joined: Callable[[], bool] = distributed.is_initialized if distributed.is_available() else bool


def _has_hooks(local: Any) -> bool:
    return bool(local._backward_hooks or local._post_accumulate_grad_hooks)  # noqa: SLF001 - no public spelling


def build() -> TorchPlatform:
    """The platform, with the DTensor class completed for it."""
    from hyper_parallel.platform.torch import autograd, dtensor, patches

    platform = TorchPlatform()
    dtensor.install(platform)
    autograd.install()
    patches.install()
    return platform
