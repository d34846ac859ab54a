"""Views: kept dims and the leading dim of a merged or split group may be sharded; no write through a view is lost."""

import numpy as np
import pytest
import torch

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import HyperParallelError, LayoutError, UnsupportedOperatorError
from hyper_parallel.verify.checker.shards import local_shard
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


SHAPES = [
    ((4, 6), (24,)), ((24,), (4, 6)), ((4, 6, 5), (24, 5)), ((4, 6, 5), (4, 30)), ((12, 5), (2, 6, 5)),
    ((12, 5), (4, 3, 5)), ((1, 8, 3), (8, 3)), ((1, 8, 3), (1, 2, 4, 3)), ((6, 4), (4, 6)), ((5, 3), (5, 3, 1)),
    ((5, 1, 3), (5, 3)), ((4, 2, 3), (8, 3)), ((5, 6), (-1,)), ((0, 3), (3, 0)), ((2, 2, 2, 3), (8, 3)),
    ((8, 3), (2, 2, 2, 3)), ((2, 4, 3), (8, 3)), ((8, 3), (2, 4, 3)),
]  # fmt: skip


@pytest.mark.parametrize("source, target", SHAPES, ids=str)
@pytest.mark.untraced
def test_view(holds, source, target):
    """Merging and splitting dims under any placement gives the plain tensor."""
    holds(lambda x: x.reshape(target), source, limits={(2,): 20, (3,): 7, (4,): 7, (2, 2): 30})


COMPLEX = np.random.default_rng(5).standard_normal((3, 4, 2)).view(np.complex128)[..., 0]
NAMED = {
    "flatten": (lambda x: x.flatten(1), (4, 5, 6)),
    "flatten first": (lambda x: torch.flatten(x, 0, 1), (4, 5, 6)),
    "unflatten": (lambda x: x.unflatten(-1, (2, 3)), (4, 5, 6)),
    "view_as": (lambda x: x.view_as(x), (4, 5, 6)),
    "flatten of a number": (lambda x: x.sum().flatten(), (4, 5, 6)),
    "view_as_complex": (lambda x: torch.view_as_complex(x) * 2j, (3, 5, 2)),
    "view_as_real": (torch.view_as_real, COMPLEX),
    "view_copy": (lambda x: torch.view_copy(x, (12,)), (3, 4)),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.untraced
def test_named_views(holds, name):
    """Views by other names show the plain elements under any placement."""
    holds(*NAMED[name])


def test_three_axes_uneven(holds):
    """A view over a 2x3 mesh whose sizes divide by one axis only is exact."""
    holds(lambda x: x.reshape(6, 2, 5), (12, 5), limits={(2, 3): 20})


def test_views_that_keep_whole_rows_cost_nothing(ranks):
    """Splitting heads off, merging them again, transposing and splitting batch from sequence communicate nothing."""

    def run(mesh):
        x = DTensor.from_local(torch.ones(2, 3, 4), mesh, [Shard(0), Shard(2)])
        rows = DTensor.from_local(torch.ones(3, 4), mesh, [Shard(0), Shard(0)])
        with record_events() as log:
            heads = x.view(4, 3, 4, 2).transpose(1, 2)
            merged = heads.transpose(1, 2).reshape(4, 3, 8)
            both = rows.view(2, 6, 4)
            back = both.reshape(12, 4)
        return log.collectives(), heads.placements, merged.placements, both.placements, back.placements

    expected = (
        [], (Shard(0), Shard(1)), (Shard(0), Shard(2)), (Shard(0), Shard(1)), (Shard(0), Shard(0)),
    )  # fmt: skip
    assert ranks(4, run, (2, 2), ("dp", "tp")) == [expected] * 4


def test_a_view_that_had_to_move_is_read_only(ranks):
    """Writing to a slice of a sharded dim would be lost, so it is refused."""

    def run(mesh):
        x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        with pytest.raises(UnsupportedOperatorError) as caught:
            x[0:1].mul_(2)
        x[:, 0:1].mul_(2)
        return str(caught.value), x.to_local().tolist()

    text, kept = ranks(2, run)[0]
    assert kept == [[2.0, 1.0, 1.0]] * 2
    assert text == (
        "mul(x=f32[1, 3@tp]): x cannot be written to: it is a copy: getitem(x=f32[4@tp, 3]) had to redistribute x to "
        "f32[4, 3@tp], so a write would be lost; write to x itself"
    )


NUMBERS = torch.complex(torch.arange(15.0).reshape(5, 3) - 7, torch.arange(15.0).reshape(5, 3) * 2 - 9)


def test_pairs_become_complex_numbers_where_they_are(ranks):
    """`view_as_complex` and back keep the shards of all dims but the pair's."""

    def run(mesh):
        pairs = distribute_tensor(torch.view_as_real(NUMBERS).contiguous().clone(), mesh, [Shard(0)])
        x = torch.view_as_complex(pairs)
        back = torch.view_as_real(x)
        return x.placements, back.placements, torch.equal(back.full_tensor(), torch.view_as_real(NUMBERS))

    assert ranks(2, run) == [((Shard(0),), (Shard(0),), True)] * 2


def test_strides_need_the_whole_storage(ranks):
    """``as_strided`` reads and writes replicated tensors and is refused for others."""

    def run(mesh):
        whole = DTensor.from_local(torch.arange(6.0), mesh)
        with pytest.raises(LayoutError) as caught:
            torch.as_strided(DTensor.from_local(torch.arange(6.0), mesh, [Shard(0)]), (2, 2), (1, 2))
        written = torch.as_strided_scatter(whole, DTensor.from_local(-torch.ones(2, 2), mesh), (2, 2), (1, 2))
        assert written.full_tensor().tolist() == [-1.0, -1.0, -1.0, -1.0, 4.0, 5.0]
        return whole.as_strided((2, 2), (1, 2), 1).full_tensor().tolist(), str(caught.value)

    message = (
        "as_strided(x=f32[12@tp]): strides address storage, of which ranks have different shards; "
        "x = x.redistribute().contiguous() first"
    )
    assert ranks(2, run) == [([[1.0, 3.0], [2.0, 4.0]], message)] * 2


VIEWS = {
    "number": lambda x: x[1],
    "last number": lambda x: x[..., -1],
    "range": lambda x: x[1:3],
    "inner range": lambda x: x[:, 1:, 2:4],
    "step": lambda x: x[:, ::2],
    "everything": lambda x: x[...],
    "new dim": lambda x: x[:, None],
    "twice": lambda x: x[1:][0],
    "select": lambda x: x.select(1, 2),
    "narrow": lambda x: torch.narrow(x, 2, 1, 2),
    "slice of a slice": lambda x: x.narrow(1, 1, 3).narrow(0, 0, 2),
    "chunk": lambda x: x.chunk(2)[1],
    "chunk inside": lambda x: torch.chunk(x, 2, 1)[0],
    "one chunk": lambda x: x.chunk(1)[0],
    "split": lambda x: x.split([1, 3])[1],
    "split inside": lambda x: x.split(3, -1)[1],
    "tensor_split": lambda x: torch.tensor_split(x, 3, 2)[1],
    "hsplit": lambda x: torch.hsplit(x, [2])[0],
    "vsplit": lambda x: torch.vsplit(x, 2)[1],
    "dsplit": lambda x: torch.dsplit(x, 3)[2],
    "unbind": lambda x: x.unbind(1)[3],
    "iteration": lambda x: list(x)[1],
    "view": lambda x: x.view(-1),
    "view merged": lambda x: x.view(20, 6),
    "view split": lambda x: x.view(2, 2, 5, 6),
    "reshape": lambda x: x.reshape(4, 5, 2, 3),
    "flatten": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(0, (2, 2)),
    "ravel": lambda x: x.ravel(),
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(2, 0, 1)[0],
    "movedim": lambda x: torch.movedim(x, 0, 2),
    "swapaxes": lambda x: x.swapaxes(1, 2)[:, 1],
    "mT": lambda x: x.mT,
    "T": lambda x: x[0].T,
    "H": lambda x: x[:, 0].H,
    "squeeze": lambda x: x[:1].squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "expanded where it is": lambda x: x.expand(4, 5, 6),
    "diagonal": lambda x: x.diagonal(),
    "diagonal inside": lambda x: torch.diagonal(x, 1, 1, 2),
    "unfold": lambda x: x.unfold(1, 2, 2),
    "atleast_3d": lambda x: torch.atleast_3d(x)[0],
    "view_as": lambda x: x.view_as(x)[1],
    "detach": lambda x: x.detach()[0],
    "real": lambda x: x.real[0],
}  # fmt: skip


def filled(y, _):
    """A constant."""
    y.fill_(3)


def doubled(y, _):
    """Multiply by the values present."""
    y.mul_(2)


def assigned(y, _):
    """Write by item assignment."""
    y[...] = -1


def partly(y, _):
    """A write into part of the view."""
    y[0] = 0.5


def added(y, scalar):
    """A replicated tensor is added."""
    y += scalar


def masked(y, _):
    """Write where a condition holds."""
    y.masked_fill_(y > 0, 0)


WRITES = [filled, doubled, assigned, partly, added, masked]
PLACEMENTS = [Replicate(), Shard(0), Shard(1), Shard(2), Partial()]
VALUES = np.round(np.random.default_rng(1).standard_normal((4, 5, 6)) * 64) / 64


def outcome(name, write, placement, mesh):
    """The outcome of a write: `written`, `refused`, or the error."""
    plain = torch.tensor(VALUES)
    write(VIEWS[name](plain), torch.ones(()))
    layout = Layout.place(mesh, [placement], VALUES.shape)
    x = DTensor.from_local(torch.tensor(local_shard(VALUES, layout, 0)), mesh, [placement], shape=VALUES.shape)
    before = x.to_local().clone()
    try:
        write(VIEWS[name](x), torch.ones(()))
    except HyperParallelError:
        return "refused" if torch.equal(x.to_local(), before) else "refused, and written in part"
    return "written" if torch.allclose(x.full_tensor(), plain, rtol=0, atol=1e-9) else "lost, or wrong"


@pytest.mark.parametrize("name", VIEWS)
def test_no_write_is_lost(name):
    """A write through a view reaches the tensor, for every layout, or is refused entirely."""

    def rank():
        mesh = init_device_mesh("cpu", (2 + (name == "number"),), mesh_dim_names=("tp",))
        return {
            (write.__name__, repr(placement)): outcome(name, write, placement, mesh)
            for write in WRITES
            for placement in PLACEMENTS
        }

    for outcomes in simulate(rank, 2 + (name == "number"), "torch"):
        assert set(outcomes.values()) <= {"written", "refused"}, outcomes
        whole = [seen for (_, placement), seen in outcomes.items() if placement == "Replicate()"]
        assert whole == ["written"] * len(WRITES)


def test_writes_into_chunks_of_other_dims_arrive(ranks):
    """Chunks along a dim that is not sharded share storage with the tensor."""

    def run(mesh):
        x = DTensor.from_local(torch.zeros(2, 6), mesh, [Shard(0)])
        first, second = x.chunk(2, dim=1)
        first.add_(1)
        second[:, 0] = 5
        return x.full_tensor().tolist()

    assert ranks(2, run) == [[[1.0, 1.0, 1.0, 5.0, 0.0, 0.0]] * 4] * 2


def test_a_shard_that_had_to_move_says_why_it_cannot_be_written(ranks):
    """The refusal of a write names the view, the moved operand, and the tensor to write instead."""

    def run(mesh):
        x = DTensor.from_local(torch.zeros(2, 3), mesh, [Shard(0)])
        with pytest.raises(UnsupportedOperatorError) as caught:
            x[0].fill_(1)
        with pytest.raises(UnsupportedOperatorError) as further:
            x.narrow(0, 1, 2).transpose(0, 1)[0] += 1
        return str(caught.value), str(further.value)

    copied, viewed = ranks(2, run)[0]
    assert copied == (
        "fill(x=f32[3@tp]): x cannot be written to: it is a copy: getitem(x=f32[4@tp, 3]) had to redistribute x to "
        "f32[4, 3@tp], so a write would be lost; write to x itself"
    )
    assert viewed == (
        "add(x=f32[2@tp]): x cannot be written to: it is a copy: getitem(x=f32[3@tp, 2]) had to redistribute x to "
        "f32[3, 2@tp], so a write would be lost; write to x itself"
    )


def test_gradients_pass_through_what_was_written_through_a_view(holds):
    """A write through a view of a tensor with a graph changes gradients as on one device."""

    def run(x, value):
        y = x * 1.0
        y[:, 1:3].mul_(2.0)
        y.narrow(2, 0, 1).copy_(value)
        y.transpose(0, 1)[4].zero_()
        return y * y

    holds(run, (4, 5, 6), (4, 5, 1), refused=True, limits={(2,): 20, (3,): 7, (2, 2): 6})


def test_kept_views_see_writes_through_slices(ranks):
    """A varying view made before a write through a slice is not used after it."""

    def run(mesh):
        weight = DTensor.from_local(torch.ones(3, 2), mesh).requires_grad_()
        x = DTensor.from_local(torch.ones(1, 3), mesh, [Shard(0)])
        scaled = weight * 1.0
        first = (x @ scaled).sum()
        scaled[0].mul_(5)
        second = (x @ scaled).sum()
        (first.detach() + second).backward()
        return second.item(), weight.grad.full_tensor().tolist()

    assert ranks(2, run) == [(28.0, [[10.0, 10.0], [2.0, 2.0], [2.0, 2.0]])] * 2


@pytest.mark.parametrize(
    "view", [lambda x: x[1:3], lambda x: x[1:3].t(), lambda x: x.diagonal(), lambda x: x.chunk(2)[1]],
)  # fmt: skip
def test_a_copy_in_a_views_place_is_stale_once_its_base_is_written(view):
    """Reading a view that had to be a copy is refused after a write to its base, and only then."""
    import torch

    from hyper_parallel import Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.errors import UnsupportedOperatorError
    from hyper_parallel.verify.simulate import simulate

    def body():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        plain = torch.arange(8.0).reshape(4, 2)
        x = distribute_tensor(plain, mesh, [Shard(0)])
        seen = view(x)
        before, kept = seen.full_tensor(), seen.clone()
        assert torch.equal(before, view(plain))
        x.detach().add_(5)
        refused = 0
        for use in (seen.full_tensor, seen.to_local, lambda: seen + 1, lambda: -seen, lambda: torch.add(kept, seen)):
            with pytest.raises(UnsupportedOperatorError, match="written since is stale"):
                use()
            refused += 1
        assert torch.equal(kept.full_tensor(), before)
        assert torch.equal(view(x).full_tensor(), view(plain + 5))
        return refused

    assert simulate(body, 3, platform="torch") == [5] * 3


MISFITS = {
    "view by two unknowns": (lambda x: x.view(-1, -1), (4, 3), "view(x=f64[4@tp, 3]): invalid shape [-1, -1]"),
    "view of a remainder": (
        lambda x: x.view(5, -1), (4, 3),
        "view(x=f64[4@tp, 3]): shape [5, -1] is invalid for [4, 3]",
    ),
    "view of others": (lambda x: x.view(5, 2), (4, 3), "view(x=f64[4@tp, 3]): shape [5, 2] is invalid for [4, 3]"),
    "flatten": (lambda x: x.flatten(1, 0), (4, 3), "flatten: start_dim 1 comes after end_dim 0"),
    "pairs": (
        torch.view_as_complex, (4, 3),
        "view_as_complex(x=f64[4@tp, 3]): the last dim must hold real and imaginary part, but x is [4, 3]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])


BEYOND = {
    "reinterpreted bits": (
        lambda x: x.view(torch.int64), (4, 3),
        ("view(x=f64[4@tp, 3]): view as [torch.int64]: only sizes are supported; reinterpret the bits of to_local() "
        "instead"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
def test_what_only_one_device_can_do_is_refused(refuses, name):
    """A call that has no meaning on local shards raises an error with the reason."""
    refuses(*BEYOND[name], plain_too=False)


JOINS = {
    "cat": (lambda x, y: torch.cat([x, y], 1), (4, 3), (4, 5)),
    "cat first": (lambda x, y: torch.cat((x, y)), (4, 3), (5, 3)),
    "cat of one twice": (lambda x: torch.cat([x, x], 0), (4, 3)),
    "stack": (lambda x, y: torch.stack([x, y], -1), (4, 3), (4, 3)),
    "hstack": (lambda x, y: torch.hstack([x, y]), (4, 3), (4, 5)),
    "vstack": (lambda x, y: torch.vstack([x, y]), (3,), (5, 3)),
}


@pytest.mark.parametrize("name", JOINS)
def test_joins(holds, name):
    """Concatenated tensors are brought to one layout in which the joined dim is whole."""
    holds(JOINS[name][0], *JOINS[name][1:])


SPLITS = {
    "unbind": lambda x: x.unbind(1),
    "torch.unbind": torch.unbind,
    "split": lambda x: x.split(2, 1),
    "split by sizes": lambda x: torch.split(x, [1, 4], dim=1),
    "split into one": lambda x: x.split(7),
    "chunk": lambda x: x.chunk(3, -1),
    "tensor_split": lambda x: torch.tensor_split(x, 3, dim=1),
    "tensor_split at": lambda x: x.tensor_split((1, 3), 1),
    "split_copy": lambda x: torch.split_copy(x, 2, 1),
}


@pytest.mark.parametrize("name", SPLITS)
def test_splits(holds, name):
    """Every part of a split has the plain elements; the split dim is whole."""
    holds(SPLITS[name], (4, 5, 6))


@pytest.mark.parametrize("join", [torch.cat, torch.stack, torch.vstack])
def test_partial_extrema_are_reduced_before_they_join_complex_numbers(ranks, join):
    """Partial(max) is reduced before it is joined into a complex result, since complex numbers have no order."""
    numbers = torch.complex(torch.arange(6.0).reshape(2, 3) - 7, torch.arange(6.0).reshape(2, 3) * 2 - 9)

    def run(mesh):
        x = DTensor.from_local(torch.full((2, 3), 1.0 + mesh.get_local_rank()), mesh, [Partial("max")])
        result = join([x, distribute_tensor(numbers.clone(), mesh, [Replicate()])])
        return torch.equal(result.full_tensor(), join([torch.full((2, 3), 3.0), numbers]))

    assert ranks(3, run) == [True] * 3


CONCAT_MISFITS = {
    "split": (lambda x: x.split(-1, 1), (4, 3), "split(x=f64[4@tp, 3]): split size -1 is not positive"),
    "split by sizes": (
        lambda x: x.split((1, 1), 1), (4, 3),
        "split(x=f64[4@tp, 3]): sections [1, 1] do not add up to dim 1 of size 3",
    ),
    "chunk": (lambda x: x.chunk(0, 1), (4, 3), "chunk(x=f64[4@tp, 3]): chunks must be positive, got 0"),
    "tensor_split": (
        lambda x: x.tensor_split("12", 1), (4, 3),
        "tensor_split: indices must be a list of numbers, or a tensor of them",
    ),
    "tensor_split in none": (
        lambda x: x.tensor_split(0, 1), (4, 3), "tensor_split: the number of sections must be positive, got 0",
    ),
    "cat": (
        lambda x, y: torch.cat([x, y]), (4, 3), (4, 2),
        "cat(tensors[0]=f64[4@tp, 3], tensors[1]=f64[4@tp, 2]): shapes [4, 3], [4, 2] differ outside dim 0",
    ),
    "stack": (
        lambda x, y: torch.stack([x, y]), (4, 3), (4, 2),
        "stack(tensors[0]=f64[4@tp, 3], tensors[1]=f64[4@tp, 2]): shapes [4, 3], [4, 2] differ",
    ),
}  # fmt: skip


CONCAT_BEYOND = {
    "nothing to unbind": (
        lambda x: x.unbind(1), (4, 0),
        "unbind(x=f64[4@tp, 0]): dim 1 of [4, 0] is empty, so it cannot be unbound",
    ),
}  # fmt: skip


@pytest.mark.parametrize("world", [2, 3])
def test_a_single_part_keeps_the_strides_of_its_base(world):
    """A tensor split into one part may be written from its base: both have the same strides, as on one device."""

    def program(base):
        x = base.narrow(1, 1, 1)
        (part,) = x.split(1, 0)
        (chunk,) = x.chunk(1, 0)
        part[...] = x
        chunk.copy_(x)
        return [(tensor.stride(), tensor.tolist()) for tensor in (x, part, chunk)]

    def on_rank():
        return program(distribute_tensor(base.clone(), init_device_mesh("cpu", (world,)), [Replicate()]))

    base = torch.randn(1, 2, 1)
    assert simulate(on_rank, world, "torch") == [program(base)] * world


@pytest.mark.parametrize("name", CONCAT_MISFITS)
def test_a_concatenation_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*CONCAT_MISFITS[name])


@pytest.mark.parametrize("name", CONCAT_BEYOND)
def test_a_concatenation_that_only_one_device_can_do_is_refused(refuses, name):
    """A call that has no meaning on local shards raises an error with the reason."""
    refuses(*CONCAT_BEYOND[name], plain_too=False)
