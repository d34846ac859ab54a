"""Scenarios of the plan cache: which plan a call finds, and how its operands reach it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.shard import dispatch
from hyper_parallel.core.shard.dispatch import Ops
from hyper_parallel.core.shard.entry import Binder, OpEntry
from hyper_parallel.core.shard.rule import Decomposition, Row, Rule, Strategies, UnknownOperandError
from hyper_parallel.errors import ShardMismatchError
from workshop.mutation.suite.fixture import S0, Fixture, R, raises, rowwise, values

__all__ = [
    "canonical_operators_by_name",
    "dtypes_are_in_the_key_where_they_count",
    "failures_leave_no_plan",
    "keys_tell_values_apart",
    "locals_come_in_their_containers",
    "numbers_share_a_plan",
    "operands_are_counted_as_the_rule_names_them",
    "operands_stand_anywhere",
    "plans_are_bounded",
    "plans_are_found_again",
    "python_operators_answer_like_dispatch",
    "signatures",
]

# Equal to Python, and not to an operator.
_ALIKE: tuple[Any, ...] = (
    1, 1.0, True, 0, False, 0.0, -1, 2, "a", None, (1,), (1.0,), (True,), [1], [1.0], (1, (2, 3)), (1, (2.0, 3)),
    [1, [2]], slice(0, 1), slice(0, 2), slice(1, 2), slice(0, 2, 1), slice(0, 2, 2), {"a": 1}, {"a": 1.0}, {"b": 1},
    {"a": 2}, (), [], (None,), (slice(0, 1),), (slice(0, 2),), [slice(0, 2)],
)  # fmt: skip


def _text(value: Any) -> str:
    return f"{type(value).__name__} {value!r}"


# -- keys --------------------------------------------------------------------------------------------------------------


def keys_tell_values_apart(fixture: Fixture) -> None:
    """Arguments that are equal in Python but differ in type do not share a plan."""
    seen: list[Any] = []

    def func(x: Any, n: Any = None, m: Any = None) -> Any:
        seen.append((n, m))
        return x * 1

    x = fixture.spread(values(5, 3))
    entry = fixture.entry(func, "x, n=None, m=None", canonical=True)
    for value in (*_ALIKE, *_ALIKE):
        for args, named in (((x, value), {}), ((x,), {"n": value})):
            fixture.call(entry, *args, **named)
            assert _text(seen[-1][0]) == _text(value), (seen[-1], value)
        fixture.call(entry, x, m=value, n=7)
        assert _text(seen[-1]) == _text((7, value))
        fixture.call(entry, x, m=7, n=value)
        assert _text(seen[-1]) == _text((value, 7))
    assert len(entry.cache) == 4 * len({_text(value) for value in _ALIKE})


def numbers_share_a_plan(fixture: Fixture) -> None:
    """Where a rule looks at no number one plan serves all of a type, and each call computes with its own."""
    array = values(5, 3)
    x = fixture.spread(array)
    for canonical in (True, False):
        entry = fixture.entry(lambda x, n: x * n, "x, n", rule={"by_value": False}, canonical=canonical)
        for number in (2.0, 3.0, 2, 3, True, False, -0.0):
            fixture.same(fixture.call(entry, x, number), array * number)
            fixture.same(fixture.call(entry, x, n=number), array * number)
            fixture.same(fixture.call(entry, n=number, x=x), array * number)
        assert len(entry.cache) == 9, len(entry.cache)
    two = fixture.entry(
        lambda x, label, n, m: (x - m) * n + 0 * len(label), "x, label, n, m", rule={"by_value": False}, canonical=True
    )
    for number in (2.0, 3.0):
        fixture.same(fixture.call(two, x, "s", number, -number), (array + number) * number)
        fixture.same(fixture.call(two, x, (1, 2), number, m=2), (array - 2) * number)


def plans_are_found_again(fixture: Fixture) -> None:
    """The second call of a key plans nothing."""
    planned = []

    def strategies(call: Any) -> Any:
        planned.append(call)
        return rowwise(call)

    x = fixture.spread(values(5, 3))
    pair = fixture.entry(lambda x, y: x - y, "x, y", strategies)
    alone = fixture.entry(lambda x: -x, "x", strategies)
    unary, binary = fixture.platform.dispatcher.unary(alone), fixture.platform.dispatcher.binary(pair)
    for _ in range(3):
        fixture.call(pair, x, x)
        binary(x, x)
        fixture.call(alone, x)
        unary(x)
    assert len(planned) == 2
    numbers = fixture.entry(lambda x, y: x - y, "x, y", strategies, rule={"by_value": False})
    door = fixture.platform.dispatcher.binary(numbers)
    for number in (1.0, 2.0, 3.0):
        fixture.same(door(x, number), values(5, 3) - number)
    assert len(planned) == 3
    many = fixture.entry(lambda x, y, n: (x - y) * n, "x, y, n", strategies)
    for _ in range(3):
        fixture.call(many, x, x, 2)
    assert len(planned) == 4


def dtypes_are_in_the_key_where_they_count(fixture: Fixture) -> None:
    """A rule that looks at dtypes is asked once for each, wherever the operand stands."""

    def strategies(call: Any) -> Any:
        placement = S0 if all(operand.floating for operand in call.operands) else R
        return Strategies((Row((placement,) * len(call.operands), (placement,)),), (call.operands[0].shape,))

    real = fixture.spread(values(6, 3))
    whole = fixture.spread(np.arange(18).reshape(6, 3))
    calls: list[Callable[[OpEntry, Any], Any]] = [
        fixture.call, lambda entry, x: fixture.call(entry, x=x), lambda entry, x: fixture.call(entry, [x, x]),
        lambda entry, x: fixture.platform.dispatcher.unary(entry)(x),
        lambda entry, x: fixture.platform.dispatcher.binary(entry)(x, x),
    ]  # fmt: skip
    for number, call in enumerate(calls):
        signature = "x, y" if number == 4 else "x"
        entry = fixture.entry(_first, signature, strategies, rule={"by_dtype": True})
        for _ in range(2):
            assert call(entry, real).placements == (S0,)
            assert call(entry, whole).placements == (R,)


def _first(x: Any, y: Any = None) -> Any:
    del y
    return (x[0] if type(x) is list else x) * 1


def failures_leave_no_plan(fixture: Fixture) -> None:
    """A call that raises, in the rule or on the locals, raises again, and leaves nothing behind."""
    x = fixture.spread(values(4, 3))

    def fails(x: Any, n: int) -> Any:
        if n:
            msg = "no"
            raise RuntimeError(msg)
        return x * 1

    entry = fixture.entry(fails, "x, n")
    for _ in range(2):
        raises(RuntimeError, lambda: fixture.call(entry, x, 1))
        assert not entry.cache
    fixture.same(fixture.call(entry, x, 0), values(4, 3))
    assert len(entry.cache) == 1
    wrong = fixture.entry(lambda x: x[:, :2], "x")
    for _ in range(2):
        assert "this is a bug in the rule" in raises(ShardMismatchError, lambda: fixture.call(wrong, x))
    assert not wrong.cache


def plans_are_bounded(fixture: Fixture) -> None:
    """A full cache is cleared, and not before."""
    entry = fixture.entry(lambda x, n: x * n, "x, n")
    x, most = fixture.spread(values(4, 3)), dispatch._MAX_PLANS  # noqa: SLF001 - made small
    dispatch._MAX_PLANS = 4  # noqa: SLF001 - as above; no collective, hence no other rank, before it is what it was
    try:
        sizes = []
        for number in range(6):
            np.testing.assert_allclose(fixture.call(entry, x, number).to_local().numpy(), x.to_local().numpy() * number)
            sizes.append(len(entry.cache))
    finally:
        dispatch._MAX_PLANS = most  # noqa: SLF001 - as above
    assert sizes == [1, 2, 3, 4, 1, 2]


# -- operands and operators --------------------------------------------------------------------------------------------


def operands_stand_anywhere(fixture: Fixture) -> None:
    """By position, by name, in lists and tuples, alone and with others: locals reach the function as they were."""
    a, b, c = (values(5, 3, seed=seed) for seed in range(3))
    x, y, z = (fixture.spread(array, place) for array, place in ((a, S0), (b, R), (c, Shard(1))))

    def func(x: Any, y: Any = 0.0, z: Any = 0.0, n: Any = 1) -> Any:
        x = x[0] - 3 * x[1][0] if isinstance(x, (list, tuple)) else x
        return (x - 2 * y + 5 * z) * n

    for canonical in (False, True):
        entry = fixture.entry(func, "x, y=0.0, z=0.0, n=1", canonical=canonical)
        calls: list[tuple[tuple[Any, ...], dict[str, Any], Any]] = [
            ((x,), {}, a), ((x, y), {}, a - 2 * b), ((x, y, z), {}, a - 2 * b + 5 * c), ((x, 2.0), {}, a - 4.0),
            ((x, y, z, 3), {}, (a - 2 * b + 5 * c) * 3), ((x,), {"z": z}, a + 5 * c), ((), {"x": x}, a),
            ((), {"z": z, "x": x}, a + 5 * c), ((x,), {"n": 3}, a * 3), ((x, y), {"n": 3}, (a - 2 * b) * 3),
            ((x,), {"n": 3, "y": y}, (a - 2 * b) * 3), ((x, x), {}, a - 2 * a), ((y, x), {}, b - 2 * a),
            (([x, (y,)],), {}, a - 3 * b), (((x, [y]), z), {}, a - 3 * b - 2 * c), ((x, 1.0, z), {}, a - 2 + 5 * c),
            ((), {"x": [x, [y]], "n": 2}, (a - 3 * b) * 2), ((x, y, 0.0, 2), {}, (a - 2 * b) * 2),
            ((3.0, x), {}, 3.0 - 2 * a), ((x, z), {}, a - 2 * c), ((3.0, x, y), {}, 3.0 - 2 * a + 5 * b),
        ]  # fmt: skip
        for args, kwargs, wanted in (*calls, *calls):
            fixture.same(fixture.call(entry, *args, **kwargs), wanted)


def locals_come_in_their_containers(fixture: Fixture) -> None:
    """A list stays a list and a tuple a tuple, in the caller's call and in the canonical one."""
    x, kinds = fixture.spread(values(5, 3)), []

    def func(xs: Any, n: Any = None) -> Any:
        kinds.append((type(xs), type(xs[1]), type(n), isinstance(xs[0], type(x))))
        return xs[0] + xs[1][0]

    for canonical in (False, True):
        entry = fixture.entry(func, "xs, n=None", canonical=canonical)
        for xs in ([x, (x,)], (x, [x]), [x, [x]]):
            for _ in range(2):
                fixture.same(fixture.call(entry, xs, [1]), 2 * values(5, 3))
                assert kinds[-1] == (type(xs), type(xs[1]), list, False)
    extra: list[Any] = [1, (2,)]
    seen: list[Any] = []

    def keeps(x: Any, n: Any) -> Any:
        seen.append(n)
        return x * 1

    pair = fixture.entry(lambda x, ys: x + 2 * ys[0], "x, ys")
    alone = fixture.entry(lambda xs: xs[0] * 2, "xs", canonical=True)
    for _ in range(2):
        fixture.same(fixture.call(pair, x, [x]), 3 * values(5, 3))
        fixture.same(fixture.call(alone, [x]), 2 * values(5, 3))
    entry = fixture.entry(keeps, "x, n")
    for _ in range(2):
        fixture.call(entry, x, extra)
    assert all(value is extra for value in seen), "without tensors it is passed on as it is"


def _broadcast(call: Any) -> Strategies:
    count = len(call.operands)
    sharded = Row(tuple(S0 if operand.ndim else R for operand in call.operands), (S0,))
    return Strategies((sharded, Row((R,) * count, (R,))), (call.operands[0].shape,))


def python_operators_answer_like_dispatch(fixture: Fixture) -> None:
    """Python's operators of one and two operands answer like dispatch itself; unknown types are left to Python."""
    array, other = values(5, 3), values(5, 3, seed=1)
    dispatcher, x, y = fixture.platform.dispatcher, fixture.spread(array), fixture.spread(other, R)

    def func(x: Any, y: Any) -> Any:
        return NotImplemented if y is None or isinstance(y, (str, list)) else x - 2 * y

    for loose in (True, False):
        entry = fixture.entry(func, "x, y", _broadcast, rule={"by_value": not loose})
        door = dispatcher.binary(entry)
        for _ in range(2):
            fixture.same(door(x, y), array - 2 * other)
            fixture.same(door(y, x), other - 2 * array)
            for number in (2, 3, 2.5, True):
                fixture.same(door(x, number), array - 2 * number)
            fixture.same(door(x, fixture.plain(np.asarray(2.0))), array - 4.0)
            assert [door(x, other) for other in (None, "a", [1])] == [NotImplemented] * 3
            raises(UnknownOperandError, lambda entry=entry: fixture.call(entry, x, None))  # type: ignore[misc] # a default
    composed = OpEntry(
        "probe", func, Binder("x, y"), Decomposition("probe", "x, y", lambda ops, x, y: ops.sub(x, y)), func
    )
    fixture.same(dispatcher.binary(composed)(x, y), array - other)
    alone = OpEntry("probe", func, Binder("x"), Decomposition("probe", "x", lambda ops, x: ops.neg(x)), func)
    for _ in range(2):
        fixture.same(dispatcher.unary(alone)(x), -array)
        fixture.same(fixture.call(alone, x=x), -array)


class _Dispatcher:
    """Records dispatched calls."""

    def __init__(self, real: Any, seen: list[Any]) -> None:
        self.platform, self.dtensor_type, self.tensors, self.seen = real.platform, real.dtensor_type, real.tensors, seen

    def dispatch(self, _: OpEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Nothing else."""
        self.seen.append((args, kwargs))


def operands_are_counted_as_the_rule_names_them(fixture: Fixture) -> None:
    """A spelling may take them in another order, and fewer."""
    a, b, names = values(5, 3), values(5, 3, seed=1), []

    def strategies(call: Any) -> Any:
        names.append([operand.name for operand in call.operands])
        return rowwise(call)

    rule = Rule("probe", "x, y, z=None", strategies)
    for canonical in (False, True):
        entry = OpEntry(
            "probe", lambda y, x: x - 2 * y, Binder("y, x"), rule, lambda x, y: x - 2 * y, canonical=canonical
        )
        for _ in range(2):
            fixture.same(fixture.call(entry, fixture.spread(b), fixture.spread(a)), a - 2 * b)
            fixture.same(fixture.call(entry, x=fixture.spread(a), y=fixture.spread(b)), a - 2 * b)
    assert names == [["x", "y"]] * 4


def canonical_operators_by_name(fixture: Fixture) -> None:
    """Plain tensors run plainly, one DTensor anywhere is enough to dispatch, and decompositions always are."""
    a, b = values(5, 3), values(5, 3, seed=1)
    x, plain, two = fixture.spread(a), fixture.plain(a), fixture.plain(np.asarray(2.0))
    kind = type(x)
    for result in (fixture.ops.sub(plain, fixture.plain(b)), fixture.ops.sub(x=plain, y=fixture.plain(b))):
        assert not isinstance(result, kind)
        np.testing.assert_allclose(result.numpy(), a - b)
    fixture.same(fixture.ops.sub(x, fixture.spread(b)), a - b)
    fixture.same(fixture.ops.sub(x=x, y=fixture.spread(b)), a - b)
    fixture.same(fixture.ops.sub(x, y=2.0), a - 2.0)
    fixture.same(fixture.ops.sub(two, x), 2.0 - a)
    fixture.same(fixture.ops.cat([x, fixture.spread(b)], 1), np.concatenate([a, b], 1))
    raises(AttributeError, lambda: fixture.ops.no_such_operator)
    seen: list[Any] = []
    watched = Ops(_Dispatcher(fixture.platform.dispatcher, seen))  # type: ignore[arg-type] # as much of one as it takes
    for args, kwargs in (((x, x), {}), ((two, x), {}), ((x,), {"y": two}), ((two,), {"y": x})):
        watched.sub(*args, **kwargs)
        assert seen.pop() == (args, kwargs)
    watched.sub(two, two)
    assert not seen


def signatures(fixture: Fixture) -> None:
    """Arguments are bound as Python binds them, under the frameworks' names too, and stars take both spellings."""
    del fixture
    plain = Binder("x, y=2, *, dim=None, keep=False")
    assert plain.names == ("x", "y", "dim", "keep")
    assert plain.bind((1,), {}) == {"x": 1, "y": 2, "dim": None, "keep": False}
    assert plain.bind((1, 3), {"dim": 4}) == {"x": 1, "y": 3, "dim": 4, "keep": False}
    assert plain.bind((), {"input": 1, "other": 5}) == {"x": 1, "y": 5, "dim": None, "keep": False}
    raises(TypeError, lambda: plain.bind((1, 2, 3), {}))
    raises(TypeError, lambda: plain.bind((1,), {"what": 3}))
    raises(TypeError, lambda: plain.bind((), {"y": 3}))
    raises(TypeError, lambda: Binder("x, *, dim").bind((1,), {}))
    assert Binder("x, *, dim").bind((1,), {"dim": 2}) == {"x": 1, "dim": 2}
    assert Binder("x, a=1, b=2").bind((0,), {"b": 5}) == {"x": 0, "a": 1, "b": 5}
    assert Binder("self, a=1").bind((), {"self": 5}) == {"self": 5, "a": 1}
    star = Binder("x, *shape, keep=1")
    for args, kwargs in (((0, 2, 3), {}), ((0, (2, 3)), {}), ((0, [2, 3]), {}), ((0,), {"shape": (2, 3)})):
        assert star.bind(args, kwargs) == {"x": 0, "shape": (2, 3), "keep": 1}, (args, kwargs)
    assert star.bind((0, 2), {}) == {"x": 0, "shape": (2,), "keep": 1}
    assert star.bind((0,), {}) == {"x": 0, "shape": (), "keep": 1}
    assert star.bind((0, (2,), (3,)), {}) == {"x": 0, "shape": ((2,), (3,)), "keep": 1}
    assert star.bind((0,), {"shape": (2, 3), "keep": 4}) == {"x": 0, "shape": (2, 3), "keep": 4}
