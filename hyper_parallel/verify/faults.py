"""Faults that are injected into a model's parallel run on purpose, to check that the harness detects them.

Each fault is a known bug of parallel code. It changes one module of the parallel run: its weights, its results, or the
transport during one of its redistributions. The library itself contains no hooks for faults.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hyper_parallel._text import near_hint
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import watching
from hyper_parallel.core.dtensor.parameter_paths import describe_nearest
from hyper_parallel.transport.base import Transport, use_transport
from hyper_parallel.transport.work import Work
from hyper_parallel.verify.input_error import InputError

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.events import PendingRedistribution
    from hyper_parallel.platform.contract.platform import Platform

__all__ = [
    "FAULTS",
    "Fault",
    "parse_fault",
]

FAULTS = {
    "drop-allreduce": ("layers.1.mlp.down", "the sum of a row-wise layer's partial results is never made"),
    "wrong-shard-dim": ("layers.1.mlp.down", "a weight is cut along dim 0 where its layout says dim 1"),
    "double-bias": ("layers.1.attn.o", "every rank adds the bias to its partial result"),
    "unreduced-norm-grad": ("layers.1.mlp_norm", "every rank keeps its own share of a norm weight's gradient"),
}
"""Model faults by name: the module that is changed by default, and the resulting error."""


def parse_fault(text: str | None) -> Fault | None:
    """Return the fault that ``NAME`` or ``NAME@module.path`` describes; None for None.

    Raises:
        InputError: (a ValueError) the name is unknown.
    """
    if text is None:
        return None
    name, _, module = text.partition("@")
    if name not in FAULTS:
        msg = f"--inject {name!r} is not one of {', '.join(FAULTS)}{near_hint(name, FAULTS)}"
        raise InputError(msg)
    return Fault(name, module or FAULTS[name][0])


@dataclass
class Fault:
    """One model fault in one module of one rank's parallel run.

    Attributes:
        name: a key of :data:`FAULTS`.
        module: path of the module to change.
        hits: number of changes that it made.
    """

    name: str
    module: str
    hits: int = 0

    def before_parallel(self, platform: Platform, model: Any) -> None:
        """Attach hooks that change a module's own result before its style processes it.

        Raises:
            InputError: (a ValueError) the model has no such module.
        """
        module = self._find(platform, model)
        if self.name == "double-bias":
            platform.register_forward_hook(module, lambda cell, _, output: self._add_bias(platform, cell, output))

    def after_parallel(self, platform: Platform, model: Any) -> None:
        """Change weights that are already distributed."""
        if self.name == "wrong-shard-dim":
            self._shard_wrong_dim(platform, self._find(platform, model))

    @contextmanager
    def running(self, platform: Platform) -> Iterator[None]:
        """Change the transport during a training step."""
        with ExitStack() as stack:
            if self.name in ("drop-allreduce", "unreduced-norm-grad"):
                phase = "forward" if self.name == "drop-allreduce" else "backward"
                transport = _DroppingTransport(platform.transport(), self)
                stack.enter_context(watching(_DropInModule(transport, self.module, phase)))
                stack.enter_context(use_transport(cast("Transport", transport)))
            yield

    def must_have_hit(self) -> None:
        """Raise an error if the fault changed nothing, because such a run proves nothing.

        Raises:
            InputError: (a ValueError) the fault changed nothing.
        """
        if not self.hits:
            msg = f"--inject {self.name}: there was nothing to change in module {self.module!r}"
            raise InputError(msg)

    def _find(self, platform: Platform, model: Any) -> Any:
        modules = dict(platform.get_cells_and_names(model))
        if self.module not in modules:
            nearest = describe_nearest(self.module, list(modules))
            msg = (
                f"--inject {self.name}: the model has no module {self.module!r}; {nearest}; name a module, as in "
                f"{self.name}@PATH"
            )
            raise InputError(msg)
        return modules[self.module]

    def _add_bias(self, platform: Platform, module: Any, output: Any) -> Any:
        """Add the bias on every rank but the first, so that the sum over the ranks includes it once per rank."""
        bias = platform.direct_parameters(module).get("bias")
        if bias is None or not isinstance(output, DTensor) or not output.layout.is_partial():
            return None
        axes = {axis for axis, _ in output.layout.partials}
        first = all(output.device_mesh.coordinate[axis] == 0 for axis in axes)  # type: ignore[index] # a member
        self.hits += 1
        extra = bias.to_local() * (0 if first else 1)
        return platform.wrap(output.to_local() + extra, output.layout)

    def _shard_wrong_dim(self, platform: Platform, module: Any) -> None:
        """Fill the local shard with consecutive values of the row-major weight, as if dim 0 were sharded."""
        name, _ = platform.layer_parameters(module)
        weight = platform.direct_parameters(module).get(name)
        if not isinstance(weight, DTensor) or not any(weight.layout.dim_axes[1:]):
            return
        layout = weight.layout
        values = platform.tensor_to_numpy(weight.detach().full_tensor()).reshape(-1)
        box = layout.local_box()
        start = box[1][0] * layout.shape[0]  # type: ignore[index] # a weight has a shape
        shard = values[start : start + int(np.prod(layout.local_shape))].reshape(layout.local_shape)
        wrong = platform.wrap(platform.from_numpy(shard), layout)
        platform.set_parameter(module, name, platform.new_parameter(wrong, requires_grad=True, name=name))
        self.hits += 1


class _DropInModule:
    """A watcher of redistributions that makes the transport drop the sums of one module and phase."""

    def __init__(self, transport: _DroppingTransport, module: str, phase: str) -> None:
        self.transport, self.module, self.phase = transport, module, phase

    def on_redistribution(self, redistribution: PendingRedistribution) -> None:
        """Switch dropping on or off for the redistribution that starts."""
        self.transport.dropping = redistribution.module == self.module and redistribution.phase == self.phase


class _DroppingTransport:
    """A transport that returns this rank's own partial value instead of the sum while ``dropping`` is set."""

    def __init__(self, inner: Transport, fault: Fault) -> None:
        self.inner, self.fault, self.dropping = inner, fault, False

    def __getattr__(self, name: str) -> Any:
        """Return the inner transport's attribute."""
        return getattr(self.inner, name)

    def all_reduce(self, x: Any, op: str, ranks: Any) -> Any:
        """Return the reduced tensor, or a copy of ``x`` while dropping."""
        if not self.dropping:
            return self.inner.all_reduce(x, op, ranks)
        self.fault.hits += 1
        return x * 1

    def reduce_scatter(self, chunks: Any, op: str, ranks: Any) -> Any:
        """Return this rank's chunk of the reduced tensor, or a copy of its own chunk while dropping."""
        if not self.dropping:
            return self.inner.reduce_scatter(chunks, op, ranks)
        self.fault.hits += 1
        return chunks[ranks.index(self.inner.rank)] * 1

    def reduce_scatter_rows(self, rows: Any, op: str, ranks: Any, shapes: Any) -> Any:
        """Return this rank's row of the reduced tensor, or a copy of its own row while dropping."""
        if not self.dropping:
            return self.inner.reduce_scatter_rows(rows, op, ranks, shapes)
        self.fault.hits += 1
        return rows[ranks.index(self.inner.rank)] * 1

    def start(self, operation: str, *args: Any) -> Work:
        """Start an asynchronous collective; a dropped reduction is complete at once."""
        if not self.dropping or operation not in ("all_reduce", "reduce_scatter"):
            return self.inner.start(operation, *args)
        result = getattr(self, operation)(*args)
        return Work(operation, lambda: result)
