"""Public functions on ranks, with random arguments: the results are those of one device, or an error of the library."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

import hyper_parallel as hp
from hyper_parallel import Partial, Replicate, Shard
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")

MESHES = st.sampled_from([(2,), (3,), (4,), (2, 2), (1, 3)])
SIZES = st.sampled_from([0, 1, 2, 3, 5, 7])
SHAPES = st.lists(SIZES, min_size=1, max_size=3).map(tuple)
FACTORIES = st.sampled_from(["zeros", "ones", "empty", "full", "rand", "randn"])
ANY_PLACEMENT = st.sampled_from([Replicate(), Partial(), Partial("max"), *(Shard(dim) for dim in range(-4, 5))])


def grid_of(mesh):
    """The mesh of this shape, with named axes."""
    return hp.init_device_mesh("cpu", mesh, mesh_dim_names=tuple("abc"[: len(mesh)]))


def shards_of(data, mesh, dims):
    """A random placement per axis: whole, or a shard of a dim that exists."""
    return data.draw(st.tuples(*(st.sampled_from([Replicate(), *map(Shard, range(dims))]) for _ in mesh)))


def random_array(data, shape):
    """Values of this shape, from a seed that is drawn."""
    return np.random.default_rng(data.draw(st.integers(0, 99))).standard_normal(shape).astype(np.float32)


@settings(max_examples=25)
@given(mesh=MESHES, shape=SHAPES, name=FACTORIES, seed=st.integers(-(2**70), 2**70), data=st.data())
def test_a_factory_has_the_values_of_one_rank(mesh, shape, name, seed, data):
    """What a factory makes depends on no mesh and no placement, and the random stream goes on from any state."""
    placements = shards_of(data, mesh, len(shape))

    def made(grid, places):
        hp.manual_seed(seed)
        options = {"device_mesh": grid, "placements": places}
        arguments = (shape, 2.5) if name == "full" else (shape,)
        state = hp.get_rng_state()
        first = getattr(hp, name)(*arguments, **options)
        after = hp.get_rng_state()
        hp.set_rng_state(state)
        second = getattr(hp, name)(*arguments, **options)
        assert hp.get_rng_state() == after
        assert first.placements == places
        return first.full_tensor().numpy(), second.full_tensor().numpy(), after

    (alone,) = simulate(lambda: made(grid_of((1,)), (Replicate(),)), 1, platform="torch")
    np.testing.assert_array_equal(alone[0], alone[1])
    for first, second, state in simulate(lambda: made(grid_of(mesh), placements), math.prod(mesh), platform="torch"):
        np.testing.assert_array_equal(first, alone[0])
        np.testing.assert_array_equal(second, alone[0])
        assert state == alone[2]


@settings(max_examples=30)
@given(
    mesh=MESHES,
    shape=SHAPES,
    places=st.lists(ANY_PLACEMENT, min_size=1, max_size=2),
    changed=st.booleans(),
    data=st.data(),
)
def test_placements_are_fitting_or_refused_on_all_ranks(mesh, shape, places, changed, data):
    """Placements that do not fit are one error of the library on every rank; others keep every value."""
    import torch

    array = random_array(data, shape)

    def on_rank():
        grid = grid_of(mesh)
        try:
            value = hp.distribute_tensor(torch.from_numpy(array.copy()), grid, None if changed else places)
            value = value.redistribute(grid, places) if changed else value
        except HyperParallelError as error:
            return str(error)
        return value.full_tensor().numpy()

    results = simulate(on_rank, math.prod(mesh), platform="torch")
    refused = [isinstance(result, str) for result in results]
    fits = len(places) == len(mesh) and all(
        not isinstance(place, Shard) or -len(shape) <= place.dim < len(shape) for place in places
    )
    assert all(refused) or not any(refused)
    assert all(refused) or fits
    assert not any(refused) or not fits or any(isinstance(place, Partial) for place in places)
    for result in results:
        if not isinstance(result, str):
            np.testing.assert_array_equal(result, array)


@settings(max_examples=25)
@given(mesh=MESHES, shape=SHAPES, data=st.data())
def test_local_tensors_make_up_the_tensor_they_came_from(mesh, shape, data):
    """from_local of to_local is the same tensor, and the gradient reaches the local leaf as this rank's part."""
    import torch

    array, cotangent = random_array(data, shape), random_array(data, shape)
    placements = shards_of(data, mesh, len(shape))

    def on_rank():
        grid = grid_of(mesh)
        parts = [hp.distribute_tensor(torch.from_numpy(each.copy()), grid, placements) for each in (array, cotangent)]
        leaf = parts[0].to_local().clone().requires_grad_()
        value = hp.DTensor.from_local(leaf, grid, placements, run_check=True, shape=shape)
        (value * value * parts[1]).sum().backward()
        torch.testing.assert_close(leaf.grad, 2 * leaf.detach() * parts[1].to_local())
        return value.full_tensor().detach().numpy()

    for result in simulate(on_rank, math.prod(mesh), platform="torch"):
        np.testing.assert_array_equal(result, array)


@settings(max_examples=25)
@given(
    mesh=MESHES,
    shapes=st.lists(SHAPES, min_size=1, max_size=3),
    norm_type=st.sampled_from([1.0, 2.0, 3.5, math.inf]),
    bound=st.sampled_from([0.0, 0.1, 1.0, 100.0]),
    data=st.data(),
)
def test_clipped_gradients_are_those_of_one_device(mesh, shapes, norm_type, bound, data):
    """clip_grad_norm_ has the norm and the gradients of PyTorch's function on one device, whatever is plain."""
    import torch

    arrays = [random_array(data, shape) for shape in shapes]
    assume(norm_type != math.inf or all(array.size for array in arrays))  # a maximum of nothing is an error
    chosen = [data.draw(st.none() | st.just(shards_of(data, mesh, len(shape)))) for shape in shapes]
    alone = [torch.from_numpy(array.copy()).requires_grad_() for array in arrays]
    for parameter in alone:
        parameter.grad = parameter.detach() * 3
    norm = torch.nn.utils.clip_grad_norm_(alone, bound, norm_type)

    def on_rank():
        grid, parameters = grid_of(mesh), []
        for array, placements in zip(arrays, chosen, strict=True):
            plain = torch.from_numpy(array.copy())
            parameter = plain if placements is None else hp.distribute_tensor(plain, grid, placements)
            parameters.append(parameter.requires_grad_())
            parameters[-1].grad = parameter.detach() * 3
        found = hp.clip_grad_norm_(parameters, bound, norm_type)
        gradients = [parameter.grad for parameter in parameters]
        return found, [each.full_tensor() if isinstance(each, hp.DTensor) else each for each in gradients]

    for total, gradients in simulate(on_rank, math.prod(mesh), platform="torch"):
        torch.testing.assert_close(total, norm)
        torch.testing.assert_close(gradients, [parameter.grad for parameter in alone])


@settings(max_examples=25)
@given(
    world=st.integers(1, 4),
    rows=st.sampled_from([1, 2, 5]),
    classes=st.sampled_from([1, 2, 3, 5, 7]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.3]),
    data=st.data(),
)
def test_a_loss_over_sharded_classes_is_that_of_one_device(world, rows, classes, reduction, smoothing, data):
    """Inside loss_parallel, loss and gradient of any labels, ignored ones too, are those of whole logits."""
    import torch

    array = random_array(data, (rows, classes))
    labels = torch.tensor(data.draw(st.lists(st.sampled_from([-100, *range(classes)]), min_size=rows, max_size=rows)))
    cotangent = torch.from_numpy(random_array(data, (rows,) if reduction == "none" else ()).copy())

    def loss_of(logits, weight):
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction=reduction, label_smoothing=smoothing)
        return loss, torch.autograd.grad(loss, logits, weight)[0]

    expected = loss_of(torch.from_numpy(array.copy()).requires_grad_(), cotangent)

    def on_rank():
        grid = grid_of((world,))
        logits = hp.distribute_tensor(torch.from_numpy(array.copy()), grid, [Shard(1)]).requires_grad_()
        with hp.loss_parallel():
            results = loss_of(logits, hp.distribute_tensor(cotangent, grid, [Replicate()]))
        return [result.full_tensor().detach() for result in results]

    for results in simulate(on_rank, world, platform="torch"):
        torch.testing.assert_close(results, [result.detach() for result in expected], equal_nan=True)


@settings(max_examples=40)
@given(state=st.none() | st.integers() | st.text(max_size=2) | st.lists(st.integers() | st.floats(), max_size=3))
def test_a_random_state_is_taken_back_or_refused(state):
    """set_rng_state takes pairs of natural numbers, and says of everything else what it must be."""

    def on_rank():
        hp.manual_seed(3)
        before = hp.get_rng_state()
        try:
            hp.set_rng_state(state)
        except ValueError as error:
            assert hp.get_rng_state() == before
            return str(error)
        return hp.get_rng_state()

    for result in simulate(on_rank, 2, platform="torch"):
        if isinstance(result, str):
            assert result.startswith("set_rng_state: ")
        else:
            assert list(result) == list(state)
