"""Dropout stays on: both runs draw the same numbers, and the ranks' own generators are checked."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.model.run import verify_model
from hyper_parallel.verify.model_case import ModelCase, ParallelPlan
from hyper_parallel.verify.random_draws import Draw, ParallelDraws, mask_errors
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")

LOCAL = {"up": ColwiseParallel(), "down": RowwiseParallel()}
GLOBAL = {name: type(style)(use_local_output=False) for name, style in LOCAL.items()}


def model(recompute=False, fresh=False, outer=0.3):
    """Return two layers with a dropout between them and another, in place, behind them."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)
            self.inner, self.outer = nn.Dropout(0.5), nn.Dropout(outer, inplace=True)

        def first(self, x):
            return self.inner(torch.tanh(self.up(x)))

        def forward(self, x):
            hidden = checkpoint(self.first, x, use_reentrant=False) if recompute else self.first(x)
            output = self.outer(self.down(hidden) * 1)
            return output * torch.rand(()) if fresh else output

    return Net().double()


def report_of(plan, mesh=((3,), ("tp",)), **options):
    """Return the report of two steps."""
    rng = np.random.default_rng(0)
    batches = [(rng.standard_normal((4, 5)), rng.standard_normal((4, 3))) for _ in range(2)]
    case = ModelCase(lambda: model(**options), batches, lambda output, batch: ((output - batch[-1]) ** 2).mean())
    return verify_model(lambda: case, plan, *mesh, platform="torch", steps=2)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("mesh", [((3,), ("tp",)), ((2, 2), ("dp", "tp"))])
def test_dropout_of_dtensors_draws_what_one_device_draws(mesh, recompute):
    """Masks of DTensors are those of the single device on every mesh, in a recomputed forward too."""
    report = report_of(
        lambda m: ParallelPlan(GLOBAL, {"dp": Shard(0)} if "dp" in m.names else {}), mesh, recompute=recompute
    )
    assert report.ok, report.text()
    assert report.counts["random"] == np.prod(mesh[0]) * 2


def test_a_mask_that_ranks_share_is_found():
    """Ranks that would draw the same mask for different parts of a tensor are told so, by module; values are equal."""
    report = report_of(lambda _: LOCAL, outer=0.0)
    assert report.first.kind == "mask"
    assert str(report.first) == (
        "step 1, mask of inner, draw 1, rank 0: rank 1 would draw the same numbers for other elements: the ranks share "
        "a generator's state; seed ranks that hold different parts differently"
    )
    assert {check.kind for check in report.checks if not check.ok} == {"mask"}


def test_masks_of_differently_seeded_ranks_are_right():
    """Ranks that draw different masks for different parts train like one device that has both."""
    report = report_of(lambda _: seeded_by_rank, outer=0.0)
    assert report.ok, report.text()
    assert report.counts["mask"] == 2 * 3 * 2  # what each dropped, and what its own generator would have dropped


def test_a_mask_that_differs_between_replicas_is_found():
    """Ranks that would draw different masks for the same elements are told so."""
    report = report_of(lambda _: seeded_by_rank)
    assert report.first.module == "outer"
    assert str(report.first).endswith(
        "would draw other numbers for the same elements: its generator has another state; seed the ranks of one "
        "replica equally"
    )


def seeded_by_rank(model, mesh):
    """Parallelize, and seed the ranks differently."""
    import torch

    parallelize_module(model, mesh, LOCAL)
    torch.manual_seed(mesh.get_local_rank())


def test_draws_that_take_no_tensor_are_refused():
    """Random numbers that belong to no tensor are refused by module."""
    with pytest.raises(InputError) as caught:
        report_of(lambda _: LOCAL, fresh=True)
    assert str(caught.value) == (
        "SPEC: module (model) draws random numbers in forward by a function that takes no tensor, so a parallel run "
        "draws others; draw them for a tensor, by dropout or torch.rand_like"
    )


def placed(shape, shapes):
    """Return what rank 0 of a 2 x 2 mesh makes of a plain tensor, or the error's text."""
    import torch

    from hyper_parallel.core.dtensor.events import module_scope
    from hyper_parallel.core.dtensor.mesh import init_device_mesh
    from hyper_parallel.platform.select import current_platform

    draws = ParallelDraws(current_platform(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    draws.shapes = shapes
    try:
        with module_scope("drop"):
            _, placements, whole = draws.place(torch.zeros(shape))
    except InputError as error:
        return str(error)
    return [str(placement) for placement in placements], whole


NO_DRAW = (
    "PLAN: module drop draws random numbers for a plain tensor [2, 3] as draw 1, where the single-device model draws "
    "for no plain tensor; both must draw in the same order"
)
UNKNOWN = (
    "PLAN: module drop draws random numbers for a plain tensor {}, and it is unknown which part of the single "
    "device's [4, 3] that is; let it draw for a DTensor (use_local_output=False)"
)


@pytest.mark.parametrize(
    "shape, shapes, expected",
    [
        ((2, 3), {0: (2, 3)}, (["Replicate()", "Replicate()"], (2, 3))),
        ((2, 3), {}, NO_DRAW),
        ((2, 3), {0: (4, 3)}, UNKNOWN.format([2, 3])),
        ((3,), {0: (4, 3)}, UNKNOWN.format([3])),
    ],
)
def test_the_part_of_a_plain_tensor(shape, shapes, expected):
    """The part is told by the shape, or the case is refused: two axes of one size could both have cut a dim."""
    assert simulate(placed, 4, "torch", (shape, shapes))[0] == expected


def test_masks_are_compared_by_box_and_state():
    """Equal boxes need equal states, other boxes other states; ranks without the draw do not count."""
    whole, left, right = ((0, 4),), ((0, 2),), ((2, 4),)
    draws = [
        [Draw(0, "a", whole, "x"), Draw(1, "b", left, "y"), Draw(2, "c", left, "z")],
        [Draw(0, "a", whole, "x"), Draw(1, "b", right, "y")],
    ]
    assert [(draw.module, bool(why)) for draw, why in mask_errors(draws, 0)] == [
        ("a", False),
        ("b", True),
        ("c", False),
    ]
