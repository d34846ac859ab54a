"""Parameters that are replaced: whole ones are freed at once, and containers of modules get the new ones."""

from __future__ import annotations

import gc
from weakref import ref

from hyper_parallel.core.dtensor.parameter_paths import note_replacement, replacing_parameters, untying_problems
from hyper_parallel.platform.select import platform_named


def three_layers(platform_name):
    """A module with a list of three linear layers of four to four."""
    if platform_name == "torch":
        from torch import nn

        return nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    from mindspore import nn

    return nn.SequentialCell(*[nn.Dense(4, 4) for _ in range(3)])


def test_a_replaced_parameter_is_freed_before_the_next(platform_name):
    """Inside already, what was replaced takes no memory, unless a module keeps it in a list, which gets the new one."""
    platform = platform_named(platform_name)
    model = three_layers(platform_name)
    first, second, third = [
        layer for _, layer in platform.get_cells_and_names(model) if platform.is_linear_module(layer)
    ]
    whole = {
        (name, index): ref(value)
        for index, layer in enumerate((first, second, third))
        for name, value in platform.direct_parameters(layer).items()
    }
    model.kept = [platform.direct_parameters(second)["weight"]]
    replacement = platform.new_parameter(platform.zeros((2, 4)), requires_grad=True)
    with replacing_parameters(platform, model):
        for name in ("weight", "bias"):
            platform.set_parameter(first, name, platform.new_parameter(platform.zeros((2, 4)), requires_grad=True))
        platform.set_parameter(second, "weight", replacement)
        if platform_name == "mindspore":
            gc.collect()  # a parameter of MindSpore refers to itself
        alive = [key for key, parameter in whole.items() if parameter() is not None]
        assert alive == [("weight", 1), ("bias", 1), ("weight", 2), ("bias", 2)]
    assert model.kept[0] is replacement


def test_a_parameter_that_was_tied_to_a_replaced_one_is_told(platform_name):
    """A replacement is remembered by what was tied to the old parameter, as long as the module keeps it."""
    platform = platform_named(platform_name)
    model = three_layers(platform_name)
    first, second, third = [
        layer for _, layer in platform.get_cells_and_names(model) if platform.is_linear_module(layer)
    ]
    old = platform.direct_parameters(first)["weight"]
    platform.set_parameter(second, "weight", old)
    new = platform.new_parameter(platform.zeros((2, 4)), requires_grad=True)
    platform.set_parameter(first, "weight", new)
    note_replacement(old, new, first, "weight")

    def problems():
        replaced = [("second", old), ("third", platform.direct_parameters(third)["weight"]), ("again", old)]
        return list(untying_problems(platform, model, replaced))

    told = (
        f"second is tied to the weight of {type(first).__name__}, which an earlier call has placed and this call "
        "would not replace; give both modules their styles in one call, or give each module its own parameter before "
        "the first call"
    )
    assert problems() == [told]
    platform.set_parameter(first, "weight", platform.new_parameter(platform.zeros((2, 4)), requires_grad=True))
    assert problems() == []
