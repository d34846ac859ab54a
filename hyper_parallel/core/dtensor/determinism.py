"""The determinism switch: two runs of a program give the same bits."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.random import manual_seed
from hyper_parallel.platform.select import get_platform

__all__ = ["SEEDS", "use_deterministic"]

SEEDS = 2**32
"""Seeds are below this number: those that NumPy's generator takes."""


def use_deterministic(seed: int = 0) -> None:
    """Make this rank's program give the same bits in every run; call it first, on every rank, with the same number.

    It sets the framework's own switches (``torch.use_deterministic_algorithms`` and cuDNN's, or
    ``mindspore.set_deterministic``), with the environment variables that cuBLAS and HCCL read when they start; has
    reductions of DTensors on accelerators computed in the order of the ranks, as they always are on CPU; and starts
    the generators of DTensors, the framework, Python and NumPy. An operator of PyTorch that has no deterministic form
    then raises PyTorch's error. There is no way back: start a new process.

    What it cannot set: the number of threads and of ranks and the machine, which must be the same in both runs, and
    the order in which PyTorch's own engines add. Gloo's differs between DDP's buckets;
    ``hyper_parallel.platform.torch.rank_order.rank_order_hook`` has DDP average in the order of the ranks.

    Args:
        seed: of all generators, from 0 up to 2**32 - 1. Ranks that shall draw different plain tensors (dropout of
            other samples) call the framework's own seed afterwards; DTensors need the same one everywhere.

    Raises:
        ValueError: the seed is negative or too large.
        TypeError: the seed is no int.
    """
    _check_seed(seed)
    platform = get_platform()
    platform.use_deterministic()
    platform.seed(seed)
    manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - the global generator, which programs draw from


def _check_seed(seed: Any) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int):
        msg = f"use_deterministic: seed must be an int, got {type(seed).__name__}"
        raise TypeError(msg)
    if not 0 <= seed < SEEDS:
        msg = f"use_deterministic: seed is {seed}; it must be from 0 to {SEEDS - 1}"
        raise ValueError(msg)
