"""Complex numbers on PyTorch: conjugates that are only a bit of a view do not get lost on the way."""

import pytest
import torch

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard

pytestmark = pytest.mark.platforms("torch")

VALUES = torch.complex(torch.arange(15.0).reshape(5, 3) - 7, torch.arange(15.0).reshape(5, 3) * 2 - 9)


def placed(mesh, values, where):
    """This rank's piece of `values`."""
    layout = Layout.place(mesh, [where], tuple(values.shape))
    local = values[tuple(slice(*bounds) for bounds in layout.local_box())].clone()
    return DTensor.from_local(local, mesh, [where], shape=tuple(values.shape))


@pytest.mark.parametrize("where", [Replicate(), Shard(0), Shard(1)], ids=repr)
def test_conjugates_survive_redistribution(ranks, where):
    """The conjugate view of a shard is gathered, resharded and multiplied as what it reads like."""

    def run(mesh):
        x = placed(mesh, VALUES, where).conj()
        other = x.redistribute(placements=[Shard(1)]).full_tensor()
        return (
            torch.equal(x.full_tensor(), VALUES.conj())
            and torch.equal(other, VALUES.conj())
            and torch.allclose((x.mT @ x).full_tensor(), VALUES.mH @ VALUES.conj())
            and torch.allclose((x.H @ x).full_tensor(), VALUES.mT @ VALUES.conj())
            and torch.equal(x.imag.full_tensor(), -VALUES.imag)
        )

    assert ranks(3, run) == [True] * 3


def test_parts_are_views(ranks):
    """What is written into the real part of a shard is in the tensor."""

    def run(mesh):
        x = placed(mesh, VALUES, Shard(0))
        x.real.fill_(2.0)
        torch.view_as_real(placed(mesh, VALUES, Shard(1)))
        return torch.equal(x.full_tensor(), torch.complex(torch.full((5, 3), 2.0), VALUES.imag))

    assert ranks(2, run) == [True] * 2


def test_pairs_become_complex_numbers_where_they_are(ranks):
    """`view_as_complex` and back keep the shards of all dims but the pair's."""

    def run(mesh):
        pairs = placed(mesh, torch.view_as_real(VALUES).contiguous(), Shard(0))
        x = torch.view_as_complex(pairs)
        back = torch.view_as_real(x)
        return x.placements, back.placements, torch.equal(back.full_tensor(), torch.view_as_real(VALUES))

    assert ranks(2, run) == [((Shard(0),), (Shard(0),), True)] * 2


def test_resolved_conjugates_stay_where_they_are(ranks):
    """`resolve_conj` and `resolve_neg` read the same values, in the same layout, with their gradient."""

    def run(mesh):
        x = placed(mesh, VALUES, Shard(1)).requires_grad_()
        conjugate, negative = x.conj().resolve_conj(), x.conj().imag.resolve_neg()
        (conjugate * conjugate).sum().real.backward()
        return (
            conjugate.placements == negative.placements == (Shard(1),)
            and not conjugate.to_local().is_conj()
            and not negative.to_local().is_neg()
            and torch.equal(conjugate.full_tensor(), VALUES.conj())
            and torch.equal(negative.full_tensor(), -VALUES.imag)
            and torch.equal(x.grad.full_tensor(), 2 * VALUES.conj())
        )

    assert ranks(2, run) == [True] * 2


@pytest.mark.parametrize("join", [torch.cat, torch.stack, torch.vstack])
def test_pending_extrema_are_reduced_before_they_join_complex_numbers(ranks, join):
    """Complex numbers have no order: a pending maximum does not pass into a complex result."""

    def run(mesh):
        x = DTensor.from_local(torch.full((2, 3), 1.0 + mesh.get_local_rank()), mesh, [Partial("max")])
        found = join([x, placed(mesh, VALUES[:2], Replicate())])
        return torch.equal(found.full_tensor(), join([torch.full((2, 3), 3.0), VALUES[:2]]))

    assert ranks(3, run) == [True] * 3
