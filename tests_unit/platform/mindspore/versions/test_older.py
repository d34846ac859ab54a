"""What older versions of MindSpore get: hooks of a Cell's forward before others, and after a forward that raises."""

from __future__ import annotations

import inspect

import pytest

pytestmark = pytest.mark.platforms("mindspore")


@pytest.fixture
def cell():
    """A Cell whose forward raises without an input, with the functions of an older version."""
    import mindspore as ms
    from mindspore import nn

    from hyper_parallel.platform.mindspore.versions import older

    class Layer(nn.Cell):
        def construct(self, x, scale=1.0):
            if x is None:
                msg = "no input"
                raise ValueError(msg)
            return x * scale

    layer = Layer()
    register, call = nn.Cell.register_forward_hook, nn.Cell.__call__
    if "always_call" not in inspect.signature(register, follow_wrapped=False).parameters:  # otherwise they are patched
        register = older.accepting_always_call(register)
        call = older.calling_hooks_after_failures(call)
    layer.value = ms.Tensor([3.0], ms.float32)
    return layer, lambda hook, **options: register(layer, hook, **options), lambda *a, **k: call(layer, *a, **k)


def test_hooks_run_once_whether_the_forward_raises_or_not(cell):
    """A hook with ``always_call`` gets the output, or None after a failure; others and removed ones do not run then."""
    layer, register, call = cell
    seen = []
    register(lambda _, _inputs, output: seen.append(("plain", output is None)))
    handle = register(lambda _, _inputs, output: seen.append(("always", output is None)), always_call=True)
    register(
        lambda _, _inputs, kwargs, output: seen.append((dict(kwargs), output is None)),
        always_call=True, with_kwargs=True,
    )  # fmt: skip
    assert call(layer.value, scale=2.0).asnumpy().tolist() == [6.0]
    assert seen == [("plain", False), ("always", False), ({"scale": 2.0}, False)]
    seen.clear()
    with pytest.raises(ValueError, match="no input"):
        call(None, scale=2.0)
    assert seen == [("always", True), ({"scale": 2.0}, True)]
    seen.clear()
    handle.remove()
    with pytest.raises(ValueError, match="no input"):
        call(None)
    assert seen == [({}, True)]


def test_a_hook_that_has_run_does_not_run_again(cell):
    """If a later hook raises, those that have run already do not run a second time."""
    layer, register, call = cell
    seen = []

    def fail(*_):
        msg = "a hook"
        raise RuntimeError(msg)

    assert call(layer.value).asnumpy().tolist() == [3.0]
    register(lambda *_: seen.append("first"), always_call=True)
    register(fail)
    register(lambda *_: seen.append("last"), always_call=True)
    with pytest.raises(RuntimeError, match="a hook"):
        call(layer.value)
    assert seen == ["first", "last"]


def test_a_hook_may_be_registered_before_others():
    """With ``prepend`` a hook runs before those that were registered earlier; without it, after them."""
    import mindspore as ms
    from mindspore import nn

    from hyper_parallel.platform.mindspore.versions import older

    def without_prepend(layer, hook, with_kwargs=False):
        return nn.Cell.register_forward_pre_hook(layer, hook, with_kwargs=with_kwargs)

    layer, seen = nn.Identity(), []
    register = older.accepting_prepend("_forward_pre_hook", without_prepend)
    register(layer, lambda *_: seen.append("first"))
    register(layer, lambda *_: seen.append("before"), prepend=True)
    register(layer, lambda _layer, _inputs, kwargs: seen.append(("last", kwargs)), True)
    layer(ms.Tensor([3.0], ms.float32))
    assert seen == ["before", "first", ("last", {})]
