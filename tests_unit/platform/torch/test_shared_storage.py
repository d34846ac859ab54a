"""``detach``, ``.data``, ``set_`` and ``.grad =`` share storage, or say why not: no write is seen on one side only."""

from __future__ import annotations

import gc
import io
import re
import weakref

import pytest

from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.errors import LayoutError, MixedTensorError, UnsupportedOperatorError
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")

WORLDS = [(2,), (3,), (4,), (2, 2)]
COPY = "it is a copy: getitem(x=f32[9@a]) had to redistribute x to f32[9], so a write would be lost; write to x itself"
STALE = (
    f"a view of a tensor that was written since is stale: {COPY}; take the view again after the write, or clone() it"
)


def on_ranks(function, shape=(2,)):
    """``function(place)`` on every rank; ``place(values, placement)`` distributes them along every axis."""
    world = 1
    for size in shape:
        world *= size

    def rank():
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
        return function(lambda whole, placement: distribute_tensor(whole, mesh, [placement] * len(shape)))

    return simulate(rank, world, "torch")


def on_one_device(whole, placement):
    """A plain tensor in the place of the DTensor."""
    del placement
    return whole.clone()


def numbers(*shape, seed=0):
    """Random values, equal on every rank."""
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def whole(value):
    """The values of a tensor, or of a DTensor."""
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def assert_as_on_one_device(function, shape):
    """``function(place)`` returns equal tensors on every rank and on one device."""
    import torch

    wanted = [whole(value) for value in function(on_one_device)]
    for results in on_ranks(lambda place: [whole(value) for value in function(place)], shape):
        torch.testing.assert_close(results, wanted)


ALIASES = {
    "detach": lambda view: view.detach(),
    "data": lambda view: view.data,
    "data of detach": lambda view: view.detach().data,
    "view": lambda view: view.view(3, 1),
}
WRITES = {
    "write": lambda base: base.mul_(2),
    "data": lambda base: base.data.mul_(2),
    "data of data": lambda base: base.data.data.mul_(2),
    "detach": lambda base: base.detach().mul_(2),
    "data of detach": lambda base: base.detach().data.mul_(2),
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("write", WRITES)
def test_a_copy_in_the_place_of_a_view_is_stale_after_any_write(alias, write):
    """A part that had to move is a copy; whatever writes to the tensor, its aliases are not read any more."""

    def rank(place):
        base = place(numbers(9), Shard(0))
        view = ALIASES[alias](base[:3])
        WRITES[write](base)
        with pytest.raises(UnsupportedOperatorError, match=re.escape(STALE)):
            view.full_tensor()
        with pytest.raises(UnsupportedOperatorError, match=r"cannot be written to|is stale"):
            view.add_(1)

    on_ranks(rank)


def _set_on(x, y):
    y.set_(x)
    return y


def _data_of(x, y):
    y.data = x
    return y


SHARED = {
    "a view": lambda x, _: (x.view_as(x), x.data),
    "a view of a view": lambda x, _: (x.view_as(x).view_as(x), x.data),
    "a view after .data =": lambda x, y: (_data_of(y, x).view_as(x), x.data),
    "set_": lambda x, y: (x, _set_on(x, y)),
    "set_, of the target": lambda x, y: (_set_on(x, y), x),
    ".data =": lambda x, y: (x, _data_of(x, y)),
    ".data =, twice": lambda x, y: (x, _data_of(_data_of(y.detach().clone(), x), y)),
    ".data =, of a view": lambda x, y: (x.view_as(x), _data_of(x, y)),
    ".data of set_": lambda x, y: (x, _set_on(x, y).data),
}


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("name", SHARED)
def test_a_write_by_another_tensor_of_the_storage_makes_a_copy_stale(name, is_read):
    """A copy of a part of one tensor is not read any more once another tensor of its storage was written."""

    def rank(place):
        x, y = place(numbers(9), Shard(0)), place(numbers(9, seed=1), Shard(0))
        read, written = SHARED[name](x, y)
        part = read[:3]
        if is_read:
            assert whole(part).equal(whole(read)[:3])
        written.mul_(2)
        with pytest.raises(UnsupportedOperatorError, match="is stale: "):
            part.full_tensor()
        assert whole(read[:3]).equal(whole(read)[:3])

    on_ranks(rank)


def test_storage_is_shared_in_inference_mode():
    """Tensors of inference mode have no version counter; ``set_()`` shares their storage all the same."""
    import torch

    def rank(place):
        with torch.inference_mode():
            x, y = place(numbers(9), Shard(0)), place(numbers(9, seed=1), Shard(0))
            y.set_(x)
            x.mul_(2)
            assert whole(y).equal(numbers(9) * 2)

    on_ranks(rank)


def test_shared_storage_is_freed():
    """Counting the writes of tensors that share storage keeps neither of them, nor a storage that was replaced."""
    import torch

    def rank(place):
        x, y = place(numbers(9), Shard(0)), place(numbers(9, seed=1), Shard(0))
        replaced = weakref.ref(x.to_local().untyped_storage())
        for _ in range(3):
            x.data = y
            y.data = x.detach().clone()
        kept = [weakref.ref(tensor.to_local()) for tensor in (x, y)]
        file = io.BytesIO()
        torch.save([x.to_local(), y[:3].full_tensor()], file)
        file.seek(0)
        assert torch.load(file, weights_only=True)[0].equal(x.to_local())
        del x, y
        gc.collect()
        assert [tensor() for tensor in kept] == [None, None]
        assert replaced() is None

    on_ranks(rank)


@pytest.mark.parametrize("shape", WORLDS)
def test_what_writes_nothing_makes_no_copy_stale(shape):
    """Reading ``.data`` is not a write, and neither is giving the tensor another storage."""

    def run(place):
        base = place(numbers(9), Shard(0))
        view = base[:3]
        norm = base.data.norm()
        base.data = base.data * 2
        return [norm, view, base, base[4:]]

    assert_as_on_one_device(run, shape)


@pytest.mark.parametrize("shape", WORLDS)
def test_a_parameter_of_a_part_is_trained(shape):
    """A parameter made of a part of a tensor has gradients; trained, it must be a tensor of its own."""
    import torch

    def run(place):
        fused = place(numbers(9, 4), Shard(0))
        part = torch.nn.Parameter(fused[:3].clone())
        view = torch.nn.Parameter(fused[3:7])
        ((part**2).sum() + (view**3).sum()).backward()
        torch.optim.SGD([part], lr=0.1).step()
        return [part, part.grad, view, view.grad]

    assert_as_on_one_device(run, shape)

    def trained(place):
        view = torch.nn.Parameter(place(numbers(9), Shard(0))[:3])
        view.sum().backward()
        with pytest.raises(UnsupportedOperatorError, match=re.escape(f"cannot be written to: {COPY}")):
            torch.optim.SGD([view], lr=0.1).step()

    on_ranks(trained)


@pytest.mark.parametrize("shape", WORLDS)
def test_set_shares_the_storage(shape):
    """``set_`` of a tensor that is laid out alike shares its storage, of leaves too; a leaf needs ``no_grad``."""
    import torch

    def run(place):
        target, source = place(numbers(9), Shard(0)), place(numbers(9, seed=1), Shard(0))
        leaf = place(numbers(5, 3, seed=2), Shard(1)).requires_grad_()
        assert target.set_(source) is target
        source.mul_(2)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            leaf.set_(place(numbers(5, 3), Shard(1)))
        with torch.no_grad():
            leaf.set_(place(numbers(5, 3), Shard(1)))
        (leaf**2 * place(numbers(5, 3, seed=4), Replicate())).sum().backward()
        return [target, source, leaf, leaf.grad]

    assert_as_on_one_device(run, shape)


@pytest.mark.parametrize("shape", WORLDS)
def test_spectral_norm_and_own_parametrizations_train(shape):
    """Registering and removing a parametrization sets parameters; both train as on one device."""
    import torch
    from torch import nn
    from torch.nn.utils import parametrizations, parametrize

    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).transpose(-1, -2)

        def right_inverse(self, x):
            return x.triu()

    def run(place):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 7))
        for number, (layer, placement) in enumerate(zip(model, (Shard(0), Replicate()), strict=True)):
            layer.weight = nn.Parameter(place(numbers(*layer.weight.shape, seed=number), placement))
            layer.bias = nn.Parameter(place(numbers(7, seed=number + 2), Replicate()))
        with torch.random.fork_rng():
            torch.manual_seed(0)
            parametrizations.spectral_norm(model[0])
        parametrize.register_parametrization(model[1], "weight", Symmetric())
        norm = model[0].parametrizations.weight[0]
        with torch.no_grad():
            for buffer in (norm._u, norm._v):
                first = nn.functional.normalize(numbers(*buffer.shape, seed=9), dim=0)
                buffer.copy_(place(first, Replicate()) if hasattr(buffer, "full_tensor") else first)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            optimizer.zero_grad()
            (model(place(numbers(3, 5, seed=step), Shard(0))) * place(numbers(3, 7, seed=5), Shard(0))).sum().backward()
            optimizer.step()
        gradients = [parameter.grad for parameter in model.parameters()]
        parametrize.remove_parametrizations(model[1], "weight")
        return [*gradients, *model.parameters(), norm._u]

    assert_as_on_one_device(run, shape)


@pytest.mark.parametrize("what", ["data", "grad", "the source of set_()"])
def test_a_copy_in_the_place_of_a_view_shares_no_storage(what):
    """Assigned to another tensor it would be shared on one device, and is not here: a clone is asked for."""

    def rank(place):
        base, target = place(numbers(9), Shard(0)), place(numbers(3), Replicate()).requires_grad_()
        for value in (base[:3], base[:3].detach(), base[:3].data):
            text = f"{what} would not share the storage of the value: {COPY}; use value.clone()"
            with pytest.raises(UnsupportedOperatorError, match=f"^{re.escape(text)}$"):
                assign(target, what, value)
        assign(target.detach(), what, base[:3].clone())

    on_ranks(rank)


def assign(target, what, value):
    """Give ``target`` the storage of ``value``."""
    if what in {"data", "grad"}:
        setattr(target, what, value)
    else:
        target.set_(value)


def test_other_sources_are_refused():
    """No plain tensor, no other shape, no storage; another layout with the call that helps."""
    import torch

    def rank(place):
        x = place(numbers(4, 3), Shard(0))
        wanted = "must be a DTensor laid out as f32[4@a, 3]"
        shared = f"{wanted}, whose storage is then shared, got f32"
        fix = "; call value.redistribute(placements=[Shard(0)]) for a copy, or write into the tensor with copy_(value)"
        for what in ("data", "the source of set_()"):
            cases = {
                f"{what} {wanted}, got Tensor": (MixedTensorError, torch.ones(4, 3)),
                f"{what} {shared}[4, 3@a]{fix}": (LayoutError, place(numbers(4, 3), Shard(1))),
                f"{what} {shared}[4@a, 5]": (LayoutError, place(numbers(4, 5), Shard(0))),
            }
            for text, (kind, value) in cases.items():
                with pytest.raises(kind, match=f"^{re.escape(text)}$"):
                    assign(x, what, value)
        text = "set_() of a DTensor takes another DTensor, and no storage, sizes or strides"
        for call in (lambda: x.set_(x, 0, (2,), (1,)), lambda: x.set_(x, storage_offset=0, size=(2,), stride=(1,))):
            with pytest.raises(UnsupportedOperatorError, match=f"^{re.escape(text)}$"):
                call()
        text = (
            "torch.Tensor.set_(x, y) of DTensors (f32[4@a, 3], f32[4@a, 3]) would act on wrappers, which have no "
            "storage"
        )
        with pytest.raises(UnsupportedOperatorError, match=rf"^{re.escape(text)}; write x.set_\(y\)$"):
            torch.Tensor.set_(x, x)

    on_ranks(rank)


@pytest.mark.parametrize("shape", WORLDS)
def test_a_gradient_in_another_layout_is_a_copy_that_nobody_writes(shape):
    """It is read as long as neither is written, and then no more; an optimizer that reads it works as on one device."""
    import torch

    def run(place):
        x, gradient = place(numbers(5, 3), Shard(0)).requires_grad_(), place(numbers(5, 3, seed=1), Shard(1))
        x.grad = gradient
        torch.optim.SGD([x], lr=0.1).step()
        x.grad = None
        return [x, gradient, gradient * 2]

    assert_as_on_one_device(run, shape)

    def written(place):
        x, gradient = place(numbers(5, 3), Shard(0)).requires_grad_(), place(numbers(5, 3, seed=1), Shard(1))
        x.grad = gradient
        reason = "it was assigned to grad in another layout, which made a copy"
        with pytest.raises(UnsupportedOperatorError, match=f"cannot be written to: {reason}$"):
            gradient.add_(1)
        (x * 3).sum().backward()
        with pytest.raises(UnsupportedOperatorError, match=f"is stale: {reason}; take the view again after the write"):
            gradient.full_tensor()

    on_ranks(written, shape)


def test_an_alias_keeps_no_graph():
    """A detached tensor that is kept, such as a loss, keeps nothing of what computed it; neither does one of a part."""
    import torch

    def rank(place):
        x = place(numbers(9), Shard(0)).requires_grad_()
        y = x * 2
        kept = [y.detach(), y.data, y[:3].detach()]
        graph = weakref.ref(y.to_local())
        del y
        gc.collect()
        assert graph() is None
        torch.testing.assert_close(whole(kept[2]), numbers(9)[:3] * 2)

    on_ranks(rank)
