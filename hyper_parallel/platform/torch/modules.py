"""Facet *modules* on PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import nn

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.module import distribute_tensor, local_data_for
from hyper_parallel.core.tensor_parallel.clip import clip_grad_norm_
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.contract.fully_sharded import FullyShardedOptions
from hyper_parallel.platform.contract.modules import HookHandle, ModulesFacet, check_hook
from hyper_parallel.platform.contract.replicated import ReplicatedOptions
from hyper_parallel.platform.torch import delayed
from hyper_parallel.platform.torch.deferred_hooks import local_leaf, refuse_earlier_hooks

__all__ = ["TorchModules"]


class TorchModules(ModulesFacet):
    """Modules of PyTorch."""

    def get_cells_and_names(self, cell: Any) -> Iterator[tuple[str, Any]]:
        """``named_modules``, shared modules once per path."""
        yield from cell.named_modules(remove_duplicate=False)

    def is_container(self, cell: Any) -> bool:
        """True for ``ModuleList`` and its like, and for subclasses without a ``forward`` of their own."""
        containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
        return isinstance(cell, containers) and type(cell).forward is nn.Module.forward

    def parameters_dict(self, cell: Any) -> dict[str, Any]:
        """``named_parameters``, shared parameters once per path."""
        return dict(cell.named_parameters(remove_duplicate=False))

    def direct_parameters(self, cell: Any) -> dict[str, Any]:
        """Own parameters that are set."""
        return {name: value for name, value in cell._parameters.items() if value is not None}

    def direct_buffers(self, cell: Any) -> dict[str, Any]:
        """Own buffers that are set."""
        return {name: value for name, value in cell._buffers.items() if value is not None}

    def set_parameter(self, cell: Any, name: str, value: Any) -> None:
        """Replace a parameter or buffer of the same name."""
        if name in cell._parameters:
            cell.register_parameter(name, value)
        else:
            cell.register_buffer(name, value, persistent=name not in cell._non_persistent_buffers_set)

    def check_unhooked(self, parameter: Any, path: str, event: str) -> None:
        """Checks the leaf's hooks, and tensor methods that PyTorch's ``fully_shard`` calls around a gather."""
        refuse_earlier_hooks(parameter, path, event)
        if event == "fully_shard" and hasattr(local_leaf(parameter), "fsdp_pre_all_gather"):
            msg = (
                f"fully_shard: parameter {path} has fsdp_pre_all_gather, which would not be called, since collectives "
                "of fully_shard are not replaced; exclude the parameter with ignored_params"
            )
            raise PlanError(msg)

    def new_parameter(self, data: Any, *, requires_grad: bool, name: str | None = None) -> Any:
        """``nn.Parameter``; PyTorch parameters carry no name."""
        del name
        return nn.Parameter(data, requires_grad=requires_grad)

    def is_linear_module(self, module: Any) -> bool:
        """``nn.Linear`` and its subclasses."""
        return isinstance(module, nn.Linear)

    def is_embedding_module(self, module: Any) -> bool:
        """``nn.Embedding`` and its subclasses."""
        return isinstance(module, nn.Embedding)

    def layer_parameters(self, module: Any) -> tuple[str, str | None]:
        """``weight`` and, where there is one, ``bias``."""
        return "weight", None if getattr(module, "bias", None) is None else "bias"

    def get_cell_construct(self, cell: Any) -> Callable[..., Any]:
        """``forward``."""
        return cell.forward

    def gradient_of(self, parameter: Any) -> Any:
        """``grad``."""
        return parameter.grad

    def set_gradient(self, parameter: Any, gradient: Any) -> None:
        """Assign ``grad``."""
        parameter.grad = gradient

    def set_layout_into_parameter(self, param: Any, layout: Any) -> Any:
        """``nn.Parameter`` of this rank's shard."""
        sharded = distribute_tensor(param.detach(), layout.mesh, layout, src_data_rank=None)
        return nn.Parameter(sharded, requires_grad=param.requires_grad)

    def get_param_local_shape(self, param: Any) -> tuple[int, ...]:
        """The shape of the local tensor."""
        return tuple(param.local_shape if isinstance(param, DTensor) else param.shape)

    def get_param_local_data(self, param: Any) -> Any:
        """The local tensor, detached."""
        return (param.to_local() if isinstance(param, DTensor) else param).detach()

    def update_param_data(self, param: Any, data: Any) -> None:
        """``copy_`` off the graph."""
        with torch.no_grad():
            self.get_param_local_data(param).copy_(local_data_for(param, data))
        if isinstance(param, DTensor):
            param.drop_views()

    def get_param_type_size(self, param: Any) -> int:
        """``element_size``."""
        return param.element_size()

    def new_zero_parameter(
        self, param_shape: Any, param_type: Any = None, requires_grad: bool = True, device: Any = None
    ) -> Any:
        """``nn.Parameter`` of zeros."""
        return nn.Parameter(torch.zeros(tuple(param_shape), dtype=param_type, device=device), requires_grad)

    def init_parameters(self, module: Any, stage_index: int = 0) -> None:
        """Initialise parameters by the ``reset_parameters`` of every module."""
        delayed.materialise(module, stage_index)

    def init_on_device(self, device: Any, include_buffers: bool = False) -> AbstractContextManager[Any]:
        """``torch.device`` as a context, or a hook that moves parameters as they are registered."""
        return torch.device(device) if include_buffers else delayed.parameters_on(torch.device(device))

    @property
    def meta_device(self) -> Any:
        """``torch.device("meta")``."""
        return torch.device("meta")

    def fully_sharded(self, module: Any, options: FullyShardedOptions, parameters: Any) -> Any:
        """Return a ``FullyShardedGroup``; see ``fully_sharded.py``."""
        from hyper_parallel.platform.torch.fully_sharded import FullyShardedGroup

        return FullyShardedGroup(self, module, options, parameters)

    def with_sharded_methods(self, module: Any) -> None:
        """Change the module's class."""
        from hyper_parallel.core.data_parallel.methods import FSDPModule, class_with

        module.__class__ = class_with(FSDPModule, cast("Hashable", type(module)))

    def compiled_forward(self, module: Any, backend: Any) -> Any:
        """Trace forward and backward through the DTensors when ``module`` is first called."""
        from hyper_parallel.platform.torch.region import CompiledForward

        module.forward = CompiledForward(module, backend)
        return module

    def replicated(self, module: Any, options: ReplicatedOptions) -> Any:
        """See ``replicated.py``."""
        from hyper_parallel.platform.torch.replicated import ReplicatedGradients

        return ReplicatedGradients(self, module, options)

    def _clip(self, *args: Any) -> Any:
        return clip_grad_norm_(*args)

    def register_full_backward_hook(self, module: Any, hook: Callable[..., Any], prepend: bool = False) -> HookHandle:
        """Register the hook with PyTorch."""
        check_hook("register_full_backward_hook", hook)
        handle = module.register_full_backward_hook(hook, prepend=prepend)
        return HookHandle("backward hook", module, handle.remove)

    def register_full_backward_pre_hook(
        self, module: Any, hook: Callable[..., Any], prepend: bool = False
    ) -> HookHandle:
        """Register the hook with PyTorch."""
        check_hook("register_full_backward_pre_hook", hook)
        handle = module.register_full_backward_pre_hook(hook, prepend=prepend)
        return HookHandle("backward pre-hook", module, handle.remove)
