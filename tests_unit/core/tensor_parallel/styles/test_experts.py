"""Experts over ranks: outputs and gradients of every input and parameter are those of one device."""

import copy

import pytest

from hyper_parallel import (
    DTensor,
    ExpertParallel,
    FSDPMeshInfo,
    Replicate,
    Shard,
    ShardPlacementResult,
    StridedShard,
    clip_grad_norm_,
    distribute_tensor,
    fully_shard,
    init_device_mesh,
    parallelize_module,
)
from hyper_parallel.errors import LayoutError, PlanError, StyleError, UnsupportedModuleError
from hyper_parallel.verify import simulate

torch_only = pytest.mark.platforms("torch")

TENSOR_NAMES = {"experts": "moe_tp_experts", "experts.gate_up": "packed_colwise", "experts.down": "rowwise"}
EXPERT_NAMES = {"experts": "ep_dispatch_experts", "experts.*": "grouped_gemm", "router": "ep_router"}
TOKENS, WIDTH = 5, 4


def make_model(count, choices=2):
    """A router and packed experts that are called as those of Transformers are, in float64."""
    import torch
    from torch import nn

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_experts, self.broken = count, False
            self.gate_up = nn.Parameter(torch.randn(count, 6, WIDTH))
            self.down = nn.Parameter(torch.randn(count, WIDTH, 3))

        def forward(self, x, index, weights):
            if self.broken:
                raise ArithmeticError
            assert len(self.gate_up) == getattr(self, "num_experts", len(self.gate_up))
            result = torch.zeros_like(x)
            for expert in range(len(self.gate_up)):
                token, choice = torch.where(index == expert)
                gate, up = (x[token] @ self.gate_up[expert].T).chunk(2, -1)
                y = (torch.tanh(gate) * up) @ self.down[expert].T
                result = result.index_add(0, token, y * weights[token, choice, None])
            return result

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(WIDTH, count), Experts()

        def forward(self, x):
            scores = self.router(x).softmax(-1)
            weights, index = scores.topk(choices)
            balance = (scores.mean(0) * torch.bincount(index.flatten(), minlength=count)).sum()
            return self.experts(x, weights=weights, index=index) + balance

    return Model().double()


def tokens(requires_grad=False):
    """Random tokens and a random cotangent of as many."""
    import torch

    generator = torch.Generator().manual_seed(5)
    x, cotangent = torch.randn(2, TOKENS, WIDTH, dtype=torch.float64, generator=generator)
    return x.requires_grad_(requires_grad), cotangent


def whole(value):
    """The global value."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def same_gradients(model, single, scale=1.0):
    """Every gradient of ``model`` is that of ``single``."""
    import torch

    for (name, mine), theirs in zip(model.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(whole(mine.grad) * scale, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


@torch_only
@pytest.mark.parametrize("count, choices, world", [(4, 2, 2), (5, 1, 3), (3, 2, 4)])
def test_every_gradient_is_that_of_one_device(count, choices, world):
    """Any number of experts and ranks, ranks without experts or tokens too; packed weights stay the model's own."""
    import torch

    torch.manual_seed(count)
    dense = make_model(count, choices)
    with torch.no_grad():
        dense.router.bias[0] -= 50  # nothing chooses the first expert
        dense.router.bias[1] += 50  # everything chooses the second, so that ranks remain without tokens

    def rank():
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        single, model = copy.deepcopy(dense), copy.deepcopy(dense)
        parallelize_module(model, mesh, TENSOR_NAMES if world < 4 else EXPERT_NAMES)
        assert model.experts.gate_up.placements == model.experts.down.placements == (Shard(0),)
        assert model.experts.num_experts == count
        for name, value in single.state_dict().items():
            torch.testing.assert_close(whole(model.state_dict()[name]), value, rtol=0, atol=0)
        runs = []
        for each in (single, model):
            x, cotangent = tokens(requires_grad=True)
            y = each(x)
            y.backward(cotangent)
            runs.append((y, x.grad))
        torch.testing.assert_close(*runs)
        same_gradients(model, single)
        assert "down" not in vars(model.experts)

    simulate(rank, world, platform="torch")


@torch_only
@pytest.mark.parametrize("calls", [1, 2])
def test_training_with_fully_sharded_experts_is_that_of_one_device(calls):
    """Clipped steps of AdamW on two axes: norms and all weights; the experts in a call of their own, or with the rest.

    In one call the experts are sharded over the ranks that share them, and the rest over all.
    """
    import torch

    dense = make_model(3)

    def train(model, rows):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        norms = []
        for _ in range(2):
            x, cotangent = (each[rows] for each in tokens())
            (model(x) * cotangent).sum().backward()
            norms.append(clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack([whole(norm) for norm in norms])

    def rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = parallelize_module(copy.deepcopy(dense), mesh["tp"], TENSOR_NAMES)
        if calls == 1:
            own = ShardPlacementResult(Shard(0), FSDPMeshInfo(mesh, shard_mesh_dim=0))
            fully_shard(
                model,
                mesh=mesh.flatten(),
                shard_placement_fn=lambda parameter: own if isinstance(parameter, DTensor) else None,
            )
            assert model.router.weight.device_mesh is mesh.flatten()
        else:
            fully_shard(model.experts, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        assert model.experts.down.placements == (StridedShard(0, 2), Shard(0))
        # Both ranks of dp have all tokens, so the mean of their gradients is the gradient.
        single = copy.deepcopy(dense)
        torch.testing.assert_close(train(model, slice(None)), train(single, slice(None)))
        for mine, theirs in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(whole(mine), theirs)

    simulate(rank, 4, platform="torch")


@torch_only
def test_tokens_may_be_sharded_over_another_axis():
    """A DTensor of sharded tokens gives a DTensor, and the gradients of experts are summed over that axis."""
    import torch

    dense = make_model(3)
    del dense.experts.num_experts  # not every module of experts keeps it
    x, cotangent = tokens()
    index = torch.tensor([[0, 2], [1, 0], [2, 1], [2, 0], [1, 2]])
    weights = torch.rand(TOKENS, 2, dtype=torch.float64)

    def rank():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        experts = parallelize_module(copy.deepcopy(dense.experts), mesh, ExpertParallel())
        values = [distribute_tensor(each, mesh, [Shard(0), Replicate()]) for each in (x, index, weights)]
        for value in (values[0], values[2]):
            value.requires_grad_()
        y = experts(*values)
        y.backward(distribute_tensor(cotangent, mesh, y.placements))
        single, leaves = copy.deepcopy(dense.experts), [each.clone().requires_grad_() for each in (x, weights)]
        expected = single(leaves[0], index, leaves[1])
        expected.backward(cotangent)
        assert y.placements == (Shard(0), Replicate())
        torch.testing.assert_close(whole(y), expected)
        torch.testing.assert_close([whole(values[0].grad), whole(values[2].grad)], [leaf.grad for leaf in leaves])
        same_gradients(experts, single)

    simulate(rank, 4, platform="torch")


@torch_only
def test_modules_that_are_no_stacked_experts_are_refused():
    """The message has the parameters, or the inputs of forward."""
    import torch
    from torch import nn

    class Other(nn.Module):
        def __init__(self, **shapes):
            super().__init__()
            for name, shape in shapes.items():
                self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

        def forward(self, x):
            return x

    counted = Other(up=(3, 2))
    counted.register_buffer("scale", torch.ones(3))
    counted.norm = nn.BatchNorm1d(2, affine=False)
    needs = "ExpertParallel needs parameters of the module itself that are all stacked over experts, dim 0; "
    cases = {
        f"{needs}Other has none": Other(),
        f"{needs}Other has up [3, 2], down [2, 3]": Other(up=(3, 2), down=(2, 3)),
        f"{needs}Other has scale []": Other(scale=()),
        f"{needs}Sequential has 0.up [3, 2]": nn.Sequential(Other(up=(3, 2))),
        "ExpertParallel needs a forward of three inputs, hidden states, chosen experts and their weights; that of "
        "Other takes (x)": Other(up=(3, 2)),
        "ExpertParallel does not shard buffers, but parameters and choices are those of one rank; Other has the "
        "buffers scale, "
        "norm.running_mean, norm.running_var, norm.num_batches_tracked": counted,
    }

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        for message, module in cases.items():
            with pytest.raises(UnsupportedModuleError) as info:
                ExpertParallel().apply(module, mesh)
            assert str(info.value) == message
        experts = ExpertParallel().apply(make_model(2).experts, mesh)
        assert ExpertParallel().unsupported_reason(experts) == "it is already parallelized by ExpertParallel"

    simulate(rank, 2, platform="torch")
    assert repr(ExpertParallel()) == "ExpertParallel()"


@pytest.mark.platforms("mindspore")
def test_modules_of_mindspore_are_refused():
    """The message has the function that does the same there."""
    from mindspore import nn

    assert ExpertParallel().unsupported_reason(nn.Dense(2, 3)) == (
        "ExpertParallel supports modules of PyTorch only; let Dense call routed_experts instead"
    )


@torch_only
def test_inputs_that_do_not_fit_are_refused():
    """With the facts; the module can be called again afterwards, also when its own forward raised."""
    import torch

    x, _ = tokens()
    index, weights = torch.zeros(TOKENS, 2, dtype=torch.int64), torch.ones(TOKENS, 2, dtype=torch.float64)

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        experts = ExpertParallel().apply(make_model(2).experts, mesh)

        def message(kind, *values, **named):
            with pytest.raises(kind) as info:
                experts(*values, **named)
            return str(info.value)

        assert message(StyleError, x, weights=weights) == (
            "Experts: called without index, which ExpertParallel converts"
        )
        takes = "its forward takes x, index, weights"
        assert message(StyleError, x, index, weights, 1) == f"Experts: called with 4 positional arguments; {takes}"
        assert message(StyleError, x, index, weights, bias=1) == f"Experts: called with bias; {takes}"
        assert message(StyleError, x, index, weights[:, :1]) == (
            "Experts: ExpertParallel needs inputs of [T, D], [T, K] and [T, K], got x [5, 4], index [5, 2], weights "
            "[5, 1]"
        )
        assert message(PlanError, x, index + 2, weights) == (
            "Experts: index has values outside of range(2), the experts of the module"
        )
        experts.broken = True
        message(ArithmeticError, x, index, weights)
        experts.broken = False
        torch.testing.assert_close(experts(x, index, 0 * weights), torch.zeros_like(x))

    simulate(rank, 2, platform="torch")


@torch_only
@pytest.mark.parametrize("count", [0, 3])
def test_a_rank_that_no_token_chooses_has_zero_gradients(count):
    """Also where experts divide by the norm of their tokens: what a rank computes in their place is no zeros."""
    import torch
    from torch import nn

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.arange(1.0, 17).reshape(2, 2, WIDTH).double().contiguous())

        def forward(self, x, index, weights):
            h = (x[:, None] @ self.w[index[:, 0]].mT)[:, 0]
            return (h / h.norm(dim=-1, keepdim=True)).repeat(1, 2) * weights[:, :1]

    def rank():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        experts = ExpertParallel().apply(Normed(), mesh)
        x = tokens()[0][:count].requires_grad_()
        y = experts(x, torch.zeros(count, 1, dtype=torch.int64), torch.ones(count, 1, dtype=torch.float64))
        y.sum().backward()
        return y.shape, experts.w.grad.full_tensor()[1]

    for shape, gradient in simulate(rank, 2, platform="torch"):
        assert shape == (count, WIDTH)
        assert (gradient == 0).all()


@torch_only
def test_inputs_on_different_ranks_are_refused():
    """On another axis every rank needs the choices and weights of its tokens."""
    import torch

    x, _ = tokens()
    index, weights = torch.zeros(TOKENS, 2, dtype=torch.int64), torch.ones(TOKENS, 2, dtype=torch.float64)

    def rank():
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        experts = ExpertParallel().apply(make_model(2).experts, mesh)
        values = [
            distribute_tensor(value, mesh, [placement, Replicate()])
            for value, placement in ((x, Shard(1)), (index, Shard(0)), (weights, Shard(0)))
        ]
        with pytest.raises(LayoutError) as info:
            experts(*values)
        return str(info.value)

    assert simulate(rank, 2, platform="torch")[0] == (
        "Experts: ExpertParallel needs all inputs on the same ranks, tokens (dim 0) sharded or replicated on each "
        "axis, got x f64[5, 4@dp], index i64[5@dp, 2], weights f64[5@dp, 2]; redistribute them to "
        "[Replicate(), Replicate()]"
    )
