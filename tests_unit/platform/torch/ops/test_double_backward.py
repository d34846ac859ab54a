"""Second derivatives of every operator where a rank's shard is empty: ranks must build the same graph."""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch

from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.shard.rule import Rule, find_rule
from hyper_parallel.core.shard.sample import samples_of
from hyper_parallel.errors import CollectiveMismatchError, UnsupportedOperatorError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.checker.checker import seedable
from hyper_parallel.verify.ops.dtensor_check import operator
from hyper_parallel.verify.ops.values import Slot, fill, size_choices, substitute
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

WORLD = 3
R = Replicate()


def operators():
    """Every canonical operator of PyTorch that has a rule."""
    from hyper_parallel.platform.torch.ops import registry

    names = {entry.rule.op for entry in (*registry.functions().values(), *registry.overloads().values())}
    return sorted(name for name in names if isinstance(find_rule(name), Rule))


def cases(op, choices):
    """Samples with values of sizes that leave a rank without elements, and up to four tuples of placements."""
    to_dtype = get_torch_platform().str_to_dtype
    for sample in samples_of(op):
        letters = list(size_choices(sample, 1)[0])
        for sizes in choices:
            sized = dict(zip(letters, itertools.cycle(sizes), strict=False))
            filled = fill(sample, sized, "float64", 1, integral=False, to_dtype=to_dtype)
            if filled is None or not any(filled.requires_grad) or sample.uninitialized:
                continue
            options = [
                [Shard(dim) for dim in range(array.ndim) if array.shape[dim] in (1, 2, 4)] for array in filled.arrays
            ]
            tuples = list(itertools.product(*[[*places, R] for places in options]))[:-1]
            yield sample, filled, tuples[:: max(1, len(tuples) // 4)][:4]


def second_derivatives(op, sample, filled, places, mesh):
    """The gradients of the squared gradients; leaves are redistributed, so that a lost gradient stops the others."""
    import torch

    leaves, operands = [], []
    for array, place, needs_grad in zip(filled.arrays, places, filled.requires_grad, strict=True):
        leaf = distribute_tensor(torch.tensor(array), mesh, [R])
        if needs_grad:
            leaves.append(leaf.requires_grad_())
            leaf = leaf * 1.0
        operands.append(leaf.redistribute(mesh, [place]))

    def operand_of(leaf):
        return operands[leaf.index] if isinstance(leaf, Slot) else leaf

    random.manual_seed(3)
    run = operator(get_torch_platform(), op, sample)
    outs = seedable(run(substitute(filled.args, operand_of), substitute(filled.kwargs, operand_of)))
    outs = [torch.view_as_real(out) if out.dtype.is_complex else out for out in outs if out.requires_grad]
    weights = [distribute_tensor(torch.full(tuple(out.shape), 0.7).to(out.dtype), mesh, [R]) for out in outs]
    leaves.extend(weight.requires_grad_() for weight in weights)
    total = sum((out * weight).sum() for out, weight in zip(outs, weights, strict=True))
    first = torch.autograd.grad(total, leaves, create_graph=True, allow_unused=True) if outs else ()
    first = [torch.view_as_real(grad) if grad.dtype.is_complex else grad for grad in first if grad is not None]
    squares = sum(grad.pow(2).sum() for grad in first if grad.requires_grad)
    second = torch.autograd.grad(squares, leaves, allow_unused=True) if torch.is_tensor(squares) else ()
    return [np.zeros(1) if grad is None else grad.full_tensor().detach().numpy() for grad in second]


def derived_twice(op, choices):
    """Differentiate the samples of ``op`` twice; the number of placements at which that could be done."""
    counts = 0
    for sample, filled, tuples in cases(op, choices):

        def on_rank(sample=sample, filled=filled, tuples=tuples):
            mesh, results = init_device_mesh("cpu", (WORLD,)), []
            for places in tuples:
                try:
                    results.append(second_derivatives(op, sample, filled, places, mesh))
                except CollectiveMismatchError:  # noqa: PERF203 - placements are tried one by one
                    raise
                except (RuntimeError, ValueError, TypeError) as error:  # refused by all ranks
                    results.append(str(error))
            return results

        ranks = simulate(on_rank, WORLD, platform="torch", timeout=60)
        for places, *results in zip(tuples, *ranks, strict=True):
            assert len({isinstance(result, str) for result in results}) == 1, (op, places, results)
            if isinstance(results[0], str):
                continue
            counts += 1
            reference = next(result for result in ranks[0] if not isinstance(result, str))
            for result in results:
                for actual, expected in zip(result, reference, strict=True):
                    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-8, err_msg=f"{op} {places}")
    return counts


@pytest.mark.untraced
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.sweep) for part in (1, 2, 3))])
def test_ranks_without_elements_take_part_in_second_derivatives(part):
    """Every operator can be differentiated twice where shards are empty, with equal results for all placements."""
    warnings.simplefilter("ignore")
    assert sum(derived_twice(op, [(2, 4)]) for op in operators()[part::4]) > 0


@pytest.mark.parametrize(
    "op", ["gather", "index_select", "embedding", "lookup", "index", "take", "dot", "unfold", "vander", "prod"]
)
def test_look_ups_in_vectors_can_be_differentiated_twice(op):
    """Other sizes of the operators whose derivatives PyTorch computes differently where nothing is looked up."""
    assert derived_twice(op, [(4, 1), (1, 4), (2, 1)]) > 0


def test_a_chain_of_vector_operators_can_be_differentiated_twice():
    """unfold, index_select, gather and dot of vectors on a mesh of two axes, where some ranks hold nothing."""
    import torch

    values, places = torch.tensor([1.5, -2.0, 0.5]), torch.tensor([2, 0])

    def chain(x, index):
        windows = x.unfold(0, 2, 1).sum(1)
        picked = torch.dot(x.index_select(0, index), x.gather(0, index)) + (windows**3).sum() + (x[:2] ** 3).sum()
        (first,) = torch.autograd.grad(picked**2, x, create_graph=True)
        return torch.autograd.grad((first * first).sum(), x)[0]

    expected = chain(values.clone().requires_grad_(), places)

    def on_rank():
        mesh = init_device_mesh("cpu", (2, 3))
        results = []
        for layout in itertools.product([R, Shard(0)], repeat=2):
            x = distribute_tensor(values, mesh, layout).requires_grad_()
            results.append(chain(x, distribute_tensor(places, mesh, [R, R])).full_tensor())
        return results

    for results in simulate(on_rank, 6, platform="torch", timeout=60):
        for result in results:
            torch.testing.assert_close(result, expected)


def differentiated_twice(write, layout, world, values):
    """The second gradients of a program that writes a view or its base, on one device and on every rank."""
    import torch

    def run(x, seed):
        y = x * 1.0
        out = write(y)
        (first,) = torch.autograd.grad(out, x, seed[: out.shape[0], : out.shape[1]], create_graph=True)
        return torch.autograd.grad((first * first).sum(), [x, seed], allow_unused=True)

    def on_rank():
        mesh = init_device_mesh("cpu", (world,))
        x, seed = (
            distribute_tensor(value, mesh, [place]).requires_grad_()
            for value, place in zip(values, layout, strict=True)
        )
        try:
            return [None if grad is None else grad.full_tensor().detach() for grad in run(x, seed)]
        except UnsupportedOperatorError:  # a view that had to move is a copy
            return None

    return run(*[value.clone().requires_grad_() for value in values]), simulate(on_rank, world, "torch", timeout=60)


def _base_written(y):
    view = y.narrow(1, 0, 2)
    y.mul_(3.0)
    return view


def _part_written(y):
    y[:, 1:2] = y[:, :1] * 2.0
    return y


def _linear(y):
    """A layer with a bias, whose result PyTorch makes as a view."""
    import torch

    return torch.nn.functional.linear(y[None], y.detach(), y.detach()[:, 0] * 0.0)


VIEW_WRITES = {
    "clamp_ of a transposed tensor": lambda y: y.t().clamp_(min=-1.0, max=1.0).t(),
    "relu_ of a view": lambda y: y.unsqueeze(0)[0].relu_(),
    "mul_ of a slice": lambda y: y[:, 0:2].mul_(y[:, 1:3].clone()),
    "fill_ of a view": lambda y: y.transpose(0, 1).fill_(0.5).t() + y,
    "the base of a view": _base_written,
    "a part": _part_written,
    "the result of a linear layer": lambda y: _linear(y)[0].copy_(y[:, :1] * y[:, 1:2]),
    "repeated rows": lambda y: y.unsqueeze(2).repeat_interleave(2, 0).clamp_(max=0.5)[:1, :, 0],
    "a section": lambda y: y.tensor_split(2, 1)[0].mul_(2.0),
    "a squeezed view": lambda y: y.unsqueeze(0).squeeze(0).mul_(y.detach().clone()),
}


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("write", VIEW_WRITES)
def test_views_of_nothing_that_are_written_stay_on_the_graph(write, world):
    """A write through a view, or to the base of one, has its second gradients where a rank's shard is empty."""
    import torch

    refused = 0
    values = [torch.tensor([[0.3, -1.7, 0.8]]).double(), torch.tensor([[0.5, -0.25, 2.0]]).double()]
    for layout in ((Shard(0), R), (Shard(0), Shard(0)), (Shard(1), Shard(0)), (R, Shard(1))):
        expected, ranks = differentiated_twice(VIEW_WRITES[write], layout, world, values)
        if all(results is None for results in ranks):
            refused += 1
            continue
        for results in ranks:
            for actual, wanted in zip(results, expected, strict=True):
                pair = [torch.zeros((), dtype=torch.float64) if grad is None else grad for grad in (actual, wanted)]
                torch.testing.assert_close(*torch.broadcast_tensors(*pair))
    assert refused <= 1


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_written_view_of_a_scattered_tensor_stays_on_the_graph(world):
    """The write of a value with a gradient has its second gradient on ranks to which nothing was scattered, too."""
    import torch

    def run(x, written, seed):
        view = x.narrow(0, 0, x.shape[0]).unsqueeze(1).flatten(1).mul_(written)
        (first,) = torch.autograd.grad(view, written, seed, create_graph=True)
        return torch.autograd.grad(first, seed, first.detach(), allow_unused=True)[0]

    values = [torch.tensor([[8.5], [7.0]]).double(), torch.tensor([[0.5], [-0.25]]).double(), torch.ones(2, 1).double()]
    expected = run(values[0].clone(), values[1].clone().requires_grad_(), values[2].clone().requires_grad_())

    def on_rank():
        mesh = init_device_mesh("cpu", (world,))
        x, written, seed = (
            distribute_tensor(value, mesh, [place]) for value, place in zip(values, [Shard(0), R, R], strict=True)
        )
        return run(x, written.requires_grad_(), seed.requires_grad_()).full_tensor()

    for result in simulate(on_rank, world, "torch", timeout=60):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_product_of_one_factor_has_one_graph(world):
    """Ranks whose factor is zero, is not, or that hold none, differentiate a product twice by the same collectives."""
    import torch

    def run(x, seed):
        (first,) = torch.autograd.grad(torch.prod(x, 0, dtype=torch.float64), x, seed, create_graph=True)
        return torch.autograd.grad((first * first).sum(), [x, seed], allow_unused=True)[1]

    values = torch.tensor([[2.0, 0.0, -4.0, 2.0, 0.0, -0.0, 1.0]])
    seed = torch.tensor([1.0, -2.0, 0.5, 3.0, 2.5, -1.0, 4.0]).double()
    expected = run(values.clone().requires_grad_(), seed.clone().requires_grad_())

    def on_rank():
        mesh = init_device_mesh("cpu", (world,))
        return [
            run(
                distribute_tensor(values, mesh, [place]).requires_grad_(),
                distribute_tensor(seed, mesh, [R]).requires_grad_(),
            ).full_tensor()
            for place in (Shard(0), Shard(1), R)
        ]

    for results in simulate(on_rank, world, "torch", timeout=60):
        for result in results:
            torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("call, classes", [
    (lambda x, target: torch.nn.functional.nll_loss(x, target, reduction="none"), 4),
    (lambda x, _: torch.prod(x, 1), 1),
], ids=["nll_loss", "prod of one factor"])  # fmt: skip
def test_a_gradient_that_its_operand_does_not_change_has_a_graph(call, classes, world):
    """Where PyTorch's gradient has a second one, which is zero, that of shards has it, too, empty ones included."""

    def program(x, target, cotangent, second):
        (gradient,) = torch.autograd.grad(call(x, target), x, cotangent, create_graph=True)
        return gradient, *torch.autograd.grad(gradient, x, second)

    def on_rank(dim):
        mesh, placements = init_device_mesh("cpu", (world,)), [Shard(dim)]
        shard = distribute_tensor(x, mesh, placements).requires_grad_()
        rows = [distribute_tensor(tensor, mesh, [R]) for tensor in (target, cotangent, second)]
        return [tensor.full_tensor().detach() for tensor in program(shard, *rows)]

    x, second = torch.randn(2, classes), torch.randn(2, classes)
    target, cotangent = torch.randint(classes, (2,)), torch.randn(2)
    expected = program(x.clone().requires_grad_(), target, cotangent, second)
    for dim in (0, 1):
        for results in simulate(on_rank, world, "torch", (dim,)):
            for result, value in zip(results, expected, strict=True):
                torch.testing.assert_close(result, value.detach())
