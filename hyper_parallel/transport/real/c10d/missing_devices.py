"""Diagnoses an unavailable device type: what is missing, and what to install or set."""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.transport.device_types import TOOLS, VISIBLE

__all__ = ["missing_device"]


def missing_device(device: str) -> str:
    """Return the missing part and the fix in one line; empty if PyTorch sees a device of this type.

    Args:
        device: type of device: ``cuda``, ``npu``, or any other word.
    """
    engine: Any = getattr(torch, device, None)  # torch_npu adds torch.npu when PyTorch is imported
    if engine is not None and engine.is_available() and engine.device_count():
        return ""
    if engine is None and device == "npu":
        return f"torch_npu is not installed: install the one for PyTorch {torch.__version__}, source CANN's set_env.sh"
    if engine is None:
        return f"there is no torch.{device}"
    if device == "cuda" and torch.version.cuda is None:
        return f"PyTorch {torch.__version__} was built without CUDA: install PyTorch's CUDA build"
    return f"the driver shows no device: look at `{TOOLS[device]}`, and at {VISIBLE[device]}, which may hide devices"
