"""Facet *modules* on MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from mindspore import Parameter, mint, nn, ops

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.module import distribute_tensor, local_data_for
from hyper_parallel.core.dtensor.parameter_paths import replacing_parameters
from hyper_parallel.core.tensor_parallel.clip import clip_grad_norm_
from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.contract.fully_sharded import FullyShardedOptions
from hyper_parallel.platform.contract.modules import HookHandle, ModulesFacet, check_hook
from hyper_parallel.platform.contract.replicated import ReplicatedOptions
from hyper_parallel.platform.mindspore import delayed
from hyper_parallel.platform.mindspore.gradients import mark_replaced
from hyper_parallel.platform.mindspore.ops.kernels import write_over
from hyper_parallel.platform.mindspore.versions import no_grad

__all__ = ["MindSporeModules"]


class MindSporeModules(ModulesFacet):
    """Cells of MindSpore."""

    def get_cells_and_names(self, cell: Any) -> Iterator[tuple[str, Any]]:
        """Yield cells depth first; a shared cell once per path, unlike ``cells_and_names``."""
        yield from _walk(cell, "")

    def is_container(self, cell: Any) -> bool:
        """True for a ``CellList`` or ``CellDict``, and for subclasses without a ``construct`` of their own."""
        return type(cell).construct in (nn.CellList.construct, nn.CellDict.construct)

    def parameters_dict(self, cell: Any) -> dict[str, Any]:
        """Return the parameters by path, not by ``Parameter.name``; a shared parameter is listed under every path."""
        return {
            f"{path}.{name}" if path else name: value
            for path, child in _walk(cell, "")
            for name, value in self.direct_parameters(child).items()
        }

    def direct_parameters(self, cell: Any) -> dict[str, Any]:
        """Own parameters that are not None."""
        return {name: value for name, value in _own_parameters(cell).items() if value is not None}

    def direct_buffers(self, cell: Any) -> dict[str, Any]:
        """Own buffers that are not None."""
        return {name: value for name, value in _own_buffers(cell).items() if value is not None}

    def set_parameter(self, cell: Any, name: str, value: Any) -> None:
        """Replace a parameter or buffer of the same name; attribute assignment would only copy values."""
        if name not in _own_parameters(cell):
            _own_buffers(cell)[name] = value
            return
        old = _own_parameters(cell)[name]
        if isinstance(value, Parameter) and isinstance(old, Parameter) and _unnamed(value):
            value.name = old.name
        cell.insert_param_to_cell(name, value, check_name_contain_dot=False)

    def parameters_replaced(self, root: Any, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Also replace parameters in a ``ParameterTuple`` (recurrent cells have one).

        Differentiating with respect to a replaced parameter raises from now on.
        """
        super().parameters_replaced(root, pairs)
        for old, new in pairs:
            mark_replaced(old, new)

    def new_parameter(self, data: Any, *, requires_grad: bool, name: str | None = None) -> Any:
        """``mindspore.Parameter``."""
        return Parameter(data, name=name, requires_grad=requires_grad)

    def is_linear_module(self, module: Any) -> bool:
        """``nn.Dense``, ``mint.nn.Linear`` and their subclasses."""
        return isinstance(module, (nn.Dense, mint.nn.Linear))

    def is_embedding_module(self, module: Any) -> bool:
        """``nn.Embedding``, ``mint.nn.Embedding`` and their subclasses."""
        return isinstance(module, (nn.Embedding, mint.nn.Embedding))

    def layer_parameters(self, module: Any) -> tuple[str, str | None]:
        """``embedding_table`` of ``nn.Embedding``, else ``weight``, and ``bias`` where there is one."""
        weight = "embedding_table" if isinstance(module, nn.Embedding) else "weight"
        return weight, None if self.direct_parameters(module).get("bias") is None else "bias"

    def get_cell_construct(self, cell: Any) -> Callable[..., Any]:
        """Return ``construct``."""
        return cell.construct

    def gradient_of(self, parameter: Any) -> Any:
        """Return ``parameter``: callers pass gradients, since MindSpore returns them from ``value_and_grad``."""
        return parameter

    def set_gradient(self, parameter: Any, gradient: Any) -> None:
        """Overwrite ``parameter``, which is the gradient itself; see :meth:`gradient_of`."""
        target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        write_over(target, gradient.to_local() if isinstance(gradient, DTensor) else gradient)

    def set_layout_into_parameter(self, param: Any, layout: Any) -> Any:
        """Return a ``Parameter`` of this rank's shard, with the same name."""
        shard = distribute_tensor(ops.stop_gradient(param), layout.mesh, layout, src_data_rank=None)
        return Parameter(shard, name=param.name, requires_grad=param.requires_grad)

    def get_param_local_shape(self, param: Any) -> tuple[int, ...]:
        """Return the shape of the local shard."""
        return tuple(param.local_shape if isinstance(param, DTensor) else param.shape)

    def get_param_local_data(self, param: Any) -> Any:
        """Return the local tensor, off the graph; a delayed parameter is returned as it is, without values."""
        local = param.to_local() if isinstance(param, DTensor) else param
        return local if delayed.is_delayed(local) else ops.stop_gradient(local)

    def update_param_data(self, param: Any, data: Any) -> None:
        """Write into the storage, which optimizers share."""
        shard = local_data_for(param, data)
        if 0 not in shard.shape:
            local = param.to_local() if isinstance(param, DTensor) else param
            with no_grad():
                write_over(local, ops.stop_gradient(shard).astype(local.dtype))
        if isinstance(param, DTensor):
            param.drop_views()

    def get_param_type_size(self, param: Any) -> int:
        """``itemsize``."""
        return int(param.itemsize)

    def new_zero_parameter(
        self, param_shape: Any, param_type: Any = None, requires_grad: bool = True, device: Any = None
    ) -> Any:
        """``Parameter`` of zeros; MindSpore chooses the device itself."""
        del device
        return Parameter(mint.zeros(tuple(param_shape), dtype=param_type), requires_grad=requires_grad)

    def fully_sharded(self, module: Any, options: FullyShardedOptions, parameters: Any) -> Any:
        """Return a ``FullyShardedGroup``; see ``fully_sharded.py``."""
        from hyper_parallel.platform.mindspore.fully_sharded import FullyShardedGroup

        if isinstance(module, (list, tuple)):
            raise UnsupportedOnBackend(
                "fully_shard: on MindSpore, module must be one cell, not a list; call fully_shard for each cell"
            )
        return FullyShardedGroup(self, module, options, parameters)

    def compiled_forward(self, module: Any, backend: Any) -> Any:
        """Refuse to compile.

        Raises:
            UnsupportedOnBackend: (a NotImplementedError) always.
        """
        del module, backend
        raise UnsupportedOnBackend(
            "compile: MindSpore's compiler parses the source of functions: it neither records the calls that a "
            "function makes nor takes a collective of this library's transports as an operator; run the cell uncompiled"
        )

    def replicated(self, module: Any, options: ReplicatedOptions) -> Any:
        """See ``replicated.py``."""
        from hyper_parallel.platform.mindspore.replicated import ReplicatedGradients

        return ReplicatedGradients(self, module, options)

    def init_parameters(self, module: Any, stage_index: int = 0) -> None:
        """Initialise parameters by the initializers with which they were declared."""
        parameters = [
            delayed.Place(cell, name, parameter)
            for _, cell in _walk(module, "")
            for name, parameter in self.direct_parameters(cell).items()
        ]
        with replacing_parameters(self, module):
            delayed.materialize(parameters, stage_index)

    def init_on_device(self, device: Any, include_buffers: bool = False) -> AbstractContextManager[Any]:
        """``no_init_parameters`` for meta; for other devices nothing: MindSpore chooses the device."""
        del include_buffers  # buffers are created with their values
        return delayed.parameters_on(device)

    @property
    def meta_device(self) -> Any:
        """The device name ``"meta"``, which is also a context."""
        return delayed.MetaDevice("meta")

    def _clip(self, *args: Any) -> Any:
        return clip_grad_norm_(*args)

    def register_full_backward_hook(self, module: Any, hook: Callable[..., Any], prepend: bool = False) -> HookHandle:
        """Register through ``Cell.register_backward_hook``; ``prepend``, which it lacks, is added here."""
        check_hook("register_full_backward_hook", hook)
        return _register_backward(module, "hook", hook, prepend=prepend)

    def register_full_backward_pre_hook(
        self, module: Any, hook: Callable[..., Any], prepend: bool = False
    ) -> HookHandle:
        """Register through ``Cell.register_backward_pre_hook``; ``prepend``, which it lacks, is added here."""
        check_hook("register_full_backward_pre_hook", hook)
        return _register_backward(module, "pre_hook", hook, prepend=prepend)


def _unnamed(parameter: Parameter) -> bool:
    return bool(parameter.name.startswith("Parameter"))


def _walk(cell: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every cell with its path, depth first; shared cells once per path."""
    yield path, cell
    for name, child in cell._cells.items():
        if child is not None:
            yield from _walk(child, f"{path}.{name}" if path else name)


def _own_parameters(cell: Any) -> dict[str, Any]:
    return cell._params


def _own_buffers(cell: Any) -> dict[str, Any]:
    return cell._buffers


# -- backward hooks: one hook of each kind is registered; it calls our own list, whose order ``prepend`` can change ----

_HOOKS = "_hyper_parallel_backward_hooks"


def _register_backward(cell: Any, kind: str, hook: Callable[..., Any], *, prepend: bool) -> HookHandle:
    """Add a ``hook`` (which gets both gradients) or a ``pre_hook`` (output gradients), last or first."""
    lists: dict[str, list[Callable[..., Any]]] = cell.__dict__.setdefault(_HOOKS, {})
    hooks = lists.get(kind)
    if hooks is None:
        hooks = lists[kind] = []
        if kind == "hook":
            cell.register_backward_hook(_run_hooks(hooks))
        else:
            cell.register_backward_pre_hook(_run_pre_hooks(hooks))

    def entry(*args: Any) -> Any:  # an object of its own, so that one function may be registered twice
        return hook(*args)

    hooks.insert(0 if prepend else len(hooks), entry)
    return HookHandle("backward hook" if kind == "hook" else "backward pre-hook", cell, lambda: hooks.remove(entry))


def _run_hooks(hooks: list[Callable[..., Any]]) -> Callable[..., Any]:
    def run(cell: Any, grad_input: Any, grad_output: Any) -> Any:
        changed = False
        for hook in list(hooks):
            replaced = hook(cell, grad_input, grad_output)
            if replaced is not None:
                grad_input, changed = replaced if isinstance(replaced, tuple) else (replaced,), True
        return grad_input if changed else None

    return run


def _run_pre_hooks(hooks: list[Callable[..., Any]]) -> Callable[..., Any]:
    def run(cell: Any, grad_output: Any) -> Any:
        changed = False
        for hook in list(hooks):
            replaced = hook(cell, grad_output)
            if replaced is not None:
                grad_output, changed = replaced if isinstance(replaced, tuple) else (replaced,), True
        return grad_output if changed else None

    return run
