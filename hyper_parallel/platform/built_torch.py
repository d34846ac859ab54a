"""Imported by the fork server of PyTorch's ranks, which then start with the platform built."""

from hyper_parallel.platform.select import platform_named

__all__: list[str] = []

platform_named("torch")
