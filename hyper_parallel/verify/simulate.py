"""Runs a function on every rank of a simulated world, on one machine, deterministically."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.mesh import DEVICE_TYPES
from hyper_parallel.platform.select import FRAMEWORKS, framework_for, platform_named, use_platform
from hyper_parallel.transport.frames import hide_file
from hyper_parallel.transport.timeouts import positive_seconds, rank_seconds
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.input_error import device_errors

__all__ = [
    "MOST_RANKS",
    "bind_imported",
    "on_platform",
    "require_device",
    "require_ranks",
    "simulate",
    "simulate_forked",
]

hide_file(__file__)

MOST_RANKS = 1024
"""Largest number of ranks on one machine; larger numbers are probably typing errors, and would exhaust its memory."""


def simulate(
    fn: Callable[..., Any],
    world_size: int,
    platform: str | None = None,
    args: Sequence[Any] = (),
    *,
    timeout: float | None = None,
    own_modules: bool = False,
    device: str = "cpu",
) -> list[Any]:
    """Call ``fn(*args)`` on every rank of a simulated world.

    Every rank has its own transport (``hyper_parallel.transport.base.active_transport``), random state and context.
    PyTorch ranks are threads that share the ``args`` objects; MindSpore ranks are reused processes, so ``fn``, ``args``
    and results are pickled (functions by value, tensors as tensors). Two runs of a deterministic ``fn`` give the same
    results.

    Args:
        fn: the function that every rank calls.
        world_size: number of ranks, at least one.
        platform: ``"torch"`` or ``"mindspore"``. None selects the framework of tensors in ``args``, else the one that
            the module of ``fn`` uses, else the default framework.
        args: arguments of ``fn``, the same on every rank.
        timeout: seconds after which the run ends with an error that includes every rank's stack; with None,
            HP_RANK_TIMEOUT, or 60 if it is not set.
        own_modules: whether each thread rank imports its own copies of modules that are neither installed nor imported
            yet, so that their module-level state is not shared; rank processes always do.
        device: ``cpu``, ``cuda`` or ``npu``: the device of the ranks' tensors; all ranks share the current device.

    Returns:
        the results in rank order.

    Raises:
        RankFailedError: a rank raised an error, died, skipped a collective, called a different one or did not finish;
            ``failures`` maps ranks to their exceptions, and ``__cause__`` is the first of these exceptions.
        UnsupportedOnBackend: the framework finds no such device.
        ValueError: the world size is not a number of ranks or exceeds the limit of one machine, the platform or device
            is unknown, or the timeout is not a positive number of seconds.
    """
    timeout = rank_seconds() if timeout is None else positive_seconds(timeout, f"timeout={timeout!r}")
    require_ranks(world_size)
    platform = platform or framework_for(fn, args)
    require_device(device, platform)
    if platform == "torch":
        harness_of(platform_named(platform))  # imported before the time limit starts, not by a rank
        from hyper_parallel.transport.frontends.c10d.simulated_world import (
            run_ranks,  # the other framework is not imported
        )

        body = functools.partial(on_platform, platform, device, fn, *args)
        return run_ranks(body, world_size, timeout, own_modules=own_modules)
    if platform == "mindspore":
        from hyper_parallel.transport.simulated.processes import run_processes

        bind_imported(platform)
        given = (platform, device, fn, *args)
        if device == "cpu":
            return run_processes(on_platform, given, world_size, timeout)
        devices = _mindspore_devices()
        return run_processes(on_platform, given, world_size, timeout, devices.SIMULATED, devices.current_device())
    msg = f"platform is {platform!r}; it must be {' or '.join(map(repr, FRAMEWORKS))}"
    raise ValueError(msg)


def simulate_forked(
    fn: Callable[..., Any],
    world_size: int,
    args: Sequence[Any],
    *,
    timeout: float,
    device: str = "cpu",
    packages: Sequence[str] = (),
) -> list[Any]:
    """Run :func:`simulate` on PyTorch with ranks that are processes, so that they share no globals.

    Args:
        fn: the function that every rank calls; ``fn`` and ``args`` are pickled.
        world_size: number of ranks, at least one.
        args: arguments of ``fn``, the same on every rank.
        timeout: seconds after which the run ends with an error that includes every rank's stack.
        device: ``cpu`` or ``cuda``.
        packages: packages that are imported before ranks start, unless they read their rank during import.
    """
    require_ranks(world_size)
    require_device(device, "torch")
    from hyper_parallel.transport.frontends.c10d.forked_world import run_forked  # the other framework is not imported

    return run_forked(on_platform, ("torch", device, fn, *args), world_size, timeout, packages)


def bind_imported(platform: str) -> None:
    """Construct the platform if its framework is imported, to register how the framework's functions are pickled."""
    if platform in sys.modules:
        platform_named(platform)


def require_ranks(world_size: int) -> None:
    """Check that a world of ``world_size`` ranks can be created on one machine.

    Raises:
        ValueError: ``world_size`` is not a number of ranks, or exceeds :data:`MOST_RANKS`.
    """
    if type(world_size) is not int or world_size < 1:
        msg = f"world_size is {world_size!r}; a world has at least one rank"
        raise ValueError(msg)
    if world_size > MOST_RANKS:
        msg = f"world_size is {world_size}; a world on one machine has at most {MOST_RANKS} ranks"
        raise ValueError(msg)


def require_device(device: str, platform: str, *, ranks: int | None = None) -> None:
    """Check that ranks of ``platform`` can run on ``device`` here.

    Args:
        device: ``cpu``, ``cuda`` or ``npu``.
        platform: ``torch`` or ``mindspore``.
        ranks: number of ranks that are processes; None for simulated ranks, or for this process.

    Raises:
        UnsupportedOnBackend: the framework finds no such device, or MindSpore finds fewer than ``ranks``.
        ValueError: ``device`` is unknown.
    """
    if device not in DEVICE_TYPES:
        msg = f"device is {device!r}; it must be {', '.join(DEVICE_TYPES[:-1])} or {DEVICE_TYPES[-1]}"
        raise ValueError(msg)
    if device == "cpu":
        return
    harness_of(platform_named(platform)).on_device(device)
    if platform == "mindspore":
        _mindspore_devices().require_devices(ranks or 1)


def _mindspore_devices() -> Any:
    """Return the module for MindSpore's ranks on devices."""
    from hyper_parallel.transport.real.mindspore import (
        devices as mindspore_devices,  # not imported for PyTorch users, who may not have MindSpore
    )

    return mindspore_devices


def on_platform(platform: str, device: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn`` on a rank, with the platform of ``simulate`` as the current one, on ``device``."""
    named = platform_named(platform)
    with use_platform(platform), harness_of(named).on_device(device), device_errors(named, device):
        return fn(*args)
