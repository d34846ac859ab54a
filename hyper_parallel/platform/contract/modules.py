"""Modules and their parameters, in one spelling."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["ModulesFacet"]


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

    def register_forward_pre_hook(
        self, module: Any, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False
    ) -> Any:
        """``hook(module, args)`` or ``hook(module, args, kwargs)`` before forward; it may return replacements."""
        return module.register_forward_pre_hook(hook, prepend=prepend, with_kwargs=with_kwargs)

    def register_forward_hook(
        self,
        module: Any,
        hook: Callable[..., Any],
        *,
        prepend: bool = False,
        with_kwargs: bool = False,
        always_call: bool = False,
    ) -> Any:
        """``hook(module, args, output)`` after forward; it may return another output.

        With ``always_call`` it runs even when forward raises, with None as output.
        """
        return module.register_forward_hook(hook, prepend=prepend, with_kwargs=with_kwargs, always_call=always_call)
