"""Run a function on every rank of a world of real processes on this machine."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.platform.select import FRAMEWORKS, framework_for
from hyper_parallel.transport.failures import WorldFailedError, exit_text, lost_peer, world_failed, world_timed_out
from hyper_parallel.transport.measurement import current_measurement
from hyper_parallel.transport.processes import SharedFile, free_port, local_environment, search_path
from hyper_parallel.transport.real.coordinator_server import CoordinatorServer
from hyper_parallel.transport.serialization import pack, unpack
from hyper_parallel.transport.simulated.coordinator import Coordinator
from hyper_parallel.transport.simulated.rank_process import RankReport, RankTask
from hyper_parallel.transport.timeouts import positive_seconds
from hyper_parallel.verify import launch_worker
from hyper_parallel.verify.simulate import bind_imported, on_platform, require_device, require_ranks

__all__ = ["launch"]

_GRACE_SECONDS = 5.0
_STACK_SECONDS = 0.5
_LAST_WORDS_SECONDS = 0.2
_ROUND_SECONDS = 0.01
_LOG_CHARACTERS = 4000


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

    Ranks are forked from a process that has imported the framework, and have the environment that torchrun gives. They
    communicate over gloo, MindSpore's over PyTorch's, too (MindSpore's own CPU collectives are incomplete). ``fn``,
    ``args`` and results are pickled, functions by value.

    Args:
        fn: the function that every rank calls.
        world_size: number of ranks, at least one.
        platform: ``"torch"`` or ``"mindspore"``; None takes that of the
            arguments, or the one that the module of ``fn`` uses, or the default framework.
        args: arguments of ``fn``, the same on every rank.
        timeout: seconds after which the processes are ended and the error shows every rank's stack.
        device: ``cpu`` (gloo), ``cuda`` (NCCL) or ``npu`` (HCCL): rank i makes its tensors on device i. More ranks of
            PyTorch than devices share them, and communicate over gloo through host memory; MindSpore's take one each.

    Returns:
        the results in rank order.

    Raises:
        RankFailedError: a rank raised, died or did not finish; ``failures`` maps ranks to their exceptions.
        UnsupportedOnBackend: the framework sees no such device, or MindSpore fewer than there are ranks.
        ValueError: the world size is none, or more than one machine has, the platform or device is unknown, or the
            timeout is no time.
    """
    require_ranks(world_size)
    timeout = positive_seconds(timeout, f"timeout={timeout!r}")
    platform = platform or framework_for(fn, args)
    if platform not in FRAMEWORKS:
        msg = f"platform is {platform!r}; it must be {' or '.join(map(repr, FRAMEWORKS))}"
        raise ValueError(msg)
    require_device(device, platform, ranks=world_size)
    bind_imported(platform)
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_launch_") as name:
        folder = Path(name)
        _write_task(folder, fn, args, world_size, platform, device)
        (folder / launch_worker.DEVICE).write_text(device)
        server = CoordinatorServer(folder / launch_worker.SOCKET, world_size, lambda rank: _how_ended(folder, rank))
        try:
            with contextlib.closing(server):
                world = _Processes(folder, world_size, platform, device)
                try:
                    _await(world, server, folder, timeout)
                finally:
                    world.end()
            return _results(folder, server, world.codes(), world.ended)
        except WorldFailedError as failed:
            server.write_record(failed)
            raise


class _Processes:
    """The ranks of a world, forked from a warm fork server; what they print to stderr is kept in the folder.

    Attributes:
        ended: ranks that ran until :meth:`end` ended them.
    """

    def __init__(self, folder: Path, world_size: int, platform: str, device: str) -> None:
        from hyper_parallel.transport.real.cluster import RankStart
        from hyper_parallel.transport.simulated.rank_pool import start_process  # starts a fork server when used

        self.ended: set[int] = set()
        self._lost_at: float | None = None
        self._processes: list[Any] = []
        self._start = RankStart(platform, device, world_size)
        try:
            (folder / launch_worker.CLUSTER).write_text(self._start.port)
            for rank in range(world_size):
                task = (str(folder), rank, platform, SharedFile(1))
                started = start_process(launch_worker.serve, task, f"rank-{rank}", self._start.server, daemon=False)
                self._processes.append(started)
        except BaseException:
            self.end()  # they would wait for the others until their limit
            raise

    def running(self) -> bool:
        """Return whether ranks still run; after one has failed, the others get a moment to say what they met."""
        codes = [process.exitcode for process in self._processes]
        if any(codes) and self._lost_at is None:
            self._lost_at = time.monotonic()
        return None in codes and (self._lost_at is None or time.monotonic() < self._lost_at + _LAST_WORDS_SECONDS)

    def codes(self) -> dict[int, int]:
        """Return the exit codes of the ranks that have ended."""
        codes = ((rank, process.exitcode) for rank, process in enumerate(self._processes))
        return {rank: code for rank, code in codes if code is not None}

    def end(self) -> None:
        """End the ranks by SIGTERM, then by SIGKILL."""
        from hyper_parallel.transport.simulated.rank_pool import end_processes

        self.ended = {rank for rank, process in enumerate(self._processes) if process.is_alive()}
        end_processes(self._processes)
        self._start.close()


def _write_task(
    folder: Path, fn: Callable[..., Any], args: Sequence[Any], world_size: int, platform: str, device: str
) -> None:
    task_of_rank = (fn, tuple(args)) if device == "cpu" else (on_platform, (platform, device, fn, *args))
    body = pack(task_of_rank, fn)
    measurement = current_measurement(until_sigterm=False)  # a rank that is ended writes down where it was
    task = RankTask(-1, world_size, body, None, search_path(), str(Path.cwd()), measurement=measurement)
    (folder / "launcher").write_text(str(os.getpid()))
    (folder / "task").write_bytes(pickle.dumps((task, _environment(), free_port())))


def _environment() -> dict[str, str]:
    """The variables of this process, and those that ranks have beside them."""
    from hyper_parallel.transport.simulated.rank_pool import ENVIRONMENT

    return {**ENVIRONMENT, "OMP_NUM_THREADS": "1", **local_environment()}


def _await(world: _Processes, server: CoordinatorServer, folder: Path, timeout: float) -> None:
    """Serve the ranks until the world has ended, or until ranks disagree about what nobody waits for."""
    deadline = time.monotonic() + timeout
    while world.running() and not server.coordinator.unreported:
        if time.monotonic() > deadline:
            if not server.coordinator.release_held():
                raise _timed_out(server, folder, timeout)
            deadline += _GRACE_SECONDS
        server.serve(_ROUND_SECONDS)


def _timed_out(server: CoordinatorServer, folder: Path, timeout: float) -> WorldFailedError:
    """The error, with what every rank is doing, and the stacks of those that run."""
    hanging = server.running()
    activities = {rank: server.coordinator.describe(rank) for rank in range(server.coordinator.world_size)}
    for rank, stack in _stacks(folder, hanging).items():
        activities[rank] = f"was running in\n{stack}"
    return world_timed_out(timeout, activities, hanging)


def _how_ended(folder: Path, rank: int) -> str:
    """What a rank reported last, or that it died."""
    report = _report(folder, rank)
    return "died" if report is None else report.how


def _stacks(folder: Path, ranks: Sequence[int]) -> dict[int, str]:
    """The stacks of running ranks; a rank that runs has a file with its process id."""
    for pid in filter(None, (path.read_text() for path in folder.glob("*.pid"))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGUSR1)
    time.sleep(_STACK_SECONDS)
    return {rank: _text(folder, rank) or "(no answer)" for rank in ranks}


def _text(folder: Path, rank: int) -> str:
    path = folder / f"{rank}.stack"
    return path.read_text(errors="replace") if path.exists() else ""


def _results(folder: Path, server: CoordinatorServer, codes: dict[int, int], ended: set[int]) -> list[Any]:
    """Return the ranks' results, or raise for those that failed: deaths first, then exceptions in the order of time."""
    coordinator = server.coordinator
    reports = {rank: _report(folder, rank) for rank in range(coordinator.world_size)}
    raised = {rank: report for rank, report in reports.items() if report is not None and report.how == "raised"}
    failures: dict[int, BaseException] = dict(coordinator.unreported)
    for rank, report in reports.items():
        if rank not in failures and rank not in ended and report is None and _died(folder, rank):
            failures[rank] = _death(folder, rank, codes)
    for rank in sorted(raised, key=lambda rank: (folder / f"{rank}.report").stat().st_mtime_ns):
        failures.setdefault(rank, unpack(raised[rank].packed))
    if not failures and None in reports.values():
        failures = {rank: _death(folder, rank, codes) for rank, report in reports.items() if report is None}
    lost = server.lost()
    if lost is not None and all(map(lost_peer, failures.values())):  # its sender may have waited for the receiver
        raise WorldFailedError(lost, failures) from CollectiveMismatchError(lost)
    if failures:
        return _fail(folder, reports, failures, coordinator)
    return [unpack(report.packed) for report in reports.values() if report is not None]


def _fail(
    folder: Path, reports: dict[int, RankReport | None], failures: dict[int, BaseException], coordinator: Coordinator
) -> NoReturn:
    """Raise for ``failures``; a rank that only lost its peer is listed beside the peer's own error."""
    causes = {rank: error for rank, error in failures.items() if not lost_peer(error)} or failures
    traces: dict[int, str] = {}
    others: dict[int, str] = {}
    for rank, report in reports.items():
        if report is not None and rank in causes:
            traces[rank] = report.trace
        elif report is not None and report.how != "unwound":
            others[rank] = "returned" if report.how == "returned" else "lost its peer:\n" + report.trace
        else:
            waited = coordinator.aborted_in.get(rank) or coordinator.describe(rank)
            ended = "was ended in\n" + (_text(folder, rank).rstrip() or "(unknown)")
            others[rank] = waited if waited.startswith("waited") else ended
    raise world_failed(len(reports), causes, others, traces)


def _died(folder: Path, rank: int) -> bool:
    """Return whether ``rank`` started and ended without a report, unless we ended it, which writes its stack."""
    text = _text(folder, rank)
    return (folder / f"{rank}.pid").exists() and (not text or text.startswith("Fatal"))


def _death(folder: Path, rank: int, codes: dict[int, int]) -> RankFailedError:
    log = folder / f"{rank}.stderr"
    details = [_text(folder, rank), log.read_text(errors="replace")[-_LOG_CHARACTERS:] if log.exists() else ""]
    code = f" {exit_text(codes[rank])}" if rank in codes else ""
    return RankFailedError("\n".join([f"rank {rank} died{code} without a report", *filter(None, details)]).rstrip())


def _report(folder: Path, rank: int) -> RankReport | None:
    path = folder / f"{rank}.report"
    if not path.exists():
        return None
    report: RankReport = unpack(path.read_bytes())
    return report
