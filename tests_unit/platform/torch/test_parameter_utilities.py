"""``torch.nn.utils`` on parallelized models: vectors, parametrizations and pruning mean what they do on one device."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn.utils import (
    parameters_to_vector,
    parametrizations,
    parametrize,
    prune,
    vector_to_parameters,
)

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.errors import LayoutError, MixedTensorError, UnsupportedOperatorError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LAYERS = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def numbers(*shape, seed=0):
    """Random values, equal on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def model():
    """Two layers, the same on every rank."""
    layers = copy.deepcopy(LAYERS)
    for number, parameter in enumerate(layers.parameters()):
        parameter.data.copy_(numbers(*parameter.shape, seed=number))
    return layers


def parallel(world):
    """The two layers over ``world`` ranks, with uneven shards."""
    mesh = init_device_mesh("cpu", (world,))
    return parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def whole(values):
    """Plain tensors off the graph."""
    return [(value.full_tensor() if isinstance(value, DTensor) else value).detach() for value in values]


def on_ranks(function, world):
    """``function(model)`` on every rank; its tensors, whole."""
    return simulate(lambda: whole(function(parallel(world))), world, "torch")


def trained(layers):
    """The loss, and every parameter and gradient after one step."""
    parameters = list(layers.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1)
    optimizer.zero_grad()
    loss = (layers(numbers(4, 5, seed=9)) * numbers(4, 3, seed=8)).square().sum()
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in parameters]
    optimizer.step()
    return [loss, *gradients, *parameters]


def assert_as_on_one_device(function, world):
    """``function`` gives equal tensors with the parallelized model and with the plain one."""
    wanted = whole(function(model()))
    for results in on_ranks(function, world):
        torch.testing.assert_close(results, wanted)


# -- vectors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4])
def test_parameters_take_the_parts_of_a_vector(world):
    """A vector computed from all parameters is assigned to them, and training goes on from there."""

    def run(layers):
        vector = parameters_to_vector(layers.parameters())
        vector_to_parameters(vector * 2 + 1, layers.parameters())
        with torch.no_grad():
            mean = 0.9 * vector + 0.1 * parameters_to_vector(layers.parameters())
        vector_to_parameters(mean, layers.parameters())
        return [*trained(layers), parameters_to_vector(layers.parameters())]

    assert_as_on_one_device(run, world)


def test_a_vector_whose_parts_were_copied_is_not_used_as_if_they_were_shared():
    """On one device the parameters are its parts: it is not written, and not read after they were."""

    def rank():
        layers = parallel(2)
        vector = parameters_to_vector(layers.parameters()).detach() * 1
        vector_to_parameters(vector, layers.parameters())
        reason = "vector_to_parameters copied its parts into parameters; give it vec.clone()"
        with pytest.raises(UnsupportedOperatorError, match=f"cannot be written to: {re.escape(reason)}$"):
            vector.add_(1)
        assert torch.equal(vector.full_tensor(), parameters_to_vector(layers.parameters()).full_tensor())
        with torch.no_grad():
            layers[2].bias.add_(1)
        with pytest.raises(UnsupportedOperatorError, match=f"is stale: {re.escape(reason)};"):
            vector.full_tensor()
        with pytest.raises(UnsupportedOperatorError, match="is stale: "):
            vector_to_parameters(vector, layers.parameters())

    simulate(rank, 2, "torch")


def test_vectors_that_do_not_fit_are_refused():
    """Plain vectors or parameters among DTensors, other sizes, and vectors that share their storage."""

    def rank():
        layers = parallel(2)
        parameters = list(layers.parameters())
        vector = parameters_to_vector(parameters)
        texts = []
        for value, targets in (
            (vector.full_tensor(), parameters),
            (vector.clone(), [*parameters[:-1], nn.Parameter(torch.ones(3))]),
            (vector[:-1].clone(), parameters),
            (vector.detach()[1:], parameters[1:]),
            (vector.detach(), parameters),
        ):
            with pytest.raises((MixedTensorError, LayoutError, UnsupportedOperatorError)) as caught:
                vector_to_parameters(value, targets)
            texts.append(str(caught.value))
        return texts

    mixed = "but others are DTensors; make all of them DTensors: distribute_tensor(vector, mesh), "
    mixed += "distribute_module(model, mesh)"
    assert simulate(rank, 2, "torch")[0] == [
        f"vector_to_parameters: the vector is a plain Tensor, {mixed}",
        f"vector_to_parameters: parameter 3 is a plain Parameter, {mixed}",
        "vector_to_parameters: the vector is f64[65], the parameters have 66 elements",
        "vector_to_parameters: the vector is f64[65], the parameters have 31 elements",
        SHARED,
    ]


SHARED = (
    "vector_to_parameters: the vector shares its storage with another tensor (a view, its local tensor, or what a "
    "backward keeps). On one device the parameters would be views of that storage, but here they are copies; use "
    "vec.clone()"
)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0)])
@pytest.mark.parametrize(
    "keep",
    [
        lambda vector: vector[:9],
        lambda vector: vector.view(1, -1),
        lambda vector: vector.to_local(),
        lambda vector: vector.requires_grad_().square(),
    ],
    ids=["slice", "view", "local tensor", "graph"],
)
def test_a_vector_of_which_a_view_lives_is_refused(placement, keep):
    """On one device a write to the view would reach the parameters, and the other way round; its copy is taken."""

    def rank():
        layers = parallel(2)
        vector = parameters_to_vector(layers.parameters()).redistribute(placements=[placement]).detach().clone()
        kept = keep(vector)
        with pytest.raises(UnsupportedOperatorError, match=f"^{re.escape(SHARED)}$"):
            vector_to_parameters(vector, layers.parameters())
        vector_to_parameters(vector.clone(), layers.parameters())
        del kept
        vector_to_parameters(vector, layers.parameters())

    simulate(rank, 2, "torch")


# -- parametrizations --------------------------------------------------------------------------------------------------


class Double(nn.Module):
    """Twice the weight; what it is assigned comes in another layout."""

    def forward(self, weight):
        """The weight that the layer has."""
        return weight * 2

    def right_inverse(self, weight):
        """What is stored."""
        return weight.redistribute() / 2 if isinstance(weight, DTensor) else weight / 2


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    "register",
    [
        parametrizations.weight_norm,
        lambda layer: nn.utils.weight_norm(layer, dim=1),
        lambda layer: parametrize.register_parametrization(layer, "weight", Double()),
        lambda layer: parametrizations.orthogonal(layer, orthogonal_map="householder", use_trivialization=False),
        lambda layer: parametrizations.orthogonal(layer, orthogonal_map="cayley", use_trivialization=False),
    ],
    ids=["weight_norm", "old weight_norm", "own", "householder", "cayley"],
)
def test_parallelized_layers_take_parametrizations(world, register):
    """A parametrization of a layer that has a style already trains as on one device, and weights can be assigned."""

    def run(layers):
        torch.manual_seed(0)
        register(layers[0])
        register(layers[2])
        results = trained(layers)
        if hasattr(layers[0], "parametrizations"):
            with parametrize.cached():
                results += [layers(numbers(2, 5)), layers[0].weight]
        if any(isinstance(module, Double) for module in layers.modules()):
            layers[0].weight = layers[0].weight.detach() * 3
            results += trained(layers)
        return results

    assert_as_on_one_device(run, world)


@pytest.mark.parametrize("orthogonal_map", ["matrix_exp", "cayley", "householder"])
def test_orthogonal_weights_that_are_completed_by_random_numbers(orthogonal_map):
    """The random part is that of one rank, whatever the number of ranks, and weights stay orthogonal."""

    def run(layers):
        torch.manual_seed(0)
        for number in (0, 2):
            parametrizations.orthogonal(layers[number], orthogonal_map=orthogonal_map)
        results = trained(layers)
        weight = whole([layers[0].weight])[0]
        torch.testing.assert_close(weight.T @ weight, torch.eye(5, dtype=torch.float64))
        return results

    alone, *others = (on_ranks(run, world) for world in (1, 2, 3))
    for results in others:
        for result in results:
            torch.testing.assert_close(result, alone[0])


def test_a_value_given_in_another_layout_is_a_copy_that_nobody_writes():
    """What ``right_inverse`` returned is not written afterwards, and a part of another tensor is refused."""

    class Same(nn.Module):
        def forward(self, weight):
            return weight * 1

        def right_inverse(self, weight):
            return weight

    def rank():
        layer = parallel(2)[0]
        parametrize.register_parametrization(layer, "weight", Same())
        value = distribute_tensor(numbers(7, 5, seed=3), layer.bias.device_mesh, [R])
        layer.weight = value
        assert torch.equal(layer.weight.full_tensor(), value.full_tensor())
        text = "cannot be written to: it was given to a parametrization in another layout, which made a copy$"
        with pytest.raises(UnsupportedOperatorError, match=text):
            value.add_(1)
        part = distribute_tensor(numbers(9, 5), layer.bias.device_mesh, [S0])[:7]
        with pytest.raises(UnsupportedOperatorError, match=r"^what right_inverse returned would not share the storage"):
            layer.weight = part

    simulate(rank, 2, "torch")


# -- pruning -----------------------------------------------------------------------------------------------------------

PRUNINGS = {
    "identity": lambda layer: prune.identity(layer, "weight"),
    "smallest": lambda layer: prune.l1_unstructured(layer, "weight", amount=0.3),
    "rows": lambda layer: prune.ln_structured(layer, "weight", amount=1, n=2, dim=0),
    "columns": lambda layer: prune.ln_structured(layer, "weight", amount=2, n=float("inf"), dim=1),
    "none": lambda layer: prune.l1_unstructured(layer, "bias", amount=0),
    "twice": lambda layer: (PRUNINGS["smallest"](layer), PRUNINGS["rows"](layer), PRUNINGS["columns"](layer)),
}


class EveryOther(prune.BasePruningMethod):
    """A method of a user's, as PyTorch's tutorial writes it."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        """Drop every other element."""
        del t
        mask = default_mask.clone()
        mask.view(-1)[::2] = 0
        return mask


PRUNINGS["own"] = lambda layer: EveryOther.apply(layer, "weight")


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("name", PRUNINGS)
def test_pruned_layers_train_as_on_one_device(name, world):
    """Masks are chosen from whole weights, gradients are masked, and removing the method keeps the values."""

    def run(layers):
        PRUNINGS[name](layers[0])
        PRUNINGS[name](layers[2])
        results = trained(layers) + list(layers.buffers())
        assert prune.is_pruned(layers)
        for number in (0, 2):
            prune.remove(layers[number], "bias" if name == "none" else "weight")
        return results + trained(layers)

    assert_as_on_one_device(run, world)


@pytest.mark.parametrize("world", [2, 3])
def test_pruning_of_all_layers_together(world):
    """The smallest weights of all layers, of which some layers lose more."""

    def run(layers):
        parameters = [(layers[0], "weight"), (layers[2], "weight"), (layers[0], "bias")]
        prune.global_unstructured(parameters, pruning_method=prune.L1Unstructured, amount=0.4)
        return trained(layers) + list(layers.buffers())

    assert_as_on_one_device(run, world)


def test_random_masks_are_those_of_one_rank():
    """Elements and rows drawn at random are the same for every number of ranks."""

    def run(layers):
        torch.manual_seed(0)
        prune.random_unstructured(layers[0], "weight", amount=0.3)
        prune.random_structured(layers[2], "weight", amount=2, dim=1)
        return trained(layers) + list(layers.buffers())

    alone, *others = (on_ranks(run, world) for world in (1, 2, 3))
    for results in others:
        for result in results:
            torch.testing.assert_close(result, alone[0])
    assert alone[0][-2].sum() == 35 - 10
    assert alone[0][-1].sum(0).tolist().count(0) == 2


def test_a_pruning_that_fails_leaves_the_layer_as_it_was():
    """The parameter, or the earlier mask, is back; plain masks and plain scores are refused."""

    def rank():
        layer = parallel(2)[0]
        weight = layer.weight
        plain = torch.ones(7, 5, dtype=torch.float64)
        with pytest.raises(MixedTensorError):
            prune.custom_from_mask(layer, "weight", plain)
        assert layer.weight is weight
        assert dict(layer.named_parameters()).keys() == {"weight", "bias"}
        with pytest.raises(MixedTensorError):
            prune.l1_unstructured(layer, "weight", amount=3, importance_scores=plain)
        prune.l1_unstructured(layer, "weight", amount=3)
        mask = layer.weight_mask
        with pytest.raises(MixedTensorError):
            prune.custom_from_mask(layer, "weight", plain)
        assert layer.weight_mask is mask
        assert layer.weight_orig is weight

    simulate(rank, 2, "torch")
