"""PyTorch's implementation of the harness interface: reference training, recording, draws by index."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.platform.torch.versions import DisableTorchFunction
from hyper_parallel.transport.host.torch.process_state import exact_products
from hyper_parallel.transport.real.c10d.missing_devices import missing_device
from hyper_parallel.verify.frameworks.contract.harness import Fingerprints, HarnessPlatform
from hyper_parallel.verify.frameworks.contract.record_log import RecordLog
from hyper_parallel.verify.frameworks.contract.training import (
    LanguageModelConfig,
    StepResult,
    check_names,
    first_paths,
)
from hyper_parallel.verify.frameworks.torch.indexed_draws import IndexedDraws
from hyper_parallel.verify.frameworks.torch.optimizers import CountersOnHost, TorchOptimizer
from hyper_parallel.verify.frameworks.torch.saved_tensors import FULLY_SHARDED, counted_for_backward

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.frameworks.contract.primitives import Graph

__all__ = ["TorchHarness", "build"]


_ON_META = re.compile(
    r"register_meta function for torch\.(\w+)\(\)|aten::(\w+): attempted to run this operator with Meta tensors"
    r"|Tensor\.(item)\(\) cannot be called on meta tensors"
)
"""Matches errors of functions that need the values of meta tensors, because a result or its size depends on values."""


class TorchHarness(HarnessPlatform):
    """The harness interface for PyTorch; trains with autograd and ``torch.optim``."""

    def recording(self, log: RecordLog) -> AbstractContextManager[None]:
        """Record by PyTorch's hooks and some replaced functions."""
        from hyper_parallel.verify.frameworks.torch.hooks import recording

        return recording(log)

    def fingerprints(self) -> Fingerprints:
        """Compute with PyTorch on the tensors' devices."""
        from hyper_parallel.verify.frameworks.torch.fingerprints import TorchFingerprints

        return TorchFingerprints()

    def saved_array(self, path: Path) -> Any:
        """Read a file of ``torch.save``."""
        from hyper_parallel.verify.frameworks.torch.local_values import read_saved

        return read_saved(path)

    def inherited_world(self) -> AbstractContextManager[None]:
        """Let ``init_process_group`` of a program keep the world that the process has joined."""
        from hyper_parallel.verify.frameworks.torch.hooks import inherited_world

        return inherited_world()

    def primitives(
        self,
        run: Callable[..., Any],
        operands: Sequence[Any],
        requires_grad: Sequence[bool],
        sizes: Callable[[Sequence[Any]], Any],
        numbers: Collection[int] = (),
    ) -> Graph:
        """Trace PyTorch's decompositions with symbolic sizes."""
        from hyper_parallel.verify.frameworks.torch.primitives import traced

        return traced(run, operands, requires_grad, sizes, numbers)

    def reading_values(self, error: Exception) -> str:
        """Return the name of the function from the message of its error on meta tensors."""
        found = _ON_META.search(str(error)) if isinstance(error, (RuntimeError, NotImplementedError)) else None
        return next(filter(None, found.groups())).strip("_2") if found is not None else ""

    @contextmanager
    def observed_calls(
        self,
        observe: Callable[..., None],
        stepped: Callable[[Sequence[Any]], None],
        every: Callable[..., None] | None = None,
        program: Any = None,
    ) -> Iterator[None]:
        """Observe calls with a torch function mode; observe backward and hooks by replacing PyTorch's functions."""
        from hyper_parallel.verify.frameworks.torch.observed_backward import observed_backward, observed_methods
        from hyper_parallel.verify.frameworks.torch.primitives import ObservedCalls, observed_steps

        calls = ObservedCalls(observe, every)
        backward = nullcontext() if program is None else observed_backward(program, calls)
        with calls, observed_methods(), observed_steps(stepped), backward:
            yield

    def memory_of(self, tensor: Any) -> tuple[int, tuple[Any, ...], int]:
        """Identify a tensor by its storage and version counter."""
        with DisableTorchFunction():  # otherwise each read would pass through the run's modes
            place = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
            return tensor.untyped_storage()._cdata, place, tensor._version  # noqa: SLF001 - these have no public name

    def program_mesh(self, sizes: Sequence[int], names: Sequence[str]) -> Any:
        """Return PyTorch's own mesh."""
        from torch.distributed.device_mesh import init_device_mesh

        return init_device_mesh("cpu", tuple(sizes), mesh_dim_names=tuple(names))

    def vjp(
        self,
        fn: Callable[..., Sequence[Any]],
        inputs: Sequence[Any],
        seeds: Sequence[Any] | Callable[[Sequence[Any]], Sequence[Any]],
        wanted: Sequence[bool],
    ) -> tuple[list[Any], list[Any]]:
        """Run ``fn``, and one backward from all outputs that have a cotangent (seed)."""
        leaves = [tensor.detach().requires_grad_(want) for tensor, want in zip(inputs, wanted, strict=True)]
        outs = list(fn(*leaves))
        cotangents = seeds(outs) if callable(seeds) else seeds
        pairs = [
            (out, seed) for out, seed in zip(outs, cotangents, strict=True) if seed is not None and out.requires_grad
        ]
        if pairs:
            torch.autograd.backward([out for out, _ in pairs], [seed for _, seed in pairs])
        grads = [
            None if not want else torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            for leaf, want in zip(leaves, wanted, strict=True)
        ]
        return outs, grads

    def reference_model(self, config: LanguageModelConfig) -> Any:
        """Return the transformer of ``reference_model.py``."""
        from hyper_parallel.verify.frameworks.torch.reference_model import Transformer

        return Transformer(config)

    def reference_loss(self, logits: Any, labels: Any) -> Any:
        """Return the loss by ``F.cross_entropy``."""
        from hyper_parallel.verify.frameworks.torch.reference_model import loss

        return loss(logits, labels)

    def tutorial_model(self, inputs: int, hidden: int, outputs: int, dtype: str) -> Any:
        """Return the regression model of ``reference_model.py``."""
        from hyper_parallel.verify.frameworks.torch.reference_model import Regression

        return Regression(inputs, hidden, outputs, getattr(torch, dtype))

    def tutorial_step(self, training: Any) -> Any:
        """Run the step of ``reference_model.py``."""
        from hyper_parallel.verify.frameworks.torch.reference_model import train_one_step

        return train_one_step(training)

    def load_arrays(self, model: Any, arrays: Mapping[str, Any]) -> None:
        """Copy the arrays in place, outside of autograd."""
        tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        check_names(list(tensors), arrays, "load_arrays")
        with torch.no_grad():
            for path, array in arrays.items():
                tensors[path].copy_(torch.as_tensor(array))

    def trainable(self, model: Any) -> dict[str, Any]:
        """Return the ``named_parameters`` that require grad."""
        every = dict(model.named_parameters(remove_duplicate=False))
        return first_paths({path: value for path, value in every.items() if value.requires_grad})

    def infers_sizes(self, model: Any) -> bool:
        """Return whether ``model`` has modules such as ``nn.LazyLinear`` that have not run their first forward."""
        return any(map(torch.nn.parameter.is_lazy, [*model.parameters(), *model.buffers()]))

    def linear_layer(self, inputs: int, outputs: int, *, dtype: Any) -> Any:
        """Return ``nn.Linear``."""
        return torch.nn.Linear(inputs, outputs, dtype=dtype)

    def parameter_with_gradient(self, gradient: Any) -> Any:
        """Return a parameter of zeros with ``gradient`` as its ``grad``."""
        parameter = torch.nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        return parameter

    def kept_operators(self) -> list[Any]:
        """Return the matrix-product operators of ``aten``."""
        aten = torch.ops.aten
        return [aten.mm.default, aten.addmm.default, aten.bmm.default]

    def training_step(self, model: Any, *compute_losses: Callable[[], Any]) -> StepResult:
        """Clear gradients; compute each loss and call its ``backward()``."""
        parameters = self.trainable(model)
        for value in parameters.values():
            value.grad = None
        total: Any = None
        for compute_loss in compute_losses:
            loss = compute_loss()
            loss.backward()
            total = loss.detach() if total is None else total + loss.detach()
        return StepResult(total, {path: value.grad for path, value in parameters.items()})

    def optimizer(
        self, model: Any, optimizer: str | Callable[[list[Any]], Any], learning_rate: float
    ) -> TorchOptimizer:
        """Return ``torch.optim.SGD``, ``torch.optim.AdamW`` or the caller's optimizer."""
        parameters = self.trainable(model)
        values = list(parameters.values())
        if optimizer == "sgd":
            engine: Any = torch.optim.SGD(values, lr=learning_rate, momentum=0.9)
        elif optimizer == "adamw":
            engine = torch.optim.AdamW(values, lr=learning_rate, weight_decay=0.1)
        elif isinstance(optimizer, str):
            raise self.unknown_optimizer(optimizer)
        else:
            engine = optimizer(values)
        if not isinstance(engine, torch.optim.Optimizer):
            raise self.no_optimizer(engine, "torch.optim.Optimizer")
        return TorchOptimizer(engine, parameters)

    def clip_gradients(self, model: Any, gradients: Mapping[Any, Any], max_norm: float) -> Any:
        """Clip the gradients of the parameters."""
        del gradients
        return self.platform.clip_grad_norm_(list(self.trainable(model).values()), max_norm)

    def saved_for_backward(self, model: Any) -> AbstractContextManager[Callable[[], int]]:
        """Count with autograd's hooks for saved tensors."""
        return counted_for_backward(model)

    def sharded_groups(self, model: Any) -> list[tuple[str, Any]]:
        """Read the groups of ``fully_shard`` from an attribute of modules."""
        groups = {id(group): group for module in model.modules() for group in getattr(module, FULLY_SHARDED, ())}
        owners = self.collective_owners(model)
        return [(owners[group.name], group) for group in groups.values() if group.members]

    def collective_owners(self, model: Any) -> dict[str, str]:
        """Return the module paths of the groups of ``fully_shard``."""
        owners: dict[str, str] = {}
        for path, module in model.named_modules():
            for group in getattr(module, FULLY_SHARDED, ()):
                owners[group.name] = f"{owners[group.name]} or {path}" if group.name in owners else path
        return owners

    def indexed_draws(self, model: Any, place: Callable[[Any], tuple[Any, Any, Any]]) -> AbstractContextManager[Any]:
        """Intercept random functions with a torch function mode."""
        del model
        return IndexedDraws(place)

    def on_device(self, device_type: str) -> AbstractContextManager[Any]:
        """See :meth:`HarnessPlatform.on_device`; nothing is changed for ``cpu``."""
        plain = super().on_device(device_type)
        return plain if device_type == "cpu" else _on_device(device_type)

    def counters_on_host(self) -> AbstractContextManager[Any]:
        """See :meth:`HarnessPlatform.counters_on_host`."""
        return CountersOnHost()

    def missing_device(self, device_type: str) -> str:
        """Diagnose from the installed packages; if a device of a different type is visible, report that first."""
        return missing_device(device_type) or f"this process computes on {self.platform.device_type()}"

    def peak_bytes(self, device_type: str) -> Callable[[], int]:
        """Read the peak from the device's allocator."""
        engine = getattr(torch, device_type)
        engine.reset_peak_memory_stats()
        most: Callable[[], int] = engine.max_memory_allocated
        return most

    @contextmanager
    def single_threaded(self) -> Iterator[None]:
        """Call ``set_num_threads``, which also affects threads that are started inside this context."""
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def generator_state(self) -> bytes | None:
        """Return the state of the default generator."""
        return torch.get_rng_state().numpy().tobytes()

    def advance_generator(self, shape: Sequence[int]) -> None:
        """Draw the numbers with ``torch.rand``."""
        torch.rand(tuple(shape))

    def watch_random(self, model: Any) -> Callable[[], str | None]:
        """Compare the state of the default generator around the forward of every module, innermost first."""
        state: list[Any] = [None]
        changed: list[str] = []

        def before(*_: Any) -> None:
            state[0] = torch.get_rng_state()

        def after(path: str) -> Callable[..., None]:
            def look(*_: Any) -> None:
                if not changed and not torch.equal(state[0], torch.get_rng_state()):
                    changed.append(path)

            return look

        model.register_forward_pre_hook(before)
        for path, module in model.named_modules():
            module.register_forward_hook(after(path))
        return lambda: changed[0] if changed else None


def build(platform: Platform) -> TorchHarness:
    """Return the harness interface for ``platform``."""
    return TorchHarness(platform)


@contextmanager
def _on_device(device_type: str) -> Iterator[None]:
    """Let factories create tensors on the device, and backward run on the rank's own thread, which knows its rank.

    Products of float32 do not use TF32 or HF32, because tolerances are measured in float32.
    """
    alone = torch.autograd.set_multithreading_enabled(mode=False)
    with torch.device(device_type), alone, exact_products():
        yield
