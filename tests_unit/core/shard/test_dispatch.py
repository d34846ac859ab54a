from __future__ import annotations

import functools
import threading

import numpy as np
import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.dtensor.skip_dispatch import SkipDTensorDispatch
from hyper_parallel.core.shard import dispatch
from hyper_parallel.core.shard.dispatch import CACHE_MISS, implicit_replication
from hyper_parallel.core.shard.entry import OpEntry, binder
from hyper_parallel.core.shard.rule import find_rule
from hyper_parallel.errors import LayoutError, MeshMismatchError, MixedTensorError, UnsupportedOperatorError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def values(*shape, seed=0):
    """Random global values, equal on every rank."""
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spread(whole, mesh, *placements):
    """A leaf DTensor of the global tensor ``whole``."""
    layout = Layout.place(mesh, placements, tuple(whole.shape))
    box = tuple(slice(*bounds) for bounds in layout.local_box())
    return get_torch_platform().wrap(whole[box].clone(), layout)


def on_ranks(function, *shape):
    """``function(mesh)`` on every rank of a mesh with axes dp, tp (or tp alone)."""
    names, world = ("dp", "tp")[-len(shape) :], int(np.prod(shape))
    return simulate(lambda: function(init_device_mesh("cpu", shape, mesh_dim_names=names)), world, "torch")


def assert_whole(actual, wanted):
    """The global value and dtype of ``actual`` are those of ``wanted``."""
    import torch

    torch.testing.assert_close(actual.detach().full_tensor(), wanted)


def text_of(kind, function):
    """The text of the error that ``function`` raises."""
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3])
def test_plans_are_right_for_every_scalar_of_their_key(world):
    """One plan serves scalars of one type; values, signs of zero and NaN come from the current call."""
    import torch

    x = values(5, 3)

    def on_rank(mesh):
        sharded = spread(x, mesh, S0)
        for scalar in (2.0, 3.0, 2, 3, True, False, 1 + 2j, 0.0, -0.0, np.float32(2.0), np.float64(3.0), np.int64(4)):
            assert_whole(sharded * scalar, x * scalar)
            assert_whole(sharded + scalar, x + scalar)
        assert torch.signbit((sharded.abs() * -0.0).full_tensor()).all()
        assert not torch.signbit((sharded.abs() * 0.0).full_tensor()).any()
        assert (sharded * float("nan")).full_tensor().isnan().all()
        for scalar in (2.0, 3.0):
            assert_whole(scalar - sharded, scalar - x)
            assert_whole(scalar / sharded, scalar / x)

    on_ranks(on_rank, world)


def test_zeros_of_both_signs_are_two_values():
    """Zeros of both signs have plans of their own, in any order, inside sequences too."""
    import torch

    x = values(5, 3)
    zeros = (0.0, -0.0, np.float64(0.0), np.float64(-0.0), np.float32(0.0), np.float32(-0.0))

    def on_rank(mesh):
        sharded = spread(x, mesh, S0)
        for zero in zeros:
            result = torch.where(sharded > 0, sharded, float(zero) if type(zero) is np.float32 else zero)
            assert torch.equal(1 / result.full_tensor(), 1 / torch.where(x > 0, x, float(zero)))
        for zero in (0j, complex(0.0, -0.0), complex(-0.0, 0.0)):
            result = torch.view_as_real(torch.where(sharded > 0, sharded, zero).full_tensor())
            assert torch.equal(1 / result, 1 / torch.view_as_real(torch.where(x > 0, x, zero)))
        keys = {sharded._dispatch.__self__._key((1, zero)) for zero in (*zeros, 0, False, 0j, complex(0.0, -0.0))}
        assert len(keys) == len(zeros) + 4

    on_ranks(on_rank, 2)


def test_plans_are_right_for_every_dtype_of_their_key():
    """A plan made by integers serves floats of the same layout, gradients included, and the other way round."""
    x = values(5, 3)
    plain = x.clone().requires_grad_()
    (x * plain).sum().backward()

    def on_rank(mesh):
        assert_whole(spread(x.long(), mesh, S0) * spread(x.long(), mesh, R), x.long() * x.long())
        weight = spread(x, mesh, R).requires_grad_()
        (spread(x, mesh, S0) * weight).sum().backward()
        assert_whole(weight.grad, plain.grad)
        assert_whole(spread(x.double(), mesh, S0) + spread(x, mesh, R), x.double() + x)
        assert_whole(spread(x.long(), mesh, S0) * 2.5, x.long() * 2.5)
        assert_whole(spread(x.long(), mesh, S0) * 2, x.long() * 2)

    on_ranks(on_rank, 2)


def test_names_and_their_order_do_not_matter():
    """Keyword arguments, in any order and under the framework's names, mean the same as positional ones."""
    import torch

    x, y = values(5), values(5, seed=1)

    def on_rank(mesh):
        a, b = spread(x, mesh, S0), spread(y, mesh, S0)
        for alpha in (2.0, 3.0):
            for result in (
                torch.sub(a, b, alpha=alpha), torch.sub(a, alpha=alpha, other=b), a.sub(b, alpha=alpha),
                torch.sub(alpha=alpha, input=a, other=b), torch.sub(other=b, input=a, alpha=alpha),
            ):  # fmt: skip
                assert_whole(result, x - alpha * y)
        assert_whole(torch.sub(other=a, input=b), y - x)

    on_ranks(on_rank, 2)


@pytest.mark.parametrize("mesh", [(2,), (3,), (4,), (2, 2), (2, 3)])
@pytest.mark.parametrize("shape", [(5, 3), (1, 4), (0, 3), ()])
@pytest.mark.untraced
def test_one_tensor_twice(mesh, shape):
    """A tensor passed twice counts twice, in values and gradients, on every layout, uneven, empty and 0-d."""
    x = values(*shape).numpy() if shape else np.asarray(1.5, np.float32)
    for function in (
        lambda x: x + x,
        lambda x: x * x,
        lambda x: x * x - 2.0 * x,
    ):
        report = check_function(function, [x], mesh, platform="torch")
        assert report.wrong == report.rejected == []
        assert report.ok


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3)])
@pytest.mark.untraced
def test_random_layouts_of_an_expression(mesh):
    """Expressions of sums, products and linear layers agree with one device on random layouts and cotangents."""
    import torch.nn.functional as F

    x, w, b = values(5, 3).numpy(), values(4, 3, seed=1).numpy(), values(4, seed=2).numpy()
    report = check_function(
        lambda x, weight, bias: (F.linear(x, weight, bias) * 2.0 + bias).relu() * F.linear(x * x, weight),
        [x, w, b], mesh, platform="torch", limit=60,
    )  # fmt: skip
    assert report.wrong == report.rejected == []
    assert report.ok


@pytest.mark.parametrize("order", [("dp", "tp"), ("tp", "dp")])
@pytest.mark.parametrize("mesh", [(2, 2), (2, 3)])
def test_nested_shards_of_one_dim(mesh, order):
    """Two axes that split one dim keep their order through operators, for uneven shards too."""
    import torch

    x, y = values(7, 3), values(7, 3, seed=1)

    def on_rank(on):
        layout = Layout.place(on, (order, None), (7, 3))
        other = Layout.place(on, (order[::-1], None), (7, 3))
        sharded = get_torch_platform().wrap(x[slice(*layout.local_box()[0])].clone(), layout).requires_grad_()
        moved = get_torch_platform().wrap(y[slice(*other.local_box()[0])].clone(), other).requires_grad_()
        assert (sharded + sharded).layout is layout
        out = sharded * moved
        assert_whole(out, x * y)
        out.sum().backward()
        assert sharded.grad.layout is layout
        assert_whole(sharded.grad, y)
        assert_whole(moved.grad, x)
        assert torch.equal(sharded.detach().full_tensor(), x)

    on_ranks(on_rank, *mesh)


# -- mixing ------------------------------------------------------------------------------------------------------------


def test_constants_of_no_dims_are_welcome():
    """A plain 0-d tensor is a constant: it is added once, to a partial sum too."""
    import torch

    x, two = values(4), torch.tensor(2.0)

    def on_rank(mesh):
        pending = get_torch_platform().wrap(x / mesh.size(), Layout.place(mesh, [P], (4,)))
        for sharded in (spread(x, mesh, S0), spread(x, mesh, R), pending):
            for result, wanted in (
                (sharded + two, x + 2),
                (two + sharded, x + 2),
                (sharded * two, x * 2),
                (two - sharded, 2 - x),
            ):
                assert_whole(result, wanted)

    on_ranks(on_rank, 3)


def test_plain_tensors_are_not_guessed():
    """A plain tensor that meets DTensors is an error that names it and the line that fixes it."""
    import torch
    import torch.nn.functional as F

    x, w = values(5, 3), values(4, 3)

    def on_rank(mesh):
        sharded = spread(x, mesh, S0, R)
        kinds = [
            lambda: sharded + x, lambda: x + sharded, lambda: torch.add(x, sharded), lambda: x.add_(sharded),
            lambda: sharded + torch.tensor(1.0, requires_grad=True),
        ]  # fmt: skip
        for mix in kinds:
            assert "a plain tensor" in text_of(MixedTensorError, mix)
        return text_of(RuntimeError, lambda: F.linear(sharded, w))

    assert on_ranks(on_rank, 2, 2)[0] == (
        "argument weight is a plain tensor [4, 3], but other operands are DTensors on DeviceMesh(cpu, dp=2, tp=2, "
        "ranks=[0, 1, 2, 3]); weight = hyper_parallel.DTensor.from_local(weight, mesh, [Replicate(), Replicate()]) "
        "if every rank holds the same values; if it is a local shard that a parallel style returned, give that style "
        "use_local_output=False"
    )


def test_implicit_replication_is_asked_for():
    """implicit_replication replicates plain tensors without gradient, and only inside its block."""
    x = values(5, 3)

    def on_rank(mesh):
        sharded = spread(x, mesh, S0)
        with implicit_replication():
            assert_whole(sharded + x, x + x)
            text_of(MixedTensorError, lambda: sharded + x.clone().requires_grad_())
        text_of(MixedTensorError, lambda: sharded + x)

    on_ranks(on_rank, 2)


def test_meshes_do_not_mix():
    """Operands on different meshes are an error that shows both."""
    x = values(4)

    def on_rank(mesh):
        flat = mesh.flatten("all")
        return text_of(MeshMismatchError, lambda: spread(x, mesh, S0, R) + spread(x, flat, S0))

    assert on_ranks(on_rank, 2, 1)[0] == (
        "__add__: operands are on different meshes, DeviceMesh(cpu, dp=2, tp=1, ranks=[0, 1]) and "
        "DeviceMesh(cpu, all=2, ranks=[0, 1]); bring them to one mesh first"
    )


def test_in_place_that_would_move():
    """A write into a tensor whose layout would have to change is refused, and the tensor is unchanged."""
    x = values(4)

    def on_rank(mesh):
        pending = get_torch_platform().wrap(x.clone(), Layout.place(mesh, [P], (4,)))
        text = text_of(UnsupportedOperatorError, lambda: pending.add_(1.0))
        assert (pending.to_local() == x).all()
        return text

    assert on_ranks(on_rank, 2)[0] == (
        "add(x=f32[4] + Partial(sum)@tp): writing in place would have to change the layout of x; "
        "use the out-of-place form, or x = x.redistribute(placements=[Replicate()]) first"
    )


def test_arguments_that_do_not_fit():
    """A call that does not fit the signature names operator and signature, and leaves no plan behind."""
    import torch

    def on_rank(mesh):
        sharded = spread(values(4), mesh, S0)
        text = text_of(TypeError, lambda: sharded.add(sharded, beta=2))
        assert_whole(torch.add(sharded, sharded), 2 * values(4))
        return text

    assert on_ranks(on_rank, 2)[0] == "add(x, y, *, alpha=1): got an unexpected keyword argument 'beta'"


def test_tensors_are_no_sizes():
    """A tensor where a rule reads a size, a dim or a count is refused by name, as a DTensor and as a constant."""
    import torch

    calls = (
        ("roll", "shifts[0]", lambda x, scalar: x.roll((scalar,), (0,))),
        ("repeat", "repeats[0]", lambda x, scalar: x.repeat(scalar, 1)),
        ("select", "index", lambda x, scalar: x.select(0, scalar)),
        ("new_zeros", "size[0]", lambda x, scalar: x.new_zeros(scalar, 4)),
    )

    def on_rank(mesh):
        x = spread(values(4, 2), mesh, S0)
        for scalar in (torch.tensor(1), spread(torch.tensor(1), mesh, R)):
            for op, name, call in calls:
                assert text_of(UnsupportedOperatorError, lambda call=call, scalar=scalar: call(x, scalar)) == (
                    f"{op}(x=f32[4@tp, 2], {name}=i64[]): {name} is a tensor where the rule needs a number; "
                    f"use int({name})"
                )

    on_ranks(on_rank, 2)


def test_operators_of_python_leave_strangers_to_python():
    """A value of another type compares unequal, cannot be added, and an in-place addition of it is refused."""

    def on_rank(mesh):
        sharded = spread(values(4), mesh, S0)
        assert (sharded == None, sharded != None, sharded == "a") == (False, True, False)  # noqa: E711 - on purpose
        assert sharded not in (None, "a")
        messages = [text_of(TypeError, lambda other=other: sharded + other) for other in (None, "a", [1.0], object())]
        messages.append(text_of(TypeError, lambda: None - sharded))
        messages.append(text_of(TypeError, lambda: sharded < None))
        for wrong in (None, [1.0]):
            with pytest.raises(TypeError):
                sharded += wrong
        assert_whole(sharded, values(4))
        return messages

    pair = "unsupported operand type(s) for"
    assert on_ranks(on_rank, 2)[0] == [
        *(f"{pair} +: 'TorchDTensor' and '{error}'" for error in ("NoneType", "str", "list", "object")),
        f"{pair} -: 'NoneType' and 'TorchDTensor'",
        "'<' not supported between instances of 'TorchDTensor' and 'NoneType'",
    ]


def test_out_is_written():
    """A call with out= writes that DTensor and returns it."""
    import torch

    def on_rank(mesh):
        sharded, out = spread(values(4), mesh, S0), spread(torch.zeros(4), mesh, S0)
        assert torch.add(sharded, sharded, out=out) is out
        assert_whole(out, 2 * values(4))

    on_ranks(on_rank, 2)


def test_threads_share_the_cache():
    """Threads that dispatch the same new calls at once all get the right values."""
    import torch

    mesh = DeviceMesh.abstract("cpu", (1,), (0,), ("threads",))
    sharded, wrong = spread(values(6), mesh, S0), []

    def work():
        results = {power: (sharded * power + sharded).to_local() for power in range(1, 40)}
        wrong.extend(p for p, result in results.items() if not torch.equal(result, values(6) * p + values(6)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_decompositions_reach_operators_by_name():
    """Canonical operators are found by name, run the framework's own on plain tensors, and unknown ones are refused."""
    import torch

    ops = get_torch_platform().dispatcher.ops

    def on_rank(mesh):
        assert_whole(ops.linear(spread(values(5, 3), mesh, S0), spread(values(4, 3), mesh, R)),
                     torch.nn.functional.linear(values(5, 3), values(4, 3)))  # fmt: skip

    on_ranks(on_rank, 2)
    plain = ops.linear(values(5, 3), values(4, 3))
    assert torch.equal(plain, torch.nn.functional.linear(values(5, 3), values(4, 3)))
    assert text_of(AttributeError, lambda: ops.no_such_thing) == "no canonical operator 'no_such_thing'"


def test_in_place_functions_called_by_keyword():
    """An in-place call writes its first parameter, however it is passed; a plain one is refused."""
    import torch

    def rank(mesh):
        x = spread(values(5, 2), mesh, S0)
        assert torch.relu_(input=x) is x
        assert_whole(x, values(5, 2).relu())
        assert torch.dropout_(p=0.0, train=True, input=x) is x
        with SkipDTensorDispatch():
            assert torch.exp_(input=x) is x
        assert_whole(x, values(5, 2).relu().exp())
        assert torch.nn.init.constant_(val=2.0, tensor=x) is x
        assert_whole(x, torch.full((5, 2), 2.0))
        return text_of(MixedTensorError, lambda: torch.ones(5, 2).add_(other=x))

    for text in on_ranks(rank, 2):
        assert text == (
            "add_: a plain tensor [5, 2] can be written only with DTensors of one element that are replicated and "
            "need no gradient; write the result of full_tensor()"
        )


def test_a_plain_tensor_is_written_with_single_values_that_all_ranks_have():
    """One whole value scales a plain tensor in place; one that is pending, has a gradient or is elsewhere does not."""
    import torch

    def rank(mesh):
        x, factor = values(5, 2), spread(values(1), mesh, R)
        assert x.mul_(factor) is x
        leaf = factor.clone().requires_grad_()
        with torch.no_grad():
            assert torch.Tensor.mul_(x, other=leaf) is x
        torch.testing.assert_close(x, values(5, 2) * values(1) ** 2)
        others = DeviceMesh("cpu", [1 - mesh.rank], mesh_dim_names=("tp",))
        refused = [spread(values(6), mesh, S0).sum(), leaf, distribute_tensor(values(1), others, [R])]
        return {text_of(MixedTensorError, functools.partial(x.mul_, scale)) for scale in refused}

    refusal = (
        "mul_: a plain tensor [5, 2] can be written only with DTensors of one element that are replicated and need "
        "no gradient; write the result of full_tensor()"
    )
    assert on_ranks(rank, 2) == [{refusal}, {refusal}]


def test_plans_are_bounded(monkeypatch):
    """The cache of plans is bounded, and a call whose plan was dropped is planned again."""
    import torch

    from hyper_parallel.platform.torch import intercept

    monkeypatch.setattr(dispatch, "_MAX_PLANS", 4)
    entry = intercept.interception().functions[torch.softmax]
    entry.cache.clear()

    def rank(mesh):
        for size in (*range(2, 30), 2, 3):
            x = spread(values(size, 2), mesh, S0)
            assert_whole(torch.softmax(x, 1), values(size, 2).softmax(1))
        return True

    assert all(on_ranks(rank, 2))
    assert 0 < len(entry.cache) <= 4


# -- shorter ways to a plan --------------------------------------------------------------------------------------------

INDICES = (
    0, -1, slice(1, 3), slice(None), (0, 1), (slice(None), 1), (slice(0, 3, 2), None), (Ellipsis, slice(1, None)),
    (slice(None, 2), -2), None, Ellipsis, (None, 0), (slice(np.int64(1), None), 0), (np.int64(1), 1),
    [1, 0], (slice(None), [0, 2]),
)  # fmt: skip


@pytest.mark.parametrize("world", [2, 3])
def test_an_index_means_the_same_when_it_comes_again(world):
    """Numbers, slices and other indices pick the plain elements, in the first call and from the cache."""
    import torch

    x = values(5, 3)

    def rank(mesh):
        for place, whole in ((S0, x), (S1, x), (R, x), (P, x * world)):
            tensor = spread(x, mesh, place)
            for index in INDICES * 2:
                assert_whole(tensor[index], whole[index])
        with SkipDTensorDispatch():
            assert type(spread(x, mesh, S0)[0:1]) is torch.Tensor
        return True

    assert all(on_ranks(rank, world))


def test_equal_numbers_of_other_types_are_other_indices():
    """1 picks an element and True, which is equal, is refused; a slice may begin at either."""
    x = values(4, 3)

    def rank(mesh):
        tensor = spread(x, mesh, S1)
        for index in (1, (slice(1, 3), 1), (slice(True, 3), 1)):
            assert_whole(tensor[index], x[index])
        return text_of(LayoutError, lambda: tensor[True])

    for text in on_ranks(rank, 2):
        assert text.endswith(
            "index True: only numbers, slices, None, Ellipsis and integer or boolean tensors are supported"
        )


@pytest.mark.parametrize("world", [2, 3])
def test_options_decide_whether_a_call_is_one_operator(world):
    """F.relu and attention are planned directly, except in place and with dropout, whatever came before."""
    import torch
    import torch.nn.functional as F

    x, q = values(5, 3), values(2, 4, 4)

    def rank(mesh):
        for _ in range(2):
            assert_whole(F.relu(spread(x, mesh, S0)), x.relu())
            written = spread(x, mesh, S0)
            assert F.relu(written, inplace=True) is written
            assert_whole(written, x.relu())
            assert_whole(F.leaky_relu(spread(x, mesh, S0), 0.5, False), F.leaky_relu(x, 0.5))
            assert_whole(F.leaky_relu(spread(x, mesh, S0), 0.25), F.leaky_relu(x, 0.25))
            heads = spread(q, mesh, S0)
            assert_whole(F.scaled_dot_product_attention(heads, heads, heads), F.scaled_dot_product_attention(q, q, q))
            dropped = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=1.0)
            assert_whole(dropped, torch.zeros_like(q))
            none = F.scaled_dot_product_attention(heads, heads, heads, dropout_p=torch.tensor(0.0))
            assert_whole(none, F.scaled_dot_product_attention(q, q, q))
        return True

    assert all(on_ranks(rank, world))


def test_joined_tensors_of_other_dtypes():
    """Cat of equal layouts and other dtypes, or of plain constants, is right; partial ones are planned anew."""
    import torch

    x, y = values(4, 3), values(4, 3, seed=1)

    def rank(mesh):
        for kind in (torch.float32, torch.float64, torch.complex64, torch.float32):
            assert_whole(
                torch.cat([spread(x, mesh, S0), spread(y.to(kind), mesh, S0)], 1), torch.cat([x, y.to(kind)], 1)
            )
            with implicit_replication():
                joined = torch.cat((spread(x, mesh, S0), y.to(kind)), 1)
            assert_whole(joined, torch.cat((x, y.to(kind)), 1))
        pending = spread(x, mesh, Partial("max"))
        joined = torch.cat([pending, pending], 1)
        assert joined.layout.partials
        assert_whole(joined, torch.cat([x, x], 1))
        with pytest.raises(RuntimeError, match="not implemented for complex"):  # it reduces, and those have no order
            torch.cat([pending, spread(y.to(torch.complex64), mesh, Partial("max"))], 1)
        return True

    assert all(on_ranks(rank, 2))


def _canonical(op):
    """A spelling of the canonical operator ``op`` that has seen no call."""
    rule, local = find_rule(op), get_torch_platform().local_op(op)
    return OpEntry(op, local, binder(rule.signature), rule, local, canonical=True)


def test_a_call_seen_before_is_repeated():
    """Its result is that of the dispatch; calls that were not seen are not guessed, nor those of other types."""
    import torch

    def check(mesh):
        dispatcher = get_torch_platform().dispatcher
        x, y = spread(values(5, 4), mesh, S0), spread(values(5, 4, seed=1), mesh, S0)
        calls = {"sum": (x, 1, True), "mul": (x, 3), "add": (x, y), "permute": (x, (1, 0)), "cat": ([x, y], 1)}
        again, entries = {}, {op: _canonical(op) for op in calls}
        for op, args in calls.items():
            entry = entries[op]
            again[op] = dispatcher.dispatch_cached(entry)
            assert again[op](args) is CACHE_MISS
            wanted = dispatcher.dispatch(entry, args, {})
            result = again[op](args)
            assert result.layout is wanted.layout
            assert_whole(result, wanted.full_tensor())
        assert_whole(again["mul"]((y, 7)), values(5, 4, seed=1) * 7)  # the number is not a part of the key
        assert_whole(again["sum"]((x, 1, True, None)), values(5, 4).sum(1, True))
        assert again["sum"]((x, 1, True, torch.float64)) is CACHE_MISS
        assert again["sum"]((x, True, True)) is CACHE_MISS
        assert again["add"]((x, y, None)) is CACHE_MISS  # None is not the default of alpha
        assert again["permute"]((x, (1, False))) is CACHE_MISS
        assert again["permute"]((x, slice(0, 1))) is CACHE_MISS
        assert again["cat"](([x, values(5, 4)], 1)) is CACHE_MISS
        joined = torch.cat([values(5, 4), values(5, 4, seed=1)], 1)
        assert_whole(again["cat"](([x.double(), y.double()], 1)), joined.double())  # nor are dtypes, of these layouts
        pending = [spread(values(5, 4), mesh, Partial("max"))] * 2
        dispatcher.dispatch(entries["cat"], (pending, 1), {})
        assert_whole(again["cat"]((pending, 1)), torch.cat([values(5, 4)] * 2, 1))
        assert again["cat"](([x.double() for x in pending], 1)) is CACHE_MISS  # a complex extremum has no order

    on_ranks(check, 2)
