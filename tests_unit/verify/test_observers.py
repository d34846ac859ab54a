"""Outputs of modules as a forward produces them."""

import pytest

from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.observers import OutputObserver

pytestmark = pytest.mark.platforms("torch")


def test_nested_outputs_have_names():
    """Every tensor of every module is recorded once, by its path, its call and its position in the output."""
    import torch
    from torch import nn

    class Nested(nn.Module):
        def forward(self, x):
            return x + 1, {"a": [x + 2, "kept"], "n": 3}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = self.again = Nested()

        def forward(self, x):
            first, _ = self.inner(x)
            return self.again(first)[1]["a"][0]

    model = Model()
    observer = OutputObserver(get_torch_platform(), model)
    model(torch.zeros(()))
    assert {name: float(output.value) for name, output in observer.outputs.items()} == {
        "inner[0]": 1.0,
        "inner[1]['a'][0]": 2.0,
        "inner#2[0]": 2.0,
        "inner#2[1]['a'][0]": 3.0,
        "(model)": 3.0,
    }
    assert observer.outputs["inner#2[0]"].module == "inner"
    observer.clear()
    model(torch.zeros(()))
    assert "inner[0]" in observer.outputs
