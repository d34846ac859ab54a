"""What the clipping functions of DeepSpeed and Megatron say: the clipped tensors, the largest norm and the norm."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

pytestmark = pytest.mark.platforms("torch")


@pytest.fixture
def clippings(monkeypatch):
    """Make modules of the stacks' names, by what reads their calls; list what clips in them."""
    from hyper_parallel.verify.frameworks.torch.stack_clipping import _FUNCTIONS, imported_clippings

    def made(functions):
        for path, owner, name, _, read in _FUNCTIONS:
            module = ModuleType(path)
            place = SimpleNamespace() if owner else module
            setattr(place, name, functions[read.__name__])
            if owner:
                setattr(module, owner, place)
            monkeypatch.setitem(sys.modules, path, module)
        return list(imported_clippings())

    for path, *_ in _FUNCTIONS:
        monkeypatch.delitem(sys.modules, path, raising=False)
    assert list(imported_clippings()) == []
    return made


def _zero(**more):
    """An optimizer of ZeRO: two flat gradients, clipped to 0.5, of losses scaled by 4."""
    parts = [SimpleNamespace(grad=object()), SimpleNamespace(grad=object())]
    return SimpleNamespace(clip_grad=0.5, loss_scale=4.0, single_partition_of_fp32_groups=parts,
                           fp32_partitioned_groups_flat=parts, **more)  # fmt: skip


def test_norms_are_read_as_the_stacks_mean_them(clippings):
    """Megatron's parameters with their norm; ZeRO's flat parts, whose norm is one of scaled gradients."""
    seen, called = [], []

    def record(held, call, largest, norm):
        seen.append((held, largest, norm))
        return call()

    def by_megatron(parameters, max_norm, total_norm):
        called.append(("megatron", max_norm))
        return total_norm + len(parameters)

    def by_zero(self, grad_groups_flat, total_norm):
        called.append(("zero", self.clip_grad, len(grad_groups_flat)))
        return total_norm

    def by_zero_3(*args, **kwargs):  # decorated without the function's signature, as DeepSpeed does
        called.append(("zero 3", args[0].clip_grad, args[1]))
        return kwargs["total_norm"]

    functions = {"_by_megatron": by_megatron, "_by_zero": by_zero, "_by_zero_3": by_zero_3}
    found = {}
    for clipping in clippings(functions):
        plain = getattr(clipping.owner, clipping.name)
        found[clipping.read.__name__] = clipping.replaced(plain, record)
    optimizer = _zero()
    first, second = optimizer.single_partition_of_fp32_groups
    assert found["_by_megatron"](["a", "b"], max_norm=1.5, total_norm=3.0) == 5.0
    assert seen.pop() == (["a", "b"], 1.5, 3.0)
    assert found["_by_zero"](optimizer, [second.grad], 8.0) == 8.0
    assert seen.pop() == ([second], 0.5, 2.0)
    assert found["_by_zero_3"](optimizer, 0, total_norm=8.0) == 8.0
    assert seen.pop() == ([first], 0.5, 2.0)
    assert found["_by_zero_3"](optimizer, 0, total_norm=None) is None
    assert found["_by_megatron"](["a"], 0.0, 3.0) == 4.0
    assert seen == []
    assert len(called) == 5
