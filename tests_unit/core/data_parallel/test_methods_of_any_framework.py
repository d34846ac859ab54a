"""What modules of ``fully_shard`` and ``compile`` have before a framework is asked."""

from __future__ import annotations

import pytest

import hyper_parallel
from hyper_parallel.core.data_parallel.methods import FSDPModule, class_with
from hyper_parallel.errors import PlanError, UnsupportedOnBackend


class Plain:
    """A module's class."""


def test_a_class_gets_the_methods_once(platform_name):
    """The class with the methods has the name and module of the plain one, is one class, and is not extended again."""
    sharded = class_with(FSDPModule, Plain)
    assert issubclass(sharded, (Plain, FSDPModule))
    assert (sharded.__name__, sharded.__module__) == ("Plain", __name__)
    assert class_with(FSDPModule, Plain) is sharded
    assert class_with(FSDPModule, sharded) is sharded


@pytest.mark.parametrize("factor", [0, -2.0])
def test_gradients_are_divided_by_a_positive_factor(platform_name, factor):
    """Zero and negative factors are refused before anything changes."""
    sharded = Plain()
    sharded.__class__ = class_with(FSDPModule, Plain)
    with pytest.raises(PlanError) as raised:
        sharded.set_gradient_divide_factor(factor)
    assert str(raised.value) == f"set_gradient_divide_factor: {factor!r} must be positive"


@pytest.mark.platforms("mindspore")
def test_compile_is_refused_on_mindspore():
    """MindSpore's compiler does not record calls: ``compile`` says so, and leaves the module as it is."""
    from mindspore import nn

    module = nn.Dense(3, 5)
    with pytest.raises(UnsupportedOnBackend, match="compile: MindSpore's compiler parses the source of functions"):
        hyper_parallel.compile(module)
    assert "_hyper_parallel_compiled" not in vars(module)
