"""The training steps that the benchmark compares."""

import pytest

from hyper_parallel.platform.select import platform_named, use_platform

pytestmark = pytest.mark.platforms("mindspore")


def test_both_steps_train_alike():
    """The step by hand and the one of this library have equal losses, before and after updates."""
    platform_named("mindspore")
    from workshop.bench.mindspore.operators import world
    from workshop.bench.mindspore.step import training_steps

    with use_platform("mindspore"), world() as mesh:
        by_hand, ours = training_steps(mesh)
        losses = [(by_hand().asnumpy().item(), ours().asnumpy().item()) for _ in range(3)]
    assert losses[0][0] > losses[1][0] > losses[2][0]
    assert all(first == second for first, second in losses)
