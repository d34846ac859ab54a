"""State that PyTorch and Python keep per process, of which each simulated rank has its own.

It is saved and put back whenever the baton passes from rank to rank, so reading it must be cheap.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

__all__ = ["ProcessState", "restore_process", "save_process"]


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The environment, and PyTorch's switches."""

    environment: dict[bytes, bytes]
    deterministic: tuple[bool, bool, bool]
    precision: str
    anomaly: tuple[bool, bool]


_ENVIRONMENT: dict[bytes, bytes] = os.environ._data  # type: ignore[attr-defined]  # noqa: SLF001 - 100 times faster


def save_process() -> ProcessState:
    """The state now."""
    return ProcessState(
        _ENVIRONMENT.copy(),
        (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]  # set by its module
        ),
        torch.get_float32_matmul_precision(),
        (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    )


def restore_process(state: ProcessState) -> None:
    """Put back what :func:`save_process` returned; what has not changed is left alone."""
    now = save_process()
    if now == state:
        return
    for name in now.environment.keys() - state.environment.keys():
        del os.environ[os.fsdecode(name)]
    for name, value in state.environment.items():
        if now.environment.get(name) != value:
            os.environ[os.fsdecode(name)] = os.fsdecode(value)
    if now.deterministic != state.deterministic:
        enabled, warn_only, fill = state.deterministic
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]  # as above
    if now.precision != state.precision:
        torch.set_float32_matmul_precision(state.precision)
    if now.anomaly != state.anomaly:
        enabled, check_nan = state.anomaly
        torch.autograd.set_detect_anomaly(enabled, check_nan=check_nan)
