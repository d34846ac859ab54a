"""The comparison of a real transport's calls before they are carried out."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import CollectiveMismatchError
from hyper_parallel.verify import launch

pytestmark = pytest.mark.platforms("torch")


def _two_receives():
    """Wait for the second of two receives first; the first one does not fit. Returns its message and the second's."""
    import torch

    from hyper_parallel.platform.select import get_platform

    platform = get_platform()
    if platform.get_rank() == 0:
        sent = [platform.isend(torch.arange(size, dtype=torch.float32), 1) for size in (4, 3)]
        for work in sent:
            work.wait()
        return None
    first, second = [platform.irecv(torch.zeros(size), 0) for size in (2, 3)]
    arrived = second.wait()
    with pytest.raises(CollectiveMismatchError) as caught:
        first.wait()
    return str(caught.value).split("\n")[0], arrived.tolist()


def test_a_mismatch_belongs_to_its_own_receive():
    """Waited for in any order, the receive that does not fit raises, and the other one gets its message."""
    _, (message, arrived) = launch(_two_receives, 2, "torch", timeout=120)
    assert message == "ranks 0 and 1 disagree about the shape of a message:"
    assert arrived == [0.0, 1.0, 2.0]
