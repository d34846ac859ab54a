"""Computes results and gradients of a sample on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel._tree import as_list
from hyper_parallel.core.dtensor import random
from hyper_parallel.core.shard.rule import LocalCall, Ref, Strategies
from hyper_parallel.verify.checker.checker import Expected
from hyper_parallel.verify.checker.difference import coarsest_eps, is_dyadic, is_single_precision
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.ops.claims import SampleCall, bind_sample, mesh_of, with_operands

if TYPE_CHECKING:
    from hyper_parallel.core.shard.rule import Rule
    from hyper_parallel.core.shard.sample import Sample
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.ops.values import FilledSample

__all__ = [
    "SEED",
    "Caller",
    "Case",
    "Reference",
    "function_reference",
    "random_cotangents",
    "rule_reference",
]

SEED = 20


class Caller:
    """Runs the canonical operator on plain tensors as the dispatcher does, with the local call of a plan.

    Args:
        platform: the framework.
        sample_call: the call.
        sample: declares whether the call writes an operand or is random.
    """

    def __init__(self, platform: Platform, sample_call: SampleCall, sample: Sample) -> None:
        self.platform, self.args, self.sample = platform, sample_call.call.args, sample
        self.func = platform.local_op(sample_call.call.op)
        self.written = next((name for name, value in self.args.items() if value == Ref(0)), "") if sample.writes else ""
        self.clone = platform.local_op("clone")

    def __call__(self, operands: Sequence[Any], local: LocalCall | None) -> list[Any]:
        """Return the outputs."""
        args = with_operands(self.args, operands)
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


@dataclass
class Reference:
    """Results and gradients of a sample on one device.

    Attributes:
        sample_call: the call on a mesh of one rank; None for a function without a rule.
        tensors: operands as tensors.
        outputs: results as arrays.
        cotangents: cotangent per output; None for an output without one.
        grads: gradient per operand; None for an operand without one.
        exact: whether the operator makes no rounding error on these values.
        eps: rounding unit of the coarsest dtype among operands and results.
    """

    sample_call: SampleCall | None
    tensors: list[Any]
    outputs: list[Any]
    cotangents: list[Any]
    grads: list[Any]
    exact: bool
    eps: float

    @property
    def expected(self) -> Expected:
        """The expected results of the ranks."""
        return Expected(self.outputs, self.cotangents, self.grads, self.exact, self.eps)


@dataclass(frozen=True)
class Case:
    """A sample with values and the results of one device.

    Attributes:
        number: number of the sample among those of its operator.
        sample: the sample as declared.
        filled: the sample's arguments with values.
        reference: results and gradients of one device.
        seed: seed of the values.
        first: whether this is the first choice of sizes for the sample.
    """

    number: int
    sample: Sample
    filled: FilledSample
    reference: Reference
    seed: int
    first: bool

    @property
    def name(self) -> str:
        """The name of the case in reports."""
        return f"sample {self.number}"


def rule_reference(platform: Platform, rule: Rule, sample: Sample, filled: FilledSample, rng: Any) -> Reference:
    """Run a sample of a rule on one device.

    Raises:
        Exception: any error that the framework raises on these sizes.
    """
    mesh = mesh_of((1,))
    tensors = [platform.from_numpy(array) for array in filled.arrays]
    sample_call = bind_sample(platform, rule, filled, mesh, tensors)
    caller = Caller(platform, sample_call, sample)
    local = _random_local_call(sample_call) if sample.random else None
    return _differentiated(platform, lambda *leaves: caller(leaves, local), filled, rng, sample_call, tensors)


def function_reference(platform: Platform, run: Callable[..., list[Any]], filled: FilledSample, rng: Any) -> Reference:
    """Run a function that has no rule on the sample's values, on one device."""
    tensors = [platform.from_numpy(array) for array in filled.arrays]

    return _differentiated(platform, lambda *leaves: run(*filled.with_operands(leaves)), filled, rng, None, tensors)


def _differentiated(
    platform: Platform,
    run: Callable[..., list[Any]],
    filled: FilledSample,
    rng: Any,
    sample_call: SampleCall | None,
    tensors: list[Any],
) -> Reference:
    cotangents: list[Any] = []

    def sample_cotangents(outs: Sequence[Any]) -> list[Any]:
        arrays = [platform.tensor_to_numpy(platform.detach(out)) for out in outs]
        cotangents[:] = random_cotangents(arrays, rng, integral=filled.integral)
        return [None if cotangent is None else platform.from_numpy(cotangent) for cotangent in cotangents]

    outs, grads = harness_of(platform).vjp(run, tensors, sample_cotangents, filled.requires_grad)
    outputs = [platform.tensor_to_numpy(platform.detach(out)) for out in outs]
    gradients = [None if grad is None else platform.tensor_to_numpy(grad) for grad in grads]
    exact = filled.integral and is_dyadic(outputs) and is_dyadic(gradients)
    eps = coarsest_eps([*filled.arrays, *outputs])
    if is_single_precision([*outputs, *gradients]):
        eps = max(eps, float(np.finfo(np.float32).eps))
    return Reference(sample_call, tensors, outputs, cotangents, gradients, exact, eps)


def _random_local_call(sample_call: SampleCall) -> LocalCall | None:
    """Return the local call of a random operator on a mesh of one rank."""
    strategies = sample_call.rule.strategies(sample_call.call)
    if not isinstance(strategies, Strategies) or strategies.localize is None:
        return None
    layouts = tuple(operand.layout for operand in sample_call.call.operands)
    outputs = tuple(layouts[0].with_shape(shape) for shape in strategies.outputs)
    return strategies.localize(sample_call.call, layouts, outputs)


def random_cotangents(outputs: Sequence[Any], rng: Any, *, integral: bool) -> list[Any]:
    """Return a random cotangent per floating output, and None for each of the others."""
    cotangents: list[Any] = []
    for output in outputs:
        if output.dtype.kind not in "fc":
            cotangents.append(None)
            continue
        sampled = rng.integers(-3, 4, output.shape) if integral else rng.standard_normal(output.shape)
        cotangents.append(np.asarray(sampled).astype(output.dtype))
    return cotangents
