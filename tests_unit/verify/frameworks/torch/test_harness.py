"""What the harness asks of PyTorch: differentiation by its tape, and the bytes that a device has in use."""

from types import SimpleNamespace

import pytest
import torch

from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.frameworks import harness_of

pytestmark = pytest.mark.platforms("torch")


def harness():
    """What the harness asks of PyTorch."""
    return harness_of(get_torch_platform())


def test_vjp_pulls_back_every_cotangent():
    """A vector-Jacobian product sums over all outputs with their cotangents."""
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    seeds = [torch.tensor([1.0, -1.0]), torch.tensor([2.0, 5.0])]
    outs, grads = harness().vjp(lambda a, b: [a * b, a + b], [x, y], seeds, [True, True])
    assert [tensor.tolist() for tensor in outs] == [[3, 8], [4, 6]]
    assert [tensor.tolist() for tensor in grads] == [[5, 1], [3, 3]]


def test_unwanted_and_unused_inputs_differ():
    """An input without request has None, an unused one zeros, and the inputs are unchanged."""
    inputs = [torch.ones(2), torch.ones(2), torch.ones(2)]
    _, grads = harness().vjp(lambda a, b, _: [a * b], inputs, [torch.ones(2)], [True, False, True])
    assert grads[0].tolist() == [1, 1]
    assert grads[1] is None
    assert grads[2].tolist() == [0, 0]
    assert not any(tensor.requires_grad for tensor in inputs)


def test_seeds_may_wait_for_the_outputs():
    """Seeds may be a function of the outputs; an output without a seed, or without gradient, is left out."""
    x = torch.tensor([1.0, 2.0])
    _, grads = harness().vjp(
        lambda a: [a * a, a.argmax()], [x], lambda outs: [torch.full_like(outs[0], 2.0), None], [True]
    )
    assert grads[0].tolist() == [4, 8]
    assert harness().vjp(lambda a: [a > 0], [x], [None], [True])[1][0].tolist() == [0, 0]


def test_the_most_bytes_in_use_are_the_allocators(monkeypatch):
    """The count begins anew when it is asked for, and is read at the end."""
    used = [7]
    device = SimpleNamespace(reset_peak_memory_stats=lambda: used.append(0), max_memory_allocated=lambda: used[-1])
    monkeypatch.setattr(torch, "npu", device, raising=False)
    most = harness().peak_bytes("npu")
    used.append(96)
    assert (most(), used) == (96, [7, 0, 96])


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "Adamax"])
def test_counters_of_steps_have_values_without_data(name):
    """An optimizer steps without data: its counter is on the CPU; other numbers of the program are not."""
    with torch.device("meta"), harness().counters_on_host():
        model = torch.nn.Linear(3, 2)
        model(torch.ones(4, 3)).sum().backward()
        optimizer = harness().optimizer(model, getattr(torch.optim, name), 0.1)
        for count in (1, 2):
            optimizer(None)
            states = [optimizer.engine.state[x] for x in model.parameters()]
            assert [state["step"].tolist() for state in states] == [count, count]
        assert all(x.is_meta for state in states for x in state.values() if x.ndim)
        assert torch.tensor(1.0).is_meta
