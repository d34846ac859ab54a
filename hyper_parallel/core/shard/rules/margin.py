"""Losses of whole rows: margins between classes, and alignments of sequences. Samples may be sharded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard.call import LocalCall, Operand
from hyper_parallel.core.shard.rule import Strategies, decomposition, rule
from hyper_parallel.core.shard.rules.loss import plain_loss, reduced, reduction_name
from hyper_parallel.core.shard.sample import between, integers, real, sample, whole
from hyper_parallel.core.shard.signature import Labels, held_rows

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.shard.call import OpCall


def _of_rows(call: OpCall, target: Sequence[int]) -> Strategies:
    """``n[c], n…, [c] -> n``; without samples everything is whole."""
    x = call["x"]
    if x.ndim not in {1, 2} or call["target"].shape not in {tuple(target), (1,) if not target else tuple(target)}:
        msg = f"x {list(x.shape)} needs a target {list(target)}, got {list(call['target'].shape)}"
        raise ValueError(msg)
    batch = ("n",) * (x.ndim - 1)
    rest = ((*batch, *(None,) * (call["target"].ndim - len(batch))), (None,))
    labels = Labels(((*batch, None), *rest)[: len(call.operands)], (batch,), None)
    return Strategies(held_rows(labels), (x.shape[:-1],))


@rule("multi_margin_loss_elements", "x, target, p=1, margin=1.0, weight=None")
def multi_margin_loss(call: OpCall) -> Strategies:
    """How far the classes of a row are from its target's."""
    return _of_rows(call, call["x"].shape[:-1])


@rule("multilabel_margin_loss_elements", "x, target")
def multilabel_margin_loss(call: OpCall) -> Strategies:
    """How far the classes of a row are from several targets, as many as come before the first -1."""
    return _of_rows(call, call["x"].shape)


plain_loss("multi_margin_loss", "p=1, margin=1.0, weight=None")
plain_loss("multilabel_margin_loss", "")


# -- sequences ---------------------------------------------------------------------------------------------------------


@rule(
    "ctc_loss_elements",
    "log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False, per_target=False",
)
def ctc_loss_elements(call: OpCall) -> Strategies:
    """``[t]n[c], n[s], n, n -> n``; targets that follow each other in one row keep everything whole."""
    x, targets = call["log_probs"], call["targets"]
    batch = ("n",) if x.ndim == 3 and targets.ndim == 2 else (None,) * (x.ndim - 2)
    rows = call.operands[2:]
    for one in rows:
        if one.shape not in {(), x.shape[1:-1]}:
            msg = f"{one.name} has shape {list(one.shape)}; log_probs hold sequences {list(x.shape[1:-1])}"
            raise ValueError(msg)
    for name in ("input_lengths", "target_lengths"):
        given = call[name]
        if not isinstance(given, Operand) and len(given) != math.prod(x.shape[1:-1]):
            msg = f"{name} are {len(given)} numbers for {math.prod(x.shape[1:-1])} sequences"
            raise ValueError(msg)
    inputs = (
        (None, *batch, None),
        (*batch, None) if targets.ndim > 1 else (None,) * targets.ndim,
        *(batch if one.ndim else () for one in rows),
    )
    return Strategies(held_rows(Labels(inputs, (batch,), None)), (x.shape[1:-1],), _own_lengths)


def _own_lengths(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall | None:
    """Lengths given as numbers are cut like the sequences."""
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
    """Connectionist temporal classification; a mean weighs each sequence by its target's length."""
    reduction = reduction_name("ctc_loss", reduction)
    rows = ops.ctc_loss_elements(
        log_probs, targets, input_lengths, target_lengths, blank, zero_infinity, reduction == "mean"
    )
    return reduced(ops, rows, reduction)


sample("multi_margin_loss_elements", real("nc"), whole("c", "n"))
sample("multi_margin_loss_elements", real("nc"), whole("c", "n"), 2, 0.5, between(0.3, 2.0, "c").fixed)
sample("multilabel_margin_loss_elements", real("nc"), whole("c", "nc"))
sample("ctc_loss ctc_loss_elements", real(9, "n", 5), integers(1, 5, "n", 3), integers(7, 9, "n"), integers(1, 3, "n"))
