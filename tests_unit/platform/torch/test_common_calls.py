"""Calls that ordinary scripts make of DTensors: each means what it means on one device."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle

import pytest
import torch
from torch.masked import (
    mean as masked_mean,  # before anything of the library is imported, as scripts do
    sum as masked_sum,
)

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import strict
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_module, distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.tensor_parallel.parallelize import parallelize_module
from hyper_parallel.core.tensor_parallel.styles import ColwiseParallel, RowwiseParallel
from hyper_parallel.errors import LayoutError, MixedTensorError, UnsupportedOperatorError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

R, S0, S1 = Replicate(), Shard(0), Shard(1)
PLACES = [R, S0, S1]


def values(*shape, seed=0):
    """Random values, equal on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def on_ranks(function, *shape):
    """``function(mesh)`` on every rank of a mesh of ``shape``; their results."""
    return simulate(lambda: function(init_device_mesh("cpu", shape)), math.prod(shape), "torch")


def whole(value):
    """A plain tensor, off the graph."""
    return value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()


def close(actual, expected):
    """Every tensor is close to its counterpart."""
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(whole(one), whole(other))


VIEWS = [
    lambda y: y[1], lambda y: y[1:], lambda y: y.reshape(-1), lambda y: y.flatten(), lambda y: y.split(2)[1],
    lambda y: y.narrow(0, 1, 2), lambda y: y.view(20), lambda y: y[1:][1:], lambda y: y.t()[2],
    lambda y: y.unbind(0)[3],
]  # fmt: skip


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_views_that_move_data_work_in_inference_mode(world, place):
    """Views of tensors made in, and before, inference mode have the values of one device."""
    base = values(5, 4)

    def on_rank(mesh):
        x = distribute_tensor(base, mesh, [place])
        with torch.inference_mode():
            return [whole(view(y)) for view in VIEWS for y in (x * 2, x)]

    with torch.inference_mode():
        expected = [view(y) for view in VIEWS for y in (base * 2, base)]
        for results in on_ranks(on_rank, world):
            close(results, expected)


@pytest.mark.parametrize("world", [2, 3])
def test_foreach_functions_mean_the_same_for_mixed_lists(world):
    """Every torch._foreach function of this release, over layouts that differ; those in place return their list."""
    tensors, others = [values(5, 4).abs() + 1, values(3, seed=1).abs() + 1], [values(5, 4, seed=2), values(3, seed=3)]
    third = [values(5, 4, seed=4).abs() + 1, values(3, seed=5).abs() + 1]
    extra = {"add": 1, "sub": 1, "mul": 1, "div": 1, "pow": 1, "maximum": 1, "minimum": 1, "clamp_min": 1,
             "clamp_max": 1, "copy_": 1, "lerp": 2, "addcmul": 2, "addcdiv": 2}  # fmt: skip
    names = [name.removeprefix("_foreach_") for name in dir(torch) if name.startswith("_foreach_")]

    def run(place):
        for name in names:
            lists = [[place(tensor) for tensor in column] for column in (tensors, others, third)]
            function = getattr(torch, f"_foreach_{name}")
            if name == "mm":
                yield function([lists[0][0]], [lists[1][0].t()])[0]
                continue
            count = extra.get(name, extra.get(name.removesuffix("_"), 0))
            arguments = (lists[1], 0.25) if name.startswith("lerp") else lists[1 : 1 + count]
            result = function(lists[0], *arguments)
            if name.endswith("_"):
                assert all(one is other for one, other in zip(result, lists[0], strict=True)), name
            yield from result

    expected = list(run(torch.clone))

    def on_rank(mesh):
        places = itertools.cycle([S0, R])
        return [whole(tensor) for tensor in run(lambda tensor: distribute_tensor(tensor, mesh, [next(places)]))]

    for results in on_ranks(on_rank, world):
        for actual, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(actual, wanted, equal_nan=True)


@pytest.mark.parametrize("options", [("Adam", {"amsgrad": True}), ("AdamW", {"amsgrad": True}), ("Adamax", {})])
def test_foreach_optimizers_take_plain_parameters_beside_dtensors(options):
    """Amsgrad and Adamax train distributed and plain parameters to the values of one device."""
    name, more = options

    def train(first):
        parameters = [torch.nn.Parameter(first), torch.nn.Parameter(values(3, seed=1))]
        optimizer = getattr(torch.optim, name)(parameters, lr=0.1, foreach=True, **more)
        for _ in range(3):
            optimizer.zero_grad()
            for parameter in parameters:
                (parameter**2).sum().backward()
            optimizer.step()
        return parameters

    for results in on_ranks(lambda mesh: [*map(whole, train(distribute_tensor(values(5, 3), mesh, [S0])))], 3):
        close(results, train(values(5, 3)))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("shapes", [((1, 0, 5), (4, 0, 3)), ((2, 0, 5), (1, 0, 2)), ((0, 3, 5), (4, 3, 2))])
def test_convolutions_of_nothing_have_the_sizes_of_one_device(shapes, place):
    """Without channels or samples the result has PyTorch's sizes, and gradients."""
    x, weight = (torch.ones(shape) for shape in shapes)

    def run(x, weight):
        x.requires_grad_()
        y = torch.nn.functional.conv1d(x, weight, padding=1)
        y.sum().backward()
        return [tuple(y.shape), tuple(x.grad.shape)]

    expected = run(x.clone(), weight)
    actual = on_ranks(lambda mesh: run(distribute_tensor(x, mesh, [place]), distribute_tensor(weight, mesh, [R])), 2)
    assert actual == [expected] * 2


@pytest.mark.parametrize("world", [2, 3])
def test_saved_tensors_load_with_plain_data_alone(world):
    """torch.load's default, weights_only, loads DTensors, parameters and the state of a parallel module."""

    def on_rank(mesh):
        model = parallelize_module(torch.nn.Linear(4, 7), mesh, ColwiseParallel())
        state = {"w": distribute_tensor(values(5, 4), mesh, [S0]), **model.state_dict(), "p": model.weight}
        file = io.BytesIO()
        torch.save(state, file)
        loaded = torch.load(io.BytesIO(file.getvalue()))
        assert type(loaded["p"]) is type(model.weight)
        assert all(loaded[name].layout is tensor.layout for name, tensor in state.items())
        close(loaded.values(), state.values())

    on_ranks(on_rank, world)


def test_a_hostile_file_makes_no_dtensor():
    """What a file gives in place of a local tensor, its layout or attributes is refused with the reason."""
    from hyper_parallel.platform.torch.dtensor import _rebuild

    def on_rank(mesh):
        layout = Layout.place(mesh, [S0], (5, 4))
        elsewhere = Layout.place(DeviceMesh("cpu", [0]), [R], (5, 4))
        texts: list[str] = []
        for local, placed, extras in [
            (torch.ones(9, 4), layout, {}), ("data", layout, {}), (torch.ones(3, 4), "layout", {}),
            (torch.ones(layout.local_shape), layout, {"_layout": 3}), (torch.ones(9, 4), elsewhere, {}),
        ]:  # fmt: skip
            with pytest.raises(LayoutError) as caught:
                _rebuild(local, placed, extras)
            texts.append(str(caught.value))
        return texts

    kinds = "a pickled DTensor must be a local tensor, its layout, and attributes that others attached; load another"
    assert on_ranks(on_rank, 2)[1] == [
        (
            "a pickled DTensor has layout f32[5@0, 4], of which rank 1 holds [2, 4], but its local tensor is [9, 4]; "
            "load the file that this rank wrote"
        ),
        kinds, kinds, kinds,
        (
            "a pickled DTensor has layout f32[5, 4], on a mesh without rank 1, with a local tensor [9, 4]; load the "
            "file that this rank wrote, or send the result of full_tensor(): pipeline stages return plain tensors"
        ),
    ]  # fmt: skip


def test_a_parallel_module_is_pickled_with_its_hooks():
    """A module with parallel styles, or with functions of distribute_module, is copied and unpickled whole."""
    x = values(3, 4)

    def on_rank(mesh):
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
        model = parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):  # noqa: S301 - its own bytes
            torch.testing.assert_close(other(x), model(x))
        replicated = distribute_module(torch.nn.Linear(4, 2), mesh, input_fn=entering, output_fn=leaving)
        torch.testing.assert_close(pickle.loads(pickle.dumps(replicated))(x), replicated(x))  # noqa: S301 - as above

    on_ranks(on_rank, 2)


def entering(module, inputs, mesh):
    """Replicate the first input."""
    del module
    return distribute_tensor(inputs[0], mesh, [R])


def leaving(module, outputs, mesh):
    """Give the whole tensor."""
    del module, mesh
    return outputs.full_tensor()


@pytest.mark.parametrize("place", PLACES)
def test_assert_close_compares_dtensors(place):
    """torch.testing.assert_close passes equal DTensors and names the greatest difference of others."""

    def on_rank(mesh):
        x = distribute_tensor(values(5, 4), mesh, [place])
        torch.testing.assert_close(x, x.clone())
        with pytest.raises(AssertionError) as caught:
            torch.testing.assert_close(x, x * torch.where(x == x.max(), 2.0, 1.0))
        assert x.layout is not torch.strided
        return "Mismatched elements: 1 / 20" in str(caught.value)

    assert on_ranks(on_rank, 3) == [True] * 3


def test_masked_functions_may_be_imported_first():
    """References to torch.masked's functions that a script took before take DTensors, and plain tensors as ever."""
    x, mask = values(5, 4), values(5, 4, seed=1) > 0
    expected = [masked_sum(x, 1, mask=mask), masked_mean(x, 0, mask=mask)]

    def on_rank(mesh):
        placed, placed_mask = (distribute_tensor(tensor, mesh, [S0]) for tensor in (x, mask))
        return [whole(masked_sum(placed, 1, mask=placed_mask)), whole(masked_mean(placed, 0, mask=placed_mask))]

    for results in on_ranks(on_rank, 3):
        close(results, expected)


@pytest.mark.parametrize("place", PLACES)
def test_samples_of_probabilities_have_a_gradient_of_zero(place):
    """torch.bernoulli of probabilities that need a gradient gives them zeros."""

    def on_rank(mesh):
        p = distribute_tensor(values(5, 4).sigmoid(), mesh, [place]).requires_grad_()
        sample = torch.bernoulli(p)
        sample.sum().backward()
        assert set(whole(sample).unique().tolist()) == {0.0, 1.0}
        return whole(p.grad)

    for gradient in on_ranks(on_rank, 3):
        assert torch.equal(gradient, torch.zeros(5, 4))


def test_constants_of_one_element_may_be_plain():
    """A plain tensor of one element and no gradient is a constant; others are refused as before."""
    x, constants = values(5, 4), [torch.tensor(2.0), torch.tensor([2.0]), torch.tensor([[3.0]])]

    def run(x):
        x.requires_grad_()
        results = [(x * constant + constant) / constant for constant in constants]
        return [*results, torch.autograd.grad(sum(result.sum() for result in results), x)[0]]

    expected = run(x.clone())
    for places in PLACES:
        for results in on_ranks(lambda mesh, p=places: [*map(whole, run(distribute_tensor(x, mesh, [p])))], 2):
            close(results, expected)


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_a_constant_may_be_written_into_a_pending_value(op, shape):
    """fill_ of a pending sum or extremum gives the constant on every rank, and torch.fill leaves its operand."""

    def on_rank(mesh):
        places = [Partial(op)] * mesh.ndim
        local = values(5, 4, seed=mesh.rank)
        x = get_torch_platform().wrap(local, Layout.place(mesh, places, (5, 4)))
        before = whole(x)
        filled = torch.fill(x, 7.0)
        assert torch.equal(whole(x), before)
        with strict():
            x.fill_(3.0)
        assert x.placements == tuple(places)
        return [whole(x), whole(filled)]

    for results in on_ranks(on_rank, *shape):
        close(results, [torch.full((5, 4), 3.0), torch.full((5, 4), 7.0)])


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_a_tensor_may_be_written_into_a_pending_value(shape):
    """fill_ of a pending value with a tensor gives that tensor's value on every rank, and its gradient."""
    cotangent, ops = values(5, 4, seed=7), ("sum", "avg", "max", "min")

    def filled(mesh, op):
        whole_places = [R] * mesh.ndim
        x = get_torch_platform().wrap(
            values(5, 4, seed=mesh.rank), Layout.place(mesh, [Partial(op)] * mesh.ndim, (5, 4))
        )
        constant = distribute_tensor(torch.tensor(3.0), mesh, whole_places).requires_grad_()
        with strict():
            x.fill_(constant)
        assert x.placements == tuple(Partial(op) for _ in shape)
        (gradient,) = torch.autograd.grad(x, constant, distribute_tensor(cotangent, mesh, whole_places))
        with strict():
            other = x.detach().fill_(torch.tensor(4.0, dtype=torch.float64))
        return [whole(gradient), whole(other)]

    for results in on_ranks(lambda mesh: [filled(mesh, op) for op in ops], *shape):
        for result in results:
            close(result, [cotangent.sum(), torch.full((5, 4), 4.0)])


@pytest.mark.parametrize("dim", [0, 1, None])
def test_weights_by_length_and_direction_train_alike(dim):
    """nn.utils.parametrizations.weight_norm over distributed weights has the outputs and gradients of one device."""
    x = values(3, 4)

    def run(place, data):
        layer = torch.nn.Linear(4, 7)
        layer.weight = torch.nn.Parameter(place(values(7, 4, seed=1), 0))
        layer.bias = torch.nn.Parameter(place(values(7, seed=2), 1))
        layer = torch.nn.utils.parametrizations.weight_norm(layer, dim=dim)
        y = layer(data)
        (y**2).sum().backward()
        return [y, *(parameter.grad for parameter in layer.parameters())]

    expected = run(lambda tensor, _: tensor, x)

    def on_rank(mesh):
        return [
            [
                *map(
                    whole,
                    run(lambda t, i, p=p: distribute_tensor(t, mesh, [(p, R)[i]]), distribute_tensor(x, mesh, [R])),
                )
            ]
            for p in PLACES
        ]

    for results in on_ranks(on_rank, 3):
        for result in results:
            close(result, expected)


@pytest.mark.parametrize("options", [
    {"max_norm": 1.0}, {"scale_grad_by_freq": True},
    {"max_norm": 0.5, "norm_type": 1.0, "scale_grad_by_freq": True, "padding_idx": 3},
])  # fmt: skip
def test_embeddings_with_options_train_alike(options):
    """max_norm and scale_grad_by_freq over tables and ids however sharded: values, gradients and shortened rows."""
    ids, table = torch.tensor([[1, 1, 3], [6, 6, 6]]), values(7, 4)

    def run(ids, weight):
        y = torch.nn.functional.embedding(ids, weight, **options)
        (y**2).sum().backward()
        return [y, weight.grad, weight]

    expected = run(ids, torch.nn.Parameter(table.clone()))

    def on_rank(mesh):
        placed = itertools.product(PLACES, repeat=2)
        return [
            [
                *map(
                    whole,
                    run(distribute_tensor(ids, mesh, [p]), torch.nn.Parameter(distribute_tensor(table, mesh, [q]))),
                )
            ]
            for p, q in placed
        ]

    for results in on_ranks(on_rank, 3):
        for result in results:
            close(result, expected)


@pytest.mark.parametrize("place", PLACES)
def test_identities_and_constants_are_written_into_parameters(place):
    """nn.init.eye_, and functions that write numbers with out=, fill a distributed parameter."""

    def on_rank(mesh):
        weight = torch.nn.Parameter(distribute_tensor(values(5, 4), mesh, [place]))
        torch.nn.init.eye_(weight)
        out = distribute_tensor(values(4, 3), mesh, [place])
        return [whole(weight), whole(torch.ones(4, 3, out=out).clone())]

    for results in on_ranks(on_rank, 3):
        close(results, [torch.eye(5, 4), torch.ones(4, 3)])


@pytest.mark.parametrize("world", [2, 3])
def test_no_tangent_is_lost_where_values_move_inside_of_a_function(world):
    """Jvp of a function that makes DTensors inside is right while nothing moves; a step is refused.

    Both of PyTorch's interfaces are refused, and backward differentiation of the same function goes.
    """
    from torch.autograd import forward_ad

    x, direction = values(world, 3), values(world, 3, seed=1)

    def on_rank(mesh):
        def local(y):
            return (DTensor.from_local(y, mesh, [S0]) * 3.0).to_local()

        def moved(y):
            return DTensor.from_local(y, mesh, [S0]).full_tensor()

        texts, rank = [], mesh.get_local_rank()
        one, along = x[rank : rank + 1], direction[rank : rank + 1]
        tangent = torch.func.jvp(local, (one,), (along,))[1]
        with pytest.raises(UnsupportedOperatorError) as caught:
            torch.func.jvp(moved, (one,), (along,))
        texts.append(str(caught.value))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(one, along)
            with pytest.raises(UnsupportedOperatorError) as caught:
                moved(dual)
        texts.append(str(caught.value))
        leaf = one.clone().requires_grad_()
        moved(leaf).backward(direction)
        return texts, torch.equal(tangent, along * 3.0), torch.equal(leaf.grad, along)

    message = (
        f"redistribute: forward-mode differentiation cannot go through f32[{world}@0, 3] -> f32[{world}, 3]; "
        "differentiate backward, or backward twice as torch.autograd.functional.jvp does"
    )
    assert on_ranks(on_rank, world) == [([message, message], True, True)] * world


def test_forward_mode_differentiation_is_refused_with_an_alternative():
    """torch.func.jvp says what goes, and that goes; grad and vjp of torch.func are right, or refused in words."""
    x, direction = values(5), values(5, seed=1)

    def function(y):
        return (y.tanh() * y).sum()

    def on_rank(mesh):
        placed, along = distribute_tensor(x, mesh, [S0]), distribute_tensor(direction, mesh, [R])
        texts: list[str] = []
        for call in (lambda: torch.func.jvp(function, (placed,), (along,)), lambda: torch.func.grad(function)(placed)):
            with pytest.raises(UnsupportedOperatorError) as caught:
                call()
            texts.append(str(caught.value))
        value, pull = torch.func.vjp(lambda y: (y * y).sum(), placed)
        gradients = [torch.func.grad(lambda y: (y * y).sum())(placed), pull(torch.ones_like(value))[0]]
        forward = torch.autograd.functional.jvp(function, placed, along)[1]
        return texts, [*map(whole, gradients), whole(forward)]

    messages = [
        (
            "forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad) does not support DTensors "
            "(f32[5@0]); use torch.autograd.functional.jvp, which runs backward twice"
        ),
        (
            "operator aten.tanh_backward.default has no sharding rule (layouts: f32[5@0], f32[5@0]), and torch.func "
            "differentiates with it; use torch.autograd.grad instead of torch.func.grad and torch.func.vjp, or run "
            "it replicated: hyper_parallel.ReplicatedOp('aten.tanh_backward.default')"
        ),
    ]
    expected = torch.autograd.functional.jvp(function, x, direction)[1]
    for texts, results in on_ranks(on_rank, 2):
        assert texts == messages
        close(results, [2 * x, 2 * x, expected])


def test_transforms_refuse_dtensors_that_their_function_captures():
    """A captured DTensor beside an argument, of one element too, is refused in words; as an argument it goes."""
    x, w = values(4, 3), values(3)
    calls = {
        "vmap": lambda w: torch.func.vmap(lambda row: row * w),
        "grad": lambda w: torch.func.grad(lambda rows: (w * rows).sum()),
    }

    def on_rank(mesh):
        rows, weight = distribute_tensor(x, mesh, [S0]), distribute_tensor(w, mesh, [R])
        refusals = []
        for name, given in (("vmap", rows), ("vmap", torch.arange(3.0)), ("grad", rows), ("grad", torch.tensor(2.0))):
            with pytest.raises(MixedTensorError) as caught:
                calls[name](weight)(given)
            refusals.append(str(caught.value))
        with pytest.raises(MixedTensorError) as caught:
            torch.func.vmap(torch.mul, (0, None))(rows, weight)
        refusals.append(str(caught.value))
        gradients = torch.func.grad(lambda rows, w: (w * rows).sum(), (0, 1))(rows, weight)
        return refusals, [*map(whole, gradients), whole(torch.func.vmap(torch.mul)(rows, rows))]

    text = (
        "an argument of a function that torch.func transforms (grad, vjp, vmap), or computed from one, but other "
        "operands are DTensors on DeviceMesh(cpu, 2, ranks=[0, 1]) that are not; pass the function every DTensor "
        "as an argument that is transformed, or differentiate with torch.autograd.grad"
    )
    for refusals, results in on_ranks(on_rank, 2):
        assert {refusal.partition(" is ")[0] for refusal in refusals} == {"argument x", "argument y"}
        assert {refusal.partition(" is ")[2] for refusal in refusals} == {text}
        close(results, [w.expand(4, 3), x.sum(0), x * x])


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("world", [2, 3])
def test_extrema_of_pending_extrema_need_no_collective(op, world):
    """maximum, amax and max of Partial(max) stay pending without a gradient; with one, ties share it."""
    pairs = [torch.randint(-2, 3, (5, 4), generator=torch.Generator().manual_seed(seed)).float() for seed in (1, 2)]
    combine = getattr(torch, f"{op}imum")

    def functions(x, y):
        return [combine(x, y), getattr(torch, op)(x, y), getattr(x, op)(), getattr(x, f"a{op}")(0)]

    def on_rank(mesh):
        made = []
        for dtype in (torch.float32, torch.int64):
            placed = [
                distribute_tensor(pair.to(dtype), mesh, [R]).redistribute(placements=[Partial(op)]) for pair in pairs
            ]
            with strict():
                results = functions(*placed)
            assert all(result.placements == (Partial(op),) for result in results)
            made.extend(map(whole, results))
        leaves = [distribute_tensor(pair, mesh, [R]).requires_grad_() for pair in pairs]
        results = functions(*(leaf.redistribute(placements=[Partial(op)]) for leaf in leaves))
        sum((result * result).sum() for result in results).backward()
        return made, [whole(leaf.grad) for leaf in leaves]

    leaves = [pair.clone().requires_grad_() for pair in pairs]
    sum((result * result).sum() for result in functions(*leaves)).backward()
    expected = [*functions(*pairs), *functions(*(pair.long() for pair in pairs))]
    for made, gradients in on_ranks(on_rank, world):
        close(made, expected)
        close(gradients, [leaf.grad for leaf in leaves])


UNSAFE = {
    "unsafe_chunk": (lambda x: x.unsafe_chunk(2, 1), lambda x: torch.chunk(x, 2, 1), "chunk"),
    "unsafe_split": (lambda x: torch.unsafe_split(x, 2), lambda x: x.split(2), "split"),
    "unsafe_split_with_sizes": (
        lambda x: torch.unsafe_split_with_sizes(x, [3, 0, 2]), lambda x: x.split([3, 0, 2]), "split"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSAFE)
@pytest.mark.parametrize("world", [2, 3])
def test_unsafe_parts_are_read_only(name, world):
    """Parts whose writes autograd does not see have the right values, gradients, and refuse to be written."""
    unsafe, safe, alternative = UNSAFE[name]
    whole = values(5, 3).requires_grad_()
    sum((part**2).sum() for part in safe(whole)).backward()

    def on_rank(mesh):
        texts: list[str] = []
        for place in PLACES:
            x = distribute_tensor(whole.detach(), mesh, [place]).requires_grad_()
            parts = unsafe(x)
            sum((part**2).sum() for part in parts).backward()
            for part, expected in zip(parts, safe(whole), strict=True):
                torch.testing.assert_close(part.full_tensor(), expected)
            torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
            with pytest.raises(UnsupportedOperatorError) as caught, torch.no_grad():
                unsafe(distribute_tensor(whole.detach(), mesh, [R]))[0].mul_(2.0)
            texts.append(str(caught.value).partition("x cannot be written to: ")[2])
        return texts

    for texts in on_ranks(on_rank, world):
        reason = f"it is a part by unsafe_{alternative}, and autograd does not see writes to it; use {alternative}"
        assert set(texts) == {f"{reason}, or write to a clone()"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_mean_of_nothing_is_not_a_number(dtype, world):
    """The mean over an empty dim is NaN in every dtype and layout, as on one device."""

    def on_rank(mesh):
        for shape, dim in (((0, 2), 0), ((3, 0), -1), ((0,), None)):
            whole = torch.zeros(shape, dtype=dtype)
            expected = whole.mean() if dim is None else whole.mean(dim, keepdim=True)
            for place in (R, *(Shard(d) for d in range(len(shape)))):
                x = distribute_tensor(whole, mesh, [place])
                mean = x.mean() if dim is None else x.mean(dim, keepdim=True)
                torch.testing.assert_close(mean.full_tensor(), expected, equal_nan=True)

    on_ranks(on_rank, world)


LEAF_WRITES = {
    "mul_": lambda x: x.mul_(3.0),
    "add_ of itself": lambda x: x.add_(x),
    "+=": lambda x: x.__iadd__(2.0 * x),
    "copy_": lambda x: x.copy_(-3.0 * x),
    "a part": lambda x: x.__setitem__((slice(None), slice(0, 1)), 2.0),
    "twice": lambda x: x.mul_(2.0).add_(torch.exp(x)),
    "zero_": lambda x: x.zero_(),
}


@pytest.mark.parametrize("write", LEAF_WRITES)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_tensor_over_a_callers_leaf_may_be_written(write, world):
    """``from_local(leaf)`` is a result of the leaf: a write keeps the leaf's gradient, and shows in its storage."""
    whole = values(5, 3)
    single = whole.clone().requires_grad_()
    expected = single * 1.0
    LEAF_WRITES[write](expected)
    (expected**2).sum().backward()

    def on_rank(mesh):
        for place in (R, S0):
            leaf = distribute_tensor(whole, mesh, [place]).to_local().clone().requires_grad_()
            x = DTensor.from_local(leaf, mesh, [place], shape=(5, 3))
            with torch.no_grad():
                x.mul_(1.0)
            assert x.is_leaf
            LEAF_WRITES[write](x)
            assert not x.is_leaf
            (x**2).sum().backward()
            torch.testing.assert_close(x.full_tensor(), expected)
            assert torch.equal(leaf.detach(), x.to_local())
            grad = distribute_tensor(single.grad, mesh, [place]).to_local()
            torch.testing.assert_close(leaf.grad, grad)

    on_ranks(on_rank, world)


def test_a_leaf_of_the_library_is_not_written():
    """A DTensor that requires a gradient itself refuses writes as a leaf of one device does."""

    def on_rank(mesh):
        for x in (
            distribute_tensor(values(5, 3), mesh, [S0]).requires_grad_(),
            DTensor.from_local(values(2, 3), mesh, [R]).requires_grad_(),
        ):
            with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
                x.mul_(2.0)

    on_ranks(on_rank, 2)


SPARSE = {
    "SparseAdam": lambda parameters: torch.optim.SparseAdam(parameters, lr=0.1),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("optimizer", SPARSE)
def test_tables_with_sparse_gradients_train_alike(optimizer, world):
    """Only rows that were looked up change, whichever dim of the table is sharded; plain tables may be beside it."""
    ids, look_up = torch.tensor([[0, 1, 6, 6], [3, 0, 1, 3]]), torch.nn.functional.embedding

    def run(place, at):
        table, plain = torch.nn.Parameter(place(values(7, 5), at)), torch.nn.Parameter(values(2, 5, seed=1))
        step, results = SPARSE[optimizer]([table, plain]), []
        for rows in (ids, ids[:, :0], ids[:1] * 0 + 2, (ids + 2) % 7):
            step.zero_grad()
            y = look_up(place(rows, R), table, padding_idx=3, sparse=True)
            (y * y).sum().backward()
            look_up(torch.tensor([1]), plain, sparse=True).sum().backward()
            results += [y, table.grad.to_dense()]
            step.step()
        return [*results, table, plain]

    def on_rank(mesh):
        return [[*map(whole, run(lambda value, at: distribute_tensor(value, mesh, [at]), place))] for place in PLACES]

    expected = run(lambda value, _: value.clone(), R)
    for results in on_ranks(on_rank, world):
        for result in results:
            close(result, expected)
