"""Streams, events and devices of PyTorch, with an accelerator and without."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.contract.runtime import HostEvent, HostStream
from hyper_parallel.platform.select import get_torch_platform

pytestmark = pytest.mark.platforms("torch")


def test_the_device_that_is_seen_is_used(monkeypatch):
    """An NPU is preferred to a GPU, and streams and events are the device's own."""
    made = SimpleNamespace(
        is_available=lambda: True,
        Stream=lambda: "a stream",
        Event=lambda: "an event",
        stream="the context",
        current_stream=lambda: "the current one",
    )
    monkeypatch.setattr(torch, "npu", made, raising=False)
    platform = get_torch_platform()
    assert platform.device_type() == "npu"
    assert (platform.new_stream(), platform.new_event()) == ("a stream", "an event")
    assert (platform.get_stream_context(), platform.get_current_stream()) == ("the context", "the current one")


@pytest.mark.skipif(torch.cuda.is_available(), reason="[other-device] this machine has a device")
def test_without_a_device_the_host_keeps_order():
    """Without an accelerator streams and events are the host's, in order, and symmetric memory is missing."""
    platform = get_torch_platform()
    assert isinstance(platform.new_stream(), HostStream)
    assert isinstance(platform.new_event(), HostEvent)
    with pytest.raises(UnsupportedOnBackend, match="get_symmetric_memory_handler"):
        platform.get_symmetric_memory_handler()
