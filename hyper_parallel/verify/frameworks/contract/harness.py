"""The interface of a framework for the harness: functions for verification that training does not need."""

from __future__ import annotations

import abc
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from hyper_parallel._text import an_object
from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.verify.frameworks.contract.training import OPTIMIZERS, first_paths

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.frameworks.contract.primitives import Graph
    from hyper_parallel.verify.frameworks.contract.record_log import RecordLog
    from hyper_parallel.verify.frameworks.contract.training import LanguageModelConfig, StepResult, TrainingOptimizer

__all__ = ["Fingerprints", "HarnessPlatform"]


class Fingerprints(Protocol):
    """Computes the fingerprints of a recording; see ``verify/frameworks/contract/fingerprint.py``."""

    def of(self, tensor: Any) -> Any:
        """Return the fingerprint of a tensor: a vector on the tensor's device, or a NumPy array for a host tensor."""

    def numbers(self, vectors: Sequence[Any]) -> list[list[float]]:
        """Return the results of :meth:`of` as lists of numbers, copied from their devices."""

    def array(self, tensor: Any) -> Any:
        """Return a copy of all elements of a tensor as a NumPy array, half precision as float32."""

    def dtype(self, tensor: Any) -> str:
        """Return the name of a tensor's dtype."""

    def world(self) -> tuple[int, int] | None:
        """Return this process's rank and the number of ranks; None if it has joined no world."""

    def facts(self) -> dict[str, str]:
        """Return the framework's version and default dtype for the header of a recording."""


class HarnessPlatform(abc.ABC):
    """Functions of a framework for the harness, for plain models and models of DTensors.

    Attributes:
        platform: the library's platform of the framework.
    """

    def __init__(self, platform: Platform) -> None:
        self.platform = platform

    @abc.abstractmethod
    def recording(self, log: RecordLog) -> AbstractContextManager[None]:
        """Return a context that records the program that runs inside it into ``log``."""

    @abc.abstractmethod
    def fingerprints(self) -> Fingerprints:
        """Return the object that computes the fingerprints of a recording."""

    def saved_array(self, path: Path) -> Any:
        """Return the tensor in a file of the framework as a NumPy array; half precision as float32.

        Args:
            path: path of a file with one tensor. Nothing in it is executed.

        Raises:
            ValueError: the file does not contain exactly one tensor.
            UnsupportedOnBackend: (a NotImplementedError) the framework has no file format for one tensor.
        """
        msg = f"{path} is a tensor that PyTorch saved, and {self.platform.platform_type} cannot read it"
        raise UnsupportedOnBackend(msg)

    def inherited_world(self) -> AbstractContextManager[None]:
        """Return a context in which a program that initialises the world gets the one that this process has joined."""
        return nullcontext()

    @abc.abstractmethod
    def program_mesh(self, sizes: Sequence[int], names: Sequence[str]) -> Any:
        """Return the mesh that is passed to a program's function."""

    @abc.abstractmethod
    def vjp(
        self,
        fn: Callable[..., Sequence[Any]],
        inputs: Sequence[Any],
        seeds: Sequence[Any] | Callable[[Sequence[Any]], Sequence[Any]],
        wanted: Sequence[bool],
    ) -> tuple[list[Any], list[Any]]:
        """Run ``fn`` on plain tensors and compute the vector-Jacobian product.

        Args:
            fn: function of the inputs that returns a sequence of plain tensors.
            inputs: plain tensors.
            seeds: cotangent per output (None for outputs without one), or a function of the outputs that returns these.
            wanted: which inputs need a gradient.

        Returns:
            the outputs, and one gradient per input (zeros if no output depends on it, None if it is not wanted).
        """

    def writing_op(self, op: str) -> Callable[..., Any]:
        """Return the in-place form of ``local_op(op)``, which writes to its first argument and returns it."""
        return self.platform.local_op(op)

    @abc.abstractmethod
    def reference_model(self, config: LanguageModelConfig) -> Any:
        """Return the reference transformer as single-device code; parameter paths are equal on every framework."""

    @abc.abstractmethod
    def reference_loss(self, logits: Any, labels: Any) -> Any:
        """Return the mean cross-entropy of ``logits`` (batch, length, vocab) against ``labels`` (batch, length)."""

    @abc.abstractmethod
    def tutorial_model(self, inputs: int, hidden: int, outputs: int, dtype: str) -> Any:
        """Return two layers, ``up`` and ``down``, written as the framework's tutorials do.

        Args:
            inputs: input size of ``up``.
            hidden: output size of ``up``.
            outputs: output size of ``down``.
            dtype: ``float64`` or ``float32``.
        """

    @abc.abstractmethod
    def tutorial_step(self, training: Any) -> Any:
        """Train one step as the framework's tutorials do, with a checkpoint that is saved and loaded.

        Args:
            training: a :class:`~hyper_parallel.verify.training_loop.Training` of one batch: inputs and targets.

        Returns:
            the loss; on MindSpore plus the loss of a model that loaded the checkpoint.
        """

    @abc.abstractmethod
    def load_arrays(self, model: Any, arrays: Mapping[str, Any]) -> None:
        """Write NumPy arrays, by path, to the plain parameters and buffers of ``model``."""

    @abc.abstractmethod
    def trainable(self, model: Any) -> dict[str, Any]:
        """Return the parameters that receive gradients, each once, under its first path."""

    def buffers(self, model: Any) -> dict[str, Any]:
        """Return the buffers of a model, each once, under its first path."""
        buffers: dict[str, Any] = {}
        for path, cell in self.platform.get_cells_and_names(model):
            start = f"{path}." if path else ""
            buffers.update({f"{start}{name}": value for name, value in self.platform.direct_buffers(cell).items()})
        return first_paths(buffers)

    def infers_sizes(self, model: Any) -> bool:
        """Return whether ``model`` has parameters whose sizes are inferred by its first forward."""
        del model
        return False

    @abc.abstractmethod
    def training_step(self, model: Any, *compute_losses: Callable[[], Any]) -> StepResult:
        """Run functions that call ``model`` and return scalar losses, and differentiate each loss.

        Returns:
            the sum of the losses, and the sum of their gradients.
        """

    @abc.abstractmethod
    def optimizer(
        self, model: Any, optimizer: str | Callable[[list[Any]], Any], learning_rate: float
    ) -> TrainingOptimizer:
        """Return an optimizer of the framework for the model's parameters.

        Args:
            model: a model of plain tensors or DTensors.
            optimizer: ``sgd`` (momentum 0.9), ``adamw`` (weight decay 0.1), or a function of the list of parameters
                that returns an optimizer of the framework.
            learning_rate: learning rate of ``sgd`` and ``adamw``.

        Raises:
            ValueError: the name is unknown, or the function does not return an optimizer.
        """

    @abc.abstractmethod
    def clip_gradients(self, model: Any, gradients: Mapping[Any, Any], max_norm: float) -> Any:
        """Clip ``gradients`` in place by the library's ``clip_grad_norm_``; return the plain norm before clipping."""

    @abc.abstractmethod
    def watch_random(self, model: Any) -> Callable[[], str | None]:
        """Watch ``model``; return a function that returns the first module that drew random numbers, or None."""

    @abc.abstractmethod
    def indexed_draws(self, model: Any, place: Callable[[Any], tuple[Any, Any, Any]]) -> AbstractContextManager[Any]:
        """Inside this context, let random functions on plain tensors in ``model`` draw as those on DTensors do.

        Args:
            model: model whose dropout layers are changed if functions cannot be intercepted.
            place: returns mesh, placements and global shape of a plain tensor; called before each draw.
        """

    def on_device(self, device_type: str) -> AbstractContextManager[Any]:
        """Inside this context, new tensors are on ``device_type``; backward passes stay on their thread.

        TF32 and HF32 are off.

        Args:
            device_type: type of the process's device; ``cpu`` changes nothing.

        Raises:
            UnsupportedOnBackend: this process has no such device.
        """
        own = self.platform.device_type()
        if device_type not in ("cpu", own):
            msg = (
                f"--device {device_type}: {self.platform.platform_type} sees no such device here, only {own}; "
                f"{self.missing_device(device_type)}, or use --device cpu"
            )
            raise UnsupportedOnBackend(msg)
        return nullcontext()

    def counters_on_host(self) -> AbstractContextManager[Any]:
        """Inside this context, an optimizer's step counters have values even if other new tensors have none."""
        return nullcontext()

    def missing_device(self, device_type: str) -> str:
        """Return a text that says why this process has no device of this type, and the fix."""
        return f"check the driver and the build of the framework for {device_type}"

    @abc.abstractmethod
    def peak_bytes(self, device_type: str) -> Callable[[], int]:
        """Start to measure the peak number of bytes in use on a device; return a function that returns it.

        Args:
            device_type: ``cuda`` or ``npu``.
        """

    def single_threaded(self) -> AbstractContextManager[Any]:
        """Inside this context, run operators in one thread, so that sums do not depend on the number of threads."""
        return nullcontext()

    def saved_for_backward(self, model: Any) -> AbstractContextManager[Callable[[], int] | None]:
        """Count the bytes that forward saves for backward inside this context.

        Args:
            model: model whose parameters are not counted.

        Returns:
            a context with a function that returns the peak number of saved bytes, or with None if the framework does
            not report it.
        """
        del model
        return nullcontext()

    def collective_owners(self, model: Any) -> dict[str, str]:
        """Return the module path of each group of ``fully_shard``, by the name of the group in recorded collectives."""
        del model
        return {}

    @abc.abstractmethod
    def generator_state(self) -> bytes | None:
        """Return the state of the framework's own generator on this rank; None if it cannot be read."""

    @abc.abstractmethod
    def advance_generator(self, shape: Sequence[int]) -> None:
        """Draw as many numbers as a tensor of ``shape`` has from the framework's own generator."""

    @abc.abstractmethod
    def linear_layer(self, inputs: int, outputs: int, *, dtype: Any) -> Any:
        """Return the framework's linear layer with a bias, initialised by the framework."""

    @abc.abstractmethod
    def parameter_with_gradient(self, gradient: Any) -> Any:
        """Return an object for which ``Platform.gradient_of`` returns ``gradient``.

        It is a parameter, or the gradient itself if the framework's gradients are values.
        """

    @abc.abstractmethod
    def kept_operators(self) -> list[Any]:
        """Return the operators whose results selective checkpointing of the reference model keeps: matrix products."""

    def primitives(
        self,
        run: Callable[..., Any],
        operands: Sequence[Any],
        requires_grad: Sequence[bool],
        sizes: Callable[[Sequence[Any]], Any],
        numbers: Collection[int] = (),
    ) -> Graph:
        """Return an operator and its backward as a graph of primitives over symbolic sizes.

        Args:
            run: ``run(tensors, sizes)`` calls the operator.
            operands: tensors; each size becomes a symbol with this example value. Dims that may have different sizes
                must have different ones here. Or pairs of a shape and a dtype, whose sizes stay numbers.
            requires_grad: whether the gradient is wanted, per operand.
            sizes: computes the second argument of ``run`` from the operands' symbolic shapes.
            numbers: sizes that stay numbers if the operator reads them, such as 1 for broadcast dims.

        Raises:
            UnsupportedOnBackend: (a NotImplementedError) the framework has no decompositions.
        """
        del run, operands, requires_grad, sizes, numbers
        framework = self.platform.platform_type
        msg = f"{framework} does not decompose operators; proofs are made on PyTorch, for the rules of both"
        raise UnsupportedOnBackend(msg)

    def reading_values(self, error: Exception) -> str:
        """Return the name of the function that failed because a meta tensor has no values; empty for other errors."""
        del error
        return ""

    def observed_calls(
        self,
        observe: Callable[..., None],
        stepped: Callable[[Sequence[Any]], None],
        every: Callable[..., None] | None = None,
        program: Any = None,
    ) -> AbstractContextManager[Any]:
        """Call ``observe(func, args, kwargs, result, in_backward)`` after each function that the program calls.

        Calls of the library's own code are skipped, except those of ``clip_grad_norm_``.

        Args:
            observe: records a call.
            stepped: called with the DTensors whose local tensors an optimizer's step is about to use.
            every: ``every(func, args, kwargs, result, by_program)`` is called after each function, including those that
                the library calls.
            program: a :class:`~hyper_parallel.verify.prove.program.Program`, to which backward and hooks are reported.

        Raises:
            UnsupportedOnBackend: (a NotImplementedError) the framework has no such hook.
        """
        del observe, stepped, every, program
        msg = f"{self.platform.platform_type} does not observe calls; plans are proven on PyTorch"
        raise UnsupportedOnBackend(msg)

    def sharded_groups(self, model: Any) -> list[tuple[str, Any]]:
        """Return the groups of ``fully_shard`` in ``model`` that have parameters, each with the path of its module."""
        del model
        return []

    def memory_of(self, tensor: Any) -> tuple[int, tuple[Any, ...], int]:
        """Return a key of a tensor's storage, the tensor's position in the storage, and its number of writes.

        Raises:
            UnsupportedOnBackend: (a NotImplementedError) as for :meth:`observed_calls`.
        """
        del tensor
        msg = f"{self.platform.platform_type} does not say where tensors lie; plans are proven on PyTorch"
        raise UnsupportedOnBackend(msg)

    def unknown_optimizer(self, name: str) -> ValueError:
        """Return the error for a name that is not in ``OPTIMIZERS``."""
        return ValueError(f"optimizer {name!r} is unknown; known optimizers: {', '.join(OPTIMIZERS)}")

    def no_optimizer(self, engine: Any, classes: str) -> ValueError:
        """Return the error for a function that returns no optimizer of the framework's ``classes``."""
        return ValueError(
            f"optimizer= returned {an_object(engine)}; it is called with the list of parameters and must return a "
            f"{classes}"
        )
