"""Losses, composed of canonical operators; sums and means are global, even with uneven shards or ignored targets.

Inside ``vocab_parallel_loss()`` a cross entropy does not gather logits that are sharded over classes: the ranks
exchange a maximum and a sum per row (vocabulary-parallel cross entropy of Megatron-LM; Shoeybi et al., 2019,
section 3). The loss of a row is ``log s - z[target]``, where ``z`` are the logits minus their maximum and ``s`` is the
sum of their exponentials.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import Cause
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.labels import Labels, labelled_rows, nonempty_rows
from hyper_parallel.core.shard.rule import (
    LocalCall,
    OpCall,
    Operand,
    Rule,
    Strategies,
    decomposition,
    register_rule,
    rule,
)
from hyper_parallel.core.shard.rules.pointwise import elementwise
from hyper_parallel.core.shard.sample import between, indices, integers, real, sample
from hyper_parallel.errors import short_dtype

__all__ = ["is_vocab_parallel", "reduce_partials", "vocab_parallel_loss"]


_VOCAB_PARALLEL: ContextVar[bool] = ContextVar("hyper_parallel_vocab_parallel", default=False)


@contextmanager
def vocab_parallel_loss() -> Iterator[None]:
    """Compute cross entropies inside this context without gathering logits that are sharded over classes."""
    token = _VOCAB_PARALLEL.set(True)
    try:
        yield
    finally:
        _VOCAB_PARALLEL.reset(token)


is_vocab_parallel = _VOCAB_PARALLEL.get
"""Return True inside :func:`vocab_parallel_loss`."""


# -- helper operators --------------------------------------------------------------------------------------------------


@rule("take_class", "x, target, dim, start=0, classes=None")
def take_class(call: OpCall) -> Strategies:
    """``nc…, n… -> n…``: the element of each row's class; a sharded ``c`` leaves Partial(sum)."""
    x, target, dim = call["x"], call["target"], call["dim"]
    names = tuple("c" if d == dim else f"d{d}" for d in range(x.ndim))
    rest = tuple(name for name in names if name != "c")
    shape = tuple(size for d, size in enumerate(x.shape) if d != dim)
    if tuple(target.shape) != shape:
        msg = (
            f"target has shape {list(target.shape)}; expected {list(shape)} for logits {list(x.shape)} "
            f"with classes in dim {dim}"
        )
        raise ValueError(msg)
    rows = labelled_rows(Labels((names, rest), (rest,), each=(0,)))
    return Strategies(rows, (shape,), _shifted)


@rule("take_weight", "x, target, dim=0, start=0, classes=None")
def take_weight(call: OpCall) -> Strategies:
    """``c, n… -> n…``: the weight of each target's class; a sharded ``c`` leaves Partial(sum)."""
    rest = tuple(f"d{d}" for d in range(call["target"].ndim))
    rows = labelled_rows(Labels((("c",), rest), (rest,), each=(0,)))
    return Strategies(rows, (call["target"].shape,), _shifted)


def _shifted(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall | None:
    del outputs
    layout, dim = targets[0], call["dim"]
    if not layout.dim_axes[dim]:
        return None
    return LocalCall({"start": layout.local_box()[dim][0], "classes": layout.shape[dim]})  # type: ignore[index] # placed


@rule("class_max", "x, dim")
def class_max(call: OpCall) -> Strategies:
    """The maximum along ``dim``, which is kept, without a gradient; a sharded ``dim`` leaves Partial(max)."""
    x, dim = call["x"], call["dim"]
    names = tuple(f"d{d}" for d in range(x.ndim))
    output = tuple(None if d == dim else name for d, name in enumerate(names))
    shape = tuple(1 if d == dim else size for d, size in enumerate(x.shape))
    return Strategies(labelled_rows(Labels((names,), (output,), "max")), (shape,))


# -- cross entropy -----------------------------------------------------------------------------------------------------


@decomposition(
    "cross_entropy",
    "x, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean', label_smoothing=0.0",
)
def cross_entropy(
    ops: Any, x: Any, target: Any, weight: Any, size_average: Any, ignore_index: int, reduce: Any, reduction: str,
    label_smoothing: float,
) -> Any:  # fmt: skip
    """Cross entropy of logits; dim 1 holds the classes (dim 0 if there is no batch).

    Raises:
        ValueError: label_smoothing is outside [0, 1], or the reduction is unknown.
    """
    if not 0.0 <= label_smoothing <= 1.0:
        msg = f"cross_entropy: label_smoothing must be between 0 and 1, got {label_smoothing}"
        raise ValueError(msg)
    reduction = reduction_name("cross_entropy", reduction, size_average, reduce)
    dim = min(1, x.ndim - 1)
    z, log_s = _log_probabilities(ops, x, dim)
    if tuple(target.shape) == tuple(x.shape):
        rows = _expected(ops, z, log_s, target, _broadcast(ops, weight, x, dim), dim, label_smoothing)
        return reduced(ops, rows, reduction, math.prod(x.shape) // x.shape[dim])
    hard = _ClassIndexLoss(ops, target, ignore_index, weight)
    loss = hard.reduce(hard.rows(z, log_s, dim), reduction)
    if not label_smoothing:
        return loss
    smooth = hard.reduce(_smooth(ops, z, log_s, _broadcast(ops, weight, x, dim), weight, dim), reduction, weigh=False)
    share = label_smoothing / x.shape[dim]
    return ops.add(ops.mul(loss, 1.0 - label_smoothing), ops.mul(smooth, share))


@decomposition(
    "nll_loss", "x, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean'"
)
def nll_loss(
    ops: Any, x: Any, target: Any, weight: Any, size_average: Any, ignore_index: int, reduce: Any, reduction: str
) -> Any:
    """Negative log likelihood of log probabilities; dim 1 holds the classes (dim 0 if there is no batch)."""
    reduction = reduction_name("nll_loss", reduction, size_average, reduce)
    hard = _ClassIndexLoss(ops, target, ignore_index, weight)
    return hard.reduce(hard.rows(reduce_partials(x, "nll_loss"), None, min(1, x.ndim - 1)), reduction)


def _log_probabilities(ops: Any, x: Any, dim: int) -> tuple[Any, Any]:
    """Return ``z`` and ``log s``, or log probabilities and None."""
    x = reduce_partials(x, "cross_entropy")
    if not (_VOCAB_PARALLEL.get() and isinstance(x, DTensor) and x.layout.dim_axes[dim]):
        return ops.log_softmax(x, dim), None
    z = ops.sub(x, reduce_partials(ops.class_max(x, dim), "cross_entropy", "maximum"))
    return z, ops.log(reduce_partials(ops.sum(ops.exp(z), dim), "cross_entropy", "sum of exponentials"))


def reduce_partials(x: Any, op: str, what: str = "x") -> Any:
    """Reduce the partial values of ``x`` here, once, instead of in each of several consumers."""
    if not isinstance(x, DTensor) or not x.layout.partials:
        return x
    layout = x.layout
    done = Layout.of(layout.mesh, layout.dim_axes, (), layout.shape)
    return x.redistribute_to(done, Cause(op, what, implicit=what == "x"))


class _ClassIndexLoss:
    """Losses of class indices: the rows that count, and their weights."""

    def __init__(self, ops: Any, target: Any, ignore_index: int, weight: Any) -> None:
        self.ops = ops
        self.ignored = ops.eq(target, ignore_index)
        self.target = ops.masked_fill(target, self.ignored, 0)
        self.weights = None
        if weight is not None:
            self.weights = ops.masked_fill(ops.take_weight(weight, self.target), self.ignored, 0)

    def rows(self, z: Any, log_s: Any, dim: int) -> Any:
        """Loss per row, unweighted."""
        picked = self.ops.take_class(z, self.target, dim)
        return self.ops.neg(picked) if log_s is None else self.ops.sub(log_s, picked)

    def reduce(self, rows: Any, reduction: str, *, weigh: bool = True) -> Any:
        """Weigh the rows, mask the ignored ones and reduce them; a mean divides by the sum of the remaining weights."""
        ops = self.ops
        rows = ops.masked_fill(rows, self.ignored, 0)
        if weigh and self.weights is not None:
            rows = ops.mul(rows, self.weights)
        if reduction == "none":
            return rows
        total = _sum_in_float32(ops, rows)
        if reduction == "mean":
            counted = ops.logical_not(self.ignored) if self.weights is None else self.weights
            total = ops.div(total, _sum_in_float32(ops, counted))
        return _cast_back(ops, total, rows)


def _smooth(ops: Any, z: Any, log_s: Any, along: Any, weight: Any, dim: int) -> Any:
    """The negative (weighted) sum of log probabilities over all classes, per row."""
    total = ops.sum(z if along is None else ops.mul(z, along), dim)
    if log_s is None:
        return ops.neg(total)
    scaled = ops.mul(
        log_s, z.shape[dim] if weight is None else reduce_partials(ops.sum(weight), "cross_entropy", "weights")
    )
    return ops.sub(scaled, total)


def _expected(ops: Any, z: Any, log_s: Any, target: Any, along: Any, dim: int, smoothing: float) -> Any:
    """The expected loss under class probabilities, per row."""
    share = target if along is None else ops.mul(target, along)
    if smoothing:
        even = smoothing / z.shape[dim]
        mixed = ops.add(ops.mul(target, 1.0 - smoothing), even)
        share = mixed if along is None else ops.mul(mixed, along)
    inner = ops.sum(ops.mul(z, share), dim)
    return ops.neg(inner) if log_s is None else ops.sub(ops.mul(log_s, ops.sum(share, dim)), inner)


def _broadcast(ops: Any, weight: Any, x: Any, dim: int) -> Any:
    return None if weight is None else ops.view(weight, (x.shape[dim], *(1 for _ in range(x.ndim - dim - 1))))


# -- reductions --------------------------------------------------------------------------------------------------------


def reduction_name(op: str, reduction: str, size_average: bool | None = None, reduce: bool | None = None) -> str:
    """Return ``none``, ``mean`` or ``sum``, also for PyTorch's deprecated ``size_average`` and ``reduce``."""
    if size_average is not None or reduce is not None:
        return "none" if reduce is False else "sum" if size_average is False else "mean"
    if reduction not in {"none", "mean", "sum", "batchmean"} or (reduction == "batchmean" and op != "kl_div"):
        msg = f"{op}: reduction must be 'none', 'mean' or 'sum', got {reduction!r}"
        raise ValueError(msg)
    return reduction


def _is_half(x: Any) -> bool:
    return short_dtype(x.dtype) in {"f16", "bf16"}


def _sum_in_float32(ops: Any, rows: Any) -> Any:
    """Return a sum that does not overflow half precision."""
    return ops.sum(rows, dtype=ops.platform.str_to_dtype("float32")) if _is_half(rows) else ops.sum(rows)


def _cast_back(ops: Any, total: Any, rows: Any) -> Any:
    return ops.cast(total, dtype=rows.dtype) if _is_half(rows) else total


def reduced(ops: Any, rows: Any, reduction: str, count: int | None = None) -> Any:
    """Losses per row, their sum, or their mean (over ``count`` rows if given)."""
    if reduction == "none":
        return rows
    if reduction == "mean" and count is None:
        return ops.mean(rows)
    total = _sum_in_float32(ops, rows)
    return _cast_back(ops, total if reduction == "sum" else ops.div(total, count), rows)


# -- element by element ------------------------------------------------------------------------------------------------


def register_elementwise_loss(op: str, extra: str) -> None:
    """Declare ``op`` as ``{op}_elements`` followed by a reduction."""
    names = [part.split("=")[0].strip() for part in extra.split(",") if part.strip()]
    tail = f", {extra}" if extra else ""

    @decomposition(op, f"x, target{tail}, size_average=None, reduce=None, reduction='mean'")
    def run(ops: Any, x: Any, target: Any, size_average: Any, reduce: Any, reduction: str, **rest: Any) -> Any:
        """Reduce the losses of the elements."""
        reduction = reduction_name(op, reduction, size_average, reduce)
        rows = getattr(ops, f"{op}_elements")(x, target, *(rest[name] for name in names))
        if reduction == "batchmean":
            # A 0-d input counts as a batch of one.
            return reduced(ops, rows, "mean", x.shape[0] if x.shape else 1)
        return reduced(ops, rows, reduction)


for _op, _extra in {
    "mse_loss": "",
    "l1_loss": "",
    "smooth_l1_loss": "beta=1.0",
    "huber_loss": "delta=1.0",
    "soft_margin_loss": "",
    "binary_cross_entropy": "weight=None",
    "binary_cross_entropy_with_logits": "weight=None, pos_weight=None",
    "kl_div": "log_target=False",
}.items():
    register_elementwise_loss(_op, _extra)


@decomposition("weighted_loss", "rows, weight, reduction='mean'")
def weighted_loss(ops: Any, rows: Any, weight: Any, reduction: str) -> Any:
    """Weighted losses of elements; a mean divides by the sum of the weights."""
    rows = ops.mul(rows, weight)
    if reduction == "none":
        return rows
    total = ops.sum(rows)
    return total if reduction == "sum" else ops.div(total, ops.sum(weight))


def _of_rows(call: OpCall, target: Sequence[int]) -> Strategies:
    """Strategies of ``n[c], n…, [c] -> n``: rows may be sharded, but an input of one row must be replicated."""
    x = call["x"]
    if x.ndim not in {1, 2} or call["target"].shape not in {tuple(target), (1,) if not target else tuple(target)}:
        msg = f"x {list(x.shape)} needs a target {list(target)}, got {list(call['target'].shape)}"
        raise ValueError(msg)
    batch = ("n",) * (x.ndim - 1)
    rest = ((*batch, *(None,) * (call["target"].ndim - len(batch))), (None,))
    labels = Labels(((*batch, None), *rest)[: len(call.operands)], (batch,), None)
    return Strategies(nonempty_rows(labels), (x.shape[:-1],))


@rule("multi_margin_loss_elements", "x, target, p=1, margin=1.0, weight=None")
def multi_margin_loss(call: OpCall) -> Strategies:
    """The multi-class margin loss of each row; rows may be sharded, classes may not."""
    return _of_rows(call, call["x"].shape[:-1])


@rule("multilabel_margin_loss_elements", "x, target")
def multilabel_margin_loss(call: OpCall) -> Strategies:
    """The multi-label margin loss of each row, whose targets end at the first -1; rows may be sharded."""
    return _of_rows(call, call["x"].shape)


register_elementwise_loss("multi_margin_loss", "p=1, margin=1.0, weight=None")
register_elementwise_loss("multilabel_margin_loss", "")


# -- element by element ------------------------------------------------------------------------------------------------

for _name, _signature in {
    "mse_loss": "x, target",
    "l1_loss": "x, target",
    "smooth_l1_loss": "x, target, beta=1.0",
    "huber_loss": "x, target, delta=1.0",
    "soft_margin_loss": "x, target",
    "binary_cross_entropy": "x, target, weight=None",
    "binary_cross_entropy_with_logits": "x, target, weight=None, pos_weight=None",
    "kl_div": "x, target, log_target=False",
}.items():
    register_rule(Rule(f"{_name}_elements", _signature, elementwise))


# -- sequences ---------------------------------------------------------------------------------------------------------


@rule(
    "ctc_loss_elements",
    "log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False, per_target=False",
)
def ctc_loss_elements(call: OpCall) -> Strategies:
    """``[t]n[c], n[s], n, n -> n``: sequences may be sharded, unless all targets are concatenated in one vector."""
    x, targets = call["log_probs"], call["targets"]
    batch = ("n",) if x.ndim == 3 and targets.ndim == 2 else (None,) * (x.ndim - 2)
    rows = call.operands[2:]
    for operand in rows:
        if operand.shape not in {(), x.shape[1:-1]}:
            msg = f"{operand.name} has shape {list(operand.shape)}; log_probs hold sequences {list(x.shape[1:-1])}"
            raise ValueError(msg)
    for name in ("input_lengths", "target_lengths"):
        lengths = call[name]
        if not isinstance(lengths, Operand) and len(lengths) != math.prod(x.shape[1:-1]):
            msg = f"{name} are {len(lengths)} numbers for {math.prod(x.shape[1:-1])} sequences"
            raise ValueError(msg)
    inputs = (
        (None, *batch, None),
        (*batch, None) if targets.ndim > 1 else (None,) * targets.ndim,
        *(batch if operand.ndim else () for operand in rows),
    )
    return Strategies(nonempty_rows(Labels(inputs, (batch,), None)), (x.shape[1:-1],), _local_lengths)


def _local_lengths(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall | None:
    """Pass this rank's lengths of sequences to the local call if they are Python numbers."""
    del targets
    if not outputs[0].shape:
        return None
    ((start, stop),) = outputs[0].local_box()
    named = {name: call[name] for name in ("input_lengths", "target_lengths")}
    return LocalCall({name: list(value)[start:stop] for name, value in named.items() if not isinstance(value, Operand)})


@decomposition(
    "ctc_loss", "log_probs, targets, input_lengths, target_lengths, blank=0, reduction='mean', zero_infinity=False"
)
def ctc_loss(
    ops: Any, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, blank: int, reduction: str,
    zero_infinity: bool,
) -> Any:  # fmt: skip
    """Connectionist temporal classification (Graves et al., 2006); a mean first divides by the target lengths."""
    reduction = reduction_name("ctc_loss", reduction)
    rows = ops.ctc_loss_elements(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity, reduction == "mean"
    )
    return reduced(ops, rows, reduction)


# -- samples -----------------------------------------------------------------------------------------------------------

sample("take_class", real("ncd"), indices("c", "nd"), 1)
sample("take_class", real("nc"), indices("c", "n"), 1)
sample("take_weight", real("c"), indices("c", "nd"))
sample("class_max", real("nc").fixed, 1)
sample("class_max", real("ncd").fixed, 1)
sample("cross_entropy nll_loss", real("nc"), indices("c", "n"))
sample("cross_entropy nll_loss", real("ncd"), indices("c", "nd"), between(0.3, 2.0, "c").fixed, ignore_index=0)
sample("cross_entropy nll_loss", real("nc"), indices("c", "n"), reduction="none")
sample("cross_entropy", real("nc"), indices("c", "n"), label_smoothing=0.25, reduction="sum")
sample("cross_entropy", real("nc"), between(0.0, 1.0, "nc"), label_smoothing=0.25)
_PLAIN = "mse_loss l1_loss smooth_l1_loss huber_loss"
sample(_PLAIN, real("ab"), real("ab"))
sample(_PLAIN, real("ab"), real("ab"), reduction="sum")
sample(f"{_PLAIN}", real("ab"), real("ab"), reduction="none")
sample("soft_margin_loss", real("ab"), real("ab").fixed)
sample("binary_cross_entropy", between(0.1, 0.9, "ab"), between(0.1, 0.9, "ab").fixed)
sample("binary_cross_entropy_with_logits", real("ab"), between(0.1, 0.9, "ab").fixed)
sample("kl_div", real("ab"), between(0.1, 0.9, "ab"))
sample("kl_div", real("ab"), between(0.1, 0.9, "ab"), reduction="batchmean")
sample("weighted_loss", real("ab"), between(0.3, 2.0, "ab"))
sample("multi_margin_loss", real("nc"), indices("c", "n"))
sample("multilabel_margin_loss", real("nc"), indices("c", "nc"))
sample("multi_margin_loss_elements", real("nc"), indices("c", "n"))
sample("multi_margin_loss_elements", real("nc"), indices("c", "n"), 2, 0.5, between(0.3, 2.0, "c").fixed)
sample("multilabel_margin_loss_elements", real("nc"), indices("c", "nc"))
sample("ctc_loss ctc_loss_elements", real(9, "n", 5), integers(1, 5, "n", 3), integers(7, 9, "n"), integers(1, 3, "n"))
sample("mse_loss_elements l1_loss_elements", real("ab"), real("ab"))
sample("mse_loss_elements l1_loss_elements", real("a1"), real("b"))
sample("smooth_l1_loss_elements", real("ab"), real("ab"), 0.5)
sample("huber_loss_elements", real("ab"), real("ab"), 0.75)
sample("soft_margin_loss_elements", real("ab"), real("ab").fixed)
sample("binary_cross_entropy_elements", between(0.1, 0.9, "ab"), between(0.1, 0.9, "ab").fixed)
sample(
    "binary_cross_entropy_elements",
    between(0.1, 0.9, "ab"),
    between(0.1, 0.9, "ab").fixed,
    between(0.3, 2.0, "b").fixed,
)
sample(
    "binary_cross_entropy_with_logits_elements",
    real("ab"),
    between(0.1, 0.9, "ab").fixed,
    between(0.3, 2.0, "b").fixed,
    between(0.3, 2.0, "b").fixed,
)
sample("kl_div_elements", real("ab"), between(0.1, 0.9, "ab"))
sample("kl_div_elements", real("ab"), real("ab"), log_target=True)
