"""Closures of calls on local tensors: which arguments are converted, and what the result becomes."""

from __future__ import annotations

from types import SimpleNamespace

from hyper_parallel.core.shard.call_codegen import CONVERTED, LOCAL, SAME, UNWRAPPED, VIEW, WRAPPED, call_form


def _called(*args, **kwargs):
    return args, kwargs


def test_arguments_become_what_the_form_says():
    """An argument is passed as it is, as its local tensor, or by its converter, by position and by name alike."""
    form = call_form((LOCAL, SAME, CONVERTED), (("weight", CONVERTED), ("eps", SAME), ("bias", LOCAL)), UNWRAPPED)
    run = form(_called, lambda value: ("first", value), lambda value: ("second", value))
    x, bias = SimpleNamespace(_local="x"), SimpleNamespace(_local="bias")
    args, kwargs = run((x, 2, "list"), {"weight": "w", "eps": 0.5, "bias": bias})
    assert args == ("x", 2, ("first", "list"))
    assert list(kwargs.items()) == [("weight", ("second", "w")), ("eps", 0.5), ("bias", "bias")]


def test_a_result_is_wrapped_with_its_layout():
    """A form that wraps gives the framework's result, and the layout that the closure was made with, to the wrapper."""
    run = call_form((LOCAL,), (), WRAPPED)(_called, lambda result, layout: (result, layout), "S(0)")
    assert run((SimpleNamespace(_local="x"),), {}) == ((("x",), {}), "S(0)")


def test_a_view_of_what_is_read_only_takes_the_other_closure():
    """A view is wrapped at once only where its base can be written; the framework is called once either way."""
    run = call_form((LOCAL, SAME), (), VIEW)(
        _called, lambda result, layout: (result, layout), "S(0)", lambda args, kwargs: ("protected", args, kwargs)
    )
    writable, read_only = SimpleNamespace(_local="x", _readonly=None), SimpleNamespace(_local="x", _readonly="a copy")
    assert run((writable, 1), {}) == ((("x", 1), {}), "S(0)")
    assert run((read_only, 1), {}) == ("protected", (read_only, 1), {})


def test_calls_of_one_form_share_the_code():
    """Closures of one form differ in what they call, not in their code; a call without arguments is a form too."""
    first, second = call_form((SAME,), (), UNWRAPPED)(abs), call_form((SAME,), (), UNWRAPPED)(str)
    assert (first((-1,), {}), second((-1,), {})) == (1, "-1")
    assert first.__code__ is second.__code__
    assert call_form((), (), UNWRAPPED)(_called)((), {}) == ((), {})
