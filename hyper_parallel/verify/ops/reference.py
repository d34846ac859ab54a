"""What one device computes: the plain result and gradients of a filled sample, and the local call of a rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor import random
from hyper_parallel.core.shard.rule import LocalCall, Ref, Rule, Strategies
from hyper_parallel.verify.ops.claims import SampleCall, bind_sample, filled_in, mesh_of
from hyper_parallel.verify.ops.compare import coarsest, in_single, is_dyadic
from hyper_parallel.verify.ops.values import Slot, substitute

if TYPE_CHECKING:
    from hyper_parallel.core.shard.sample import Sample
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.ops.values import FilledSample

__all__ = ["SEED", "Caller", "Case", "Reference", "as_list", "cotangents", "plain_run", "refer"]

SEED = 20


class Caller:
    """Runs the canonical operator on plain tensors, as the dispatcher would: with a plan's local call.

    Args:
        platform: the framework.
        problem: the call.
        sample: whether it writes or draws.
    """

    def __init__(self, platform: Platform, problem: SampleCall, sample: Sample) -> None:
        self.platform, self.args, self.sample = platform, problem.call.args, sample
        self.func = platform.local_op(problem.call.op)
        self.written = next((name for name, value in self.args.items() if value == Ref(0)), "") if sample.writes else ""
        self.clone = platform.local_op("clone")

    def __call__(self, operands: Sequence[Any], local: LocalCall | None) -> list[Any]:
        """The outputs."""
        args = filled_in(self.args, operands)
        run = None
        if local is not None:
            args, run = {**args, **(local.args or {})}, local.run
        if self.written:
            args[self.written] = self.clone(x=args[self.written], memory_format=None)
        if self.sample.random:
            random.manual_seed(SEED)
        out = self.func(**args) if run is None else run(self.platform, args)
        if self.written and out is None:
            out = args[self.written]
        return as_list(out)


def as_list(out: Any) -> list[Any]:
    """The outputs of an operator that returns one or several."""
    return list(out) if isinstance(out, (list, tuple)) else [out]


@dataclass
class Reference:
    """The plain run.

    Attributes:
        problem: the call on a mesh of one rank, None for a function without a rule.
        tensors: operands as tensors.
        outputs: results.
        seeds: cotangent per output, None where it has none.
        grads: gradient per operand, None where it has none.
        exact: the operator made no rounding error on these values.
        eps: rounding unit of the coarsest dtype among operands and results.
    """

    problem: SampleCall | None
    tensors: list[Any]
    outputs: list[Any]
    seeds: list[Any]
    grads: list[Any]
    exact: bool
    eps: float


@dataclass(frozen=True)
class Case:
    """A filled sample with its plain result."""

    number: int
    sample: Sample
    filled: FilledSample
    reference: Reference
    seed: int
    first: bool

    @property
    def name(self) -> str:
        """How reports call it."""
        return f"sample {self.number}"


def refer(platform: Platform, rule: Rule, sample: Sample, filled: FilledSample, rng: Any) -> Reference:
    """Run the sample on one device.

    Raises:
        Exception: whatever the framework raises on these sizes.
    """
    mesh = mesh_of((1,))
    tensors = [platform.from_numpy(array) for array in filled.arrays]
    problem = bind_sample(platform, rule, filled, mesh, tensors)
    caller = Caller(platform, problem, sample)
    local = _drawn(problem) if sample.random else None
    return _differentiated(platform, lambda *leaves: caller(leaves, local), filled, rng, problem, tensors)


def plain_run(platform: Platform, run: Callable[..., list[Any]], filled: FilledSample, rng: Any) -> Reference:
    """The same for a function of filled arguments, which has no rule of its own."""
    tensors = [platform.from_numpy(array) for array in filled.arrays]

    def on_leaves(*leaves: Any) -> list[Any]:
        def one(leaf: Any) -> Any:
            return leaves[leaf.index] if isinstance(leaf, Slot) else leaf

        return run(substitute(filled.args, one), substitute(filled.kwargs, one))

    return _differentiated(platform, on_leaves, filled, rng, None, tensors)


def _differentiated(
    platform: Platform,
    run: Callable[..., list[Any]],
    filled: FilledSample,
    rng: Any,
    problem: SampleCall | None,
    tensors: list[Any],
) -> Reference:
    found: list[Any] = []

    def seeds(outs: Sequence[Any]) -> list[Any]:
        arrays = [platform.tensor_to_numpy(platform.detach(one)) for one in outs]
        found[:] = cotangents(arrays, rng, integral=filled.integral)
        return [None if one is None else platform.from_numpy(one) for one in found]

    outs, grads = platform.vjp(run, tensors, seeds, filled.wanted)
    outputs = [platform.tensor_to_numpy(platform.detach(one)) for one in outs]
    gradients = [None if one is None else platform.tensor_to_numpy(one) for one in grads]
    exact = filled.integral and is_dyadic(outputs) and is_dyadic(gradients)
    eps = coarsest([*filled.arrays, *outputs])
    if in_single([*outputs, *gradients]):
        eps = max(eps, float(np.finfo(np.float32).eps))
    return Reference(problem, tensors, outputs, found, gradients, exact, eps)


def _drawn(problem: SampleCall) -> LocalCall | None:
    """What one rank draws."""
    strategies = problem.rule.strategies(problem.call)
    if not isinstance(strategies, Strategies) or strategies.localize is None:
        return None
    layouts = tuple(one.layout for one in problem.call.operands)
    outputs = tuple(layouts[0].with_shape(shape) for shape in strategies.outputs)
    return strategies.localize(problem.call, layouts, outputs)


def cotangents(outputs: Sequence[Any], rng: Any, *, integral: bool) -> list[Any]:
    """A random cotangent per floating output."""
    found: list[Any] = []
    for one in outputs:
        if one.dtype.kind not in "fc":
            found.append(None)
            continue
        drawn = rng.integers(-3, 4, one.shape) if integral else rng.standard_normal(one.shape)
        found.append(np.asarray(drawn).astype(one.dtype))
    return found
