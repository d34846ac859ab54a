"""Streams, events and devices of PyTorch, with an accelerator and without."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.contract.runtime import HostEvent, HostStream
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.verify.frameworks import harness_of

pytestmark = pytest.mark.platforms("torch")


def test_the_card_that_is_seen_is_used(monkeypatch):
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="[other-device] this machine has a card")
def test_without_a_card_the_host_keeps_order():
    """Without an accelerator streams and events are the host's, in order, and symmetric memory is missing."""
    platform = get_torch_platform()
    assert isinstance(platform.new_stream(), HostStream)
    assert isinstance(platform.new_event(), HostEvent)
    with pytest.raises(UnsupportedOnBackend, match="get_symmetric_memory_handler"):
        platform.get_symmetric_memory_handler()


def test_the_most_bytes_in_use_are_the_allocators(monkeypatch):
    """The count begins anew when it is asked for, and is read at the end."""
    used = [7]
    card = SimpleNamespace(reset_peak_memory_stats=lambda: used.append(0), max_memory_allocated=lambda: used[-1])
    monkeypatch.setattr(torch, "npu", card, raising=False)
    most = harness_of(get_torch_platform()).peak_bytes("npu")
    used.append(96)
    assert (most(), used) == (96, [7, 0, 96])
