from __future__ import annotations

import copy
import io
import pickle

import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import ArgumentTypeError, LayoutError, MixedTensorError, UnsupportedOperatorError
from hyper_parallel.platform.select import get_torch_platform
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


def pending(local, mesh, op="sum"):
    """A DTensor over one axis whose partial values are ``local``."""
    return get_torch_platform().wrap(local, Layout.place(mesh, [Partial(op)], tuple(local.shape)))


def on_ranks(function, world):
    """``function(mesh)`` on every rank of a one-axis mesh."""
    return simulate(lambda: function(init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))), world, "torch")


def assert_whole(result, wanted):
    """The global value of ``result`` is ``wanted``."""
    import torch

    torch.testing.assert_close(result.detach().full_tensor() if isinstance(result, DTensor) else result, wanted)


def text_of(kind, function):
    """The text of the error that ``function`` raises."""
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


# -- facts -------------------------------------------------------------------------------------------------------------


def test_facts_are_global():
    """Shape, sizes, strides and length are global; dtype and device are those of the local tensor."""
    import torch

    def on_rank(mesh):
        x = spread(values(5, 3), mesh, S0)
        assert (x.shape, x.size(), x.size(0), x.size(dim=-1)) == ((5, 3), (5, 3), 5, 3)
        assert (x.ndim, x.dim(), x.numel(), x.nelement(), len(x), x.stride()) == (2, 2, 15, 15, 5, (3, 1))
        assert (x.dtype, x.device, x.itemsize) == (torch.float32, torch.device("cpu"), 4)
        assert x.data_ptr() == x.to_local().data_ptr()
        assert isinstance(x.shape, torch.Size)
        assert repr(x).startswith("DTensor(f32[5@tp, 3] on DeviceMesh(cpu, tp=2, ranks=[0, 1]), local=tensor(")
        assert text_of(TypeError, lambda: len(x.sum())) == (
            "len() of a 0-d tensor (to make one tensor of several DTensors, call torch.stack)"
        )
        assert {x: 1}[x] == 1

    on_ranks(on_rank, 2)


def test_scalars_leave_whole():
    """item, float, int, bool and format reduce a Partial scalar."""
    import torch

    def on_rank(mesh):
        x = spread(torch.arange(5.0), mesh, S0).sum()
        assert x.placements == (P,)
        assert (x.item(), float(x), int(x), bool(x), f"{x:.1f}") == (10.0, 10.0, 10, True, "10.0")
        assert spread(torch.arange(5), mesh, S0).tolist() == [0, 1, 2, 3, 4]
        assert text_of(UnsupportedOperatorError, x.numpy) == (
            "numpy() of a DTensor: call x.full_tensor().numpy(), or x.to_local().numpy() for the local shard"
        )

    on_ranks(on_rank, 3)


# -- backward ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 4])
def test_only_a_scalar_has_an_implicit_seed(world):
    """backward() without a gradient needs one global element, however few a rank has."""
    import torch

    def on_rank(mesh):
        single = spread(values(1), mesh, S0).requires_grad_()
        (single * 2.0).backward()
        assert_whole(single.grad, torch.full((1,), 2.0))
        many = spread(values(world), mesh, S0).requires_grad_()
        return text_of(RuntimeError, (many * 2.0).backward)

    assert set(on_ranks(on_rank, world)) == {
        f"backward: grad can be implicitly created only for scalar outputs, not for f32[{world}@tp]"
    }


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("world", [2, 3])
def test_backward_from_a_partial_loss(op, world):
    """A Partial loss has gradient 1 (sum), 1/n (avg) or 1 on the rank that attained it (max, min)."""
    import torch

    def on_rank(mesh):
        x = pending(torch.tensor(1.0 + mesh.get_rank()), mesh, op).requires_grad_()
        x.backward()
        kept = x.grad.to_local().item()
        y = pending(torch.tensor(1.0 + mesh.get_rank()), mesh, op).requires_grad_()
        y.redistribute().backward(spread(torch.tensor(1.0), mesh, R))
        assert kept == pytest.approx(y.grad.to_local().item())
        z = pending(torch.tensor(1.0 + mesh.get_rank()), mesh, op).requires_grad_()
        (result,) = torch.autograd.grad(z, z, spread(torch.tensor(1.0), mesh, R))
        assert result.to_local().item() == pytest.approx(kept)
        return kept

    wanted = {"sum": [1.0] * world, "avg": [1 / world] * world, "max": [0.0] * (world - 1) + [1.0],
              "min": [1.0] + [0.0] * (world - 1)}[op]  # fmt: skip
    assert on_ranks(on_rank, world) == pytest.approx(wanted)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_gradients_accumulate_as_on_one_device(world):
    """Gradients of several backward passes add up in .grad as on one device, with retained graphs too."""
    import torch.nn.functional as F

    x, w, seed = values(5, 3), values(4, 3, seed=1), values(5, 4, seed=2)
    plain = w.clone().requires_grad_()
    (3 * F.linear(x, plain)).backward(seed)

    def on_rank(mesh):
        sharded, weight = spread(x, mesh, S0), spread(w, mesh, R).requires_grad_()
        out = F.linear(sharded, weight)
        out.backward(spread(seed, mesh, S0), retain_graph=True)
        out.backward(spread(seed, mesh, R))
        F.linear(sharded, weight).backward(spread(seed, mesh, S1))
        assert weight.grad.placements == (R,)
        assert_whole(weight.grad, plain.grad)
        weight.grad = None
        assert weight.grad is None

    on_ranks(on_rank, world)


def test_grad_modes_do_not_leak():
    """Calls under no_grad and inference_mode leave no plan or view behind that would lose a later gradient."""
    import torch
    import torch.nn.functional as F

    x, w = values(5, 3), values(4, 3, seed=1)
    plain = w.clone().requires_grad_()
    F.linear(x, plain).sum().backward()

    def on_rank(mesh):
        sharded, weight = spread(x, mesh, S0), spread(w, mesh, R)
        F.linear(sharded, weight)
        weight.requires_grad_()
        with torch.no_grad():
            assert not F.linear(sharded, weight).requires_grad
        with torch.inference_mode():
            assert not F.linear(sharded, weight).requires_grad
            assert_whole(spread(x, mesh, S0).mul_(2.0), 2 * x)
        F.linear(sharded, weight).sum().backward()
        assert_whole(weight.grad, plain.grad)
        weight.requires_grad = False
        assert not F.linear(sharded, weight).requires_grad

    on_ranks(on_rank, 2)


def test_hooks_see_dtensors():
    """Hooks on tensors get and may replace DTensors in the dual layout; those after accumulation get the tensor."""
    x = values(4)

    def on_rank(mesh):
        seen, sharded = [], spread(x, mesh, S0).requires_grad_()
        sharded.register_hook(lambda grad: (seen.append(grad), grad * 2.0)[1])
        sharded.register_post_accumulate_grad_hook(seen.append)
        (sharded * 3.0).sum().backward()
        assert_whole(seen[0], 3 + 0 * x)
        assert seen[1] is sharded
        assert_whole(sharded.grad, 6 + 0 * x)
        bad = spread(x, mesh, S0).requires_grad_()
        bad.register_hook(lambda grad: grad.to_local())
        return text_of(MixedTensorError, lambda: (bad * 3.0).sum().backward())

    assert on_ranks(on_rank, 2)[0] == "gradient returned by a hook of a DTensor must be a DTensor, got Tensor"


def test_gradients_do_not_pass_by_a_hook():
    """A gathered tensor gets its gradient if retain_grad is called before, and an error otherwise."""
    import torch.nn.functional as F

    x, w = values(4, 3), values(4, 3, seed=1)
    plain = x.clone().requires_grad_()
    F.linear(plain, w).sum().backward()

    def on_rank(mesh):
        sharded, weight, seen = spread(x, mesh, S0).requires_grad_(), spread(w, mesh, S0), []
        gathered = sharded.redistribute()
        gathered.register_hook(seen.append)
        gathered.retain_grad()
        F.linear(gathered, weight).sum().backward()
        for grad in (seen[0], gathered.grad, sharded.grad):
            assert_whole(grad, plain.grad)
        late = sharded.redistribute()
        F.linear(late, weight)
        return text_of(UnsupportedOperatorError, lambda: late.register_hook(print))

    assert on_ranks(on_rank, 2)[0] == (
        "register_hook: f32[4, 3] was redistributed and used already, and its gradient goes straight to what it was "
        "redistributed from; use x.clone() in its place, or register hooks first"
    )


def test_what_a_gradient_must_be():
    """A gradient assigned or passed in must be a DTensor of the tensor's shape; it is redistributed to the dual."""
    x = values(4)

    def on_rank(mesh):
        sharded = spread(x, mesh, S0).requires_grad_()
        sharded.grad = spread(x, mesh, R)
        assert sharded.grad.placements == (S0,)
        assert_whole(sharded.grad, x)
        return [
            text_of(MixedTensorError, lambda: setattr(sharded, "grad", x)),
            text_of(LayoutError, lambda: setattr(sharded, "grad", spread(values(5), mesh, S0))),
            text_of(MixedTensorError, lambda: (sharded * 2.0).backward(x)),
        ]

    assert on_ranks(on_rank, 2)[0] == [
        "grad of a DTensor must be a DTensor, got Tensor",
        "grad has shape [5], the tensor has [4]",
        "backward: gradient of a DTensor must be a DTensor, got Tensor",
    ]


# -- objects -----------------------------------------------------------------------------------------------------------


def test_parameters_stay_parameters():
    """nn.Parameter of a DTensor is both, through deepcopy, pickle and torch.save, with attributes, not gradients."""
    import torch
    from torch import nn

    w = values(4, 3)

    def on_rank(mesh):
        made = nn.Parameter(spread(w, mesh, S0))
        made.tag = "mine"
        made.grad = spread(2 * w, mesh, S0)
        stream = io.BytesIO()
        torch.save(made, stream)
        stream.seek(0)
        loaded = torch.load(stream, weights_only=False)
        copied, pickled = copy.deepcopy(made), pickle.loads(pickle.dumps(made))  # noqa: S301 - our own bytes
        for parameter in (made, copied, pickled, loaded):
            assert isinstance(parameter, nn.Parameter)
            assert isinstance(parameter, DTensor)
            assert parameter.requires_grad
            assert parameter.is_leaf
            assert parameter.tag == "mine"
            assert parameter.layout is made.layout
            assert_whole(parameter, w)
        assert [parameter.grad for parameter in (copied, pickled, loaded)] == [None] * 3
        with torch.no_grad():
            copied.add_(1.0)
        assert_whole(made, w)
        twins = copy.deepcopy([made, made])
        assert twins[0] is twins[1]

    on_ranks(on_rank, 2)


def test_data_keeps_the_layout_and_may_change_the_dtype():
    """Assigning .data replaces values and dtype, of the wrapper too; another layout is refused."""
    import torch

    w = values(4, 3)

    def on_rank(mesh):
        made = torch.nn.Parameter(spread(w, mesh, S0))
        made.data = made.data.to(torch.float64)
        with torch._C.DisableTorchFunctionSubclass():
            assert torch.Tensor.dtype.__get__(made) is torch.float64
        assert made.dtype is torch.float64
        made.sum().backward()
        assert made.grad.dtype is torch.float64
        return text_of(LayoutError, lambda: setattr(made, "data", spread(w, mesh, R)))

    text = on_ranks(on_rank, 2)[0]
    assert text == (
        "data must be a DTensor laid out as f64[4@tp, 3], whose storage is then shared, got f32[4, 3]; call "
        "value.redistribute(placements=[Shard(0)]) for a copy, or write into the tensor with copy_(value)"
    )


def test_modules_hold_dtensors():
    """state_dict, load_state_dict and to(dtype) work on a module of DTensor parameters, forward after each."""
    import torch.nn.functional as F
    from torch import nn

    x, w, b = values(5, 3), values(4, 3, seed=1), values(4, seed=2)

    def on_rank(mesh):
        module = nn.Linear(3, 4)
        module.weight, module.bias = nn.Parameter(spread(w, mesh, S0)), nn.Parameter(spread(b, mesh, S0))
        state = {name: value * 2.0 for name, value in module.state_dict().items()}
        assert_whole(module(spread(x, mesh, R)), F.linear(x, w, b))
        module.load_state_dict(state)
        assert_whole(module(spread(x, mesh, R)), F.linear(x, 2 * w, 2 * b))
        assert isinstance(module.weight, nn.Parameter)
        module.double()
        assert_whole(module(spread(x.double(), mesh, S0)), F.linear(x.double(), 2 * w.double(), 2 * b.double()))

    on_ranks(on_rank, 2)


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad"])
def test_optimizers_write_in_place(name):
    """Steps of PyTorch's optimizers are those of one device, and no forward uses a stale gathered copy."""
    import torch
    import torch.nn.functional as F

    x, w = values(5, 3), values(4, 3, seed=1)

    def train(weight, sharded):
        optimizer = getattr(torch.optim, name)([weight], lr=0.1, foreach=False)
        for _ in range(3):
            optimizer.zero_grad()
            F.linear(sharded, weight).square().sum().backward()
            optimizer.step()
        return weight

    plain = train(torch.nn.Parameter(w.clone()), x).detach()

    def on_rank(mesh):
        for place in (R, S0, S1):
            assert_whole(train(torch.nn.Parameter(spread(w, mesh, place)), spread(x, mesh, S0)), plain)

    on_ranks(on_rank, 2)


# -- writing -----------------------------------------------------------------------------------------------------------


def test_writes_to_copies_are_refused():
    """Writing to a view that had to be a copy, or to any alias or view of it, is refused."""
    x = values(4, 6)

    def on_rank(mesh):
        copied = spread(x, mesh, S1).view(24)
        aliases = [copied, copied.detach(), copied.data, copied.view(4, 6), copied.view(4, 6)[1:], copied.unbind(0)[0],
                   copied.contiguous(), copy.copy(copied)]  # fmt: skip
        texts = [text_of(UnsupportedOperatorError, lambda alias=alias: alias.add_(1.0)) for alias in aliases]
        assert_whole(copied.clone().add_(1.0), x.view(24) + 1)
        assert_whole(copy.deepcopy(copied).add_(1.0), x.view(24) + 1)
        return texts

    texts = on_ranks(on_rank, 2)[0]
    assert texts[0] == (
        "add(x=f32[24@tp]): x cannot be written to: it is a copy: view(x=f32[4, 6@tp]) had to redistribute x to "
        "f32[4@tp, 6], so a write would be lost; write to x itself"
    )
    assert all("so a write would be lost; write to x itself" in text for text in texts)


def test_writes_through_views_arrive():
    """A view that needed no communication shares storage, so a write to it reaches the tensor."""
    x = values(4, 6)

    def on_rank(mesh):
        sharded = spread(x, mesh, S0)
        sharded.view(24).add_(1.0)
        sharded.detach().mul_(2.0)
        sharded.data.mul_(3.0)
        assert_whole(sharded, 6 * (x + 1))

    on_ranks(on_rank, 2)


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_through_writes(world):
    """In-place operations on the graph give both operands the gradients of one device."""
    x, y = values(5, 3), values(3, seed=1)
    plain_x, plain_y = x.clone().requires_grad_(), y.clone().requires_grad_()
    ((plain_x * 1.0 * plain_y) ** 2).sum().backward()

    def on_rank(mesh):
        sharded, other = spread(x, mesh, S0).requires_grad_(), spread(y, mesh, R).requires_grad_()
        written = sharded * 1.0
        assert written.mul_(other) is written
        (written * written).sum().backward()
        assert_whole(sharded.grad, plain_x.grad)
        assert_whole(other.grad, plain_y.grad)

    on_ranks(on_rank, world)


def test_sparse_tensors_are_refused():
    """Sparse tensors are refused by distribute_tensor and from_local."""
    import torch

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sparse = torch.eye(3).to_sparse()
        messages = []
        for call in (
            lambda: DTensor.from_local(sparse, mesh, [Replicate()]),
            lambda: distribute_tensor(sparse.to_sparse_csr(), mesh, [Shard(0)]),
        ):
            with pytest.raises(ArgumentTypeError) as raised:
                call()
            messages.append(str(raised.value))
        return messages

    assert simulate(run, 2, "torch")[0] == [
        "from_local: local has sparse storage, which cannot be sharded; use tensor.to_dense()",
        "distribute_tensor: tensor has sparse storage, which cannot be sharded; use tensor.to_dense()",
    ]


def test_no_gathered_copy_is_cached_after_to_local_of_a_leaf():
    """After `to_local()` of a leaf no gathered copy is cached, since `.data` writes are not counted."""
    import torch

    def on_rank(mesh):
        x = spread(values(4), mesh, R).requires_grad_()
        k = spread(values(4), mesh, S0)
        first = (x * k).full_tensor()
        x.to_local().data.mul_(2)
        return bool(torch.equal((x * k).full_tensor(), 2 * first))

    assert on_ranks(on_rank, 2) == [True, True]


def test_methods_that_would_reach_for_storage_are_refused():
    """share_memory_ and apply_, which would crash the process, are refused with the fix."""

    def on_rank(mesh):
        x = spread(values(4), mesh, S0)
        return [
            text_of(UnsupportedOperatorError, x.share_memory_),
            text_of(UnsupportedOperatorError, lambda: x.apply_(abs)),
        ]

    assert on_ranks(on_rank, 2)[0] == [
        "share_memory_() of a DTensor: call x.to_local().share_memory_() for the local tensor",
        "apply_() of a DTensor: call x.to_local().apply_(...) for the local tensor",
    ]


def test_what_a_wrapper_is_made_like_is_kept_outside_of_special_modes_only(monkeypatch):
    """Tensors of inference mode or of a fake device would not suit later wrappers; dtype is the local's in any case."""
    import torch
    from torch._subclasses import FakeTensorMode

    from hyper_parallel.platform.torch import dtensor

    wrap, kept = get_torch_platform().wrap, {}
    monkeypatch.setattr(dtensor, "_LIKE", kept)
    layout = Layout.place(DeviceMesh.abstract("cpu", (1,), (0,), ("tp",)), [R], (2,))
    local = torch.randn(2, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        made = [wrap(local, layout)]
    with FakeTensorMode():
        wrap(torch.ones(2, requires_grad=True), layout)
    torch.func.grad(lambda x: (wrap(x, layout), x.sum())[1])(local.detach())
    assert kept == {}
    made += [wrap(local, layout), wrap(local, layout)]
    ((key, like),) = kept.items()
    assert (key, like.numel(), like.requires_grad, like.is_inference()) == (torch.float64, 0, False, False)
    for wrapped in made:
        own = [getattr(torch._C.TensorBase, name).__get__(wrapped) for name in ("dtype", "shape", "requires_grad")]
        assert own == [torch.float64, (2,), False]


@pytest.mark.parametrize("needs_grad", [False, True])
def test_what_is_pickled_is_the_local_tensor_once(needs_grad):
    """What PyTorch's constructor keeps of the local tensor is no attribute that others attached."""

    def program(mesh):
        tensor = spread(values(2, 3), mesh, S0).requires_grad_(needs_grad)
        tensor = get_torch_platform().wrap(tensor.to_local(), tensor.layout)
        tensor.label = "weight"
        return tensor.__reduce_ex__(4)[1][2], vars(copy.deepcopy(tensor)).get("label")

    assert on_ranks(program, 1) == [({"label": "weight"}, "weight")]
