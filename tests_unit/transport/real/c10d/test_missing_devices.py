"""Why PyTorch sees no device is said with what was found and what to install or set."""

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.platforms("torch")


def engine(available, count):
    """A `torch.cuda` or `torch.npu` that sees so many devices."""
    return SimpleNamespace(is_available=lambda: available, device_count=lambda: count)


HIDDEN = "the driver shows no device: look at `{}`, and at {}, which may hide devices"
BUILD = "PyTorch 1.2 was built without CUDA: install PyTorch's CUDA build"


@pytest.mark.parametrize(
    "device, seen, cuda, text",
    [
        ("npu", None, None, "torch_npu is not installed: install the one for PyTorch 1.2, source CANN's set_env.sh"),
        ("abacus", None, None, "there is no torch.abacus"),
        ("cuda", engine(available=False, count=0), None, BUILD),
        ("cuda", engine(available=False, count=0), "12.8", HIDDEN.format("nvidia-smi", "CUDA_VISIBLE_DEVICES")),
        ("npu", engine(available=True, count=0), None, HIDDEN.format("npu-smi info", "ASCEND_RT_VISIBLE_DEVICES")),
        ("npu", engine(available=True, count=2), None, ""),
    ],
)
def test_what_is_missing_and_what_to_do(device, seen, cuda, text, monkeypatch):
    """A missing package, a build without CUDA and hidden devices are distinguished; with a device none is."""
    import torch

    from hyper_parallel.transport.real.c10d.missing_devices import missing_device

    monkeypatch.setattr(torch, "__version__", "1.2")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    if seen is None:
        monkeypatch.delattr(torch, device, raising=False)
    else:
        monkeypatch.setattr(torch, device, seen, raising=False)
    assert missing_device(device) == text
