"""The error for input that cannot be verified, and its use for errors of a device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel._text import first_line
from hyper_parallel.transport.device_types import TOOLS, VISIBLE

__all__ = ["InputError", "device_errors"]

_FULL = re.compile(r"out of memory|memory isn't enough|memory not enough", re.IGNORECASE)  # PyTorch's, MindSpore's


class InputError(ValueError):
    """The input cannot be verified: a wrong program, SPEC, PLAN, mesh, world size or fault."""


@contextmanager
def device_errors(platform: Any, device: str) -> Iterator[None]:
    """Create a tensor on the device; inside the block, raise memory errors of the device as InputError.

    Args:
        platform: platform of the rank.
        device: device of the rank.

    Raises:
        InputError: (a ValueError) the device cannot be used, or its memory runs out.
    """
    if device == "cpu":
        yield
        return
    tool, visible = TOOLS[device], VISIBLE[device]
    try:
        platform.zeros((1,), device=device)
    except RuntimeError as error:
        fix = f"`{tool}` shows what uses it: end that, or choose another device with {visible}"
        msg = f"--device {device}: the device cannot be used: {first_line(error)}; {fix}"
        raise InputError(msg) from error
    try:
        yield
    except RuntimeError as error:
        if _FULL.search(str(error)) is None:
            raise
        fix = (
            f"take a smaller model or fewer ranks, all of which share a device where they are simulated; `{tool}` shows"
        )
        msg = f"--device {device}: the device's memory ran out: {first_line(error)}; {fix} what else uses it"
        raise InputError(msg) from error
