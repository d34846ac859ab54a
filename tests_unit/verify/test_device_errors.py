"""Devices that are in use or out of memory."""

from __future__ import annotations

import pytest

from hyper_parallel.verify.input_error import InputError, device_errors


class _Device:
    """A platform whose device makes tensors, or refuses them with an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.made: list[str] = []

    def zeros(self, size, *, device):
        """Make a tensor."""
        assert size == (1,)
        self.made.append(device)
        if self.error is not None:
            raise self.error


def test_nothing_happens_on_the_processor():
    """On CPU no tensor is made, and errors are the program's own."""
    device = _Device()
    with pytest.raises(RuntimeError, match=r"^CUDA out of memory$"), device_errors(device, "cpu"):
        raise RuntimeError("CUDA out of memory")
    assert device.made == []


def test_a_device_in_use_is_told_before_anything_runs():
    """The first line of the engine's error, what shows who uses the device, and the variable that chooses another."""
    device = _Device(RuntimeError("CUDA-capable device(s) is/are busy or unavailable\nmore"))
    with pytest.raises(InputError) as caught, device_errors(device, "cuda"):
        pytest.fail("the device was used")
    assert str(caught.value) == (
        "--device cuda: the device cannot be used: CUDA-capable device(s) is/are busy or unavailable; `nvidia-smi` "
        "shows what uses it: end that, or choose another device with CUDA_VISIBLE_DEVICES"
    )


def test_memory_that_runs_out_is_told_with_what_to_do():
    """An error of the device's memory is one of the input."""
    with pytest.raises(InputError) as caught, device_errors(_Device(), "npu"):
        raise RuntimeError("NPU out of memory. Tried to allocate 2.00 GiB\nmore")
    assert str(caught.value) == (
        "--device npu: the device's memory ran out: NPU out of memory. Tried to allocate 2.00 GiB; take a smaller "
        "model or fewer ranks, all of which share a device where they are simulated; `npu-smi info` shows what else "
        "uses it"
    )


@pytest.mark.parametrize("words", ["Device(id:0) memory isn't enough, alloc failed", "Memory not enough: alloc size"])
def test_memory_that_runs_out_is_known_by_mindspores_words(words):
    """MindSpore says it in other words than PyTorch."""
    with (
        pytest.raises(InputError, match=r"^--device npu: the device's memory ran out: "),
        device_errors(_Device(), "npu"),
    ):
        raise RuntimeError(words)


def test_other_errors_are_left_alone():
    """What is not an error of memory keeps its type and text, and a run without one ends as it would."""
    device = _Device()
    with pytest.raises(RuntimeError, match=r"^shapes differ$"), device_errors(device, "npu"):
        raise RuntimeError("shapes differ")
    with device_errors(device, "npu"):
        pass
    assert device.made == ["npu", "npu"]
