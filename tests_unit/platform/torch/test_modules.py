from __future__ import annotations

import pytest

from hyper_parallel.platform.select import get_torch_platform

pytestmark = pytest.mark.platforms("torch")


def tied():
    """A module with a shared child, a shared parameter and buffers of both kinds."""
    from torch import nn

    module = nn.Module()
    module.first = nn.Linear(3, 3)
    module.second = module.first
    module.embedding = nn.Embedding(3, 3)
    module.embedding.weight = module.first.weight
    module.register_buffer("kept", nn.Parameter().detach())
    module.register_buffer("dropped", nn.Parameter().detach(), persistent=False)
    module.register_parameter("empty", None)
    return module


def test_shared_things_appear_under_every_path():
    """A parameter or module reachable under two paths is listed under both."""
    platform, module = get_torch_platform(), tied()
    assert [name for name, _ in platform.get_cells_and_names(module)] == ["", "first", "second", "embedding"]
    names = platform.parameters_dict(module)
    assert set(names) == {"first.weight", "first.bias", "second.weight", "second.bias", "embedding.weight"}
    assert names["first.weight"] is names["embedding.weight"]


def test_own_things_only():
    """The direct dictionaries have only parameters, buffers and children that the module itself owns."""
    platform, module = get_torch_platform(), tied()
    assert platform.direct_parameters(module) == {}
    assert set(platform.direct_buffers(module)) == {"kept", "dropped"}
    assert set(platform.direct_parameters(module.first)) == {"weight", "bias"}


def test_replacing_keeps_the_kind():
    """set_parameter keeps a parameter a parameter and a buffer as persistent as it was."""
    import torch

    platform, module = get_torch_platform(), tied()
    new = platform.new_parameter(torch.ones(3, 3), requires_grad=False, name="ignored")
    platform.set_parameter(module.first, "weight", new)
    platform.set_parameter(module, "kept", torch.ones(1))
    platform.set_parameter(module, "dropped", torch.ones(2))
    assert module.first.weight is new
    assert not new.requires_grad
    assert isinstance(new, torch.nn.Parameter)
    assert set(module.state_dict()) >= {"kept"}
    assert "dropped" not in module.state_dict()
    assert module.dropped.shape == (2,)


def test_layers_are_recognised():
    """Only linear and embedding layers, subclasses included, are recognised as such."""
    from torch import nn

    class Mine(nn.Linear):
        pass

    platform = get_torch_platform()
    modules = (Mine(2, 2), nn.Embedding(2, 2), nn.Conv1d(1, 1, 1))
    assert [platform.is_linear_module(module) for module in modules] == [True, False, False]
    assert [platform.is_embedding_module(module) for module in modules] == [False, True, False]


def test_hooks_replace_what_passes():
    """Hooks before and after forward may replace arguments, keywords and outputs, and can be removed."""
    import torch
    from torch import nn

    class Scale(nn.Module):
        def forward(self, x, factor=1.0):
            return x * factor

    platform, module = get_torch_platform(), Scale()
    handles = [
        platform.register_forward_pre_hook(
            module, lambda _, args, kwargs: ((args[0] + 1,), {**kwargs, "factor": 3.0}), with_kwargs=True
        ),
        platform.register_forward_hook(module, lambda _, __, out: out * 10),
    ]
    assert module(torch.tensor(1.0)) == 60
    for handle in handles:
        handle.remove()
    assert module(torch.tensor(1.0)) == 1
