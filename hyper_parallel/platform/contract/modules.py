"""Modules, their parameters and hooks, in one spelling."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from hyper_parallel.errors import HandleError

__all__ = ["HookHandle", "ModulesFacet", "check_hook"]


class HookHandle:
    """Removes a hook, once.

    Args:
        what: kind of hook, for messages.
        module: where it is.
        remove: takes it away.
    """

    def __init__(self, what: str, module: Any, remove: Callable[[], Any]) -> None:
        self._what, self._kind = what, type(module).__name__
        self._remove: Callable[[], Any] | None = remove
        self._lock = threading.Lock()

    def remove(self) -> None:
        """Take the hook away.

        Raises:
            HandleError: it was removed before.
        """
        with self._lock:
            remove, self._remove = self._remove, None
        if remove is None:
            msg = f"this {self._what} of {self._kind} was removed before; remove it once"
            raise HandleError(msg)
        remove()


def check_hook(member: str, hook: Any) -> None:
    """Refuse at once what would fail in some later step.

    Raises:
        TypeError: ``hook`` cannot be called.
    """
    if not callable(hook):
        msg = f"{member}: hook {hook!r} cannot be called"
        raise TypeError(msg)


class ModulesFacet(abc.ABC):
    """Facet *modules*: as far as parallelising and verifying a model needs it."""

    @abc.abstractmethod
    def get_cells_and_names(self, cell: Any) -> Iterator[tuple[str, Any]]:
        """Every submodule with its dotted path; the module itself comes first, called ``""``."""

    @abc.abstractmethod
    def parameters_dict(self, cell: Any) -> dict[str, Any]:
        """Parameters by dotted path; a parameter reachable under two paths appears under both."""

    @abc.abstractmethod
    def direct_parameters(self, cell: Any) -> dict[str, Any]:
        """The module's own parameters (not its children's) by attribute name."""

    @abc.abstractmethod
    def direct_buffers(self, cell: Any) -> dict[str, Any]:
        """The module's own buffers by attribute name."""

    @abc.abstractmethod
    def set_parameter(self, cell: Any, name: str, value: Any) -> None:
        """Replace the module's own parameter or buffer ``name``."""

    @abc.abstractmethod
    def new_parameter(self, data: Any, *, requires_grad: bool, name: str | None = None) -> Any:
        """A trainable parameter holding ``data``, a plain tensor or a DTensor."""

    @abc.abstractmethod
    def is_linear_module(self, module: Any) -> bool:
        """True for the framework's linear layers."""

    @abc.abstractmethod
    def is_embedding_module(self, module: Any) -> bool:
        """True for the framework's embedding layers."""

    @abc.abstractmethod
    def layer_parameters(self, module: Any) -> tuple[str, str | None]:
        """Attribute names of weight and bias (None without one) of a linear or embedding layer."""

    @abc.abstractmethod
    def get_cell_construct(self, cell: Any) -> Callable[..., Any]:
        """The module's forward function."""

    @abc.abstractmethod
    def gradient_of(self, parameter: Any) -> Any:
        """The gradient kept on ``parameter`` (or that ``parameter`` is, where gradients are values), or None."""

    @abc.abstractmethod
    def set_gradient(self, parameter: Any, gradient: Any) -> None:
        """Replace the gradient kept on ``parameter``."""

    def search_parameter_by_name(self, cell: Any, param_name: str) -> tuple[Any, str, Any] | None:
        """The module that owns the parameter at path ``param_name``, its name there, and it; None without one."""
        path, _, name = param_name.rpartition(".")
        for at, module in self.get_cells_and_names(cell):
            if at == path:
                found = self.direct_parameters(module).get(name)
                return None if found is None else (module, name, found)
        return None

    def update_parameter_by_name(self, cell: Any, result: tuple[Any, str, Any], new_param: Any) -> None:
        """Put ``new_param`` in the place that :meth:`search_parameter_by_name` found in ``cell``."""
        del cell
        owner, name, _ = result
        self.set_parameter(owner, name, new_param)

    @abc.abstractmethod
    def set_layout_into_parameter(self, param: Any, layout: Any) -> Any:
        """A parameter that is a DTensor of ``layout``; every rank keeps its own piece of ``param``, nothing travels."""

    @abc.abstractmethod
    def get_param_local_shape(self, param: Any) -> tuple[int, ...]:
        """Sizes of what this rank holds."""

    @abc.abstractmethod
    def get_param_local_data(self, param: Any) -> Any:
        """What this rank holds, a plain tensor that shares the parameter's storage."""

    @abc.abstractmethod
    def update_param_data(self, param: Any, data: Any) -> None:
        """Give ``param`` the values of ``data``: of its own shape, of this rank's piece, or a DTensor.

        Raises:
            LayoutError: (a ValueError) ``data`` has neither shape.
        """

    def load_into_param(self, param: Any, data: Any) -> None:
        """As :meth:`update_param_data`, converted to the parameter's dtype."""
        self.update_param_data(param, data)

    @abc.abstractmethod
    def get_param_type_size(self, param: Any) -> int:
        """Bytes per element."""

    @abc.abstractmethod
    def new_zero_parameter(
        self, param_shape: Any, param_type: Any = None, requires_grad: bool = True, device: Any = None
    ) -> Any:
        """A parameter of zeros."""

    @abc.abstractmethod
    def init_parameters(self, module: Any, stage_index: int = 0) -> None:
        """Give delayed parameters their storage and initial values; each rank only its own piece of a DTensor.

        Args:
            module: changed in place; make optimizers afterwards.
            stage_index: of a pipeline: stages draw different numbers.

        Raises:
            PlanError: (a ValueError) a module with delayed parameters does not say how it is initialised.
        """

    @abc.abstractmethod
    def init_on_device(self, device: Any, include_buffers: bool = False) -> AbstractContextManager[Any]:
        """Modules built inside have their parameters (and buffers) on ``device``; :attr:`meta_device` delays them."""

    @property
    @abc.abstractmethod
    def meta_device(self) -> Any:
        """The device without storage; also a context in which models are built on it."""

    def clip_grad_norm_(
        self,
        parameters: Any,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Any:
        """Scale gradients to a global norm of at most ``max_norm``; the norm before, equal on all ranks.

        Args:
            parameters: on any meshes; where gradients are values, the gradients.
            max_norm: bound.
            norm_type: from 1 to ``math.inf``.
            error_if_nonfinite: raise for a norm that is not finite.
            foreach: accepted for PyTorch's signature.
        """
        return self._clip(parameters, max_norm, norm_type, error_if_nonfinite, foreach)

    @abc.abstractmethod
    def _clip(self, *args: Any) -> Any:
        """Core's function; a platform reaches up to it."""

    def register_forward_pre_hook(
        self, module: Any, hook: Callable[..., Any], prepend: bool = False, with_kwargs: bool = False
    ) -> HookHandle:
        """``hook(module, args)`` or ``hook(module, args, kwargs)`` before forward; it may return replacements."""
        check_hook("register_forward_pre_hook", hook)
        held = module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=with_kwargs)
        return HookHandle("forward pre-hook", module, held.remove)

    def register_forward_hook(
        self,
        module: Any,
        hook: Callable[..., Any],
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> HookHandle:
        """``hook(module, args, output)`` after forward; it may return another output.

        With ``always_call`` it runs even when forward raises, with None as output.
        """
        check_hook("register_forward_hook", hook)
        held = module.register_forward_hook(hook, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call)
        return HookHandle("forward hook", module, held.remove)

    @abc.abstractmethod
    def register_full_backward_hook(self, module: Any, hook: Callable[..., Any], prepend: bool = False) -> HookHandle:
        """``hook(module, grad_input, grad_output)`` in backward; it may return another ``grad_input``.

        Both are tuples, of the positional inputs and of the outputs.
        """

    @abc.abstractmethod
    def register_full_backward_pre_hook(
        self, module: Any, hook: Callable[..., Any], prepend: bool = False
    ) -> HookHandle:
        """``hook(module, grad_output)`` before the module's backward; it may return another ``grad_output``."""
