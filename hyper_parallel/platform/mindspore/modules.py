"""Facet *modules* on MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import mindspore
from mindspore import Parameter, mint, nn

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform.contract.modules import ModulesFacet

__all__ = ["MindSporeModules"]


class MindSporeModules(ModulesFacet):
    """Cells of MindSpore."""

    def get_cells_and_names(self, cell: Any) -> Iterator[tuple[str, Any]]:
        """Depth first; shared cells once per path, which ``cells_and_names`` does not give."""
        yield from _walk(cell, "")

    def parameters_dict(self, cell: Any) -> dict[str, Any]:
        """By path, not by ``Parameter.name``; shared parameters once per path."""
        return {
            f"{path}.{name}" if path else name: value
            for path, one in _walk(cell, "")
            for name, value in self.direct_parameters(one).items()
        }

    def direct_parameters(self, cell: Any) -> dict[str, Any]:
        """Own parameters that are set."""
        return {name: value for name, value in cell._params.items() if value is not None}  # noqa: SLF001 - no public spelling

    def direct_buffers(self, cell: Any) -> dict[str, Any]:
        """Own buffers that are set."""
        return {name: value for name, value in cell._buffers.items() if value is not None}  # noqa: SLF001

    def set_parameter(self, cell: Any, name: str, value: Any) -> None:
        """Replace a parameter or buffer of the same name; attribute assignment would only copy values."""
        if name not in cell._params:  # noqa: SLF001
            cell._buffers[name] = value  # noqa: SLF001
            return
        old = cell._params[name]  # noqa: SLF001
        if isinstance(value, Parameter) and isinstance(old, Parameter) and _unnamed(value):
            value.name = old.name
        cell.insert_param_to_cell(name, value, check_name_contain_dot=False)

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
        """``construct``."""
        return cell.construct

    def gradient_of(self, parameter: Any) -> Any:
        """The value itself: MindSpore's gradients are what ``value_and_grad`` returns."""
        return parameter

    def set_gradient(self, parameter: Any, gradient: Any) -> None:
        """Write into the value that is the gradient."""
        target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        target.copy_(gradient.to_local() if isinstance(gradient, DTensor) else gradient)


def _walk(cell: mindspore.nn.Cell, path: str) -> Iterator[tuple[str, Any]]:
    yield path, cell
    for name, child in cell._cells.items():  # noqa: SLF001
        if child is not None:
            yield from _walk(child, f"{path}.{name}" if path else name)


def _unnamed(parameter: Parameter) -> bool:
    return bool(parameter.name.startswith("Parameter"))
