"""MindSpore's ranks on devices, without devices: what is missing is reported, and calls fit their signatures."""

from __future__ import annotations

import os
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest

from hyper_parallel.errors import UnsupportedOnBackend

pytestmark = pytest.mark.platforms("mindspore")


@pytest.fixture
def devices():
    """The module under test."""
    from hyper_parallel.transport.real.mindspore import devices as mindspore_devices

    return mindspore_devices


@pytest.mark.parametrize(
    "loaded, plugin, error, says",
    [
        (True, True, "", ""),
        (False, False, "", "MindSpore 2.10.0 is the CPU build: install the one for Ascend"),
        (
            False, True, "Load dynamic library: libmindspore_ascend.so.2 failed. libge_runner.so: cannot open\nLoad",
            ("MindSpore 2.10.0 cannot load its plugin for Ascend (libge_runner.so: cannot open): install CANN, and "
             "source its set_env.sh"),
        ),
        (
            False, True, "",
            ("MindSpore 2.10.0 cannot load its plugin for Ascend (no reason is given): install CANN, and source its "
             "set_env.sh"),
        ),
    ],
)  # fmt: skip
def test_why_there_is_no_ascend(devices, monkeypatch, loaded, plugin, error, says):
    """A CPU build, a plugin without CANN and a plugin that has loaded are distinguished, each with what to do."""
    context = SimpleNamespace(is_pkg_support_device=lambda _: loaded, load_plugin_error=lambda: error)
    monkeypatch.setattr(devices, "MSContext", SimpleNamespace(get_instance=lambda: context))
    monkeypatch.setattr(devices, "has_plugin", lambda _: plugin)
    monkeypatch.setattr(devices.mindspore, "__version__", "2.10.0")
    assert devices.missing_ascend() == says


def test_mindspore_of_this_machine_is_asked(devices):
    """What MindSpore answers here has the form that is expected: it has no Ascend, and says why in one line."""
    why = devices.missing_ascend()
    assert "for Ascend" in why
    assert "\n" not in why


def test_a_rank_needs_a_device_of_its_own(devices, monkeypatch):
    """More ranks of MindSpore than devices are refused with both numbers, and so is a dry run."""
    monkeypatch.setattr(devices.ascend, "device_count", lambda: 2)
    monkeypatch.delenv("MS_SIMULATION_LEVEL", raising=False)
    devices.require_devices(2)
    with pytest.raises(UnsupportedOnBackend) as caught:
        devices.require_devices(3)
    assert str(caught.value) == (
        "--device npu: 3 ranks of MindSpore need 3 devices, one each, and MindSpore sees 2; take at most 2 ranks, look "
        "at `npu-smi info` and at ASCEND_RT_VISIBLE_DEVICES, which may hide devices, or take --platform torch, whose "
        "ranks share devices"
    )
    monkeypatch.setattr(devices.ascend, "device_count", lambda: 0)
    with pytest.raises(UnsupportedOnBackend) as caught:
        devices.require_devices(1)
    assert str(caught.value) == (
        "--device npu: MindSpore sees no device; look at `npu-smi info` and at ASCEND_RT_VISIBLE_DEVICES, which may "
        "hide devices, or take --device cpu"
    )
    monkeypatch.setenv("MS_SIMULATION_LEVEL", "1")
    with pytest.raises(UnsupportedOnBackend) as caught:
        devices.require_devices(2)
    assert str(caught.value) == (
        "--device npu: MS_SIMULATION_LEVEL=1: MindSpore makes a dry run, without values and without HCCL; "
        "unset MS_SIMULATION_LEVEL"
    )


def test_a_rank_takes_its_device_before_it_joins(devices, monkeypatch):
    """The variables of msrun, the device of the rank's number, HCCL: in this order, each call as it is documented."""
    order = []
    device, init = create_autospec(devices.mindspore.set_device), create_autospec(devices.communication.init)
    device.side_effect = lambda *_: order.append(os.environ["MS_NODE_ID"])
    init.side_effect = lambda *_: order.append("joined")
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(devices.mindspore, "set_device", device)
    monkeypatch.setattr(devices.communication, "init", init)
    monkeypatch.setattr(devices, "missing_ascend", lambda: "")
    monkeypatch.setattr(devices, "distributed", SimpleNamespace(get_rank=lambda: 1, get_world_size=lambda: 2))
    joined = devices.start_world("npu", 1, 2, "8118", "")
    assert (joined.rank, joined.world_size, joined.backend, joined.framework) == (1, 2, "hccl", "mindspore")
    assert (device.call_args.args, init.call_args.args, order) == (("Ascend", 1), ("hccl",), ["1", "joined"])
    assert os.environ == devices.rank_environment(1, 2, "8118")


def test_simulated_ranks_share_the_device_of_the_process_that_asks(devices, monkeypatch):
    """Each takes that device before it computes, and memory in small parts; in a second world nothing is set again."""
    device, memory = (
        create_autospec(devices.mindspore.set_device),
        create_autospec(devices.mindspore.runtime.set_memory),
    )
    monkeypatch.setattr(devices.mindspore, "set_device", device)
    monkeypatch.setattr(devices.mindspore.runtime, "set_memory", memory)
    monkeypatch.setattr(devices, "begin_simulated", lambda inner: f"bridge over {inner}")
    monkeypatch.setattr(
        devices.mindspore, "get_current_device", lambda: SimpleNamespace(device_target="Ascend", device_id=2)
    )
    devices._share_device.cache_clear()
    for world in ("one", "another"):
        assert devices.start_simulated(world, devices.current_device()) == f"bridge over {world}"
    assert [call.args for call in device.call_args_list] == [("Ascend", 2)]
    assert [call.kwargs for call in memory.call_args_list] == [{"init_size": "0.25GB", "increase_size": "0.25GB"}]
    devices._share_device.cache_clear()


def test_products_are_not_rounded_on_a_device(devices, monkeypatch):
    """HF32 is switched off for products of matrices and convolutions; what a program has allowed before is refused."""
    precision = devices.ascend.op_precision
    switches = {name: create_autospec(getattr(precision, name)) for name in ("matmul_allow_hf32", "conv_allow_hf32")}
    for name, switch in switches.items():
        monkeypatch.setattr(precision, name, switch)
    devices.exact_products()
    assert [switch.call_args.args for switch in switches.values()] == [(False,), (False,)]
    switches["conv_allow_hf32"].side_effect = RuntimeError("The 'conv_allow_hf32' can not be set repeatedly.")
    with pytest.raises(UnsupportedOnBackend) as caught:
        devices.exact_products()
    assert str(caught.value) == (
        "--device npu: this process lets MindSpore round products of float32 to HF32: The 'conv_allow_hf32' can not be "
        "set repeatedly.; leave out matmul_allow_hf32(True) and conv_allow_hf32(True)"
    )


def test_a_rank_without_ascend_does_not_join(devices, monkeypatch):
    """It says what is missing, where MindSpore's own error would be a page of C++."""
    monkeypatch.setattr(devices, "missing_ascend", lambda: "MindSpore is the CPU build")
    with pytest.raises(UnsupportedOnBackend, match=r"^device npu: MindSpore is the CPU build, or use --device cpu$"):
        devices.start_world("npu", 0, 2, "8118", "")


@pytest.mark.parametrize("port, backends", [("8118", ["mccl"]), ("", [])])
def test_the_rehearsal_takes_the_path_of_a_device(devices, monkeypatch, port, backends):
    """On CPU ranks meet in MindSpore's cluster if there is one, and the calls to HCCL are carried over gloo."""
    init = create_autospec(devices.communication.init)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(devices.communication, "init", init)
    monkeypatch.setattr(devices, "_over_gloo", lambda rank, size, _: SimpleNamespace(rank=rank, world_size=size))
    joined = devices.start_world("cpu", 1, 2, port, "")
    assert (joined.rank, joined.world_size, joined.backend) == (1, 2, "hccl")
    assert [call.args[0] for call in init.call_args_list] == backends


def test_tensors_are_described_for_fingerprints(devices):
    """Shape and dtype as NumPy's ranks name them, and whether there is an average; devices are not compared."""
    import mindspore

    facts, dtypes = devices.TensorFacts(), (mindspore.float32, mindspore.bfloat16, mindspore.complex64, mindspore.int8)
    told = [(facts.dtype(x), facts.inexact(x)) for x in (mindspore.ops.zeros((2, 3), dtype) for dtype in dtypes)]
    assert told == [("float32", True), ("bfloat16", True), ("complex64", True), ("int8", False)]
    x = mindspore.ops.zeros((2, 3))
    assert (facts.framework, facts.shape(x), facts.device(x)) == ("mindspore", (2, 3), "")
