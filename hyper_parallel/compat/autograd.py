"""Imperative gradients on MindSpore: ``loss.backward()`` and ``tensor.grad``."""

from __future__ import annotations

from hyper_parallel.platform.select import get_mindspore_platform

__all__ = ["enable_mindspore_backward_compat"]


def enable_mindspore_backward_compat() -> None:
    """Give MindSpore's tensors ``backward``, ``grad``, ``requires_grad`` and ``grad_fn``; once per process."""
    get_mindspore_platform().enable_imperative_gradients()
