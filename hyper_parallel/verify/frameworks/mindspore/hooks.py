"""Connects a recorder to the cells, differentiated functions and optimizers of the program that runs in a context.

MindSpore has no hooks for all cells at once, so the methods that call cells and optimizers are replaced during the
recording. A process is one rank and runs one program at a time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from mindspore import amp, context, nn
from mindspore.experimental import optim
from mindspore.ops.composite import base
from mindspore.ops.function.grad import grad_func
from mindspore.train import amp as rewriting, serialization

from hyper_parallel.platform.mindspore import imperative
from hyper_parallel.platform.mindspore.captured import reaches_dtensor
from hyper_parallel.platform.mindspore.ops.loss_scale import UNCOMPILED
from hyper_parallel.platform.mindspore.patches import places_of
from hyper_parallel.verify.frameworks.contract.record_log import RecordLog, use_log
from hyper_parallel.verify.frameworks.mindspore.known_defects import DEFECTS, reporting
from hyper_parallel.verify.frameworks.mindspore.recorder import Recorder

__all__ = ["recording"]

_FORWARD, _BACKWARD = "_pynative_func_grad_forward", "_pynative_func_grad_backward"


@contextmanager
def recording(log: RecordLog) -> Iterator[None]:
    """Record the MindSpore program that runs inside this context into ``log``.

    Args:
        log: log of the rank; its perturbation, if any, is applied.
    """
    recorder, mode = Recorder(log), context.get_context("mode")
    replaced: list[tuple[Any, str, Any]] = []

    def replace(owner: Any, name: str, run: Callable[..., Any]) -> None:
        plain = getattr(owner, name)
        replaced.append((owner, name, plain))
        setattr(owner, name, functools.wraps(plain)(run(plain)))

    for optimizers in (nn.Optimizer, optim.Optimizer):
        replace(optimizers, "__call__", lambda plain: _method(log, recorder.step, plain))
    replace(nn.Cell, "__call__", lambda plain: _method(log, recorder.call, plain))
    for module in (base, grad_func):
        replace(module, _FORWARD, lambda plain: _function(log, recorder.forward, plain))
        replace(module, _BACKWARD, lambda plain: _function(log, recorder.backward, plain))
    replace(rewriting, "_auto_mixed_precision_rewrite", lambda plain: _function(log, recorder.rewrite, plain))
    for owner, name in places_of(serialization.save_checkpoint):
        replace(owner, name, lambda plain: _function(log, recorder.save, plain))
    replace(imperative, "run_backward", lambda plain: _function(log, recorder.imperative_backward, plain))
    # A recorded program is not compiled, so the guard of jit, from which these functions are called, never runs.
    for function, served in UNCOMPILED.items():
        replace(amp, function.__name__, functools.partial(_served, served))
    if not log.limits.pretend:  # --pretend replaces these functions by correct ones
        for defect in DEFECTS:
            replace(defect.owner, defect.name, functools.partial(reporting, log, defect))
    try:
        with use_log(log), _pretended(log), _uncompiled(log) if log.limits.observe else nullcontext():
            yield
    finally:
        for owner, name, plain in reversed(replaced):
            setattr(owner, name, plain)
        context.set_context(mode=mode)  # the program may have set graph mode, and its process runs other programs later
        recorder.finish()


@contextmanager
def _pretended(log: RecordLog) -> Iterator[None]:
    """If the log's limits name a device, let the CPU stand in for this device, and record the replaced calls."""
    if not log.limits.pretend:
        yield
        return
    from hyper_parallel.verify.frameworks.mindspore.pretended_npu import pretended_npu

    with pretended_npu() as counts:
        try:
            yield
        finally:
            log.notes["pretended"] = {"device": log.limits.pretend, "counts": dict(counts), "stubs": {}}


@contextmanager
def _uncompiled(log: RecordLog) -> Iterator[None]:
    """Inside this context, let MindSpore run functions and cells uncompiled that the program compiles."""
    before = os.environ.get("MS_JIT")
    os.environ["MS_JIT"] = "0"
    try:
        yield
    finally:
        if context.get_context("mode") == context.GRAPH_MODE:
            log.notes["uncompiled"] = True
        if before is None:
            del os.environ["MS_JIT"]
        else:
            os.environ["MS_JIT"] = before


def _method(log: RecordLog, seen: Callable[..., Any], plain: Any) -> Any:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs) if log.paused else seen(plain, self, args, kwargs)

    return call


def _served(served: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return (served if reaches_dtensor([args, kwargs]) else plain)(*args, **kwargs)

    return call


def _function(log: RecordLog, seen: Callable[..., Any], plain: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs) if log.paused else seen(plain, args, kwargs)

    return call
