"""Random operators: results do not depend on the layout, because a number depends on its global element index only.

The generator is counter-based (Philox 4x64-10; Salmon et al., 2011). Numbers are sampled at each call; the plan stores
which elements are on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor import random, sampling
from hyper_parallel.core.dtensor.placements import PARTIAL_OPS, Partial
from hyper_parallel.core.shard.labels import Labels, labelled_rows
from hyper_parallel.core.shard.rule import LocalCall, OpCall, R, Row, Rule, Strategies, register_rule, rule
from hyper_parallel.core.shard.rules.pointwise import elementwise, partial_rows
from hyper_parallel.core.shard.sample import Sample, between, booleans, dtype, real, sample_call
from hyper_parallel.errors import LayoutError, short_dtype

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.sampling import Distribution

__all__ = ["dropout_mask"]

Sampler = Callable[[dict[str, Any]], "Distribution"]


def dropout_mask(platform: Any, like: Any, layout: Layout, p: float) -> Any:
    """Return the dropout mask of the local shard, in the dtype of ``like``; advances the stream by one call.

    Args:
        platform: the framework of ``like``.
        like: a plain tensor of the wanted dtype and device.
        layout: layout of the tensor that dropout is applied to.
        p: probability of dropping an element.
    """
    kept = platform.from_numpy(random.bernoulli(layout, 1.0 - p), device=like.device)
    return platform.local_op("cast_as")(kept, like) * (0.0 if p == 1.0 else 1.0 / (1.0 - p))


def _dropout(call: OpCall) -> Strategies:
    """All dims may be sharded; partial values are reduced first, unless nothing is dropped."""
    p = call["p"]
    if not 0.0 <= p <= 1.0:
        msg = f"p is {p}; it must be between 0 and 1"
        raise ValueError(msg)
    if not call["training"] or p == 0.0:
        elements = elementwise(call, extra=partial_rows(1, (0,), PARTIAL_OPS))
        return replace(elements, localize=lambda *_: LocalCall(run=_unchanged))
    return replace(elementwise(call), localize=_drop)


def _unchanged(platform: Any, args: dict[str, Any]) -> Any:
    del platform
    return args["x"]


def _drop(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall:
    del call, outputs
    (layout,) = targets

    def run(platform: Any, args: dict[str, Any]) -> Any:
        x = args["x"]
        return x * dropout_mask(platform, x, layout, args["p"])

    return LocalCall(run=run)


register_rule(Rule("dropout", "x, p=0.5, training=True", _dropout, itself=True))


# -- filling -----------------------------------------------------------------------------------------------------------


DIGITS = {"f32": 24, "f16": 11, "bf16": 8}


def _digits(args: dict[str, Any]) -> int:
    """Binary digits of the significand of the dtype to fill."""
    return DIGITS.get(short_dtype(args["x"].dtype if args.get("dtype") is None else args["dtype"]), 53)


def _uniform(args: dict[str, Any]) -> Distribution:
    return sampling.uniform(_digits(args)).map(lambda sampled: args["low"] + (args["high"] - args["low"]) * sampled)


def _normal(args: dict[str, Any]) -> Distribution:
    return sampling.normal(_digits(args)).map(lambda sampled: args["mean"] + args["std"] * sampled)


def _bernoulli(args: dict[str, Any]) -> Distribution:
    return sampling.bernoulli(args["p"])


def _exponential(args: dict[str, Any]) -> Distribution:
    return sampling.uniform().map(lambda sampled: -np.log1p(-sampled) / args["lambd"])


def _cauchy(args: dict[str, Any]) -> Distribution:
    return sampling.uniform().map(lambda sampled: args["median"] + args["sigma"] * np.tan(np.pi * (sampled - 0.5)))


def _geometric(args: dict[str, Any]) -> Distribution:
    p = args["p"]
    if not 0 < p < 1:
        msg = f"geometric: p is {p}; it must be between 0 and 1"
        raise LayoutError(msg)
    return sampling.uniform().map(lambda sampled: np.maximum(np.ceil(np.log1p(-sampled) / np.log1p(-p)), 1.0))


def _log_normal(args: dict[str, Any]) -> Distribution:
    return sampling.normal().map(lambda sampled: np.exp(args["mean"] + args["std"] * sampled))


def _integers(args: dict[str, Any]) -> Distribution:
    return sampling.integers(args["low"], args["high"])


def _register_fill(name: str, signature: str, sampler: Sampler) -> None:
    """Declare an operator that fills ``x`` in place; all dims may be sharded, but ``x`` must not be Partial."""

    def strategies(call: OpCall) -> Strategies:
        elements = elementwise(call)
        return Strategies(elements.rows, elements.outputs, _sampling(sampler, "write"))

    register_rule(Rule(name, signature, strategies))


def _register_random_like(name: str, signature: str, sampler: Sampler) -> None:
    """Declare a random tensor with the shape and layout of ``x``; it is replicated on axes where ``x`` is Partial."""

    def strategies(call: OpCall) -> Strategies:
        elements = elementwise(call, extra=[Row((Partial(op),), (R,)) for op in PARTIAL_OPS])
        return Strategies(elements.rows, elements.outputs, _sampling(sampler, "make_like"))

    register_rule(Rule(name, signature, strategies))


def _sampling(sampler: Sampler, how: str) -> Callable[..., LocalCall]:
    def localize(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall:
        del call, targets
        (layout,) = outputs

        def run(platform: Any, args: dict[str, Any]) -> Any:
            sampled = random.sample(layout, sampler(args))
            return platform.local_op(how)(args["x"], sampled, args.get("dtype"))

        return LocalCall(run=run)

    return localize


def _sampled(call: OpCall) -> Strategies:
    """One sample per element of ``x``, which holds probabilities; all dims may be sharded."""
    elements = elementwise(call)
    return Strategies(elements.rows, elements.outputs, _sample)


def _sample(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall:
    del call, outputs
    (layout,) = targets

    def run(platform: Any, args: dict[str, Any]) -> Any:
        x = args["x"]
        sampled = platform.from_numpy(random.uniform(layout), device=x.device)
        drawn = platform.local_op("cast_as")(sampled < platform.detach(x), x)
        return drawn + x * 0 if platform.needs_grad(x) else drawn  # the gradient is zero but not None

    return LocalCall(run=run)


_register_fill("uniform", "x, low=0.0, high=1.0, *, generator=None", _uniform)
_register_fill("normal", "x, mean=0.0, std=1.0, *, generator=None", _normal)
_register_fill("bernoulli_fill", "x, p=0.5, *, generator=None", _bernoulli)
_register_fill("random_fill", "x, low, high, *, generator=None", _integers)
_LIKE = "dtype=None, layout=None, device=None, pin_memory=None, requires_grad=False, memory_format=None"
_register_random_like("rand_like", f"x, *, low=0.0, high=1.0, {_LIKE}", _uniform)
_register_random_like("randn_like", f"x, *, mean=0.0, std=1.0, {_LIKE}", _normal)
_register_random_like("randint_like", f"x, low, high, *, {_LIKE}", _integers)
_register_fill("exponential", "x, lambd=1.0, *, generator=None", _exponential)
_register_fill("cauchy", "x, median=0.0, sigma=1.0, *, generator=None", _cauchy)
_register_fill("geometric", "x, p, *, generator=None", _geometric)
_register_fill("log_normal", "x, mean=1.0, std=2.0, *, generator=None", _log_normal)
register_rule(Rule("bernoulli", "x, *, generator=None", _sampled))


# -- with parameters per element----------------------------------------------------------------------------------------


@rule("normal_around", "mean, std=1.0, *, generator=None")
def normal_around(call: OpCall) -> Strategies:
    """One normal number per element of ``mean`` and ``std``, without gradient; all dims may be sharded."""
    elements = elementwise(call)
    return Strategies(elements.rows, elements.outputs, _sample_normal_around)


def _sample_normal_around(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall:
    del call, targets
    (layout,) = outputs

    def run(platform: Any, args: dict[str, Any]) -> Any:
        parameters = (args["mean"], args["std"])
        mean, std = (
            platform.detach(parameter) if platform.is_tensor(parameter) else parameter for parameter in parameters
        )
        like = mean + std
        digits = DIGITS.get(short_dtype(like.dtype), 53)
        sampled = platform.from_numpy(random.normal(layout, digits), device=like.device)
        return platform.local_op("cast_as")(sampled, like) * std + mean

    return LocalCall(run=run)


@rule("multinomial", "x, num_samples, replacement=False, *, generator=None")
def multinomial(call: OpCall) -> Strategies:
    """``…[d] -> …[n]``: indices sampled by weight; rows may be sharded, but not the weights of a row."""
    x, count = call["x"], call["num_samples"]
    if x.ndim not in (1, 2):
        msg = f"x has {x.ndim} dims; weights are a vector or a matrix of one vector per row"
        raise ValueError(msg)
    if not call["replacement"] and count > x.shape[-1]:
        msg = f"cannot sample {count} of {x.shape[-1]} weights without replacement"
        raise ValueError(msg)
    rows = ("b",) * (x.ndim - 1)
    labels = Labels(((*rows, None),), ((*rows, None),), None)
    return Strategies(labelled_rows(labels), ((*x.shape[:-1], count),), _sample_multinomial)


def _sample_multinomial(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall:
    """Sample one number per weight (with replacement: per sample) from its global index."""
    (numbered,) = outputs if call["replacement"] else targets

    def run(platform: Any, args: dict[str, Any]) -> Any:
        x = args["x"]
        sampled = platform.from_numpy(random.uniform(numbered), device=x.device)
        return platform.local_op("pick")(platform.detach(x), sampled, args["num_samples"], args["replacement"])

    return LocalCall(run=run)


sample_call("dropout", Sample((real("ab"), 0.4), random=True))
sample_call("dropout", Sample((real("ab"), 0.4, False)))
sample_call("uniform normal bernoulli_fill", Sample((real("ab"),), writes=True, random=True))
sample_call("random_fill", Sample((real("ab"), -3, 9), writes=True, random=True))
sample_call("rand_like randn_like", Sample((real("ab"),), random=True))
sample_call("randint_like", Sample((real("ab"), -3, 9), random=True))
sample_call("bernoulli", Sample((between(0.1, 0.9, "ab").fixed,), random=True))
sample_call("dropout", Sample((booleans("ab"), 0.4, False)))
sample_call("rand_like randn_like", Sample((booleans("ab"),), {"dtype": dtype("float32")}, random=True))
sample_call("randint_like", Sample((booleans("ab"), -3, 9), {"dtype": dtype("int64")}, random=True))
sample_call("exponential cauchy log_normal", Sample((real("ab"),), writes=True, random=True))
sample_call("geometric", Sample((real("ab"), 0.4), writes=True, random=True))
sample_call("normal_around", Sample((real("ab").fixed, between(0.3, 2.0, "b").fixed), random=True))
sample_call("multinomial", Sample((between(0.3, 2.0, "a9"), 4), random=True))
sample_call("multinomial", Sample((between(0.3, 2.0, "ab"), 4, True), random=True))
