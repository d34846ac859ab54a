"""Losses of whole rows, distances between rows, bags of rows: samples may be sharded."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import LayoutError

pytestmark = pytest.mark.platforms("torch")

FEW = {(2,): 8, (3,): 4, (4,): 3, (2, 2): 3}
RNG = np.random.default_rng(5)
SIGNS = np.array([1, -1, 1, 1, -1])
CLASSES = np.array([3, 0, 2, 1, 0])
SEVERAL = np.array([[0, 2, -1, -1], [1, -1, -1, -1], [3, 2, 1, 0], [-1, 0, 0, 0], [2, 0, -1, 1]])
WEIGHT = RNG.uniform(0.5, 2.0, 4)
SHARES = RNG.uniform(0.1, 0.9, (5, 4))
SPOKEN = 1 + RNG.integers(0, 3, (5, 3))
ROWS = (5, 4)
FRAMES = (7, 5, 4)

LOSSES = {
    "multi_margin": (lambda x, t, w, r: F.multi_margin_loss(x, t, 2, 0.8, w.detach(), reduction=r), ROWS, CLASSES, WEIGHT),
    "multilabel_margin": (lambda x, t, r: F.multilabel_margin_loss(x, t, reduction=r), ROWS, SEVERAL),
    "multilabel_soft_margin": (
        lambda x, t, w, r: F.multilabel_soft_margin_loss(x, t.detach().round(), w.detach(), reduction=r),
        ROWS, SHARES, WEIGHT,
    ),
    "margin_ranking": (
        lambda x, y, t, r: F.margin_ranking_loss(x, y, t, margin=0.3, reduction=r), (5,), (5,), SIGNS,
    ),
    "hinge_embedding": (lambda x, t, r: F.hinge_embedding_loss(x, t, margin=0.7, reduction=r), (5,), SIGNS),
    "cosine_embedding": (
        lambda x, y, t, r: F.cosine_embedding_loss(x, y, t, margin=0.1, reduction=r), ROWS, ROWS, SIGNS,
    ),
    "triplet_distance": (
        lambda a, p, n, r: F.triplet_margin_with_distance_loss(a, p, n, swap=True, reduction=r), ROWS, ROWS, ROWS,
    ),
    "gaussian_nll": (lambda x, y, v, r: F.gaussian_nll_loss(x, y, v, full=True, reduction=r), ROWS, ROWS, SHARES),
    "gaussian_nll, one variance per row": (
        lambda x, y, v, r: F.gaussian_nll_loss(x, y, v, reduction=r), ROWS, ROWS, SHARES[:, 0].copy(),
    ),
    "poisson_nll": (lambda x, y, r: F.poisson_nll_loss(x, y, full=True, reduction=r), ROWS, 4 * SHARES),
    "ctc": (
        lambda x, t, i, o, r: F.ctc_loss(x.log_softmax(2), t, i, o, reduction=r),
        FRAMES, SPOKEN, np.array([7, 6, 7, 5, 7]), np.array([3, 2, 1, 0, 2]),
    ),
    "ctc, lengths in Python": (
        lambda x, t, r: F.ctc_loss(x.log_softmax(2), t, (7, 6, 7, 1, 7), (3, 2, 1, 2, 2), reduction=r, zero_infinity=True),
        FRAMES, SPOKEN,
    ),
    "ctc, targets in one row": (
        lambda x, t, r: F.ctc_loss(x.log_softmax(2), t, (7,) * 5, (3, 2, 1, 2, 2), blank=3, reduction=r),
        FRAMES, RNG.integers(0, 3, 10),
    ),
    "nll of images": (
        lambda x, t, w, r: F.nll_loss(x, t, w.detach(), ignore_index=2, reduction=r),
        (5, 4, 3), np.stack([CLASSES] * 3, 1), WEIGHT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.untraced
def test_losses(holds, name, reduction):
    """Every reduction is over all samples, wherever they are, and every argument has its gradient."""
    fn, *specs = LOSSES[name]
    holds(lambda *tensors: fn(*tensors, reduction), *specs, drawn=FEW)


def test_one_row(holds):
    """A row without samples, and a sequence without a batch, are losses of their own."""
    holds(F.multi_margin_loss, (4,), np.array(2), drawn=FEW)
    holds(lambda x, t: F.multilabel_margin_loss(x, t, reduction="sum"), (4,), SEVERAL[0], drawn=FEW)
    holds(lambda x, t: F.ctc_loss(x.log_softmax(1), t, (7,), (3,)), (7, 4), SPOKEN[0], drawn=FEW)
    holds(lambda x, t: torch.ctc_loss(x.log_softmax(2), t, (7,) * 5, (3,) * 5, 0, 2, False), FRAMES, SPOKEN, drawn=FEW)


def test_a_number_for_the_variance(holds):
    """A variance in Python stands for every element."""
    holds(lambda x, y: F.gaussian_nll_loss(x, y, 0.7, reduction="sum"), ROWS, ROWS, drawn=FEW)


DISTANCES = {
    **{
        f"cdist {p}": (lambda x, y, p=p: torch.cdist(x, y, p=p), (3, 5, 4), (3, 6, 4))
        for p in (0.0, 1.0, 2.0, 3.0, np.inf)
    },
    "cdist of many": (torch.cdist, (26, 2), (3, 2)),
    "cdist, broadcast": (torch.cdist, (5, 4), (3, 6, 4)),
    "pdist": (lambda x: F.pdist(x, 3.0), ROWS),
    "pairwise": (F.pairwise_distance, ROWS, ROWS),
    "pairwise, broadcast": (lambda x, y: F.pairwise_distance(x, y, p=1.0, keepdim=True), ROWS, (1, 4)),
    "glu": (F.glu, (5, 6)),
    "prelu": (F.prelu, (5, 3, 4), (3,)),
    "prelu, one weight": (F.prelu, (5, 3, 4), (1,)),
    "softmin by its old default": (F.softmin, ROWS),
    "softmax by its old default": (F.softmax, (5, 3, 4)),
}


@pytest.mark.parametrize("name", DISTANCES)
@pytest.mark.filterwarnings("ignore:Implicit dimension choice")
def test_distances_and_activations(holds, name):
    """Distances between sharded vectors, and activations with weights, mean what they mean plain."""
    holds(DISTANCES[name][0], *DISTANCES[name][1:], drawn=FEW)


IDS = RNG.integers(0, 7, (5, 3))
LINE = RNG.integers(0, 7, 9)
BAGS = {
    **{mode: (lambda i, w, mode=mode: F.embedding_bag(i, w, mode=mode), IDS, (7, 4)) for mode in ("sum", "mean", "max")},
    "weighted": (lambda i, w, s: F.embedding_bag(i, w, mode="sum", per_sample_weights=s), IDS, (7, 4), (5, 3)),
    "padded": (lambda i, w: F.embedding_bag(i, w, padding_idx=2), IDS, (7, 4)),
    "offsets": (lambda i, w, o: F.embedding_bag(i, w, o, mode="max"), LINE, (7, 4), np.array([0, 2, 2, 5])),
    "last offset": (
        lambda i, w, o: F.embedding_bag(i, w, o, mode="sum", include_last_offset=True), LINE, (7, 4), np.array([0, 2, 9]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAGS)
def test_bags(holds, name):
    """Bags of ids may be sharded, and the width of the table."""
    holds(BAGS[name][0], *BAGS[name][1:], drawn=FEW)


REFUSED = {
    "bags": (lambda ids, x: F.embedding_bag(ids[:, 0], x), "bags are rows of a matrix, or a vector and offsets"),
    "renormalised bags": (
        lambda ids, x: F.embedding_bag(ids, x, max_norm=1.0),
        (
            "max_norm looks at rows or counts of the whole table, so it needs whole operands: "
            "x = x.redistribute(); weight = weight.redistribute()"
        ),
    ),
    "margins": (lambda ids, x: F.multi_margin_loss(x, ids[:3, 0]), "x [4, 4] needs a target [4], got [3]"),
    "lengths": (
        lambda ids, x: F.ctc_loss(x[:, None].expand(4, 4, 4), ids, (4,) * 3, (3,) * 4),
        "input_lengths are 3 numbers for 4 sequences",
    ),
    "lengths in a tensor": (
        lambda ids, x: F.ctc_loss(x[:, None].expand(4, 4, 4), ids, ids[:3, 0], ids[:3, 0]),
        "input_lengths has shape [3]; log_probs hold sequences [4]",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(ranks, name):
    """Shapes that do not fit, and what would look at a part of a table only, are errors with their reason."""
    fn, words = REFUSED[name]

    def run(mesh):
        ids = distribute_tensor(torch.ones(4, 3, dtype=torch.int64), mesh, [Shard(0)])
        with pytest.raises(LayoutError) as caught:
            fn(ids, distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
        return str(caught.value)

    assert ranks(2, run)[0].endswith(words)
