"""Normalisations and attention."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import LayoutError

pytestmark = pytest.mark.platforms("torch")


NORMS = {
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (6,), w, b), (4, 5, 6), (6,), (6,)),
    "layer_norm of two dims": (lambda x: F.layer_norm(x, (5, 6)), (4, 5, 6)),
    "rms_norm": (lambda x, w: F.rms_norm(x, (6,), w, 1e-6), (4, 5, 6), (6,)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (3, 4, 5), (4,), (4,)),
    "operator": (lambda x, w, b: torch.native_layer_norm(x, (6,), w, b, 1e-5)[0], (4, 6), (6,), (6,)),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(holds, name):
    """Normalised dims are whole, the others run through, and weights get their full gradient."""
    holds(NORMS[name][0], *NORMS[name][1:])


attend = F.scaled_dot_product_attention
Q, K, V = (2, 4, 5, 3), (2, 4, 6, 3), (2, 4, 6, 7)
ATTENTION = {
    "plain": (attend, Q, K, V),
    "causal": (lambda q, k, v: attend(q, k, v, is_causal=True), Q, Q, Q),
    "causal and longer": (lambda q, k, v: attend(q, k, v, is_causal=True, scale=0.3), (2, 4, 3), (2, 6, 3), (2, 6, 5)),
    "mask": (attend, Q, K, (2, 4, 6, 3), (4, 5, 6)),
    "boolean mask": (
        lambda q, k, v, m: attend(q, k, v, attn_mask=m > 0), Q, K, (2, 4, 6, 3), np.tile([1, 0, 1], (2, 1, 1, 2)),
    ),
    "grouped": (lambda q, k, v: attend(q, k, v, enable_gqa=True), (2, 8, 5, 3), (2, 4, 6, 3), (2, 4, 6, 3)),
    "grouped, causal": (
        lambda q, k, v: attend(q, k, v, is_causal=True, enable_gqa=True), (2, 6, 5, 3), (2, 2, 5, 3), (2, 2, 5, 3),
    ),
    "grouped with mask": (
        lambda q, k, v, m: attend(q, k, v, m, enable_gqa=True), (2, 8, 5, 3), (2, 4, 6, 3), (2, 4, 6, 3), (8, 5, 6),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(holds, name):
    """Batch, heads and queries may be sharded, causal ones too; grouped heads stay with their own keys."""
    holds(ATTENTION[name][0], *ATTENTION[name][1:], drawn={(2,): 14, (3,): 7, (4,): 4, (2, 2): 3})


def test_heads_and_queries_cost_nothing(ranks):
    """Attention over sharded heads, grouped ones, and causal sharded queries communicates nothing forward."""

    def run(mesh):
        q = DTensor.from_local(torch.ones(2, 4, 3, 5), mesh, [Shard(1)])
        k = DTensor.from_local(torch.ones(2, 2, 3, 5), mesh, [Shard(1)])
        whole = DTensor.from_local(torch.ones(2, 4, 6, 5), mesh, [Replicate()])
        queries = DTensor.from_local(torch.ones(2, 4, 3, 5), mesh, [Shard(2)])
        with record_events() as log:
            heads = attend(q, k, k, enable_gqa=True)
            part = attend(queries, whole, whole, is_causal=True)
        return log.collectives(), heads.placements, part.placements

    assert ranks(2, run) == [([], (Shard(1),), (Shard(2),))] * 2


def test_dropout_in_attention_is_refused(ranks):
    """A mask drawn by every rank for itself would depend on the layout."""

    def run(mesh):
        q = DTensor.from_local(torch.ones(2, 3, 5), mesh, [Shard(0)])
        with pytest.raises(LayoutError) as caught:
            attend(q, q, q, dropout_p=0.1)
        return str(caught.value)

    assert ranks(2, run)[0] == (
        "scaled_dot_product_attention(q=f32[4@tp, 3, 5], k=f32[4@tp, 3, 5], v=f32[4@tp, 3, 5]): dropout_p > 0 would "
        "draw another mask on every rank; use dropout_p=0.0, or softmax, dropout and matmul one by one"
    )
