"""What older versions of MindSpore get: hooks before others and after failures, exact masks, errors of rules."""

from __future__ import annotations

import contextlib
import inspect
import operator

import numpy as np
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


def test_masked_values_and_gradients_are_exact():
    """``masked_fill`` keeps float64 of what is not masked, its gradient and a NaN stay outside, and integers fill."""
    import mindspore as ms
    from mindspore import Tensor

    from hyper_parallel import DTensor
    from hyper_parallel.platform.mindspore.versions import older

    fill = older.filling_by_where(DTensor, Tensor.masked_fill)
    values, mask = np.array([0.1, 0.2, 0.3]), np.array([True, False, False])
    x, weights = Tensor(values), Tensor(np.array([np.nan, 1 / 3, 2 / 3]))
    assert fill(x, Tensor(mask), 7).asnumpy().tolist() == [7.0, 0.2, 0.3]
    assert fill(x, Tensor(mask), Tensor(0.7, ms.float64)).asnumpy().tolist() == [0.7, 0.2, 0.3]
    assert fill(Tensor([1, 2, 3]), Tensor(mask), 7).asnumpy().tolist() == [7, 2, 3]
    gradient = ms.grad(lambda x: (fill(x, Tensor(mask), 0.0) * weights).sum())(x)
    assert gradient.asnumpy().tolist() == [0.0, 1 / 3, 2 / 3]
    assert fill(x.astype(ms.float32), Tensor(mask), Tensor(7.0, ms.float32)).asnumpy()[0] == 7.0


def test_a_masked_fill_of_dtensors_goes_to_their_handler():
    """Anything but a plain tensor, a mask of booleans and a value of its dtype is left to MindSpore."""
    import mindspore as ms

    from hyper_parallel import DTensor, Replicate, init_device_mesh
    from hyper_parallel.platform.mindspore.versions import older

    calls = []
    fill = older.filling_by_where(DTensor, lambda *operands: calls.append(operands))
    x, mask = ms.Tensor([1.0, 2.0], ms.float32), ms.Tensor([True, False])
    placed = DTensor.from_local(x, init_device_mesh("cpu", (1,), mesh_dim_names=["tp"]), [Replicate()])
    given = [(placed, mask, 0.0), (x, placed, 0.0), (x, mask, placed), (x, x, x), (x, mask, "one")]
    for operands in given:
        fill(*operands)
    assert len(calls) == len(given)
    assert all(map(operator.is_, sum(calls[:3] + calls[4:], ()), sum(given[:3] + given[4:], ())))


def test_operations_are_told_apart_by_their_numbers():
    """Two objects of one operation are equal, and leaves are never taken for each other."""
    from types import SimpleNamespace

    from hyper_parallel.platform.mindspore.versions.older import identity

    def node(number, leaf):
        return SimpleNamespace(is_leaf=lambda: leaf, _sequence_nr=lambda: number)

    last = 2**64 - 1
    assert identity(node(3, leaf=False)) == identity(node(3, leaf=False)) != identity(node(4, leaf=False))
    assert identity(node(last, leaf=True)) != identity(node(last, leaf=True))
    assert identity(SimpleNamespace(_unique_id=lambda: 5)) == 5


def test_what_is_recomputed_enters_the_contexts_itself(monkeypatch):
    """A ``recompute`` without contexts runs the function in the first one, and in the second one from then on."""
    import mindspore

    from hyper_parallel.platform.mindspore.versions.older import recompute_to_the_end

    seen = []

    @contextlib.contextmanager
    def noted(name):
        seen.append(name)
        yield

    def plain(block, *args, use_reentrant):
        return use_reentrant, block(*args), block(*args)

    monkeypatch.setattr(mindspore, "recompute", plain)
    assert recompute_to_the_end(abs, -3) == (False, 3, 3)
    assert recompute_to_the_end(abs, -3, context_fn=lambda: (noted("first"), noted("again"))) == (False, 3, 3)
    assert seen == ["first", "again"]

    def newer(*args, early_stop=True, **options):
        return args, early_stop, options

    monkeypatch.setattr(mindspore, "recompute", newer)
    assert recompute_to_the_end(abs, -3, context_fn=noted) == (
        (abs, -3), False, {"use_reentrant": False, "context_fn": noted},
    )  # fmt: skip


def test_errors_of_rules_arrive_where_mindspore_hides_them():
    """The error that a handler raised replaces MindSpore's own; an error of something else stays."""
    from hyper_parallel.platform.mindspore.versions import older

    def handler(*_):
        msg = "no rule"
        raise LookupError(msg)

    handler = older.remembering_errors(handler)

    def operation(fails, text):
        if fails:
            with contextlib.suppress(LookupError):
                handler(None, operation, ())
        raise RuntimeError(text)

    told = older.revealing_errors(operation)
    for fails, text, kind in (
        (True, "Python fallback failed.\n---", LookupError),
        (False, "Python fallback failed.\n---", RuntimeError),
        (True, "another", RuntimeError),
    ):
        with pytest.raises(kind) as caught:
            told(fails, text)
        assert str(caught.value) == ("no rule" if kind is LookupError else text)
