"""Views and joins: a dim that is kept may be sharded, and so may the leading dim of a merged or split group."""

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.errors import UnsupportedOperatorError

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
    holds(lambda x: x.reshape(target), source, drawn={(2,): 20, (3,): 7, (4,): 7, (2, 2): 30})


DIMS = {
    "flatten": lambda x: x.flatten(1),
    "flatten first": lambda x: torch.flatten(x, 0, 1),
    "unflatten": lambda x: x.unflatten(-1, (2, 3)),
    "view_as": lambda x: x.view_as(x),
    "flatten of a number": lambda x: x.sum().flatten(),
    "transpose": lambda x: x.transpose(0, -1),
    "transpose of a number": lambda x: x.sum().transpose(0, -1),
    "swapaxes": lambda x: x.swapaxes(0, 1),
    "permute": lambda x: x.permute(2, 0, 1),
    "torch.permute": lambda x: torch.permute(x, (2, 0, 1)),
    "movedim": lambda x: x.movedim(0, -1),
    "movedim of two": lambda x: torch.movedim(x, (0, 1), (2, 0)),
    "mT": lambda x: x.mT,
    "T": lambda x: x[0].T,
    "t": lambda x: x[:, 0].t(),
    "squeeze": lambda x: x[:, :1].squeeze(),
    "squeeze of nothing": lambda x: x.squeeze(0),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "expand": lambda x: x[:, :1].expand(2, -1, 5, 6),
    "expand_as": lambda x: x[:, :1].expand_as(x),
    "broadcast_to": lambda x: torch.broadcast_to(x, (2, *x.shape)),
    "narrow": lambda x: x.narrow(1, 1, 2),
    "narrow to all": lambda x: torch.narrow(x, 1, 0, 5),
    "select": lambda x: x.select(1, -1),
    "unbind": lambda x: x.unbind(1),
    "torch.unbind": torch.unbind,
    "split": lambda x: x.split(2, 1),
    "split by sizes": lambda x: torch.split(x, [1, 4], dim=1),
    "split into one": lambda x: x.split(7),
    "chunk": lambda x: x.chunk(3, -1),
    "tensor_split": lambda x: torch.tensor_split(x, 3, dim=1),
    "tensor_split at": lambda x: x.tensor_split((1, 3), 1),
    "diagonal": lambda x: x.diagonal(1, 2, 0),
    "unfold": lambda x: x.unfold(1, 3, 2),
    "glu": lambda x: F.glu(x, -1),
    "repeat": lambda x: x.repeat(2, 1, 3, 1),
    "tile": lambda x: x.tile((2, 1)),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "repeat_interleave first": lambda x: torch.repeat_interleave(x, 3, dim=0),
    "repeat_interleave flat": lambda x: x.repeat_interleave(2),
    "roll": lambda x: x.roll(1, 0),
    "roll flat": lambda x: torch.roll(x, 2),
    "flip": lambda x: x.flip(0, 2),
    "torch.flip": lambda x: torch.flip(x, [1]),
    "tril": lambda x: x.tril(),
    "triu": lambda x: torch.triu(x, 1),
    "tril below": lambda x: x.tril(-1),
}


@pytest.mark.parametrize("name", DIMS)
def test_dims(holds, name):
    """Rearranging, cutting and stretching dims gives the plain tensor, also where a dim is 1 only locally."""
    holds(DIMS[name], (4, 5, 6))


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
    """Joined tensors meet in one layout; the joined dim is whole."""
    holds(JOINS[name][0], *JOINS[name][1:])


def test_three_axes_uneven(holds):
    """A view over a 2x3 mesh whose sizes divide by one axis only is exact."""
    holds(lambda x: x.reshape(6, 2, 5), (12, 5), drawn={(2, 3): 20})


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
        "mul(x=f32[1, 3@tp]): x cannot be written to: it is a copy: getitem(x=f32[4@tp, 3]) had to move x to "
        "f32[4, 3@tp], so a write would be lost; write to x itself"
    )
