"""Attention on PyTorch."""

import copy
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.dtensor.random import manual_seed
from hyper_parallel.errors import LayoutError, MixedTensorError, UnsupportedOperatorError

pytestmark = pytest.mark.platforms("torch")


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


@pytest.mark.untraced
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(holds, name):
    """Batch, heads and queries may be sharded, causal ones too; grouped heads stay with their own keys."""
    holds(ATTENTION[name][0], *ATTENTION[name][1:], limits={(2,): 14, (3,): 7, (4,): 4, (2, 2): 3})


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


NEVER = 1e-15  # a probability of dropping that no draw meets
LOWER = np.tril(np.random.default_rng(2).random((5, 6)) < 0.8, -1)  # the first query sees nothing
UNDROPPED = {
    "plain": ({}, Q, K, V),
    "causal": ({"is_causal": True, "scale": 0.3}, (2, 4, 3), (2, 6, 3), (2, 6, 5)),
    "masked": ({}, Q, K, V, LOWER),
    "biased": ({}, Q, K, V, (4, 5, 6)),
    "grouped": ({"enable_gqa": True}, Q, (2, 2, 6, 3), (2, 2, 6, 7)),
}


@pytest.mark.parametrize("name", UNDROPPED)
def test_attention_with_dropout_is_attention(holds, name):
    """The composed attention without dropout has the values and gradients of the plain call, masks included."""
    options, *specs = UNDROPPED[name]

    def fn(*tensors):
        return attend(*tensors, dropout_p=NEVER if hasattr(tensors[0], "placements") else 0.0, **options)

    holds(fn, *specs, limits={(2,): 10, (3,): 5, (2, 2): 3})


DROPPED = {
    "plain": {},
    "causal": {"is_causal": True},
    "masked": {"attn_mask": "lower"},
    "biased": {"attn_mask": "scores", "scale": 0.3},
    "grouped": {"enable_gqa": True},
}


@pytest.mark.untraced
@pytest.mark.parametrize("name", DROPPED)
def test_dropout_in_attention(ranks, name):
    """The same weights are dropped for every layout, with every argument, and gradients are those of one rank."""

    def attend_and_differentiate(mesh, placement):
        manual_seed(5)
        options = dict(DROPPED[name])
        heads = 2 if "enable_gqa" in options else 4
        q, k, v = (
            distribute_tensor(torch.linspace(-1, 1, math.prod(shape)).double().sin().view(shape), mesh, [placement])
            for shape in ((2, 4, 5, 3), (2, heads, 5, 3), (2, heads, 5, 6))
        )
        tensors = [each.requires_grad_() for each in (q, k, v)]
        if "attn_mask" in options:
            scores = (q @ k.mT).detach()
            options["attn_mask"] = (scores > 0.1).tril(-1) if options["attn_mask"] == "lower" else scores
        out = attend(*tensors, dropout_p=0.4, **options)
        out.square().sum().backward()
        return [each.full_tensor().detach() for each in (out, *(tensor.grad for tensor in tensors))]

    def run(mesh):
        return [
            attend_and_differentiate(mesh, placement)
            for placement in (Replicate(), Shard(0), Shard(1), Shard(2), Partial())
        ]

    ((alone, *_),) = ranks(1, run)
    assert all(torch.isfinite(value).all() for value in alone)
    for world in (2, 3):
        for result in ranks(world, run)[0]:
            for value, wanted in zip(result, alone, strict=True):
                torch.testing.assert_close(value, wanted)


def test_attention_drops_its_share():
    """Kept weights are divided by the probability of keeping, so that the mean is unchanged."""
    from hyper_parallel.core.dtensor.mesh import init_device_mesh
    from hyper_parallel.verify.simulate import simulate

    def run():
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=["tp"])
        q = distribute_tensor(torch.zeros(1, 50, 4), mesh, [Shard(0)])
        v = distribute_tensor(torch.eye(50)[None], mesh, [Shard(0)])
        return attend(q, q, v, dropout_p=0.25).full_tensor()

    (weights,) = simulate(run, 1, "torch")
    torch.testing.assert_close(weights.unique(), torch.tensor([0.0, 1 / 50 / 0.75]))
    assert abs(float((weights == 0).double().mean()) - 0.25) < 0.03


def test_a_mask_and_causality_exclude_each_other(ranks):
    """A mask together with is_causal is refused, with dropout and without."""

    def run(mesh):
        q = DTensor.from_local(torch.ones(2, 3, 5), mesh, [Shard(0)])
        with pytest.raises(ValueError, match="attn_mask and is_causal exclude each other"):
            attend(q, q, q, attn_mask=q @ q.mT, is_causal=True, dropout_p=0.1)

    ranks(2, run)


SDPA = F.scaled_dot_product_attention
MISFITS = {
    "attention of other features": (
        SDPA, (4, 3), (4, 2), (4, 2),
        ("scaled_dot_product_attention(q=f64[4@tp, 3], k=f64[4@tp, 2], v=f64[4@tp, 2]): q, k and v must have "
        "shapes (..., L, E), (..., S, E) and (..., S, F)"),
    ),
    "attention under two masks": (
        lambda x, mask: SDPA(x, x, x, mask, is_causal=True), (4, 3), (4, 4),
        ("scaled_dot_product_attention(q=f64[4@tp, 3], k=f64[4@tp, 3], v=f64[4@tp, 3], attn_mask=f64[4@tp, 4]): "
        "attn_mask and is_causal exclude each other"),
    ),
    "attention under another mask": (
        lambda x, mask: SDPA(x, x, x, mask), (4, 3), (5, 4),
        ("scaled_dot_product_attention(q=f64[4@tp, 3], k=f64[4@tp, 3], v=f64[4@tp, 3], attn_mask=f64[5@tp, 4]): "
        "attn_mask [5, 4] does not broadcast to [4, 4]"),
    ),
    "attention of odd groups": (
        lambda q, x: SDPA(q, x, x, enable_gqa=True), (2, 3, 4, 3), (2, 2, 4, 3),
        ("scaled_dot_product_attention(q=f64[2@tp, 3, 4, 3], k=f64[2@tp, 2, 4, 3], v=f64[2@tp, 2, 4, 3]): enable_gqa: "
        "the heads of q must be a multiple of those of k and v"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])


@pytest.mark.parametrize("world", [2, 3])
def test_a_result_of_wide_values_may_be_written(ranks, world):
    """What one device may write before backward, ranks may: no shard of the values meets a kernel that keeps it."""
    queries, keys, values = (torch.randn(1, 2, 3, width).double() for width in (2, 2, 2 * world))

    def grad(q, k, v):
        attend(q, k, v).relu_().sum().backward()
        return v.grad

    def on_rank(mesh):
        q, k = (distribute_tensor(tensor, mesh, [Replicate()]) for tensor in (queries, keys))
        return grad(q, k, distribute_tensor(values, mesh, [Shard(3)]).requires_grad_()).full_tensor()

    expected = grad(queries, keys, values.clone().requires_grad_())
    for result in ranks(world, on_rank):
        torch.testing.assert_close(result, expected)


RECURRENT = {
    "LSTM": (lambda: torch.nn.LSTM(4, 3), (5, 3, 4)),
    "LSTM both ways": (lambda: torch.nn.LSTM(4, 3, num_layers=2, bidirectional=True, proj_size=2), (5, 3, 4)),
    "GRU": (lambda: torch.nn.GRU(4, 3, batch_first=True), (3, 5, 4)),
    "RNN": (lambda: torch.nn.RNN(4, 3, nonlinearity="relu"), (5, 3, 4)),
    "LSTMCell": (lambda: torch.nn.LSTMCell(4, 3), (5, 4)),
    "GRUCell": (lambda: torch.nn.GRUCell(4, 3), (5, 4)),
    "RNNCell": (lambda: torch.nn.RNNCell(4, 3), (5, 4)),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_modules(name):
    """Recurrent modules take DTensors, start from zeros by themselves, and give every weight its gradient."""
    from hyper_parallel.verify.checker.function import check_function

    torch.manual_seed(0)
    make, shape = RECURRENT[name]
    module = make().double()
    names = [parameter for parameter, _ in module.named_parameters()]

    def run(x, *parameters):
        arguments = dict(zip(names, parameters, strict=True))
        return torch.utils._pytree.tree_leaves(functional_call(copy.deepcopy(module), arguments, (x,)))

    arrays = [torch.randn(*shape).double().numpy(), *(parameter.detach().numpy() for parameter in module.parameters())]
    for placements in ([Shard(0)], [Shard(1)], [Replicate()], [Partial()]):
        weights = [[(Shard(0) if index == 1 else Replicate(),)] for index in range(len(names))]
        for world in (2, 4):
            report = check_function(run, arrays, (world,), platform="torch", placements=[[tuple(placements)], *weights])
            assert report.ok, report.wrong[:3]
            assert not report.rejected, report.rejected[:1]


def test_what_recurrent_layers_refuse(ranks):
    """Dropout between layers, packed sequences, and plain states other than zeros are refused."""

    def run(mesh):
        def whole(*shape):
            return distribute_tensor(torch.randn(*shape), mesh, [Replicate()])

        weights = [whole(12, 4), whole(12, 3), whole(12), whole(12)]
        deep = [*weights, whole(12, 3), *weights[1:]]
        x, state = whole(5, 2, 4), whole(2, 2, 3)
        with pytest.raises(LayoutError) as dropout:
            torch.lstm(x, [state, state], deep, True, 2, 0.5, True, False, False)
        with pytest.raises(UnsupportedOperatorError) as packed:
            torch.lstm(x, torch.tensor([2]), [state, state], weights, True, 1, 0.0, True, False)
        with pytest.raises(MixedTensorError, match=r"argument hx\[0\] is a plain tensor \[1, 2, 3\]"):
            torch.lstm(x, [torch.ones(1, 2, 3)] * 2, weights, True, 1, 0.0, True, False, False)
        assert isinstance(
            torch.lstm(x, [torch.zeros(1, 2, 3)] * 2, weights, True, 1, 0.0, True, False, False)[0], DTensor
        )
        return str(dropout.value).rsplit("): ", maxsplit=1)[1], str(packed.value)

    assert ranks(2, run)[0] == (
        (
            "dropout between layers would sample a different mask on every rank; use dropout=0.0, or one module per "
            "layer with F.dropout between them"
        ),
        "lstm: packed sequences of DTensors are not supported; pad them, and mask the results of the padding",
    )


RECURRENT_MISFITS = {
    "recurrence": (
        lambda x, h, w, v: torch.rnn_tanh(x, h, [w, v], False, 1, 0.0, True, False, False),
        (2, 4, 3), (1, 3, 2), (2, 3), (2, 2),
        ("rnn_tanh(x=f64[2@tp, 4, 3], hx=f64[1@tp, 3, 2], params[0]=f64[2@tp, 3], params[1]=f64[2@tp, 2]): x [2, 4, 3] "
        "and hx [[1, 3, 2]] must have the same number of samples"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECURRENT_MISFITS)
def test_a_recurrence_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*RECURRENT_MISFITS[name])
