"""Recurrent layers: samples may be sharded, time is whole."""

import copy

import pytest
import torch
from torch.func import functional_call

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import LayoutError, MixedTensorError, UnsupportedOperatorError

pytestmark = pytest.mark.platforms("torch")


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
            "dropout between layers would sample another mask on every rank; "
            "use dropout=0.0, or one module per layer with F.dropout between them"
        ),
        "lstm: packed sequences of DTensors are not supported; pad them, and mask what the padding gives",
    )


MISFITS = {
    "recurrence": (
        lambda x, h, w, v: torch.rnn_tanh(x, h, [w, v], False, 1, 0.0, True, False, False),
        (2, 4, 3), (1, 3, 2), (2, 3), (2, 2),
        ("rnn_tanh(x=f64[2@tp, 4, 3], hx=f64[1@tp, 3, 2], params[0]=f64[2@tp, 3], params[1]=f64[2@tp, 2]): x [2, 4, 3] "
        "and hx [[1, 3, 2]] need the same samples"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])
