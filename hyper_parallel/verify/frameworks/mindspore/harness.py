"""MindSpore's implementation of the harness interface: reference training, recording, draws by index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import mindspore
from mindspore import Tensor, mint, ops
from mindspore.experimental import optim

from hyper_parallel.platform.mindspore.ops.kernels import requires_grad, write_over
from hyper_parallel.platform.mindspore.versions import Function
from hyper_parallel.transport.frontends.mindspore_comm.world import active_world
from hyper_parallel.transport.real.mindspore.devices import exact_products, missing_ascend
from hyper_parallel.transport.real.mindspore.transport import compute_on_cpu
from hyper_parallel.verify.frameworks.contract.fingerprint import fingerprint_of
from hyper_parallel.verify.frameworks.contract.harness import Fingerprints, HarnessPlatform
from hyper_parallel.verify.frameworks.contract.record_log import RecordLog
from hyper_parallel.verify.frameworks.contract.training import (
    LanguageModelConfig,
    StepResult,
    check_names,
    first_paths,
)
from hyper_parallel.verify.frameworks.mindspore.indexed_draws import active_dropouts, indexed_draws
from hyper_parallel.verify.frameworks.mindspore.optimizers import MindSporeOptimizer

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["MindSporeHarness", "build"]


class _Seeded(Function):
    """A scalar function of several tensors; its gradient with respect to each is a given cotangent, the seed."""

    @staticmethod
    def forward(ctx: Any, seeds: list[Tensor], *outs: Tensor) -> Tensor:
        """Return zero; the value is not used."""
        del outs
        ctx.seeds = seeds
        return mint.zeros((), dtype=mindspore.float32)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the seeds."""
        del grad
        return (None, *ctx.seeds)


class MindSporeHarness(HarnessPlatform):
    """The harness interface for MindSpore; trains with ``value_and_grad`` and MindSpore's optimizers."""

    def recording(self, log: RecordLog) -> AbstractContextManager[None]:
        """Record by replacing the calls of cells and optimizers."""
        from hyper_parallel.verify.frameworks.mindspore.hooks import recording

        return recording(log)

    def fingerprints(self) -> Fingerprints:
        """Compute with NumPy: the recorder reads tensors as arrays on the host."""
        return _HostFingerprints()

    def program_mesh(self, sizes: Sequence[int], names: Sequence[str]) -> Any:
        """Return this library's mesh, because MindSpore has no mesh."""
        from hyper_parallel.core.dtensor.mesh import init_device_mesh

        return init_device_mesh(self.platform.device_type(), tuple(sizes), mesh_dim_names=tuple(names))

    def vjp(
        self,
        fn: Callable[..., Sequence[Any]],
        inputs: Sequence[Any],
        seeds: Sequence[Any] | Callable[[Sequence[Any]], Sequence[Any]],
        wanted: Sequence[bool],
    ) -> tuple[list[Any], list[Any]]:
        """Run one forward and one backward of a scalar whose gradients with respect to the outputs are the seeds."""
        leaves = [ops.stop_gradient(tensor) for tensor in inputs]
        positions = tuple(index for index, want in enumerate(wanted) if want)
        outs: list[Any] = []

        def seeded(*xs: Any) -> Any:
            outs[:] = fn(*xs)
            cotangents = seeds(outs) if callable(seeds) else seeds
            pairs = [
                (out, seed)
                for out, seed in zip(outs, cotangents, strict=True)
                if seed is not None and requires_grad(out)
            ]
            return _Seeded.apply([seed for _, seed in pairs], *(out for out, _ in pairs))

        if not positions:
            seeded(*leaves)
            return outs, [None] * len(leaves)
        gradients = mindspore.grad(seeded, positions)(*leaves)
        grads: list[Any] = [None] * len(leaves)
        for position, grad in zip(positions, gradients if len(positions) > 1 else (gradients,), strict=True):
            grads[position] = grad
        return outs, grads

    def writing_op(self, op: str) -> Callable[..., Any]:
        """Return the kernel that writes its result into its first argument."""
        from hyper_parallel.platform.mindspore.ops.registry import writing_kernels

        return writing_kernels()[op]

    def reference_model(self, config: LanguageModelConfig) -> Any:
        """Return the transformer of ``reference_model.py``."""
        from hyper_parallel.verify.frameworks.mindspore.reference_model import Transformer

        return Transformer(config)

    def reference_loss(self, logits: Any, labels: Any) -> Any:
        """Return the loss by ``ops.cross_entropy``."""
        from hyper_parallel.verify.frameworks.mindspore.reference_model import loss

        return loss(logits, labels)

    def tutorial_model(self, inputs: int, hidden: int, outputs: int, dtype: str) -> Any:
        """Return the regression model of ``reference_model.py``."""
        from hyper_parallel.verify.frameworks.mindspore.reference_model import Regression

        return Regression(inputs, hidden, outputs, getattr(mindspore, dtype))

    def tutorial_step(self, training: Any) -> Any:
        """Run the step of ``reference_model.py``."""
        from hyper_parallel.verify.frameworks.mindspore.reference_model import train_one_step

        return train_one_step(training)

    def load_arrays(self, model: Any, arrays: Mapping[str, Any]) -> None:
        """Write with ``set_data``, because in-place arithmetic has no effect in MindSpore's CPU build."""
        tensors = self.platform.parameters_dict(model)
        for path, cell in self.platform.get_cells_and_names(model):
            prefix = f"{path}." if path else ""
            tensors.update({f"{prefix}{name}": buffer for name, buffer in self.platform.direct_buffers(cell).items()})
        check_names(list(tensors), arrays, "load_arrays")
        for path, array in arrays.items():
            value = mindspore.Tensor(array, dtype=tensors[path].dtype)
            if isinstance(tensors[path], mindspore.Parameter):
                tensors[path].set_data(value)
            else:
                write_over(tensors[path], value)

    def trainable(self, model: Any) -> dict[str, Any]:
        """Return the parameters that require grad."""
        parameters = self.platform.parameters_dict(model).items()
        return first_paths({path: parameter for path, parameter in parameters if parameter.requires_grad})

    def linear_layer(self, inputs: int, outputs: int, *, dtype: Any) -> Any:
        """Return ``mint.nn.Linear``."""
        return mindspore.mint.nn.Linear(inputs, outputs, dtype=dtype)

    def parameter_with_gradient(self, gradient: Any) -> Any:
        """Return the gradient itself, because MindSpore's parameters do not hold gradients."""
        return gradient

    def kept_operators(self) -> list[Any]:
        """Return the names under which MindSpore dispatches matrix products."""
        return ["MatMulExt", "Dense", "BatchMatMul", "MatMul"]

    def training_step(self, model: Any, *compute_losses: Callable[[], Any]) -> StepResult:
        """Differentiate with ``value_and_grad``, with respect to the parameters."""
        parameters = self.trainable(model)
        total: Any = None
        gradients: dict[str, Any] = {}
        for compute_loss in compute_losses:
            loss, grads = mindspore.value_and_grad(compute_loss, None, list(parameters.values()))()
            total = loss if total is None else total + loss
            for path, gradient in zip(parameters, grads, strict=True):
                gradients[path] = gradients[path] + gradient if path in gradients else gradient
        return StepResult(total, gradients)

    def optimizer(
        self, model: Any, optimizer: str | Callable[[list[Any]], Any], learning_rate: float
    ) -> MindSporeOptimizer:
        """Return ``nn.Momentum`` (``SGD`` rejects float64), ``experimental.optim.AdamW`` or the caller's optimizer."""
        parameters = self.trainable(model)
        values = list(parameters.values())
        if optimizer == "sgd":
            engine: Any = mindspore.nn.Momentum(values, learning_rate, 0.9)
        elif optimizer == "adamw":
            engine = optim.AdamW(values, lr=learning_rate, weight_decay=0.1)
        elif isinstance(optimizer, str):
            raise self.unknown_optimizer(optimizer)
        else:
            engine = optimizer(values)
        if not isinstance(engine, (mindspore.nn.Optimizer, optim.Optimizer)):
            raise self.no_optimizer(engine, "mindspore.nn.Optimizer, or an optimizer of mint.optim")
        return MindSporeOptimizer(engine, parameters)

    def clip_gradients(self, model: Any, gradients: Mapping[Any, Any], max_norm: float) -> Any:
        """Clip the values of ``gradients``."""
        del model
        return self.platform.clip_grad_norm_(list(gradients.values()), max_norm)

    def on_device(self, device_type: str) -> AbstractContextManager[Any]:
        """See :meth:`HarnessPlatform.on_device`; a MindSpore process has one device and one precision of products.

        For ``cpu``, the device of a process that has not computed anything stays unset.
        """
        if device_type == "cpu":
            compute_on_cpu()
        plain = super().on_device(device_type)
        if device_type != "cpu":
            exact_products()
        return plain

    def peak_bytes(self, device_type: str) -> Callable[[], int]:
        """Read the peak from the memory pool of ``mindspore.runtime``, after all work is complete."""
        del device_type
        mindspore.runtime.synchronize()
        mindspore.runtime.reset_peak_memory_stats()

        def most() -> int:
            mindspore.runtime.synchronize()
            return int(mindspore.runtime.max_memory_allocated())

        return most

    def missing_device(self, device_type: str) -> str:
        """Diagnose from the installed packages and the state of MindSpore's plugin for Ascend."""
        if device_type == "cuda":
            return "this library uses MindSpore on cpu and npu: take --platform torch"
        return missing_ascend() or f"this process computes on {self.platform.device_type()}"

    def indexed_draws(self, model: Any, place: Callable[[Any], tuple[Any, Any, Any]]) -> AbstractContextManager[Any]:
        """Replace the calls of dropout cells, because functions on plain tensors cannot be intercepted on MindSpore."""
        return indexed_draws(active_dropouts(self.platform.get_cells_and_names(model)), place)

    def generator_state(self) -> bytes | None:
        """Return None: the state of MindSpore's CPU generators cannot be read."""
        return None

    def advance_generator(self, shape: Sequence[int]) -> None:
        """Do nothing: the generator's state is not compared."""

    def watch_random(self, model: Any) -> Callable[[], str | None]:
        """Watch nothing: dropout cells draw by index, and repeats of the reference reveal any other random draws."""
        del model
        return lambda: None


class _HostFingerprints:
    """Computes fingerprints on the host, from the copies that MindSpore's recorder makes of tensors."""

    def of(self, tensor: Any) -> Any:
        """Return the numbers of a tensor."""
        return fingerprint_of(self.array(tensor)).numbers

    def numbers(self, vectors: Sequence[Any]) -> list[list[float]]:
        """Return the numbers of vectors as lists."""
        return [vector.tolist() for vector in vectors]

    def array(self, tensor: Any) -> Any:
        """Return all elements, half precision as float32."""
        from hyper_parallel.verify.frameworks.mindspore.local_values import read_tensor

        taken = read_tensor(tensor)
        assert taken is not None
        return taken.array.copy()

    def dtype(self, tensor: Any) -> str:
        """Return the name of a tensor's dtype."""
        return str(tensor.dtype).lower()

    def world(self) -> tuple[int, int] | None:
        """Return rank and size of the world that the process has joined."""
        simulated = active_world()
        if simulated is not None:
            return simulated.rank, simulated.size
        if not mint.distributed.is_initialized():
            return None
        return mint.distributed.get_rank(), mint.distributed.get_world_size()

    def facts(self) -> dict[str, str]:
        """Return MindSpore's version and its default dtype."""
        return {"framework": f"mindspore {mindspore.__version__}", "dtype": "float32"}


def build(platform: Platform) -> MindSporeHarness:
    """Return the harness interface for ``platform``."""
    return MindSporeHarness(platform)
