"""Closures of calls on local tensors: which arguments are converted, and what the result becomes."""

from __future__ import annotations

from types import SimpleNamespace

from hyper_parallel.core.shard.call_form import CONVERTED, LOCAL, SAME, call_form


def _called(*args, **kwargs):
    return args, kwargs


def test_arguments_become_what_the_form_says():
    """An argument is passed as it is, as its local tensor, or by its converter, by position and by name alike."""
    form = call_form((LOCAL, SAME, CONVERTED), (("weight", CONVERTED), ("eps", SAME), ("bias", LOCAL)), False)
    run = form(_called, lambda value: ("first", value), lambda value: ("second", value))
    x, bias = SimpleNamespace(_local="x"), SimpleNamespace(_local="bias")
    args, kwargs = run((x, 2, "list"), {"weight": "w", "eps": 0.5, "bias": bias})
    assert args == ("x", 2, ("first", "list"))
    assert list(kwargs.items()) == [("weight", ("second", "w")), ("eps", 0.5), ("bias", "bias")]


def test_a_result_is_wrapped_with_its_layout():
    """A form that wraps gives the framework's result, and the layout that the closure was made with, to the wrapper."""
    run = call_form((LOCAL,), (), True)(_called, lambda result, layout: (result, layout), "S(0)")
    assert run((SimpleNamespace(_local="x"),), {}) == ((("x",), {}), "S(0)")


def test_calls_of_one_form_share_the_code():
    """Closures of one form differ in what they call, not in their code; a call without arguments is a form too."""
    first, second = call_form((SAME,), (), False)(abs), call_form((SAME,), (), False)(str)
    assert (first((-1,), {}), second((-1,), {})) == (1, "-1")
    assert first.__code__ is second.__code__
    assert call_form((), (), False)(_called)((), {}) == ((), {})
