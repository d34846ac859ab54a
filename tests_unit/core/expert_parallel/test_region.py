"""``routed_experts``: the values and gradients of one device, on any number of ranks."""

from __future__ import annotations

import pytest

from hyper_parallel import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    clip_grad_norm_,
    distribute_tensor,
    init_device_mesh,
    load_balancing_loss,
    routed_experts,
    router_z_loss,
)
from hyper_parallel.errors import LayoutError, PlanError
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

WIDTH, HIDDEN = 5, 7
MESHES = {
    "2": ((2,), ("ep",)),
    "3": ((3,), ("ep",)),
    "4": ((4,), ("ep",)),
    "2x3": ((2, 3), ("dp", "ep")),
    "3x2": ((3, 2), ("ep", "dp")),
}


def expert(rows, up, bias, down):
    """Two layers."""
    return (rows @ up + bias).tanh() @ down


def values(tokens, count, choices, unused=()):
    """Return x, router, experts' parameters and a cotangent; no token chooses the experts ``unused``."""
    import torch

    random = torch.Generator().manual_seed(tokens * 100 + count * 10 + choices)
    shapes = (tokens, WIDTH), (WIDTH, count), (count, WIDTH, HIDDEN), (count, HIDDEN), (count, HIDDEN, WIDTH + 1)
    x, router, *stacked = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    mask = torch.zeros(count, dtype=torch.float64)
    mask[list(unused)] = -1e3
    return x, router, stacked, mask, torch.randn(tokens, WIDTH + 1, generator=random, dtype=torch.float64)


def layer(x, router, stacked, mask, cotangent, choices, capacity_factor, *, partial_sums=False):
    """Return the layer's output and a loss with both auxiliary losses."""
    import torch

    logits = x @ router + mask
    probabilities = torch.softmax(logits, -1)
    weights, experts = torch.topk(probabilities, choices)
    y = routed_experts(x, experts, weights, stacked, expert, capacity_factor=capacity_factor, partial_sums=partial_sums)
    auxiliary = 0.3 * load_balancing_loss(probabilities, experts) + 0.07 * router_z_loss(logits)
    return y, (y * cotangent).sum() + auxiliary


def place(mesh, tensors):
    """Return the tensors as leaves on the mesh: tokens sharded over all axes, experts over ``ep``."""
    x, router, stacked, mask, cotangent = tensors
    tokens, whole = [Shard(0)] * mesh.ndim, [Replicate()] * mesh.ndim
    own = [Shard(0) if name == "ep" else Replicate() for name in mesh.names]
    leaves = [distribute_tensor(tensor.clone(), mesh, placements).requires_grad_() for tensor, placements in
              [(x, tokens), (router, whole), *[(each, own) for each in stacked]]]  # fmt: skip
    return leaves[0], leaves[1], leaves[2:], distribute_tensor(mask, mesh), distribute_tensor(cotangent, mesh, tokens)


def on_one_device(tensors, choices, capacity_factor):
    """Return output, loss and gradients on plain tensors."""
    x, router, stacked, mask, cotangent = tensors
    leaves = [tensor.clone().requires_grad_() for tensor in (x, router, *stacked)]
    y, loss = layer(leaves[0], leaves[1], leaves[2:], mask, cotangent, choices, capacity_factor)
    loss.backward()
    return y.detach(), loss.detach(), [leaf.grad for leaf in leaves]


@pytest.mark.parametrize("mesh_name", MESHES)
@pytest.mark.parametrize(
    "tokens, count, choices, unused, capacity_factor",
    [
        (13, 5, 2, (), None),
        (11, 7, 3, (0, 5), None),
        (3, 2, 1, (), None),
        (17, 4, 2, (1,), 0.6),
        (14, 5, 2, (), 1.1),
    ],
)
def test_values_and_gradients_are_those_of_one_device(mesh_name, tokens, count, choices, unused, capacity_factor):
    """Tokens and experts need not divide; ranks may have none of them, experts no tokens, and tokens may be dropped."""
    import torch

    shape, names = MESHES[mesh_name]
    tensors = values(tokens, count, choices, unused)
    expected_y, expected_loss, expected = on_one_device(tensors, choices, capacity_factor)

    def rank():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        placed = place(mesh, tensors)
        y, loss = layer(*placed, choices, capacity_factor)
        loss.backward()
        assert y.placements == placed[0].placements
        torch.testing.assert_close(y.full_tensor().detach(), expected_y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(loss.full_tensor().detach(), expected_loss, rtol=1e-12, atol=1e-12)
        for leaf, gradient in zip([placed[0], placed[1], *placed[2]], expected, strict=True):
            torch.testing.assert_close(leaf.grad.full_tensor(), gradient, rtol=1e-11, atol=1e-12)
        for index in unused:
            assert not any(stacked.grad.full_tensor()[index].any() for stacked in placed[2])

    simulate(rank, len(torch.empty(shape).flatten()), platform="torch")


@pytest.mark.parametrize("needs", ["x", "parameters", "nothing"])
def test_only_what_needs_a_gradient_has_one(needs):
    """Ranks without experts take part in backward although only parameters, or only tokens, need a gradient."""
    import torch

    def gradient_of(x, stacked, weights, experts):
        leaves = [x] if needs == "x" else stacked if needs == "parameters" else []
        for leaf in leaves:
            leaf.requires_grad_()
        y = routed_experts(x, experts, weights, stacked, expert)
        assert y.requires_grad == bool(leaves)
        if leaves:
            y.square().sum().backward()
        return [leaf.grad for leaf in leaves]

    x, _, stacked, _, _ = values(7, 2, 1)
    experts, weights = torch.tensor([[1], [1], [0], [1], [1], [1], [1]]), torch.rand(7, 1, dtype=torch.float64)
    expected = gradient_of(x.clone(), [each.clone() for each in stacked], weights, experts)

    def rank():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("ep",))
        placed = [distribute_tensor(each, mesh, [Shard(0)]) for each in (x, *stacked, weights, experts)]
        gradients = gradient_of(placed[0], placed[1:-2], *placed[-2:])
        for gradient, right in zip(gradients, expected, strict=True):
            torch.testing.assert_close(gradient.full_tensor(), right)

    simulate(rank, 3, platform="torch")


@pytest.mark.parametrize("mesh_name", ["3", "2x3"])
def test_the_norm_of_all_gradients_is_that_of_one_device(mesh_name):
    """Clipping counts each expert once, wherever it is, and the replicated router once."""
    import torch

    shape, names = MESHES[mesh_name]
    tensors = values(13, 5, 2)
    _, _, expected = on_one_device(tensors, 2, None)
    norm = torch.cat([gradient.reshape(-1) for gradient in expected[1:]]).norm()

    def rank():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        placed = place(mesh, tensors)
        layer(*placed, 2, None)[1].backward()
        leaves = [placed[1], *placed[2]]
        total = clip_grad_norm_(leaves, float(norm) / 3)
        total = total.full_tensor() if isinstance(total, DTensor) else total
        torch.testing.assert_close(total.double(), norm)
        for leaf, gradient in zip(leaves, expected[1:], strict=True):
            torch.testing.assert_close(leaf.grad.full_tensor(), gradient / 3, rtol=1e-5, atol=1e-8)

    simulate(rank, len(torch.empty(shape).flatten()), platform="torch")


def test_parameters_may_be_replicated():
    """Over a data axis alone nothing is exchanged, and gradients of the experts are summed over it."""
    import torch

    tensors = values(9, 3, 2)
    _, expected_loss, expected = on_one_device(tensors, 2, 0.8)

    def rank():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        placed = place(mesh, tensors)
        _, loss = layer(*placed, 2, 0.8)
        loss.backward()
        torch.testing.assert_close(loss.full_tensor().detach(), expected_loss)
        for leaf, gradient in zip([placed[0], placed[1], *placed[2]], expected, strict=True):
            torch.testing.assert_close(leaf.grad.full_tensor(), gradient)

    simulate(rank, 4, platform="torch")


def refused(mesh_shape, names, error, change):
    """Return the message of the call with ``change`` applied to its arguments."""
    import torch

    def rank():
        mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
        x, _, stacked, _, _ = place(mesh, values(6, 4, 2))
        experts = distribute_tensor(torch.zeros(6, 2, dtype=torch.int64), mesh, x.placements)
        weights = distribute_tensor(torch.ones(6, 2, dtype=torch.float64), mesh, x.placements)
        arguments = {"x": x, "experts": experts, "weights": weights, "parameters": stacked, "compute": expert}
        arguments.update(change(mesh, arguments))
        with pytest.raises(error) as caught:
            routed_experts(**arguments)
        return str(caught.value)

    messages = simulate(rank, len(torch.empty(mesh_shape).flatten()), platform="torch")
    assert len(set(messages)) == 1
    return messages[0]


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda _, old: {"x": old["x"].full_tensor()},
            (
                "routed_experts: plain tensors among DTensors: x; use distribute_tensor(tensor, mesh, placements) or "
                "DTensor.from_local"
            ),
        ),
        (
            lambda mesh, old: {"x": old["x"].redistribute(mesh, [Shard(1)])},
            (
                "routed_experts: x is f64[6, 5@ep]; only its tokens, dim 0, may be sharded: "
                "x.redistribute(placements=...) with Shard(0) or Replicate() on each axis"
            ),
        ),
        (
            lambda mesh, old: {"x": DTensor.from_local(old["x"].full_tensor(), mesh, [Partial()])},
            (
                "routed_experts: x is f64[6, 5] + Partial(sum)@ep; only its tokens, dim 0, may be sharded: "
                "x.redistribute(placements=...) with Shard(0) or Replicate() on each axis"
            ),
        ),
        (
            lambda _, old: {"weights": old["weights"].redistribute()},
            "routed_experts: weights is f64[6, 2], x is f64[6@ep, 5]; weights.redistribute(placements=[Shard(0)])",
        ),
        (
            lambda _, old: {name: old[name].redistribute() for name in ("x", "experts", "weights")},
            (
                "routed_experts: experts are sharded over 'ep', and x is f64[6, 5]; its tokens must be sharded over "
                "that axis too: x.redistribute(placements=[Shard(0)]), and the same for experts and weights"
            ),
        ),
        (
            lambda mesh, old: {
                "parameters": [old["parameters"][0], old["parameters"][1].redistribute(mesh, [Shard(1)])]
            },
            (
                "routed_experts: on axis 'ep' parameters are [Shard(0), Shard(1)] and x is Shard(0); there, "
                "parameters must be all Replicate(), or all Shard(0) with x Shard(0), or all sharded along other dims "
                "with x Replicate() and partial_sums=True, if compute returns this rank's term of the sum"
            ),
        ),
    ],
)
def test_other_layouts_are_refused(change, message):
    """The message has the layouts and the line that fixes it, on all ranks."""
    assert refused((2,), ("ep",), LayoutError, change) == message


@pytest.mark.parametrize("shape", [(2, 2), (2, 3), (1, 2)])
@pytest.mark.parametrize("count, capacity_factor", [(5, None), (2, 0.7)])
def test_each_expert_may_be_split(shape, count, capacity_factor):
    """Experts x tensor: columns of the first matrix and its bias, rows of the second; the result is a partial sum."""
    import torch

    tensors = values(13, count, 2)
    expected_y, _, expected = on_one_device(tensors, 2, capacity_factor)

    def rank():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("ep", "tp"))
        x, router, stacked, mask, cotangent = tensors
        tokens, whole = [Shard(0), Replicate()], [Replicate(), Replicate()]
        layouts = [tokens, whole, *([Shard(0), Shard(dim)] for dim in (2, 1, 1))]
        leaves = [
            distribute_tensor(tensor.clone(), mesh, layout).requires_grad_()
            for tensor, layout in zip([x, router, *stacked], layouts, strict=True)
        ]
        constants = distribute_tensor(mask, mesh), distribute_tensor(cotangent, mesh, tokens)
        y, loss = layer(*leaves[:2], leaves[2:], *constants, 2, capacity_factor, partial_sums=True)
        assert y.placements == (Shard(0), Partial())
        loss.backward()
        torch.testing.assert_close(y.full_tensor().detach(), expected_y, rtol=1e-12, atol=1e-12)
        for leaf, gradient in zip(leaves, expected, strict=True):
            torch.testing.assert_close(leaf.grad.full_tensor(), gradient, rtol=1e-11, atol=1e-12)

    simulate(rank, shape[0] * shape[1], platform="torch")


def test_split_experts_must_be_declared():
    """Without partial_sums, nothing says that what a rank computes is a summand of the result."""

    def split(mesh, old):
        dims = zip(old["parameters"], (2, 1, 1), strict=True)
        return {
            "parameters": [stacked.redistribute(mesh, [Replicate(), Shard(dim)]) for stacked, dim in dims],
            **{name: old[name].redistribute(mesh, [Shard(0), Replicate()]) for name in ("x", "experts", "weights")},
        }

    message = refused((1, 2), ("ep", "tp"), LayoutError, split)
    assert message.startswith(
        "routed_experts: on axis 'tp' parameters are [Shard(2), Shard(1), Shard(1)] and x is Replicate(); there, "
    )


def test_experts_are_sharded_over_one_axis():
    """Two axes that shard the experts are refused."""

    def twice(mesh, old):
        return {"parameters": [stacked.redistribute(mesh, [Shard(0), Shard(0)]) for stacked in old["parameters"]]}

    assert refused((2, 2), ("ep", "dp"), LayoutError, twice) == (
        "routed_experts: experts are sharded over 'ep' and 'dp'; shard them over one axis, Shard(0) on it alone"
    )


def test_one_mesh_is_needed():
    """A tensor on a slice of the mesh is refused."""
    message = refused(
        (2, 1),
        ("ep", "dp"),
        LayoutError,
        lambda mesh, old: {"weights": distribute_tensor(old["weights"].full_tensor(), mesh["ep"], [Shard(0)])},
    )
    assert message.startswith("routed_experts: weights is on DeviceMesh(")
    assert message.endswith("; use one mesh")


def test_experts_out_of_range_are_refused_on_all_ranks():
    """One rank's wrong value is an error on every rank, which names it."""

    def wrong(mesh, old):
        if mesh.rank == 1:
            old["experts"].to_local()[0] = 4
        return {}

    message = refused((2,), ("ep",), PlanError, wrong)
    assert message == "routed_experts: experts has values outside of range(4) (rank 1: 2)"


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda old: {"x": old["x"].reshape(2, 3, 5)},
            (
                "routed_experts: x is [2, 3, 5], experts [6, 2], weights [6, 2]; they must be [T, D], [T, k] and [T, "
                "k] with k of at least 1; flatten batch and sequence first"
            ),
        ),
        (
            lambda old: {"parameters": [old["parameters"][0], old["parameters"][1][:3]]},
            (
                "routed_experts: parameters are [[4, 5, 7], [3, 7]]; each must be [E, ...], with the same number of "
                "experts E"
            ),
        ),
        (
            lambda _: {"capacity_factor": float("inf")},
            "routed_experts: capacity_factor is inf; it must be a finite number above 0, or None",
        ),
    ],
)
def test_other_arguments_are_refused(change, message):
    """Shapes and numbers that do not fit, on plain tensors too."""
    import torch

    x, _, stacked, _, _ = values(6, 4, 2)
    arguments = {
        "x": x,
        "experts": torch.zeros(6, 2, dtype=torch.int64),
        "weights": torch.ones(6, 2, dtype=torch.float64),
        "parameters": stacked,
        "compute": expert,
    }
    with pytest.raises(PlanError) as caught:
        routed_experts(**{**arguments, **change(arguments)})
    assert str(caught.value) == message
