"""Seeded faults: bugs that parallel code really has, put where a real one would be, to see that they are noticed.

Nothing in the library knows of them. Each changes one module of the parallel run: its weights, what it computes, or
what the transport does while one of its redistributions runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import watching
from hyper_parallel.transport.base import use_transport
from hyper_parallel.transport.pending import Pending
from hyper_parallel.verify.model_case import InputError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.events import Occurrence
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.transport.base import Transport

__all__ = ["FAULTS", "Fault", "parse_fault"]

FAULTS = {
    "drop-allreduce": ("layers.1.mlp.down", "the sum of a row-wise layer's partial results is never made"),
    "wrong-shard-dim": ("layers.1.mlp.down", "a weight is cut along dim 0 where its layout says dim 1"),
    "double-bias": ("layers.1.attn.o", "every rank adds the bias to its partial result"),
    "unreduced-norm-grad": ("layers.1.mlp_norm", "every rank keeps its own share of a norm weight's gradient"),
}
"""Name to the module that is hit by default, and what goes wrong there."""


def parse_fault(text: str | None) -> Fault | None:
    """Read ``NAME`` or ``NAME@module.path``.

    Raises:
        InputError: (a ValueError) unknown name.
    """
    if text is None:
        return None
    name, _, module = text.partition("@")
    if name not in FAULTS:
        msg = f"--inject {name!r} is no fault; known: {', '.join(FAULTS)}"
        raise InputError(msg)
    return Fault(name, module or FAULTS[name][0])


@dataclass
class Fault:
    """One fault in one module of one rank's parallel run.

    Attributes:
        name: of :data:`FAULTS`.
        module: path of the module to hit.
        hits: how often it changed something.
    """

    name: str
    module: str
    hits: int = 0

    def before_parallel(self, platform: Platform, model: Any) -> None:
        """Hook in where the module's own result can be changed before its style sees it."""
        if self.name == "double-bias":
            module = self._find(platform, model)
            platform.register_forward_hook(module, lambda cell, _, output: self._add_bias(platform, cell, output))

    def after_parallel(self, platform: Platform, model: Any) -> None:
        """Change weights that have been laid out."""
        if self.name == "wrong-shard-dim":
            self._cut_wrongly(platform, self._find(platform, model))

    @contextmanager
    def running(self, platform: Platform) -> Iterator[None]:
        """Around a training step: change what the transport does."""
        with ExitStack() as stack:
            if self.name in ("drop-allreduce", "unreduced-norm-grad"):
                phase = "forward" if self.name == "drop-allreduce" else "backward"
                deaf = _Deaf(platform.transport(), self)
                stack.enter_context(watching(_Arm(deaf, self.module, phase)))
                stack.enter_context(use_transport(cast("Transport", deaf)))
            yield

    def must_have_hit(self) -> None:
        """Refuse a run that the fault never touched: it would prove nothing.

        Raises:
            InputError: (a ValueError) nothing was changed.
        """
        if not self.hits:
            msg = f"--inject {self.name}: there was nothing to change in module {self.module!r}"
            raise InputError(msg)

    def _find(self, platform: Platform, model: Any) -> Any:
        modules = dict(platform.get_cells_and_names(model))
        if self.module not in modules:
            msg = f"--inject {self.name}: the model has no module {self.module!r}"
            raise InputError(msg)
        return modules[self.module]

    def _add_bias(self, platform: Platform, module: Any, output: Any) -> Any:
        """One bias per rank, where the sum over the ranks should hold one bias."""
        bias = platform.direct_parameters(module).get("bias")
        if bias is None or not isinstance(output, DTensor) or not output.layout.is_partial():
            return None
        owing = {axis for axis, _ in output.layout.partials}
        first = all(output.device_mesh.coordinate[axis] == 0 for axis in owing)  # type: ignore[index] # a member
        self.hits += 1
        extra = bias.to_local() * (0 if first else 1)
        return platform.wrap(output.to_local() + extra, output.layout)

    def _cut_wrongly(self, platform: Platform, module: Any) -> None:
        """The rank's numbers are the next ones of the row-major weight, as if it were cut along dim 0."""
        weight = platform.direct_parameters(module).get("weight")
        if not isinstance(weight, DTensor) or not any(weight.layout.dim_axes[1:]):
            return
        layout = weight.layout
        numbers = platform.tensor_to_numpy(weight.detach().full_tensor()).reshape(-1)  # type: ignore[attr-defined]
        box = layout.local_box()
        start = box[1][0] * layout.shape[0]  # type: ignore[index] # a weight has a shape
        piece = numbers[start : start + int(np.prod(layout.local_shape))].reshape(layout.local_shape)
        wrong = platform.wrap(platform.from_numpy(piece), layout)
        platform.set_parameter(module, "weight", platform.new_parameter(wrong, requires_grad=True, name="weight"))
        self.hits += 1


class _Arm:
    """Hears of redistributions; those of one module and phase find the transport deaf."""

    def __init__(self, deaf: _Deaf, module: str, phase: str) -> None:
        self.deaf, self.module, self.phase = deaf, module, phase

    def hear(self, occurrence: Occurrence) -> None:
        """Arm or disarm for the steps that follow."""
        self.deaf.armed = occurrence.module == self.module and occurrence.phase == self.phase


class _Deaf:
    """A transport whose sums, while it is armed, are this rank's own summand; all else is as the inner one does it."""

    def __init__(self, inner: Transport, fault: Fault) -> None:
        self.inner, self.fault, self.armed = inner, fault, False

    def __getattr__(self, name: str) -> Any:
        """What is not told below."""
        return getattr(self.inner, name)

    def all_reduce(self, x: Any, op: str, ranks: Any) -> Any:
        """The sum, or the own summand."""
        if not self.armed:
            return self.inner.all_reduce(x, op, ranks)
        self.fault.hits += 1
        return x * 1

    def reduce_scatter(self, chunks: Any, op: str, ranks: Any) -> Any:
        """The own part of the sum, or of the own summand."""
        if not self.armed:
            return self.inner.reduce_scatter(chunks, op, ranks)
        self.fault.hits += 1
        return chunks[ranks.index(self.inner.rank)] * 1

    def start(self, operation: str, *args: Any) -> Pending:
        """As it is; what is not summed is complete at once."""
        if not self.armed or operation not in ("all_reduce", "reduce_scatter"):
            return self.inner.start(operation, *args)
        result = getattr(self, operation)(*args)
        return Pending(operation, lambda: result)
