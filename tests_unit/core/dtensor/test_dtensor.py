from __future__ import annotations

import gc
import weakref

import pytest

import hyper_parallel.core.dtensor.dtensor as unit
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import module_scope, record_events
from hyper_parallel.core.dtensor.factories import zeros
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import LayoutError, MeshMismatchError, ShardMismatchError, UnsupportedOperatorError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def spread(whole, mesh, *placements):
    """A leaf DTensor of the global tensor ``whole``."""
    layout = Layout.place(mesh, placements, tuple(whole.shape))
    box = tuple(slice(*value) for value in layout.local_box())
    return get_torch_platform().wrap(whole[box].clone(), layout)


def on_ranks(function, *shape):
    """``function(mesh)`` on every rank of a mesh with axes dp, tp (or tp alone)."""
    names = ("dp", "tp")[-len(shape) :]
    world = 1
    for size in shape:
        world *= size
    return simulate(lambda: function(init_device_mesh("cpu", shape, mesh_dim_names=names)), world, "torch")


def text_of(kind, function):
    """The text of the error that ``function`` raises."""
    with pytest.raises(kind) as caught:
        function()
    return str(caught.value)


@pytest.mark.parametrize("shape, size", [((2,), 5), ((3,), 2), ((4,), 5), ((2, 2), 7), ((2, 3), 5), ((3,), 0)])
def test_local_shards_make_the_global_tensor(shape, size):
    """from_local with the global shape and full_tensor are inverse, also for uneven and empty shards."""
    import torch

    whole = torch.arange(float(size * 3)).reshape(size, 3)

    def on_rank(mesh):
        places = [S0] * mesh.ndim
        local = spread(whole, mesh, *places).to_local()
        tensor = DTensor.from_local(local, mesh, places, shape=whole.shape, run_check=True)
        assert tensor.shape == whole.shape
        assert tensor.local_shape == tuple(local.shape)
        assert torch.equal(tensor.full_tensor(), whole)

    on_ranks(on_rank, *shape)


def test_from_local_again_is_checked_again(monkeypatch):
    """A repeated from_local has its own placements and shape, checks storage, and keeps a bounded number of layouts."""
    import torch

    monkeypatch.setattr(unit, "_MAX_EVEN", 4)
    unit._EVEN.clear()

    def on_rank(mesh):
        for size in (*range(1, 6), 1, 2):
            for places, rows in (([S0], 2 * size), ((S1,), size), (["tp", "None"], 2 * size), ([R], size)):
                for _ in range(2):
                    tensor = DTensor.from_local(torch.ones(size, 3), mesh, places)
                    assert tensor.shape[0] == rows
        mine = torch.ones(2, 3, requires_grad=True)
        for local in (mine, mine * 2):
            assert DTensor.from_local(local, mesh, [S0])._is_callers_leaf == local.is_leaf
        return text_of(TypeError, lambda: DTensor.from_local(torch.ones(2, 3).to_sparse(), mesh, [S0]))

    for text in on_ranks(on_rank, 2):
        assert text == "from_local: local has sparse storage, which cannot be sharded; use tensor.to_dense()"
    assert 0 < len(unit._EVEN) <= 4


def test_constructor_is_from_local():
    """DTensor(local, mesh, placements) is from_local with even shards, an instance of both tensor types."""
    import torch

    def on_rank(mesh):
        tensor = DTensor(torch.ones(2, 3), mesh, [S0])
        assert isinstance(tensor, DTensor)
        assert isinstance(tensor, torch.Tensor)
        assert tensor.shape == torch.Size([4, 3])
        with mesh:
            assert DTensor.from_local(torch.ones(2)).placements == (R,)

    on_ranks(on_rank, 2)


def test_local_shards_that_do_not_fit_are_refused():
    """A shard of a wrong shape, and ranks that disagree in checked mode, raise ShardMismatchError on every rank."""
    import torch

    def on_rank(mesh):
        rank = mesh.get_rank()
        make = DTensor.from_local
        return [
            text_of(ShardMismatchError, lambda: make(torch.ones(3, 2), mesh, [S0], shape=(5, 3))),
            text_of(ShardMismatchError, lambda: make(torch.ones(3), mesh, [S0], shape=(5, 3))),
            text_of(ShardMismatchError, lambda: make(torch.ones(3 - rank), mesh, [S0], run_check=True)),
            text_of(
                ShardMismatchError,
                lambda: make(torch.ones(2, dtype=(torch.float32, torch.int64)[rank]), mesh, [S0], run_check=True),
            ),
        ]

    def sizes(mesh):
        return [
            text_of(LayoutError, lambda shape=shape: DTensor.from_local(torch.ones(0), mesh, [S0], shape=shape))
            for shape in ((-4,), (4.0,), "4", 4)
        ]

    assert on_ranks(sizes, 2)[0] == [
        f"from_local: shape must give an int per dim, none negative, got {shape}"
        for shape in ("(-4,)", "(4.0,)", "'4'", "4")
    ]
    first, second = on_ranks(on_rank, 2)
    assert first[0] == "from_local: rank 0 holds [3, 3] of [5@tp, 3], but local has [3, 2]"
    assert second[0] == "from_local: rank 1 holds [2, 3] of [5@tp, 3], but local has [3, 2]"
    assert first[1] == second[1] == "from_local: shape [5, 3] has 2 dims, local [3] has 1"
    assert first[2] == (
        "from_local: the local tensors do not make one tensor of [6] under (Shard(0),): rank 1 should hold [3] "
        "(rank 0: [3] torch.float32, rank 1: [2] torch.float32); pass shape=, the global shape"
    )
    assert second[2].startswith("from_local: the local tensors do not make one tensor of [4] under (Shard(0),): rank 0")
    assert (
        first[3]
        == second[3]
        == ("from_local: ranks hold different dtypes (rank 0: [2] torch.float32, rank 1: [2] torch.int64)")
    )


def test_a_local_tensor_on_another_device_than_its_mesh_is_refused():
    """A tensor left on the host is reported with both ways out, also after one that was on the mesh's device."""
    import torch

    def on_rank(mesh):
        device = DeviceMesh.abstract("npu", (2,), (0, 1), ("tp",))
        delayed = DTensor.from_local(torch.ones(2, device="meta"), device, [S0])
        assert tuple(delayed.shape) == (4,)
        return text_of(MeshMismatchError, lambda: DTensor.from_local(torch.ones(2), device, [S0]))

    expected = (
        "from_local: local is on cpu, but the mesh is DeviceMesh(npu, tp=2, ranks=[0, 1]); move it there with "
        'local.to("npu"), or make the mesh for cpu'
    )
    assert on_ranks(on_rank, 2) == [expected] * 2


def test_what_from_local_takes():
    """from_local takes a plain tensor of a framework, and a mesh."""
    import torch

    def on_rank(mesh):
        nested = text_of(TypeError, lambda: DTensor.from_local(spread(torch.ones(2), mesh, R), mesh))
        return nested.partition("got")[0], text_of(TypeError, lambda: DTensor.from_local([1.0], mesh))

    assert on_ranks(on_rank, 2)[0] == (
        "from_local: local must be a plain tensor, ",
        ("from_local: local must be a tensor of torch or mindspore, got list; convert it first, as in "
         "torch.tensor(data) or mindspore.Tensor(data)"),
    )  # fmt: skip
    assert text_of(ValueError, lambda: unit.resolve_mesh(None)) == (
        "device_mesh: none was given and there is no current mesh; pass one, or use 'with mesh:'"
    )


def test_redistribute_stays_on_its_mesh():
    """The identical layout is the tensor itself; another mesh is refused."""
    import torch

    def on_rank(mesh):
        x = spread(torch.ones(4, 6), mesh, S0, R)
        assert x.redistribute(placements=[S0, R]) is x
        assert x.redistribute(placements=("dp", None)) is x
        return text_of(MeshMismatchError, lambda: x.redistribute(mesh["tp"], [R]))

    assert on_ranks(on_rank, 2, 2)[0] == (
        "redistribute: the tensor is on DeviceMesh(cpu, dp=2, tp=2, ranks=[0, 1, 2, 3]), "
        "not on DeviceMesh(cpu, tp=2, ranks=[0, 1])"
    )


@pytest.mark.untraced
@pytest.mark.parametrize("shape", [(2, 2), (2, 3)])
def test_gradients_follow_every_change_of_placement(shape):
    """For every redistribution, the gradient of full_tensor() is this rank's shard of the random cotangent."""
    import torch

    generator = torch.Generator().manual_seed(3)
    whole, seed = torch.randn(5, 7, generator=generator), torch.randn(5, 7, generator=generator)
    kinds = (R, S0, S1)

    def on_rank(mesh):
        for source in [(value, other) for value in kinds for other in kinds]:
            for target in [(value, other) for value in kinds for other in kinds]:
                x = spread(whole, mesh, *source).requires_grad_()
                y = x.redistribute(placements=target)
                assert torch.equal(y.full_tensor(), whole)
                (y.full_tensor() * seed).sum().backward()
                assert x.grad.placements == x.placements
                assert torch.equal(x.grad.full_tensor(), seed)

    on_ranks(on_rank, *shape)


def test_to_local_takes_gradient_placements():
    """With grad_placements Partial, to_local sums the ranks' gradients; without, it uses the dual layout."""
    import torch

    def on_rank(mesh):
        factor = 1.0 + mesh.get_rank()
        x = spread(torch.ones(3), mesh, R).requires_grad_()
        (x.to_local(grad_placements=[P]) * factor).sum().backward()
        message = x.grad.to_local()
        x.grad = None
        (x.to_local() * factor).sum().backward()
        return message.tolist(), x.grad.to_local().tolist()

    assert on_ranks(on_rank, 3) == [([6.0] * 3, [factor] * 3) for factor in (1.0, 2.0, 3.0)]


def test_gradient_placements_that_cannot_be():
    """A gradient placement other than the dual, or Partial for a replicated tensor, is refused with the legal ones."""
    import torch

    def on_rank(mesh):
        x, y, z = spread(torch.ones(4, 4), mesh, S0), spread(torch.ones(4), mesh, R), spread(torch.ones(4), mesh, R)
        z = get_torch_platform().wrap(z.to_local(), z.layout.with_placement(0, P))
        assert x.to_local(grad_placements=[Shard(-2)]) is not None
        return [
            text_of(LayoutError, lambda: x.to_local(grad_placements=[P])),
            text_of(LayoutError, lambda: y.to_local(grad_placements=[S0])),
            text_of(LayoutError, lambda: z.to_local(grad_placements=[P])),
            text_of(LayoutError, lambda: x.to_local(grad_placements=[R, R])),
        ]

    assert on_ranks(on_rank, 2)[0] == [
        "to_local: on axis tp the tensor is Shard(0); its gradient can be Shard(0), not Partial(sum)",
        "to_local: on axis tp the tensor is Replicate(); its gradient can be Replicate() or Partial(sum), not Shard(0)",
        "to_local: on axis tp the tensor is Partial(sum); its gradient can be Replicate(), not Partial(sum)",
        "to_local: 2 grad_placements given for the 1 axes ('tp',)",
    ]


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_from_local_takes_gradient_placements(shape):
    """With grad_placements Partial, the gradients of the ranks' local tensors add up to the true one."""
    import torch

    seed = torch.randn(5, 3, generator=torch.Generator().manual_seed(4))

    def on_rank(mesh):
        inner = [S0] * (mesh.ndim - 1)
        box = Layout.place(mesh, [R, *inner], (5, 3)).local_box()
        own = seed[tuple(slice(*part) for part in box)]
        result = []
        for kind in (R, P):
            local = torch.ones(own.shape, requires_grad=True)
            x = DTensor.from_local(local, mesh, [kind, *inner], shape=(5, 3), grad_placements=[P, *inner])
            assert x.placements == (kind, *inner)
            (x.full_tensor() * seed).sum().backward()
            result.append(local.grad)
            fixed = DTensor.from_local(local.detach(), mesh, [kind, *inner], shape=(5, 3), grad_placements=[P, *inner])
            assert not fixed.requires_grad
        local.grad = None
        x = DTensor.from_local(local, mesh, [R, *inner], shape=(5, 3), grad_placements=[R, *inner])
        (x.full_tensor() * seed).sum().backward()
        assert torch.equal(local.grad, own)
        with torch.no_grad():
            x = DTensor.from_local(local, mesh, [R, *inner], shape=(5, 3), grad_placements=[P, *inner])
        assert not x.requires_grad
        assert x.to_local().data_ptr() == local.data_ptr()
        return [mesh.coordinate[1:], own, *result]

    rows = on_ranks(on_rank, *shape)
    for coordinate in {row[0] for row in rows}:
        members = [row[1:] for row in rows if row[0] == coordinate]
        for kind in (1, 2):
            assert torch.equal(sum(row[kind] for row in members), members[0][0])


def test_gradients_that_local_cannot_have():
    """from_local refuses gradient placements of another shape, with the legal ones."""
    import torch

    def on_rank(mesh):
        whole = torch.ones(4, 4, requires_grad=True)

        def tried(kind, gradient):
            return text_of(LayoutError, lambda: DTensor.from_local(whole, mesh, [kind], grad_placements=[gradient]))

        return [tried(S0, P), tried(R, S0), tried(Partial("avg"), P)]

    facts = (
        ("Shard(0)", "Shard(0)", "Partial(sum)"),
        ("Replicate()", "Replicate() or Partial(sum)", "Shard(0)"),
        ("Partial(avg)", "Replicate()", "Partial(sum)"),
    )
    assert on_ranks(on_rank, 2)[0] == [
        f"from_local: on axis tp the tensor is {own}; its gradient can be {allowed}, not {asked}"
        for own, allowed, asked in facts
    ]


_GATHERED_BACKWARD = {(R, S0), (R, S1), (S0, S1), (S1, S0), (P, S0), (P, S1)}


@pytest.mark.parametrize("shape", [(2,), (3,)])
def test_dtypes_of_a_redistribution(shape):
    """Forward and backward communicate in their own dtypes; the gradient has the tensor's, also of second order."""
    import torch

    generator = torch.Generator().manual_seed(5)
    whole, seed, again = (torch.randn(5, 7, generator=generator) for _ in range(3))

    def on_rank(mesh):
        for source in (R, S0, S1, P):
            for target in (R, S0, S1):
                x = distribute_tensor(whole, mesh, [source]).requires_grad_()
                with record_events() as log:
                    y = x.redistribute(placements=[target], forward_dtype=torch.float64, backward_dtype=torch.bfloat16)
                    (y.full_tensor() * seed).sum().backward()
                assert (y.dtype, y.placements, x.grad.dtype) == (torch.float64, (target,), torch.float32)
                assert torch.equal(y.full_tensor().float(), whole)
                assert torch.equal(x.grad.full_tensor(), seed.bfloat16().float())
                sources = {event.source.partition("[")[0] for event in log if event.phase == "backward"}
                assert sources == ({"bf16"} if (source, target) in _GATHERED_BACKWARD else set())
        x = distribute_tensor(whole, mesh, [S0]).requires_grad_()
        y = x.redistribute(forward_dtype=torch.float64).full_tensor()
        (grad,) = torch.autograd.grad((y * y * seed).sum(), x, create_graph=True)
        (grad.full_tensor() * again).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * seed * again)
        fixed = distribute_tensor(whole, mesh, [S0])
        assert fixed.redistribute(placements=[S0], backward_dtype=torch.float64) is fixed
        assert fixed.redistribute(forward_dtype=torch.bfloat16).dtype is torch.bfloat16

    on_ranks(on_rank, *shape)


def test_functions_say_that_they_return_dtensors():
    """Editors and type checkers know what comes back, so that completion works."""
    functions = [distribute_tensor, zeros, DTensor.from_local, DTensor.redistribute, DTensor.reduce_partial]
    assert [function.__annotations__["return"] for function in functions] == ["DTensor"] * len(functions)


def test_dtypes_that_a_redistribution_cannot_have():
    """Integers, and reductions that are no sums, are cast by themselves: the message says so."""
    import torch

    def on_rank(mesh):
        numbers = distribute_tensor(torch.arange(4), mesh, [S0])
        layout = Layout.place(mesh, [Partial("max")], (4,))
        highest = get_torch_platform().wrap(torch.ones(4), layout)
        return [
            text_of(UnsupportedOperatorError, lambda: numbers.redistribute(forward_dtype=torch.bfloat16)),
            text_of(UnsupportedOperatorError, lambda: highest.redistribute(backward_dtype=torch.float64)),
        ]

    message = (
        "redistribute: forward_dtype and backward_dtype require real floating tensors and dtypes, and no reduction "
        "except sum and avg; got {}; cast the tensor before or after redistribute() instead"
    )
    assert on_ranks(on_rank, 2)[0] == [
        message.format("torch.bfloat16 and torch.int64 for i64[4@tp]"),
        message.format("torch.float32 and torch.float64 for f32[4] + Partial(max)@tp"),
    ]


def test_one_view_serves_all_consumers():
    """Consumers of a replicated tensor that vary along the same axes share one view; other axes have another."""
    import torch

    def on_rank(mesh):
        x = spread(torch.ones(4), mesh, R, R).requires_grad_()
        first, second = x.local_for(x.layout, (0,)), x.local_for(x.layout, (0,))
        assert first is second
        assert x.local_for(x.layout, (1,)) is not first
        with torch.no_grad():
            assert x.local_for(x.layout, (0,)) is x.to_local()

    on_ranks(on_rank, 2, 2)


@pytest.mark.untraced
def test_a_view_lives_until_its_gradient_has_passed():
    """After backward no gathered copy is kept, so that no later write can leave one stale."""
    import torch

    def on_rank(mesh):
        x = spread(torch.ones(4, 3), mesh, S0).requires_grad_()
        target = Layout.place(mesh, [R], (4, 3))
        gathered = weakref.ref(x.local_for(target, ()))
        gathered().sum().backward()
        gc.collect()
        assert gathered() is None
        assert torch.equal(x.grad.full_tensor(), torch.ones(4, 3))

    on_ranks(on_rank, 2)


def test_a_view_of_a_leaf_serves_the_next_forward():
    """Gradients accumulate over backward passes through one view, until the leaf is written or has a hook."""
    import torch

    def on_rank(mesh):
        x = spread(torch.arange(5.0), mesh, R).requires_grad_()
        rank, first = mesh.get_local_rank(), x.local_for(x.layout, (0,))
        for factor in (1.0, 10.0):
            view = x.local_for(x.layout, (0,))
            assert view is first
            (view * view * (rank + 1) * factor).sum().backward()
        assert torch.equal(x.grad.full_tensor(), 2 * torch.arange(5.0) * 11 * sum(range(1, mesh.size() + 1)))
        with record_events() as log, module_scope("block"):
            heard = x.local_for(x.layout, (0,))
            assert heard is not first
            heard.sum().backward()
        assert [(event.collective, event.module) for event in log] == [("all_reduce", "block")]
        with torch.no_grad():
            x.add_(1.0)
        written = x.local_for(x.layout, (0,))
        assert written is not first
        assert torch.equal(written.detach(), torch.arange(5.0) + 1)

    on_ranks(on_rank, 3)


@pytest.mark.parametrize("write", ["add_", "data", "detach", "local"])
def test_a_write_invalidates_views(write):
    """A gathered copy is not used again after any write to its tensor."""
    import torch

    def on_rank(mesh):
        x = spread(torch.arange(4.0), mesh, S0).requires_grad_()
        target = Layout.place(mesh, [R], (4,))
        before = x.local_for(target, ())
        assert torch.equal(before.detach(), torch.arange(4.0))
        with torch.no_grad():
            alias = {"add_": x, "data": x.data, "detach": x.detach(), "local": x.to_local()}[write]
            alias.add_(1.0)
        assert torch.equal(x.local_for(target, ()).detach(), torch.arange(4.0) + 1)
        with torch.no_grad():
            alias.add_(1.0)
        assert torch.equal(x.local_for(target, ()).detach(), torch.arange(4.0) + 2)

    on_ranks(on_rank, 2)


def test_reduce_partial_reduces_partial_axes_only():
    """reduce_partial leaves shards alone and reduces every Partial axis."""
    import torch

    def on_rank(mesh):
        layout = Layout.place(mesh, [P, S0], (4,))
        x = get_torch_platform().wrap(torch.ones(2), layout)
        y = x.reduce_partial()
        assert y.placements == (R, S0)
        assert torch.equal(y.full_tensor(), torch.full((4,), 2.0))

    on_ranks(on_rank, 2, 2)


@pytest.mark.parametrize("aliases", [("None", "a"), ("None", "b")])
def test_a_layout_of_another_mesh_places_nothing(aliases):
    """A layout given as placements must be of the tensor's own mesh, in every function that takes one."""
    import torch

    def on_rank(m3):
        x, foreign = torch.zeros(4, 6), Layout((2, 2), ("a", "b"))(*aliases)
        local = distribute_tensor(x, m3, [S0])
        calls = (
            lambda: distribute_tensor(x, m3, Layout((2, 2), ("a", "b"))(*aliases)),
            lambda: local.redistribute(m3, foreign),
            lambda: DTensor.from_local(x, m3, foreign),
            lambda: zeros(4, 6, device_mesh=m3, placements=foreign),
        )
        return [text_of(MeshMismatchError, call) for call in calls]

    lines = on_ranks(on_rank, 3)[0]
    text = (
        "placements: the layout is on DeviceMesh(cpu, a=2, b=2, ranks=[0, 1, 2, 3]), the tensor on "
        "DeviceMesh(cpu, tp=3, ranks=[0, 1, 2]); give a layout of the tensor's mesh"
    )
    assert lines == [text] * 4


def test_a_layout_of_an_equal_mesh_places():
    """A layout from the public constructor fits every mesh of equal shape, names and ranks."""
    import torch

    def on_rank(mesh):
        layout = Layout((2, 2), ("dp", "tp"))
        x = torch.arange(24.0).reshape(4, 6)
        for spelled in (layout("dp", "None"), layout([S0, R]), layout([Shard(-2), R])):
            tensor = distribute_tensor(x, mesh, spelled)
            assert tensor.placements == (S0, R)
            assert tensor.redistribute(mesh, spelled) is tensor
            assert torch.equal(tensor.full_tensor(), x)

    on_ranks(on_rank, 2, 2)


def test_grad_placements_by_position():
    """to_local and full_tensor take grad_placements by position and by name."""
    import torch

    def on_rank(mesh):
        local = spread(torch.arange(6.0), mesh, S0).requires_grad_()
        (local.full_tensor([P]) * (mesh.rank + 1)).sum().backward()
        assert torch.equal(local.grad.to_local(), torch.full((3,), 3.0))
        assert torch.equal(local.to_local([S0]), local.to_local(grad_placements=[S0]))

    on_ranks(on_rank, 2)
