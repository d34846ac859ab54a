"""Runs a function on every rank of a world of real processes on this machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.platform.select import FRAMEWORKS, framework_for
from hyper_parallel.transport.serialization import pack
from hyper_parallel.transport.timeouts import positive_seconds
from hyper_parallel.verify.simulate import bind_imported, on_platform, require_device, require_ranks

__all__ = ["launch"]


def launch(
    fn: Callable[..., Any],
    world_size: int,
    platform: str | None = None,
    args: Sequence[Any] = (),
    *,
    timeout: float = 300.0,
    device: str = "cpu",
) -> list[Any]:
    """Call ``fn(*args)`` on every rank of a world of real processes.

    Ranks are forked from a process that has imported the framework, and have the environment variables of torchrun.
    They communicate over gloo. MindSpore's ranks use PyTorch's gloo as well, because MindSpore's own CPU collectives
    are incomplete. ``fn``, ``args`` and results are pickled, functions by value.

    Args:
        fn: the function that every rank calls.
        world_size: number of ranks, at least one.
        platform: ``"torch"`` or ``"mindspore"``. None selects the framework of tensors in ``args``, else the one that
            the module of ``fn`` uses, else the default framework.
        args: arguments of ``fn``, the same on every rank.
        timeout: seconds after which the processes are ended; the error then includes every rank's stack.
        device: ``cpu`` (gloo), ``cuda`` (NCCL) or ``npu`` (HCCL): rank i creates its tensors on device i. If there are
            more ranks of PyTorch than devices, ranks share devices and communicate over gloo through host memory;
            MindSpore's ranks use one device each.

    Returns:
        the results in rank order.

    Raises:
        RankFailedError: a rank raised an error, died or did not finish; ``failures`` maps ranks to their exceptions.
        UnsupportedOnBackend: the framework finds no such device, or MindSpore finds fewer devices than ranks.
        ValueError: the world size is not a number of ranks or exceeds the limit of one machine, the platform or device
            is unknown, or the timeout is not a time.
    """
    require_ranks(world_size)
    timeout = positive_seconds(timeout, f"timeout={timeout!r}")
    platform = platform or framework_for(fn, args)
    if platform not in FRAMEWORKS:
        msg = f"platform is {platform!r}; it must be {' or '.join(map(repr, FRAMEWORKS))}"
        raise ValueError(msg)
    require_device(device, platform, ranks=world_size)
    bind_imported(platform)
    from hyper_parallel.transport.real.launched_processes import run_launched  # this starts a fork server on first use

    task = (fn, tuple(args)) if device == "cpu" else (on_platform, (platform, device, fn, *args))
    run = run_launched(pack(task, fn), world_size, platform, timeout, device, single=True)
    if run.failure is not None:
        raise run.failure
    return run.results
