"""Diagonals, complex numbers, copying views, scatters of every kind and their in-place forms."""

import numpy as np
import pytest
import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Partial, Shard
from hyper_parallel.errors import LayoutError, UnsupportedOperatorError

pytestmark = pytest.mark.platforms("torch")

COMPLEX = np.random.default_rng(5).standard_normal((3, 4, 2)).view(np.complex128)[..., 0]

VIEWS = {
    "diag_embed": (lambda x: torch.diag_embed(x, 1), (3, 4)),
    "diag_embed in front": (lambda x: x.diag_embed(-2, 0, 2), (3, 4)),
    "diag of a vector": (lambda x: torch.diag(x, -1), (5,)),
    "diag of a matrix": (lambda x: x.diag(1), (4, 5)),
    "diagflat": (lambda x: torch.diagflat(x, 1), (2, 3)),
    "rot90": (torch.rot90, (3, 4)),
    "rot90 back": (lambda x: x.rot90(-1, [2, 0]), (3, 4, 5)),
    "rot180": (lambda x: torch.rot90(x, 2, (0, 1)), (3, 4)),
    "view_as_complex": (lambda x: torch.view_as_complex(x) * 2j, (3, 5, 2)),
    "view_as_real": (torch.view_as_real, COMPLEX),
    "real": (lambda x: x.real, COMPLEX),
    "imag": (lambda x: torch.imag(x.conj()), COMPLEX),
    "conj": (lambda x: x.conj() * x, COMPLEX),
    "H": (lambda x: x.H, COMPLEX),
    "mH": (lambda x: x.mH @ x, COMPLEX),
    "meshgrid": (lambda x, y: torch.meshgrid(x, y, indexing="ij"), (3,), (4,)),
    "meshgrid by columns": (lambda x, y, z: torch.meshgrid([x, y, z], indexing="xy"), (3,), (4,), (2,)),
    "unfold of a number": (lambda x: x.sum().unfold(0, 1, 1), (3, 4)),
    "permute_copy": (lambda x: torch.permute_copy(x, (2, 0, 1)), (3, 4, 5)),
    "split_copy": (lambda x: torch.split_copy(x, 2, 1), (3, 5)),
    "view_copy": (lambda x: torch.view_copy(x, (12,)), (3, 4)),
    "slice_copy": (lambda x: torch.slice_copy(x, 1, 1, 3), (3, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.untraced
def test_rearranged(holds, name):
    """Elements arrive where they arrive on one device, from pieces of any layout."""
    holds(*VIEWS[name])


DISTINCT = np.array([[0, 2], [1, 4], [3, 0], [2, 1]])

SCATTERS = {
    "scatter by keyword": (lambda x, i: torch.scatter(x, 1, i, value=0.5), (4, 5), (5, (4, 2))),
    "scatter adding": (lambda x, i, s: x.detach().scatter(1, i, s.detach(), reduce="add"), (4, 5), (5, (4, 3)), (4, 3)),
    "scatter_reduce": (lambda x, i, s: x.scatter_reduce(1, i, s, "sum"), (4, 5), (5, (4, 3)), (4, 3)),
    "scatter_reduce alone": (
        lambda x, i, s: torch.scatter_reduce(x, 0, i, s, "mean", include_self=False), (4, 5), (4, (3, 5)), (3, 5),
    ),
    "scatter_reduce amax": (lambda x, i, s: x.scatter_reduce(-1, i, s, "amax"), (4, 5), (5, (4, 3)), (4, 3)),
    "scatter_reduce prod": (lambda x, i, s: x.scatter_reduce(0, i, s, "prod"), (4, 5), (4, (3, 5)), (3, 5)),
    "index_copy": (lambda x, s: x.index_copy(1, index(x, 3, 0), s), (4, 5), (4, 2)),
    "index_copy of a number": (lambda x, i, s: x.index_copy(0, i, s), (4,), np.array([2]), ()),
    "index_fill": (lambda x: x.index_fill(0, index(x, 2, 0), 0.5), (4, 5)),
    "index_fill with zeros": (lambda x: x.index_fill(1, index(x, 2, 0), 0), (4, 5)),
    "index_reduce": (lambda x, s: x.index_reduce(0, index(x, 1, 1, 3), s, "mean"), (4, 5), (3, 5)),
    "index_reduce amin": (lambda x, s: x.index_reduce(0, index(x, 1), s, "amin", include_self=False), (4, 5), (1, 5)),
    "index_put": (lambda x, i, v: x.index_put((i,), v), (5, 3), np.array([4, 1]), (2, 3)),
    "index_put adding": (lambda x, i, v: torch.index_put(x, (i, i), v, accumulate=True), (5, 5), (5, (4,)), (4,)),
    "index_put by a mask": (lambda x, m, v: x.index_put((m > 0,), v), (3, 4), (2, (3, 4)), (1,)),
    "take": (torch.take, (4, 5), (20, (2, 3))),
    "take from the end": (lambda x, i: x.take(i - 20), (4, 5), (20, (7,))),
    "take_along_dim from the end": (lambda x, i: torch.take_along_dim(x, i - 5, 1), (4, 5), (5, (4, 3))),
    "put": (lambda x, i, s: x.put(i, s), (4, 5), np.array([3, 19, 0]), (3,)),
    "put adding": (lambda x, i, s: x.put(i, s, accumulate=True), (4, 5), (20, (2, 3)), (2, 3)),
    "masked_scatter": (lambda x, m, s: x.masked_scatter(m > 0, s), (4, 5), (2, (4, 5)), (20,)),
    "select_scatter": (lambda x, s: x.select_scatter(s, 1, -2), (4, 5, 3), (4, 3)),
    "slice_scatter": (lambda x, s: torch.slice_scatter(x, s, 1, 0, 5, 2), (4, 5), (4, 3)),
    "diagonal_scatter": (lambda x, s: x.diagonal_scatter(s, 1), (4, 5), (4,)),
    "diagonal_scatter inside": (lambda x, s: torch.diagonal_scatter(x, s, 0, 0, 2), (4, 5, 3), (5, 3)),
}  # fmt: skip


def index(x, *places):
    """Places as an index for `x`, whatever it is."""
    plain = torch.tensor(places)
    return DTensor.from_local(plain, x.device_mesh) if isinstance(x, DTensor) else plain


@pytest.mark.parametrize("name", SCATTERS)
@pytest.mark.untraced
def test_scattered(holds, name):
    """Values and gradients of what was written, added or reduced at places do not depend on layouts."""
    holds(*SCATTERS[name], drawn={(2,): 20, (3,): 7, (2, 2): 4})


IN_PLACE = {
    "scatter_": (lambda y, i, s: y.scatter_(1, i, s), (4, 5), DISTINCT, (4, 2)),
    "scatter_reduce_": (lambda y, i, s: y.scatter_reduce_(1, i, s, "amax"), (4, 5), (5, (4, 3)), (4, 3)),
    "index_copy_": (lambda y, s: y.index_copy_(1, index(y, 3, 0), s), (4, 5), (4, 2)),
    "index_fill_": (lambda y: y.index_fill_(0, index(y, 2, 0), 0.5), (4, 5)),
    "index_reduce_": (lambda y, s: y.index_reduce_(1, index(y, 1, 4), s, "amin"), (4, 5), (4, 2)),
    "index_put_": (lambda y, i, v: y.index_put_((i,), v), (4, 5), np.array([0, 3]), (2, 5)),
    "index_put_ adding": (lambda y, i, v: y.index_put_((i,), v, accumulate=True), (4, 5), (4, (3,)), (3, 5)),
    "put_": (lambda y, i, s: y.put_(i, s), (4, 5), np.array([3, 19, 0]), (3,)),
    "masked_scatter_": (lambda y, m, s: y.masked_scatter_(m > 0, s), (4, 5), (2, (4, 5)), (20,)),
    "tril_": (lambda y: y.tril_(1), (4, 5)),
    "triu_": (lambda y: y.triu_(), (5, 4, 3)),
    "fill_diagonal_": (lambda y: y.fill_diagonal_(0.5), (5, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(holds, name):
    """In-place forms write what their plain forms write, or are refused; gradients included."""
    write, *specs = IN_PLACE[name]

    def run(x, *rest):
        y = x * 1.0
        returned = write(y, *rest)
        return returned + 0 * y

    holds(run, *specs, refused=True, drawn={(2,): 30, (3,): 12})


OUT = {
    "sort": lambda x, out: torch.sort(x, out=out),
    "topk": lambda x, out: torch.topk(x, 4, out=out),
}


@pytest.mark.parametrize("name", OUT)
def test_out_of_several(ranks, name):
    """Results move to the layouts of the tensors that are written, which are returned."""

    def run(mesh):
        whole = torch.tensor([[3.0, 1.0, 2.0, 0.0]] * 4) + torch.arange(4.0)[:, None]
        x = DTensor.from_local(whole.chunk(2)[mesh.coordinate[0]], mesh, [Shard(0)])
        values = DTensor.from_local(torch.zeros(4, 4), mesh)
        places = DTensor.from_local(torch.zeros(4, 2, dtype=torch.int64), mesh, [Shard(1)])
        returned = OUT[name](x, (values, places))
        wanted = OUT[name](whole, None)
        return (
            returned[0] is values and returned[1] is places,
            torch.equal(values.to_local(), wanted[0]),
            torch.equal(places.full_tensor(), wanted[1]),
        )

    assert ranks(2, run) == [(True, True, True)] * 2


def test_zero_dim_masks(holds, ranks):
    """A mask without dims keeps all of a tensor or nothing of it, in a new first dim; among others it is refused."""

    def run(mesh):
        x, yes = DTensor.from_local(torch.zeros(4, 5), mesh), DTensor.from_local(torch.tensor(True), mesh)
        messages = []
        for wrong in (lambda: x[:, yes], lambda: x[torch.tensor(True)]):
            with pytest.raises(LayoutError) as caught:
                wrong()
            messages.append(str(caught.value))
        return messages

    assert (
        ranks(2, run)
        == [
            [
                "__getitem__: a mask without dims is supported as the only index, as a DTensor",
                "__getitem__: a mask without dims is supported as the only index, as a DTensor",
            ]
        ]
        * 2
    )
    holds(lambda x, m: x[m.sum() > 0], (4, 5), np.array([1, 2]))
    holds(lambda x, m: x[m.sum() > 9] + x.sum(), (4, 5), np.array([1, 2]))
    holds(lambda x, m: torch.masked_select(x.sum(), m.sum() > 0), (4, 5), np.array([1, 2]))


def test_conjugates_travel_by_value(ranks):
    """A conjugate or negative is a flag on the same bytes; what is gathered has it applied."""

    def run(mesh):
        x = DTensor.from_local(torch.tensor([1 + 2j, 3 - 1j]), mesh, [Shard(0)])
        return x.conj().full_tensor().tolist(), x.conj().imag.full_tensor().tolist()

    assert ranks(2, run) == [([1 - 2j, 3 + 1j] * 2, [-2.0, 1.0] * 2)] * 2


def test_strides_need_the_whole_storage(ranks):
    """``as_strided`` reads and writes what every rank holds whole, and is refused otherwise."""

    def run(mesh):
        whole = DTensor.from_local(torch.arange(6.0), mesh)
        with pytest.raises(LayoutError) as caught:
            torch.as_strided(DTensor.from_local(torch.arange(6.0), mesh, [Shard(0)]), (2, 2), (1, 2))
        written = torch.as_strided_scatter(whole, DTensor.from_local(-torch.ones(2, 2), mesh), (2, 2), (1, 2))
        assert written.full_tensor().tolist() == [-1.0, -1.0, -1.0, -1.0, 4.0, 5.0]
        return whole.as_strided((2, 2), (1, 2), 1).full_tensor().tolist(), str(caught.value)

    message = (
        "as_strided(x=f32[12@tp]): strides address storage, of which ranks hold different pieces; "
        "x = x.redistribute().contiguous() first"
    )
    assert ranks(2, run) == [([[1.0, 3.0], [2.0, 4.0]], message)] * 2


def test_wrapped_diagonals_are_refused(ranks):
    """More than one diagonal is not filled by guessing."""

    def run(mesh):
        with pytest.raises(UnsupportedOperatorError) as caught:
            DTensor.from_local(torch.zeros(7, 2), mesh).fill_diagonal_(1, wrap=True)
        return str(caught.value)

    assert ranks(2, run) == ["fill_diagonal_: only one diagonal of a matrix can be filled, x has shape [7, 2]"] * 2


def test_summands_pass_what_is_linear(ranks):
    """A diagonal of summands is a sum of diagonals; nothing moves."""

    def run(mesh):
        x = DTensor.from_local(torch.ones(3), mesh, [Partial()])
        with record_events() as events:
            found = torch.diag_embed(x), x.index_fill(0, index(x, 1), 0)
        return len(events), [one.placements for one in found], found[1].full_tensor().tolist()

    assert ranks(2, run) == [(0, [(Partial("sum"),)] * 2, [2.0, 0.0, 2.0])] * 2


def test_indices_of_take_stay_sharded(ranks):
    """Each rank takes what its indices say."""

    def run(mesh):
        x = DTensor.from_local(torch.arange(6.0).reshape(2, 3), mesh)
        places = DTensor.from_local(torch.tensor([1, 5]), mesh, [Shard(0)])
        with record_events() as events:
            found = x.take(places)
        return len(events), found.placements, found.to_local().tolist()

    assert ranks(2, run) == [(0, (Shard(0),), [1.0, 5.0])] * 2
