"""MindSpore's platform refuses members that only PyTorch has."""

from __future__ import annotations

import pytest

from hyper_parallel.errors import (
    MeshError,
    UnsupportedOnBackend,
)
from hyper_parallel.platform.select import platform_named

pytestmark = pytest.mark.platforms("mindspore")


def test_what_only_another_framework_has_is_refused():
    """Conversions that need PyTorch's own DTensor are refused with the reason."""
    platform = platform_named("mindspore")
    with pytest.raises(UnsupportedOnBackend) as caught:
        platform.from_torch(3)
    assert str(caught.value) == "from_torch: expected a torch.distributed.tensor.DTensor, got a int"


def test_what_the_rehearsal_does_not_take_is_refused(monkeypatch):
    """A gloo world refuses options of HCCL and missing rank, size or address by name."""
    platform = platform_named("mindspore")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UnsupportedOnBackend, match=r"^MCCL, MindSpore's engine on CPU, is refused: it silently "):
        platform.init_process_group("mccl", rank=0, world_size=1)
    with pytest.raises(UnsupportedOnBackend, match=r"^backend 'nccl' is none of MindSpore's; there is 'hccl'$"):
        platform.init_process_group("nccl")
    with pytest.raises(UnsupportedOnBackend) as caught:
        platform.init_process_group("gloo", rank=0, world_size=1, store=object(), device_id=0)
    assert str(caught.value) == (
        "init_process_group: the CPU rehearsal over gloo takes no store, device_id; leave them out"
    )
    with pytest.raises(MeshError) as caught:
        platform.init_process_group("gloo", rank=0)
    assert str(caught.value) == (
        "init_process_group: world_size is not given, and no launcher set WORLD_SIZE; pass world_size="
    )
