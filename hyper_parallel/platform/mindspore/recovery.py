"""MindSpore works on after a differentiation that failed.

An exception inside a function that is being differentiated leaves MindSpore's record of it half written, and every
later ``x[0]`` of any tensor fails. Where DTensors refuse what they cannot do, that must not cost the process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any

from mindspore.common.api import _pynative_executor
from mindspore.ops.composite import base
from mindspore.ops.function.grad import grad_func

__all__ = ["install"]

_FORWARD, _BACKWARD = "_pynative_func_grad_forward", "_pynative_func_grad_backward"


def install() -> None:
    """Let every way into differentiation recover; called once, by the platform's construction."""
    for name in (_FORWARD, _BACKWARD):
        recovering = _recovering(getattr(base, name))
        for module in (base, grad_func):
            setattr(module, name, recovering)


def _recovering(differentiated: Callable[..., Any]) -> Callable[..., Any]:
    """Inside another differentiation nothing is cleared: that one is still at work."""

    @wraps(differentiated)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return differentiated(*args, **kwargs)
        except BaseException:
            if not _differentiating():
                _pynative_executor.clear_res()
            raise

    return run


def _differentiating() -> bool:
    """Whether a differentiation is at work above; MindSpore's own flag stays set after one that failed."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the interpreter's only door to it
    while frame is not None:
        if frame.f_code.co_name == _FORWARD:
            return True
        frame = frame.f_back
    return False
