from __future__ import annotations

import itertools
import math

import pytest

from hyper_parallel.core.shard.entry import Binder, KeywordCall, binder


def test_one_binder_per_text():
    """Equal signatures share a binder."""
    assert binder("x, y") is binder("x, y")


@pytest.mark.parametrize("args, kwargs, wanted", [
    ((1, 2), {}, {"x": 1, "dim": 2, "keepdim": False, "dtype": None}),
    ((1,), {"dim": 2, "keepdim": True}, {"x": 1, "dim": 2, "keepdim": True, "dtype": None}),
    ((), {"dtype": "f", "x": 1}, {"x": 1, "dim": None, "keepdim": False, "dtype": "f"}),
    ((), {"input": 1}, {"x": 1, "dim": None, "keepdim": False, "dtype": None}),
    ((), {"self": 1, "dim": 0}, {"x": 1, "dim": 0, "keepdim": False, "dtype": None}),
])  # fmt: skip
def test_arguments_by_name(args, kwargs, wanted):
    """Positions, names in any order and the frameworks' own names give the canonical arguments, defaults filled in."""
    assert Binder("x, dim=None, keepdim=False, *, dtype=None").bind(args, kwargs) == wanted


@pytest.mark.parametrize("args, kwargs", [
    ((1, 2, 3), {}), ((1, (2, 3)), {}), ((1, [2, 3]), {}), ((1,), {"shape": (2, 3)}), ((1,), {"shape": [2, 3]}),
])  # fmt: skip
def test_a_starred_parameter_takes_both_forms(args, kwargs):
    """Sizes given separately, as a sequence or by name are bound as one tuple."""
    assert Binder("x, *shape").bind(args, kwargs) == {"x": 1, "shape": (2, 3)}


@pytest.mark.parametrize("args, kwargs, text", [
    ((), {}, "missing a required argument: 'x'"),
    ((1, 2, 3), {}, "too many positional arguments"),
    ((1,), {"out": 2}, "got an unexpected keyword argument 'out'"),
    ((1,), {"x": 2}, "multiple values for argument 'x'"),
])  # fmt: skip
def test_calls_that_do_not_fit(args, kwargs, text):
    """A call that does not fit raises Python's own TypeError."""
    with pytest.raises(TypeError) as caught:
        Binder("x, y=None").bind(args, kwargs)
    assert str(caught.value) == text


SIGNATURES = ["x", "x, y", "x, dim=None, keepdim=False, *, dtype=None", "x=1, *, y, z=2", "x, y=3, *, alpha", "*, x=1"]


@pytest.mark.parametrize("text", SIGNATURES)
def test_arguments_are_bound_as_python_binds_them(text):
    """Every number of positions and every choice of names gives what Python's own binding gives, or the same error."""
    own = Binder(text)
    calls = [
        (tuple(range(count)), dict.fromkeys(names, "named"))
        for count in range(5)
        for size in range(len(own.names) + 1)
        for names in itertools.combinations((*own.names, "other"), size)
    ]
    fits = 0
    for args, kwargs in calls:
        named = {"y" if name == "other" else name: value for name, value in kwargs.items()}
        expected = _outcome(lambda: _bound_by_python(own.signature, args, named))  # noqa: B023 - called at once
        assert _outcome(lambda: list(own.bind(args, named).items())) == expected  # noqa: B023
        fits += isinstance(expected, list)
    assert 0 < fits < len(calls)


def _bound_by_python(signature, args, kwargs):
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return list(bound.arguments.items())


def _outcome(bind):
    """Return the result, or the error's message."""
    try:
        return bind()
    except TypeError as error:
        return str(error)


def test_a_call_by_canonical_names():
    """The function gets its parameters by position, and keyword-only ones by name."""
    call = KeywordCall(lambda *args, **kwargs: (args, kwargs), "x, dim=None, *, dtype=None")
    assert call(dtype="f", x=1, dim=2) == ((1, 2), {"dtype": "f"})
    assert (call.positional, call.named) == (("x", "dim"), ("dtype",))


@pytest.mark.parametrize(
    "text, most, optional",
    [("x, dim=None, *, dtype=None", 2, True), ("x, y, *, alpha=1", 2, False), ("x, *shape", math.inf, True)],
)
def test_positional_arguments_have_a_limit(text, most, optional):
    """A starred parameter takes any number of them; whether None stands for all that are named is known."""
    signature = binder(text)
    assert (signature.most_positional, signature.named_are_optional) == (most, optional)
