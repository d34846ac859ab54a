"""Types of cards by their device: the variable that hides some of them from a process, and the tool that lists them."""

from __future__ import annotations

__all__ = ["TOOLS", "VISIBLE"]

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Environment variables with the numbers of the cards that a process sees, separated by commas."""

TOOLS = {"cuda": "nvidia-smi", "npu": "npu-smi info"}
"""Commands of the drivers."""
