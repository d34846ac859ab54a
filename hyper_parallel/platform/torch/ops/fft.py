"""PyTorch's spellings of Fourier transforms."""

from __future__ import annotations

from torch import fft

from hyper_parallel.core.shard.rules.fft import KINDS
from hyper_parallel.platform.torch.ops.registry import spelling

for _kind in KINDS:
    for _op in (_kind, f"{_kind}2", f"{_kind}n"):
        spelling(_op, getattr(fft, _op))
spelling("stft")
spelling("istft")
