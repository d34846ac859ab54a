"""Facet *modules*: modules, their parameters and hooks."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from hyper_parallel.errors import HandleError
from hyper_parallel.platform.contract.fully_sharded import FullyShardedOptions
from hyper_parallel.platform.contract.ledger import LedgerFacet
from hyper_parallel.platform.contract.replicated import ReplicatedOptions

__all__ = ["HookHandle", "ModulesFacet", "check_hook"]


class HookHandle:
    """A handle that removes a hook, once.

    Args:
        what: type of hook, for messages.
        module: the module that has the hook.
        remove: removes it.
    """

    def __init__(self, what: str, module: Any, remove: Callable[[], Any]) -> None:
        self._what, self._kind = what, type(module).__name__
        self._remove: Callable[[], Any] | None = remove
        self._lock = threading.Lock()

    def remove(self) -> None:
        """Remove the hook.

        Raises:
            HandleError: it was already removed.
        """
        with self._lock:
            remove, self._remove = self._remove, None
        if remove is None:
            msg = f"this {self._what} of {self._kind} was already removed; remove it once"
            raise HandleError(msg)
        remove()


def check_hook(member: str, hook: Any) -> None:
    """Check at registration that a hook can be called, since it would only fail in a later step.

    Raises:
        TypeError: ``hook`` cannot be called.
    """
    if not callable(hook):
        msg = f"{member}: hook {hook!r} cannot be called"
        raise TypeError(msg)


_REGISTRIES = frozenset({"_params", "_cells", "_buffers", "_parameters", "_modules"})


def _with_successors(value: Any, successors: Mapping[int, Any]) -> Any:
    """Return ``value`` with old parameters in it replaced (found by ``id``), or ``value`` itself if it has none.

    Lists and dicts are changed in place, since other objects may hold them, too.
    """
    if id(value) in successors:
        return successors[id(value)]
    if isinstance(value, (list, dict)):
        for key in value if isinstance(value, dict) else range(len(value)):
            replaced = _with_successors(value[key], successors)
            if replaced is not value[key]:
                value[key] = replaced
        return value
    if not isinstance(value, tuple):
        return value
    items = [_with_successors(item, successors) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


class ModulesFacet(LedgerFacet):
    """Facet *modules*."""

    @abc.abstractmethod
    def get_cells_and_names(self, cell: Any) -> Iterator[tuple[str, Any]]:
        """Iterate over all submodules with their dotted paths; the module itself comes first, with path ``""``."""

    @abc.abstractmethod
    def is_container(self, cell: Any) -> bool:
        """Return whether the module is one of the framework's containers, which cannot be called."""

    @abc.abstractmethod
    def parameters_dict(self, cell: Any) -> dict[str, Any]:
        """Return parameters by dotted path; a tied parameter appears under each of its paths."""

    @abc.abstractmethod
    def direct_parameters(self, cell: Any) -> dict[str, Any]:
        """Return the module's own parameters (not its children's) by attribute name."""

    @abc.abstractmethod
    def direct_buffers(self, cell: Any) -> dict[str, Any]:
        """Return the module's own buffers by attribute name."""

    @abc.abstractmethod
    def set_parameter(self, cell: Any, name: str, value: Any) -> None:
        """Replace the module's own parameter or buffer ``name``."""

    def check_unhooked(self, parameter: Any, path: str, event: str) -> None:
        """Refuse to replace a parameter that has hooks, which would not be called.

        Args:
            parameter: parameter that is about to be replaced.
            path: dotted path of the parameter.
            event: function after which hooks may be registered, for the message.

        Raises:
            PlanError: the parameter has hooks.
        """

    def parameters_replaced(self, root: Any, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Replace old parameters that modules under ``root`` hold outside of their registry.

        Modules iterate over lists, tuples and dicts of their parameters; a forward that used the old ones would use
        values that no optimizer trains.

        Args:
            root: the module whose parameters were replaced.
            pairs: each old parameter with its replacement.
        """
        if not pairs:
            return
        successors = {id(old): new for old, new in pairs}
        for _, module in self.get_cells_and_names(root):
            attributes = vars(module)
            for name, value in list(attributes.items()):
                if name not in _REGISTRIES:
                    attributes[name] = _with_successors(value, successors)

    @abc.abstractmethod
    def new_parameter(self, data: Any, *, requires_grad: bool, name: str | None = None) -> Any:
        """Return a parameter of ``data``, a plain tensor or a DTensor."""

    @abc.abstractmethod
    def is_linear_module(self, module: Any) -> bool:
        """Return True for the framework's linear layers."""

    @abc.abstractmethod
    def is_embedding_module(self, module: Any) -> bool:
        """Return True for the framework's embedding layers."""

    @abc.abstractmethod
    def layer_parameters(self, module: Any) -> tuple[str, str | None]:
        """Return the attribute names of weight and bias (None without a bias) of a linear or embedding layer."""

    @abc.abstractmethod
    def get_cell_construct(self, cell: Any) -> Callable[..., Any]:
        """Return the module's forward function."""

    @abc.abstractmethod
    def gradient_of(self, parameter: Any) -> Any:
        """Return the gradient kept on ``parameter``, or None; if it is itself a gradient, return it."""

    @abc.abstractmethod
    def set_gradient(self, parameter: Any, gradient: Any) -> None:
        """Replace the gradient kept on ``parameter``."""

    def search_parameter_by_name(self, cell: Any, param_name: str) -> tuple[Any, str, Any] | None:
        """Return the owning module, attribute name and parameter at path ``param_name``, or None."""
        path, _, name = param_name.rpartition(".")
        for module_path, module in self.get_cells_and_names(cell):
            if module_path == path:
                parameter = self.direct_parameters(module).get(name)
                return None if parameter is None else (module, name, parameter)
        return None

    def update_parameter_by_name(self, cell: Any, result: tuple[Any, str, Any], new_param: Any) -> None:
        """Replace the parameter that :meth:`search_parameter_by_name` returned as ``result`` with ``new_param``."""
        del cell
        owner, name, _ = result
        self.set_parameter(owner, name, new_param)

    @abc.abstractmethod
    def set_layout_into_parameter(self, param: Any, layout: Any) -> Any:
        """Return a DTensor parameter of ``layout``; every rank takes its own shard of ``param``."""

    @abc.abstractmethod
    def get_param_local_shape(self, param: Any) -> tuple[int, ...]:
        """Return the local shape of a parameter."""

    @abc.abstractmethod
    def get_param_local_data(self, param: Any) -> Any:
        """Return this rank's local tensor, a plain tensor that shares the parameter's storage."""

    @abc.abstractmethod
    def update_param_data(self, param: Any, data: Any) -> None:
        """Write ``data`` into ``param``; ``data`` has the global or the local shape, or is a DTensor.

        Raises:
            LayoutError: (a ValueError) ``data`` has neither shape.
        """

    def load_into_param(self, param: Any, data: Any) -> None:
        """Write ``data``, converted to the parameter's dtype, into ``param``, as :meth:`update_param_data` does."""
        self.update_param_data(param, data)

    @abc.abstractmethod
    def get_param_type_size(self, param: Any) -> int:
        """Return the number of bytes per element."""

    @abc.abstractmethod
    def new_zero_parameter(
        self, param_shape: Any, param_type: Any = None, requires_grad: bool = True, device: Any = None
    ) -> Any:
        """Return a parameter of zeros."""

    @abc.abstractmethod
    def init_parameters(self, module: Any, stage_index: int = 0) -> None:
        """Allocate and initialise delayed parameters; each rank only its own shard of a DTensor.

        Args:
            module: the module, which is changed in place; create optimizers afterwards.
            stage_index: pipeline stage; stages sample different numbers.

        Raises:
            PlanError: (a ValueError) a module with delayed parameters has no function that initialises them.
        """

    @abc.abstractmethod
    def init_on_device(self, device: Any, include_buffers: bool = False) -> AbstractContextManager[Any]:
        """Build modules inside with parameters (and buffers) on ``device``; :attr:`meta_device` delays them."""

    @property
    @abc.abstractmethod
    def meta_device(self) -> Any:
        """The device without storage; as a context, it builds models inside on it."""

    @abc.abstractmethod
    def fully_sharded(self, module: Any, options: FullyShardedOptions, parameters: Any) -> Any:
        """Return the group that gathers and frees the ``parameters`` of ``module`` and reduces their gradients.

        Args:
            module: the module, which is hooked.
            options: options of the sharding.
            parameters: for each parameter the original, the DTensor parameter, and pairs of owner and attribute name.

        Raises:
            UnsupportedOnBackend: it is in the gap ledger.
        """

    def with_sharded_methods(self, module: Any) -> None:
        """Add the methods of modules under ``fully_shard`` to ``module``, if users of the framework expect them."""
        del module

    @abc.abstractmethod
    def compiled_forward(self, module: Any, backend: Any) -> Any:
        """Run the forward of ``module`` as graphs of local operators and collectives; see ``compile``.

        Args:
            module: the module, with its plan applied; it is changed in place.
            backend: compiles the graphs; None: they run operator by operator.
        """

    @abc.abstractmethod
    def replicated(self, module: Any, options: ReplicatedOptions) -> Any:
        """Return the object that averages the gradients of ``module`` during backward, unless its ``reduces`` is False.

        Args:
            module: the module, which is hooked.
            options: the ranks to average over, and the buckets.

        Raises:
            UnsupportedOnBackend: it is in the gap ledger.
        """

    def clip_grad_norm_(
        self,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        """Scale gradients to a global norm of at most ``max_norm``; return the norm before, equal on all ranks.

        Args:
            parameters: parameters on any meshes; on frameworks where gradients are values, the gradients.
            max_norm: bound of the norm.
            norm_type: order of the norm, from 1 to ``math.inf``.
            error_if_nonfinite: raise if the norm is not finite.
            foreach: ignored; accepted for PyTorch's signature.
        """
        return self._clip(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    @abc.abstractmethod
    def _clip(self, *args: Any) -> Any:
        """Call ``clip_grad_norm_`` of ``core``, which this package must not import."""

    def register_forward_pre_hook(
        self, module: Any, hook: Callable[..., Any], prepend: bool = False, with_kwargs: bool = False
    ) -> HookHandle:
        """Register ``hook(module, args)`` or ``hook(module, args, kwargs)``, called before forward.

        It may return replacements of the arguments.
        """
        check_hook("register_forward_pre_hook", hook)
        handle = module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=with_kwargs)
        return HookHandle("forward pre-hook", module, handle.remove)

    def register_forward_hook(
        self,
        module: Any,
        hook: Callable[..., Any],
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> HookHandle:
        """Register ``hook(module, args, output)``, called after forward; it may return a different output.

        With ``always_call`` it runs even when forward raises, with None as output.
        """
        check_hook("register_forward_hook", hook)
        handle = module.register_forward_hook(hook, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call)
        return HookHandle("forward hook", module, handle.remove)

    @abc.abstractmethod
    def register_full_backward_hook(self, module: Any, hook: Callable[..., Any], prepend: bool = False) -> HookHandle:
        """Register ``hook(module, grad_input, grad_output)``, called in backward; it may return a new ``grad_input``.

        Both gradients are tuples: of the positional inputs, and of the outputs.
        """

    @abc.abstractmethod
    def register_full_backward_pre_hook(
        self, module: Any, hook: Callable[..., Any], prepend: bool = False
    ) -> HookHandle:
        """Register ``hook(module, grad_output)``, called before backward; it may return a new ``grad_output``."""
