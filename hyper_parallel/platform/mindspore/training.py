"""Facet *training* on MindSpore."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import mindspore
from mindspore.experimental import optim

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.transition import dual
from hyper_parallel.platform.contract.training import (
    LanguageModelConfig,
    StepResult,
    TrainingFacet,
    first_paths,
    has_all,
)
from hyper_parallel.platform.mindspore.ops.kernels import write_over

__all__ = ["MindSporeTraining"]


class MindSporeTraining(TrainingFacet):
    """Training by MindSpore's function transform and MindSpore's optimizers."""

    def reference_model(self, config: LanguageModelConfig) -> Any:
        """The transformer of ``reference_model.py``."""
        from hyper_parallel.platform.mindspore.reference_model import Transformer

        return Transformer(config)

    def reference_loss(self, logits: Any, labels: Any) -> Any:
        """``ops.cross_entropy``."""
        from hyper_parallel.platform.mindspore.reference_model import loss

        return loss(logits, labels)

    def load_arrays(self, model: Any, arrays: Mapping[str, Any]) -> None:
        """``set_data``: in-place arithmetic does nothing on MindSpore's CPU build."""
        held = self.parameters_dict(model)
        for path, cell in self.get_cells_and_names(model):
            start = f"{path}." if path else ""
            held.update({f"{start}{name}": value for name, value in self.direct_buffers(cell).items()})
        has_all(list(held), arrays, "load_arrays")
        for path, array in arrays.items():
            value = mindspore.Tensor(array, dtype=held[path].dtype)
            if isinstance(held[path], mindspore.Parameter):
                held[path].set_data(value)
            else:
                write_over(held[path], value)

    def trainable(self, model: Any) -> dict[str, Any]:
        """Parameters that require grad."""
        return first_paths({path: one for path, one in self.parameters_dict(model).items() if one.requires_grad})

    def linear_layer(self, inputs: int, outputs: int, *, dtype: Any) -> Any:
        """``mint.nn.Linear``."""
        return mindspore.mint.nn.Linear(inputs, outputs, dtype=dtype)

    def parameter_with_gradient(self, gradient: Any) -> Any:
        """The gradient, which is a value."""
        return gradient

    def kept_operators(self) -> list[Any]:
        """Products, by the names that MindSpore dispatches them under."""
        return ["MatMulExt", "Dense", "BatchMatMul", "MatMul"]

    def training_step(self, model: Any, compute_loss: Callable[[], Any]) -> StepResult:
        """``value_and_grad`` over the parameters; local gradients are in the dual of their parameter's layout."""
        held = self.trainable(model)
        loss, grads = mindspore.value_and_grad(compute_loss, None, list(held.values()))()
        wrapped = {path: self._gradient(one, grad) for (path, one), grad in zip(held.items(), grads, strict=True)}
        return StepResult(loss, wrapped)

    def optimizer(self, model: Any, name: str, learning_rate: float) -> Callable[[StepResult], None]:
        """``nn.Momentum`` (``SGD`` takes no float64) or ``experimental.optim.AdamW``, on local gradients."""
        held = self.trainable(model)
        values = list(held.values())
        if name == "sgd":
            engine: Any = mindspore.nn.Momentum(values, learning_rate, 0.9)
        elif name == "adamw":
            engine = optim.AdamW(values, lr=learning_rate, weight_decay=0.1)
        else:
            raise self.unknown_optimizer(name)

        def apply(result: StepResult) -> None:
            grads = [result.gradients[path] for path in held]
            engine(tuple(grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads))
            for value in values:
                if isinstance(value, DTensor):
                    value.drop_views()

        return apply

    def overwritten(self, local: Any, array: Any) -> Any:
        """A new tensor: optimizers are handed their gradients."""
        del local
        return mindspore.Tensor(array)

    def watch_gradient(self, tensor: Any, keep: Callable[[Any], None]) -> None:
        """A hook of the tensor."""
        if tensor._requires_grad:  # noqa: SLF001 - no public spelling
            tensor.register_hook(keep)

    def watch_random(self, model: Any) -> Callable[[], str | None]:
        """MindSpore's CPU generators do not tell their state: name a dropout layer that is active."""
        found = [
            path
            for path, cell in self.get_cells_and_names(model)
            if "Dropout" in type(cell).__name__ and cell.training and float(getattr(cell, "p", 0.0) or 0.0) > 0
        ]
        return lambda: found[0] if found else None

    def _gradient(self, parameter: Any, grad: Any) -> Any:
        if not isinstance(parameter, DTensor) or isinstance(grad, DTensor):
            return grad
        return parameter._platform.wrap(grad, dual(parameter.layout))
