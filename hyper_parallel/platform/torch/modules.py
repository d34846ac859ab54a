"""Facet *modules* on PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from hyper_parallel.platform.contract.modules import ModulesFacet

__all__ = ["TorchModules"]


class TorchModules(ModulesFacet):
    """Modules of PyTorch."""

    def get_cells_and_names(self, cell: Any) -> Iterator[tuple[str, Any]]:
        """``named_modules``, shared modules once per path."""
        yield from cell.named_modules(remove_duplicate=False)

    def parameters_dict(self, cell: Any) -> dict[str, Any]:
        """``named_parameters``, shared parameters once per path."""
        return dict(cell.named_parameters(remove_duplicate=False))

    def direct_parameters(self, cell: Any) -> dict[str, Any]:
        """Own parameters that are set."""
        return {name: value for name, value in cell._parameters.items() if value is not None}  # noqa: SLF001 - no public spelling

    def direct_buffers(self, cell: Any) -> dict[str, Any]:
        """Own buffers that are set."""
        return {name: value for name, value in cell._buffers.items() if value is not None}  # noqa: SLF001

    def set_parameter(self, cell: Any, name: str, value: Any) -> None:
        """Replace a parameter or buffer of the same name."""
        if name in cell._parameters:  # noqa: SLF001
            cell.register_parameter(name, value)
        else:
            cell.register_buffer(name, value, persistent=name not in cell._non_persistent_buffers_set)  # noqa: SLF001

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
