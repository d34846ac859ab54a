"""Losses on PyTorch: the whole signature of cross entropy, every placement, against the plain loss and gradient."""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import distribute_tensor
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard.rules.loss import vocab_parallel_loss
from hyper_parallel.errors import LayoutError
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


RNG = np.random.default_rng(3)
LOGITS = RNG.uniform(-3, 3, (5, 7))
CLASSES = np.array([6, 0, -100, 3, 5])
WEIGHT = RNG.uniform(0.5, 2.0, 7)
SHARES = RNG.dirichlet(np.ones(7), 5)
IMAGES = RNG.uniform(-3, 3, (2, 5, 3))
LABELS = np.array([[4, -100, 1], [0, 2, 3]])
TABLE = list(itertools.product(("mean", "sum", "none"), (0.0, 0.2), (False, True)))


def check(fn, arrays, mesh=(2,), **options):
    """Assert that `fn` means the same for all placements, and that none is refused."""
    report = check_function(fn, arrays, mesh, platform="torch", **options)
    assert report.ok, report.wrong[:5]
    assert not report.rejected, report.rejected[:3]


def entropy(reduction, smoothing, *, parallel, **rest):
    """Cross entropy of logits, target and perhaps a weight."""

    def fn(x, target, weight=None):
        weight = None if weight is None else weight.detach()  # PyTorch has no gradient for it
        options = {"reduction": reduction, "label_smoothing": smoothing, **rest}
        if not parallel:
            return F.cross_entropy(x, target, weight, **options)
        with vocab_parallel_loss():
            return F.cross_entropy(input=x, target=target, weight=weight, **options)

    return fn


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("reduction, smoothing, weighted", TABLE)
@pytest.mark.untraced
def test_cross_entropy(reduction, smoothing, weighted, parallel):
    """Cross entropy is the plain one for every reduction, smoothing, weight and ignored row on uneven shards."""
    fn = entropy(reduction, smoothing, parallel=parallel)
    arrays = [LOGITS, CLASSES, *([WEIGHT] if weighted else [])]
    check(fn, arrays, (2,), limit=30)
    check(fn, arrays, (4,), limit=10)
    check(fn, arrays, (2, 2), limit=15)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("reduction, smoothing, weighted", TABLE)
def test_cross_entropy_of_class_probabilities(reduction, smoothing, weighted, parallel):
    """Cross entropy with class probabilities as targets has the plain value and gradients."""
    fn = entropy(reduction, smoothing, parallel=parallel)
    arrays = [LOGITS, SHARES, *([WEIGHT] if weighted else [])]
    check(fn, arrays, (2,), limit=12)
    check(fn, arrays, (3,), limit=8)


@pytest.mark.parametrize("parallel", [False, True])
def test_cross_entropy_of_more_dims(parallel):
    """Cross entropy takes classes in dim 1 of images, a row without a batch, and a chosen ignored index."""
    check(entropy("mean", 0.1, parallel=parallel), [IMAGES, LABELS], (2,))
    check(entropy("none", 0.0, parallel=parallel, ignore_index=3), [IMAGES, np.abs(LABELS) % 5], (2, 2), limit=20)
    check(entropy("mean", 0.1, parallel=parallel), [LOGITS[0], np.array(4)], (3,))


def test_more_ranks_than_classes():
    """A rank without a class takes part and adds nothing."""
    check(
        entropy("mean", 0.1, parallel=True), [LOGITS[:, :3], np.array([0, 1, -100, 2, 1]), WEIGHT[:3]], (4,), limit=20
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_nll_loss(reduction):
    """nll_loss is the plain one with an ignored row and class weights."""
    check(lambda x, t, w: F.nll_loss(x, t, w.detach(), reduction=reduction), [LOGITS, CLASSES, WEIGHT], (2,), limit=30)
    check(
        lambda x, t: F.nll_loss(x, t, ignore_index=0, reduction=reduction),
        [IMAGES, np.abs(LABELS) % 5],
        (2, 2),
        limit=15,
    )


PLAIN = [
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
    lambda x, y: F.soft_margin_loss(x, y.detach()),
    F.binary_cross_entropy_with_logits, F.kl_div, torch.nn.MSELoss(reduction="sum"), torch.nn.BCEWithLogitsLoss(),
    lambda x, y: F.mse_loss(x, y, reduction="none"),
    lambda x, y: F.mse_loss(x, y, reduction="none", weight=x.detach() + 1),
    lambda x, y: F.smooth_l1_loss(x, y, beta=0.1),
    lambda x, y: F.kl_div(x, y, reduction="batchmean"), lambda x, y: F.kl_div(x, y, log_target=True, reduction="sum"),
    lambda x, y: F.mse_loss(x, y, weight=x.detach() + 1), lambda x, y: F.l1_loss(x, y, reduction="sum"),
    lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=y.detach() + 2),
    lambda x, y: F.binary_cross_entropy(x, y, weight=x.detach(), reduction="sum"),
    lambda x, y: F.l1_loss(x, y, size_average=False), lambda x, y: F.huber_loss(x, y, delta=0.2),
]  # fmt: skip


@pytest.mark.parametrize("fn", PLAIN)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.untraced
def test_losses_by_element(fn):
    """Means of elementwise losses are over the global count, and both arguments have their gradient."""
    arrays = [RNG.uniform(0.1, 0.9, (5, 3)), RNG.uniform(0.1, 0.9, (5, 3))]
    check(fn, arrays, (2,))
    check(fn, arrays, (2, 2), limit=10)


def test_half_precision_does_not_overflow():
    """The sum of many half-precision losses exceeds the type (on one device too); their mean does not."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["dp"])
        logits = torch.zeros(8000, 4, dtype=torch.float16)
        logits[:, 0] = 12.0
        x = DTensor.from_local(logits, mesh, [Shard(0)])
        target = DTensor.from_local(torch.ones(8000, dtype=torch.int64), mesh, [Shard(0)])
        return F.cross_entropy(x, target).full_tensor()

    assert simulate(run, 2, "torch") == [torch.tensor(12.0, dtype=torch.float16)] * 2


def placed(local, mesh, *placements, **options):
    """A DTensor."""
    return DTensor.from_local(local, mesh, placements, **options)


def test_vocab_parallel_communicates_no_logits():
    """vocab_parallel_loss reduces each row's maximum and sum only, and nothing in backward; without it logits move."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
        x = placed(torch.randn(3, 4, requires_grad=True), mesh, Shard(1))
        target = placed(torch.tensor([7, 1, -100]), mesh, Replicate())
        with record_events() as log, vocab_parallel_loss():
            loss = F.cross_entropy(x, target, label_smoothing=0.1)
        with record_events() as back:
            loss.backward()
        with record_events() as outside:
            F.cross_entropy(x, target)
        seen = [(event.op, event.argument, event.collective, event.bytes) for event in log]
        return seen, back.collectives(), loss.placements, outside.collectives("forward"), outside[0].implicit

    assert simulate(run, 2, "torch")[0] == (
        [
            ("cross_entropy", "maximum", "all_reduce", 12),
            ("cross_entropy", "sum of exponentials", "all_reduce", 12),
        ],
        [],
        (Partial(),),
        ["all_to_all"],
        True,
    )


def test_a_target_that_is_no_class_is_refused():
    """A target outside the classes, or of a wrong shape, raises the framework's error on every rank."""

    def run():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=["tp"])
        x = placed(torch.randn(3, 4), mesh, Shard(1))
        with vocab_parallel_loss(), pytest.raises(IndexError, match=r"Target 8 is out of bounds."):
            F.cross_entropy(x, placed(torch.tensor([7, 8, 0]), mesh, Replicate()))
        with pytest.raises(LayoutError) as caught:
            F.cross_entropy(x, placed(torch.tensor([7, 8]), mesh, Replicate()))
        return str(caught.value)

    assert simulate(run, 2, "torch")[0].endswith(
        "target has shape [2]; expected [3] for logits [3, 8] with classes in dim 1"
    )


FEW = {(2,): 8, (3,): 4, (4,): 3, (2, 2): 3}
ROW_RNG = np.random.default_rng(5)
SIGNS = np.array([1, -1, 1, 1, -1])
ROW_CLASSES = np.array([3, 0, 2, 1, 0])
SEVERAL = np.array([[0, 2, -1, -1], [1, -1, -1, -1], [3, 2, 1, 0], [-1, 0, 0, 0], [2, 0, -1, 1]])
CLASS_WEIGHT = ROW_RNG.uniform(0.5, 2.0, 4)
ROW_SHARES = ROW_RNG.uniform(0.1, 0.9, (5, 4))
SPOKEN = 1 + ROW_RNG.integers(0, 3, (5, 3))
ROWS = (5, 4)
FRAMES = (7, 5, 4)
LOSSES = {
    "multi_margin": (
        lambda x, t, w, r: F.multi_margin_loss(x, t, 2, 0.8, w.detach(), reduction=r),
        ROWS, ROW_CLASSES, CLASS_WEIGHT,
    ),
    "multilabel_margin": (lambda x, t, r: F.multilabel_margin_loss(x, t, reduction=r), ROWS, SEVERAL),
    "multilabel_soft_margin": (
        lambda x, t, w, r: F.multilabel_soft_margin_loss(x, t.detach().round(), w.detach(), reduction=r),
        ROWS, ROW_SHARES, CLASS_WEIGHT,
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
    "gaussian_nll": (lambda x, y, v, r: F.gaussian_nll_loss(x, y, v, full=True, reduction=r), ROWS, ROWS, ROW_SHARES),
    "gaussian_nll, one variance per row": (
        lambda x, y, v, r: F.gaussian_nll_loss(x, y, v, reduction=r), ROWS, ROWS, ROW_SHARES[:, 0].copy(),
    ),
    "poisson_nll": (lambda x, y, r: F.poisson_nll_loss(x, y, full=True, reduction=r), ROWS, 4 * ROW_SHARES),
    "ctc": (
        lambda x, t, i, o, r: F.ctc_loss(x.log_softmax(2), t, i, o, reduction=r),
        FRAMES, SPOKEN, np.array([7, 6, 7, 5, 7]), np.array([3, 2, 1, 0, 2]),
    ),
    "ctc, lengths in Python": (
        lambda x, t, r: F.ctc_loss(x.log_softmax(2), t, (7, 6, 7, 1, 7), (3, 2, 1, 2, 2), 0, r, True),
        FRAMES, SPOKEN,
    ),
    "ctc, targets in one row": (
        lambda x, t, r: F.ctc_loss(x.log_softmax(2), t, (7,) * 5, (3, 2, 1, 2, 2), blank=3, reduction=r),
        FRAMES, ROW_RNG.integers(0, 3, 10),
    ),
    "nll of images": (
        lambda x, t, w, r: F.nll_loss(x, t, w.detach(), ignore_index=2, reduction=r),
        (5, 4, 3), np.stack([ROW_CLASSES] * 3, 1), CLASS_WEIGHT,
    ),
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.untraced
def test_losses(holds, name, reduction):
    """Every reduction of a loss is over all global samples, and every argument has its gradient."""
    fn, *specs = LOSSES[name]
    holds(lambda *tensors: fn(*tensors, reduction), *specs, limits=FEW)


def test_one_row(holds):
    """Losses take a single row and a sequence without a batch."""
    holds(F.multi_margin_loss, (4,), np.array(2), limits=FEW)
    holds(lambda x, t: F.multilabel_margin_loss(x, t, reduction="sum"), (4,), SEVERAL[0], limits=FEW)
    holds(lambda x, t: F.ctc_loss(x.log_softmax(1), t, (7,), (3,)), (7, 4), SPOKEN[0], limits=FEW)
    holds(lambda x, t: torch.ctc_loss(x.log_softmax(2), t, (7,) * 5, (3,) * 5, 0, 2, False), FRAMES, SPOKEN, limits=FEW)


def test_a_number_for_the_variance(holds):
    """gaussian_nll_loss takes a Python number as variance of every element."""
    holds(lambda x, y: F.gaussian_nll_loss(x, y, 0.7, reduction="sum"), ROWS, ROWS, limits=FEW)


REFUSED = {
    "margins": (lambda ids, x: F.multi_margin_loss(x, ids[:3, 0]), "x [4, 4] needs a target [4], got [3]"),
    "lengths": (
        lambda ids, x: F.ctc_loss(x[:, None].expand(4, 4, 4), ids, (4,) * 3, (3,) * 4),
        "input_lengths are 3 numbers for 4 sequences",
    ),
    "lengths in a tensor": (
        lambda ids, x: F.ctc_loss(x[:, None].expand(4, 4, 4), ids, ids[:3, 0], ids[:3, 0]),
        "input_lengths has shape [3]; log_probs hold sequences [4]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused(ranks, name):
    """Shapes that do not fit, and options that need the whole operand, are errors with the reason."""
    fn, words = REFUSED[name]

    def run(mesh):
        ids = distribute_tensor(torch.ones(4, 3, dtype=torch.int64), mesh, [Shard(0)])
        with pytest.raises(LayoutError) as caught:
            fn(ids, distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
        return str(caught.value)

    assert ranks(2, run)[0].endswith(words)


MISFITS = {
    "label_smoothing": (
        lambda x, t: F.cross_entropy(x, t, label_smoothing=1.5), (4, 3), (3, (4,)),
        "cross_entropy: label_smoothing must be between 0 and 1, got 1.5",
    ),
    "reduction": (
        lambda x, t: F.cross_entropy(x, t, reduction="avg"), (4, 3), (3, (4,)),
        "cross_entropy: reduction must be 'none', 'mean' or 'sum', got 'avg'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISFITS)
def test_a_call_that_does_not_fit_is_refused(refuses, name):
    """A call that fails on one device fails on every rank with its reason, before anything moves."""
    refuses(*MISFITS[name])
