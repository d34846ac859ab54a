"""Every collective of the simulated transport against NumPy, with tensors of each framework."""

import pytest

from hyper_parallel.verify.simulate import simulate
from workshop.conformance.transport import check_transport


@pytest.mark.platforms("torch", "mindspore")
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.untraced
def test_every_collective_equals_numpy(platform_name, world_size):
    """On simulated ranks every collective equals NumPy, for every dtype and shape."""
    assert all(simulate(check_transport, world_size, platform_name, (platform_name,)))


@pytest.mark.platforms("torch", "mindspore")
def test_runs_repeat_bit_for_bit(platform_name):
    """Two runs of the same function give the same bits."""
    runs = [simulate(check_transport, 2, platform_name, (platform_name,)) for _ in range(2)]
    for first, second in zip(*runs, strict=True):
        assert [x.tobytes() for x in first] == [x.tobytes() for x in second]
