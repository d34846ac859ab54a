"""Scenarios of results: skipped dispatch, constants, several or replicated outputs, local calls, writes, views."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.dtensor.skip_dispatch import SkipDTensorDispatch
from hyper_parallel.core.shard.dispatch import implicit_replication, no_function
from hyper_parallel.core.shard.entry import Binder, KeywordCall, OpEntry
from hyper_parallel.core.shard.rule import (
    Decomposition,
    FixedLayouts,
    LayoutOptions,
    LocalCall,
    Ref,
    Row,
    Strategies,
    UnknownOperandError,
)
from hyper_parallel.errors import MixedTensorError, UnsupportedOperatorError
from workshop.mutation.suite.fixture import S0, Fixture, P, R, never, raises, values

__all__ = [
    "constants_meet_distributed_tensors",
    "dispatch_is_skipped",
    "local_calls_that_differ",
    "outputs_that_only_the_call_tells",
    "several_outputs",
    "the_operand_itself",
    "views_write_through_or_are_read_only",
    "whole_layouts_as_answers",
    "writes_return_what_is_written",
]

# -- calls outside of DTensors and calls of both -----------------------------------------------------------------------


def dispatch_is_skipped(fixture: Fixture) -> None:
    """Inside the block calls act on locals, whichever spelling and operator; outside again not."""
    array = values(4, 3)
    x = fixture.spread(array)
    kind, dispatcher = type(x), fixture.platform.dispatcher
    spelled = fixture.entry(lambda x, n=1: x * n, "x, n=1")
    canonical = fixture.entry(never, "x, n=1", canonical=True, local=lambda x, n: x * n)
    pair = fixture.entry(lambda x, y: x - y, "x, y")
    negated = Decomposition("probe", "x", lambda ops, x: ops.neg(x))
    composed = OpEntry("probe", no_function, Binder("x"), negated, never)
    own = OpEntry("probe", lambda x: -x, Binder("x"), negated, never)
    doubled = OpEntry("probe", lambda x: x.mul_(2.0), Binder("x"), negated, never)
    kept = fixture.entry(
        lambda x, w: x * w, "x, w", lambda call: Strategies((Row((S0, R), (S0,)),), (call["x"].shape,))
    )
    weight = fixture.spread(values(3), R).requires_grad_()
    written = fixture.entry(lambda x, n: x.mul_(n), "x, n", in_place=True)
    unary, binary = dispatcher.unary(spelled), dispatcher.binary(pair)
    for _ in range(2):
        fixture.same(fixture.call(spelled, x, 2), array * 2)
        fixture.same(unary(x), array)
        fixture.same(binary(x, x), array * 0)
        with SkipDTensorDispatch():
            results = [fixture.call(spelled, x, 2), fixture.call(canonical, x, n=2), unary(x), binary(x, x),
                     fixture.call(composed, x), fixture.call(own, x)]  # fmt: skip
            assert not any(isinstance(result, kind) for result in results)
            for have, factor in zip(results, (2, 2, 1, 0, -1, -1), strict=True):
                np.testing.assert_allclose(have.numpy(), x.to_local().numpy() * factor)
            assert fixture.call(written, x, 1) is x
            assert not isinstance(fixture.call(written, x.to_local(), 1), kind)
            with fixture.platform.no_grad():
                assert fixture.call(doubled, x) is x
                assert fixture.call(doubled, x=x) is x
                fixture.call(written, x, 0.25)
        with SkipDTensorDispatch(no_skip=["probe"]):
            fixture.same(fixture.call(spelled, x, 2), array * 2)
    fixture.call(kept, x, weight)
    assert weight._views
    with SkipDTensorDispatch(), fixture.platform.no_grad():
        fixture.call(own, weight)
        assert weight._views
        assert fixture.call(doubled, weight) is weight
        assert not weight._views


def constants_meet_distributed_tensors(fixture: Fixture) -> None:
    """Plain numbers of no dims are constants; other plain tensors are only inside implicit_replication()."""
    array, plain = values(4, 3), fixture.plain(values(4, 3, seed=1))
    entry = fixture.entry(lambda x, y: x + 2 * y, "x, y", lambda call: Strategies(
        (Row((R, R), (R,)), Row((P, P), (P,)), Row((S0, S0 if call["y"].ndim else R), (S0,))), (call["x"].shape,)
    ))  # fmt: skip
    size = fixture.mesh.size()
    pending = fixture.platform.wrap(fixture.plain(array / size), Layout.place(fixture.mesh, [P], array.shape))
    two, learned = fixture.plain(np.asarray(2.0)), fixture.plain(np.asarray(1.0)).requires_grad_()
    for x in (fixture.spread(array), fixture.spread(array, R), pending):
        for _ in range(2):
            fixture.same(fixture.call(entry, x, two), array + 4.0)
            raises(MixedTensorError, lambda x=x: fixture.call(entry, x, learned))  # type: ignore[misc] # a default
            raises(MixedTensorError, lambda x=x: fixture.call(entry, x, plain))  # type: ignore[misc] # a default
            with implicit_replication():
                fixture.same(fixture.call(entry, x, plain), array + 2 * values(4, 3, seed=1))
                fixture.same(fixture.call(entry, x, y=plain), array + 2 * values(4, 3, seed=1))
                raises(MixedTensorError, lambda x=x: fixture.call(entry, x, learned))  # type: ignore[misc] # a default
                raises(MixedTensorError, lambda x=x: fixture.call(entry, x, plain.clone().requires_grad_()))  # type: ignore[misc] # a default
    raises(MixedTensorError, lambda: fixture.call(entry, fixture.spread(array), plain))
    first = fixture.entry(
        lambda y, x: x - 3 * y, "y, x", lambda call: Strategies((Row((R, R), (R,)),), (call["x"].shape,))
    )
    for _ in range(2):
        fixture.same(fixture.call(first, two, fixture.spread(array, R)), array - 6.0)


# -- answers -----------------------------------------------------------------------------------------------------------


class _Pair(NamedTuple):
    first: Any
    second: Any


def several_outputs(fixture: Fixture) -> None:
    """Each output has its own layout, and they come in the framework's own container, on every call."""
    array = values(4, 6)
    x = fixture.spread(array)

    def strategies(call: Any) -> Any:
        return Strategies((Row((S0,), (S0, Shard(1))),), (call["x"].shape, call["x"].shape[::-1]), many=True)

    for made in (_Pair, lambda *both: list(both), lambda *both: both):
        entry = fixture.entry(lambda x, made=made: made(x * 2, x.t()), "x", strategies)
        for _ in range(3):
            out = fixture.call(entry, x)
            assert type(out) is type(made(1, 2))
            fixture.same(out[0], array * 2)
            fixture.same(out[1], array.T)
            assert [part.placements for part in out] == [(S0,), (Shard(1),)]


def outputs_that_only_the_call_tells(fixture: Fixture) -> None:
    """Whole outputs are wrapped whatever their number, nesting and size; what is not a tensor stays."""
    array = np.arange(6.0).reshape(2, 3)
    x = fixture.spread(array)

    def strategies(_: Any) -> Any:
        return Strategies((Row((R,), ()),), (), open=True)

    entry = fixture.entry(lambda x: (x[:1], [x * 2, 5], "a"), "x", strategies)
    for _ in range(2):
        first, (rest, five), a = fixture.call(entry, x)
        fixture.same(first, array[:1])
        fixture.same(rest, array * 2)
        assert (five, a, first.placements, tuple(rest.shape)) == (5, "a", (R,), (2, 3))


def whole_layouts_as_answers(fixture: Fixture) -> None:
    """Fixed and listed layouts are taken as they are, with the implementation that goes with them."""
    array = values(2 * fixture.mesh.size(), 3)
    x, layout = fixture.spread(array), Layout.place(fixture.mesh, [S0], array.shape)
    whole = Layout.place(fixture.mesh, [R], array.shape)
    fixed = fixture.entry(lambda x: x * 2, "x", lambda _: FixedLayouts((layout,)))
    own = fixture.entry(never, "x", lambda _: FixedLayouts((layout.with_shape(None),), impl=lambda x: x * 3))
    sized = fixture.entry(never, "x", lambda _: FixedLayouts((layout,), impl=lambda x: x * 3))
    even = fixture.entry(lambda x: x * 5, "x", lambda _: FixedLayouts((layout.with_shape(None),)))
    both = fixture.entry(
        lambda x: (x * 2, x * 3), "x", lambda _: FixedLayouts((layout, layout.with_shape(None)), many=True)
    )
    options = (((whole,), (whole,), None), ((layout,), (layout,), None))
    listed = fixture.entry(lambda x: x * 4, "x", lambda _: LayoutOptions(options))
    priced = fixture.entry(
        lambda x: x * 4, "x", lambda _: LayoutOptions(((*options[0][:2], -1.0), (*options[1][:2], 0.0)))
    )
    several = fixture.entry(lambda x: [x * 4], "x", lambda _: LayoutOptions(options, many=True))
    summed = (((layout,), (Layout.place(fixture.mesh, [P], (3,)),), None),)
    reduced = fixture.entry(lambda x: x.sum(0), "x", lambda _: LayoutOptions(summed))
    fixture.same(fixture.call(reduced, x), array.sum(0))
    paired = (((layout, Layout.place(fixture.mesh, [R], (3,))), (layout,), None),)
    pair = fixture.entry(lambda x, w: x * w, "x, w", lambda _: LayoutOptions(paired))
    for operand in (fixture.spread(array).requires_grad_(), fixture.spread(array, R).requires_grad_()):
        weight = fixture.spread(values(3), R).requires_grad_()
        fixture.call(pair, operand, weight).sum().backward()
        fixture.same(weight.grad, array.sum(0))
        fixture.same(operand.grad, np.broadcast_to(values(3), array.shape))
    still = (((whole, Layout.place(fixture.mesh, [R], (3,))), (whole,), None),)
    alike = fixture.entry(lambda x, w: x * w, "x, w", lambda _: LayoutOptions(still))
    weight = fixture.spread(values(3), R).requires_grad_()
    fixture.call(alike, x, weight).sum().backward()
    fixture.same(weight.grad, array.sum(0))
    for _ in range(2):
        fixture.same(fixture.call(fixed, x), array * 2)
        fixture.same(fixture.call(own, x), array * 3)
        fixture.same(fixture.call(sized, x), array * 3)
        fixture.same(fixture.call(even, x), array * 5)
        first, second = fixture.call(both, x)
        fixture.same(first, array * 2)
        fixture.same(second, array * 3)
        assert fixture.call(listed, x).placements == (S0,)
        assert fixture.call(priced, x).placements == (R,)
        fixture.same(fixture.call(listed, x), array * 4)
        fixture.same(fixture.call(several, x)[0], array * 4)


def local_calls_that_differ(fixture: Fixture) -> None:
    """What localize replaces is replaced, in the arguments or as a whole, and the rest is the caller's."""
    array = values(4, 3)
    x = fixture.spread(array)

    def strategies(local: Any) -> Any:
        return lambda call: Strategies((Row((S0,), (S0,)),), (call["x"].shape,), lambda *_: local)

    def func(x: Any, size: Any, scale: Any = 1.0, label: Any = None) -> Any:
        assert label in (None, "b")
        return x * size * scale

    run = LocalCall({"size": 7}, lambda _, args: args["x"] * args["size"] * 10 * args["scale"])
    for by_value in (False, True):
        for local, wanted in ((LocalCall({"size": 7}), 7), (run, 70), (None, 5), (LocalCall({}), 5), (LocalCall(), 5)):
            entry = fixture.entry(
                func, "x, size, scale=1.0, label=None", strategies(local), rule={"by_value": by_value}
            )
            for scale in (1.0, 2.0, 3.0, 3):
                fixture.same(fixture.call(entry, x, 5, scale), array * wanted * scale)
                fixture.same(fixture.call(entry, x, 5, scale=scale, label="b"), array * wanted * scale)
    entry = fixture.entry(
        never, "x, size=1", strategies(LocalCall({"size": [2, 3]})), local=lambda x, size: x * size[1]
    )
    for args in ((x, 1), (x, 1), (x,), (x,)):
        fixture.same(fixture.call(entry, *args), array * 3)
    constant = strategies(LocalCall({"size": 3}))
    scaled = KeywordCall(lambda x, size, *, scale: x * size * scale, "x, size, *, scale")
    turned = KeywordCall(lambda size, x: size - x, "size, x")
    kernels: tuple[tuple[str, Callable[..., Any], Any], ...] = (
        ("x, size, scale=2", scaled, array * 6),
        ("x, size", partial(_product, scale=2), array * 6),
        ("x, size", turned, 3 - array),
    )
    for signature, kernel, result in kernels:
        entry = fixture.entry(never, signature, constant, rule={"by_value": True}, local=kernel)
        for _ in range(2):
            fixture.same(fixture.call(entry, x, 5), result)
    refs = fixture.entry(never, "xs, n", lambda call: Strategies(
        (Row((S0, S0), (S0,)),), (call.operands[0].shape,), lambda *_: LocalCall({"xs": [Ref(1), (Ref(0),), 2]})
    ), local=lambda xs, n: (xs[0] - xs[2] * xs[1][0]) * n)  # fmt: skip
    fixture.same(fixture.call(refs, [x, fixture.spread(array * 5)], 2), (array * 5 - 2 * array) * 2)


def _product(x: Any, size: int, scale: int) -> Any:
    return x * size * scale


# -- writing -----------------------------------------------------------------------------------------------------------


def writes_return_what_is_written(fixture: Fixture) -> None:
    """The object itself, written, by position and by name; what would have to move is refused and untouched."""
    array = values(4, 3)
    double = fixture.entry(lambda x: x.mul_(2.0), "x", in_place=True)
    for _ in range(2):
        leaf = fixture.spread(array).to_local().requires_grad_()
        written = DTensor.from_local(leaf, fixture.mesh, [S0] * fixture.mesh.ndim)
        assert fixture.call(double, written) is written
        written.sum().backward()
        assert fixture.platform.tensor_to_numpy(leaf.grad).tolist() == np.full(leaf.shape, 2.0).tolist()
    for canonical in (False, True):
        entry = fixture.entry(lambda x, n=2.0: x.mul_(n), "x, n=2.0", in_place=True, canonical=canonical)
        x = fixture.spread(array)
        for _ in range(2):
            assert fixture.call(entry, x) is x
            assert fixture.call(entry, x=x, n=0.5) is x
            fixture.same(x, array)
    moved = fixture.entry(lambda x: x.mul_(2.0), "x", lambda call: Strategies((Row((R,), (R,)),), (call["x"].shape,)),
                        in_place=True)  # fmt: skip
    x = fixture.spread(array)
    raises(UnsupportedOperatorError, lambda: fixture.call(moved, x))
    fixture.same(x, array)
    unknown = fixture.entry(lambda _x, _y: NotImplemented, "x, y", in_place=True)
    raises(UnknownOperandError, lambda: fixture.call(unknown, x, "a"))


def views_write_through_or_are_read_only(fixture: Fixture) -> None:
    """A view of what stayed writes through; one of what had to move may not be written, nor its own views."""
    array = values(4, 3)
    stay = fixture.entry(lambda x: x.view(-1, 3), "x", rule={"view": True})
    move = fixture.entry(lambda x: x.view(-1, 3), "x", lambda call: Strategies((Row((R,), (R,)),), (call["x"].shape,)),
                       rule={"view": True})  # fmt: skip
    pieces = fixture.entry(lambda x: x.split(2, 1), "x", lambda call: Strategies(
        (Row((S0,), (S0, S0)), Row((R,), (R, R))), ((call["x"].shape[0], 2), (call["x"].shape[0], 1)), many=True
    ), rule={"view": True})  # fmt: skip
    moved_pieces = fixture.entry(lambda x: x.split(2, 1), "x", lambda call: Strategies(
        (Row((R,), (R, R)),), ((call["x"].shape[0], 2), (call["x"].shape[0], 1)), many=True
    ), rule={"view": True})  # fmt: skip
    moves_one = fixture.entry(lambda x, _: x.view(-1, 3), "x, y", lambda call: Strategies(
        (Row((R, R), (R,)),), (call["x"].shape,)
    ), rule={"view": True})  # fmt: skip
    write = fixture.entry(lambda x: x.mul_(2.0), "x", in_place=True)
    last = fixture.entry(lambda _, x: x.view(-1, 3), "n, x", rule={"view": True})
    for _ in range(2):
        x = fixture.spread(array)
        fixture.call(write, fixture.call(last, 1, x))
        fixture.same(x, array * 2)
        x = fixture.spread(array)
        fixture.call(write, fixture.call(stay, x))
        fixture.same(x, array * 2)
        first, second = fixture.call(pieces, x)
        fixture.call(write, first)
        fixture.same(second, array[:, 2:] * 2)
        fixture.same(x, array * np.array([4, 4, 2.0]))
        x = fixture.spread(array)
        copied = fixture.call(move, x)
        for view in (
            *fixture.call(moved_pieces, x),
            copied,
            fixture.call(stay, copied),
            fixture.call(last, 1, copied),
            *fixture.call(pieces, copied),
        ):
            text = raises(UnsupportedOperatorError, lambda view=view: fixture.call(write, view))  # type: ignore[misc] # a default
            assert "had to redistribute x to" in text
        fixture.same(x, array)
        two = fixture.call(moves_one, x, fixture.spread(values(3), R))
        assert two._readonly is not None
        fixture.call(write, x)
        raises(UnsupportedOperatorError, lambda copied=copied: copied + 1.0)  # type: ignore[misc] # a default


def shards_that_are_contiguous_by_chance(fixture: Fixture) -> None:
    """A shard that happens to be contiguous is copied and stored like on other ranks, whose shards are not."""
    array = values(5, fixture.mesh.size())
    turned = fixture.spread(array, *[Shard(1)] * fixture.mesh.ndim).t()
    x = fixture.spread(values(fixture.mesh.size(), 5)).t()
    column = fixture.spread(values(5, 1), *[R] * fixture.mesh.ndim)
    asis = fixture.entry(lambda x: x, "x", lambda call: Strategies(
        (Row((Shard(1),), (Shard(1),)),), (call["x"].shape,)
    ), rule={"itself": True})  # fmt: skip
    for _ in range(2):
        copied = x.contiguous()
        assert copied is not x
        assert copied.contiguous() is copied
        assert fixture.call(asis, x) is x
        assert (x * 2.0).stride() == (x * column).stride() == x.stride()
        turned.reshape(-1).mul_(2.0)
        fixture.same(turned, array.T)


def the_operand_itself(fixture: Fixture) -> None:
    """Operators that return their operand return the same DTensor object."""
    array = values(4, 3)
    x = fixture.spread(array)
    for view in (False, True):
        for place in (S0, R):

            def strategies(call: Any, place: Any = place) -> Any:
                return Strategies((Row((place,), (place,)),), (call["x"].shape,))

            same = fixture.entry(lambda x: x, "x", strategies, rule={"itself": True, "view": view})
            other = fixture.entry(lambda x: x * 2, "x", strategies, rule={"itself": True, "view": view})
            for _ in range(2):
                assert (fixture.call(same, x) is x) == (place == S0), (view, place)
                assert (fixture.call(same, x=x) is x) == (place == S0)
                fixture.same(fixture.call(same, x), array)
                fixture.same(fixture.call(other, x), array * 2)
                assert (fixture.call(other, x)._readonly is None) == (place == S0 or not view)
