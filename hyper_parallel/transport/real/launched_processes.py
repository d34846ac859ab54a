"""Real ranks as processes whose collectives a coordinator in this process checks.

A warm team joins its world once and serves many runs in it. After a failed run the team is ended and replaced, so that
the failure cannot affect the next run. A team for a single run has torchrun's environment.
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from hyper_parallel.errors import CollectiveMismatchError, RankFailedError
from hyper_parallel.transport.failures import WorldFailedError, advice, lost_peer, world_failed, world_timed_out
from hyper_parallel.transport.frames import stack
from hyper_parallel.transport.measurement import current_measurement
from hyper_parallel.transport.processes import (
    SharedFile,
    free_port,
    local_environment,
    rehearsed_engine,
    search_path,
    torchrun_environment,
)
from hyper_parallel.transport.real.cluster import RankStart
from hyper_parallel.transport.real.launched_rank import RankSetup, launched_main, single_run_main
from hyper_parallel.transport.real.requests import Requests, called
from hyper_parallel.transport.serialization import unpack
from hyper_parallel.transport.simulated.coordinator import Coordinator
from hyper_parallel.transport.simulated.rank_pool import (
    ENVIRONMENT,
    SERVERS,
    Worker,
    end_processes,
    preload,
    stacks_of,
)
from hyper_parallel.transport.simulated.rank_process import RankReport, RankTask

__all__ = ["LaunchedRun", "close_launched_teams", "run_launched", "warm_up"]

_GRACE_SECONDS = 2.0
_HISTORY = 64
_OUTPUT_CHARACTERS = 20_000
_LAST_CHARACTERS = 4000
_MAX_PROCESSES = 12
_START_SECONDS = {"cpu": 120.0, "cuda": 300.0, "npu": 300.0}

_Key = tuple[str, int, str, str]  # framework, number of ranks, device, rehearsed engine

_LOCK = threading.Lock()
_IDLE: dict[_Key, list[_Team]] = {}


@dataclass
class LaunchedRun:
    """The result of a run.

    Attributes:
        results: results of the ranks; empty if the run failed.
        failure: the error of a failed run, or None.
        outputs: printed output of each rank; in a single run only stderr, since ranks share the stdout of this process.
        history: last collectives and messages of each rank, oldest first.
    """

    results: list[Any] = field(default_factory=list)
    failure: WorldFailedError | None = None
    outputs: list[str] = field(default_factory=list)
    history: list[list[str]] = field(default_factory=list)


class _Team:
    """The processes of one world. For a ``single`` run, they join the world during the run, and may start processes."""

    def __init__(self, framework: str, world_size: int, device: str, *, single: bool = False) -> None:
        self.single = single
        self.key = (framework, world_size, device, rehearsed_engine())
        self._folder = Path(tempfile.mkdtemp(prefix="hyper_parallel_world_"))
        self._outputs = [self._folder / f"{rank}.output" for rank in range(world_size)]
        self.workers: list[Worker] = []
        self._start = RankStart(framework, device, world_size)
        try:
            for rank, output in enumerate(self._outputs):
                output.touch()
                setup = RankSetup(
                    framework, device, rank, world_size, str(self._folder / "store"), str(output), os.getpid(),
                    self.key[3], self._start.port,
                )  # fmt: skip
                main, more = (single_run_main, (SharedFile(1),)) if single else (launched_main, ())
                self.workers.append(Worker(main, (setup, *more), self._start.server, daemon=not single))
        except BaseException:
            self.close(range(len(self.workers)))
            raise  # the ranks that have started would wait for the others
        if not single:
            self._await_ready()

    def _await_ready(self) -> None:
        """Return when every rank has joined the world.

        Raises:
            RankFailedError: a rank could not join; the error has its traceback.
        """
        deadline = time.monotonic() + _START_SECONDS[self.key[2]]
        for rank, worker in enumerate(self.workers):
            problem = None if worker.line.poll(max(0.0, deadline - time.monotonic())) else "did not start in time"
            try:
                failed: RankReport | None = None if problem else worker.line.recv()[1]
                problem = failed.trace if failed else problem
            except (EOFError, OSError):
                problem = "died"
            if problem:
                words = [problem, stack(worker.last_words()), self.output(rank), self._start.how_it_ended()]
                report = "\n".join(filter(None, words))
                self.close()
                msg = f"rank {rank} of {len(self.workers)} could not join its world: {report}"
                raise RankFailedError("\n".join(filter(None, [msg, advice(report)])))

    def alive(self) -> bool:
        """Return True if every process is alive."""
        return all(worker.alive() for worker in self.workers)

    def output(self, rank: int) -> str:
        """Return the end of the output of ``rank`` during this run."""
        text = self._outputs[rank].read_text(encoding="utf-8", errors="replace")
        return text[-_OUTPUT_CHARACTERS:]

    def close(self, busy: Collection[int] = ()) -> None:
        """End the processes: idle ones exit themselves, ``busy`` ones get SIGTERM and then SIGKILL."""
        for worker in self.workers:
            worker.line.close()
        end_processes([self.workers[rank].process for rank in busy])
        for worker in self.workers:
            worker.close(idle=True)
        self._start.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class _LaunchedWorld:
    """One run of a team."""

    def __init__(self, team: _Team, deadline: float) -> None:
        self.coordinator = Coordinator(len(team.workers))
        self._requests = Requests(self.coordinator)
        self.reports: dict[int, RankReport] = {}
        self.failures: dict[int, BaseException] = {}
        self.traces: dict[int, str] = {}
        self.ended_in: dict[int, str] = {}
        self.given_up: set[int] = set()
        self.history: list[deque[str]] = [deque(maxlen=_HISTORY) for _ in team.workers]
        self._team = team
        self._running = set(range(len(team.workers)))
        self._waiting: set[int] = set()
        self._joining = set(self._running) if team.single else set()  # a warm team has joined its world before
        self._deadline = deadline

    def start(self, tasks: list[tuple[RankTask, dict[str, str]]]) -> None:
        """Send every rank its task."""
        for rank, task in enumerate(tasks):
            self._send(rank, task)

    def run(self) -> bool:
        """Serve the ranks until all have ended; return False on timeout."""
        while self._running:
            if not self._listen():
                if self.coordinator.aborted:
                    self._give_up()
                elif self.coordinator.release_held():
                    self._deadline = time.monotonic() + _GRACE_SECONDS
                else:
                    return False
            for rank, resumption in self._requests.answers(self._waiting).items():
                self._send(rank, resumption)
        return True

    def _listen(self) -> bool:
        """Receive one message of each rank that has sent one; return False if none arrived in time."""
        workers = {rank: self._team.workers[rank] for rank in self._running}
        ends = [end for worker in workers.values() for end in (worker.line, worker.process.sentinel)]
        readable = wait(ends, max(0.0, self._deadline - time.monotonic()))
        for rank, worker in workers.items():
            if worker.line in readable:
                self._take(rank)
            elif worker.process.sentinel in readable and not worker.line.poll():  # its child may keep the line open
                self._died(rank, EOFError())
        self._report_unreported()
        return bool(readable)

    def _report_unreported(self) -> None:
        """Fail the run if ranks disagree about a collective that no rank awaits: the engine would hang or mix data."""
        if self.coordinator.aborted or not self.coordinator.unreported:
            return
        for rank, error in self.coordinator.unreported.items():
            self.failures[rank] = error
            self.traces[rank] = f"{type(error).__name__}: {error}"
        self.coordinator.abort()
        self._deadline = min(self._deadline, time.monotonic() + _GRACE_SECONDS)

    def _take(self, rank: int) -> None:
        try:
            kind, content = self._team.workers[rank].line.recv()
        except (EOFError, OSError) as error:
            self._died(rank, error)
        else:
            self._handle(rank, kind, content)

    def _handle(self, rank: int, kind: str, content: Any) -> None:
        if kind == "joined":
            self._joining.discard(rank)
            self._let_leave()
            return
        if kind == "done":
            self._report(rank, content)
            self._let_leave()
            return
        call = called(kind, content)
        if call is not None:
            self._note(rank, call)
        if self._requests.carry_out(rank, kind, content):
            self._waiting.add(rank)

    def _let_leave(self) -> None:
        """Let ranks of a single run exit after their report, so that the engine fails ranks that wait for them."""
        if self._team.single and not self._joining:
            for rank in self.reports:
                self._team.workers[rank].line.close()

    def _note(self, rank: int, call: str) -> None:
        self.history[rank].append(call)
        if self.coordinator.aborted:
            self.ended_in[rank] = f"reached {call} after the failure"

    def _report(self, rank: int, report: RankReport) -> None:
        self._running.discard(rank)
        self.reports[rank] = report
        if report.how == "returned":
            self.ended_in[rank] = "returned"
            self.coordinator.finish(rank)
            return
        if report.how == "raised" and rank not in self.failures:
            self.failures[rank] = unpack(report.packed)
            self.traces[rank] = report.trace
        self._fail(rank, report.how)

    def _died(self, rank: int, error: Exception) -> None:
        worker, single = self._team.workers[rank], self._team.single
        how = worker.how_it_died(None if single else error)
        last = f"; last in {self.history[rank][-1]}" if self.history[rank] else ""
        doing = " without a report" if single else f"; it {self.coordinator.describe(rank)}{last}"
        printed = self._team.output(rank)[-_LAST_CHARACTERS:] if single else ""
        text = "\n".join(filter(None, [f"rank {rank} {how}{doing}", stack(worker.last_words()), printed])).rstrip()
        self._running.discard(rank)
        self._waiting.discard(rank)
        self.failures[rank] = RankFailedError(text)
        self.traces[rank] = text
        self._fail(rank, how)

    def _fail(self, rank: int, how: str) -> None:
        self.coordinator.fail(rank, how)
        # Running ranks get a short time to reach their next collective, where they unwind.
        self._deadline = min(self._deadline, time.monotonic() + _GRACE_SECONDS)

    def _send(self, rank: int, what: object) -> None:
        try:
            self._team.workers[rank].line.send(what)
        except OSError as error:
            self._died(rank, error)

    def _give_up(self) -> None:
        """Record the stacks of the ranks that do not reach a collective; these ranks are then ended."""
        self.ended_in.update({rank: f"was ended in\n{text}" for rank, text in self._stacks(self._running).items()})
        self.given_up = set(self._running)
        self._running.clear()

    @property
    def busy(self) -> set[int]:
        """Ranks that have not ended by themselves."""
        return self._running | self.given_up

    def timed_out(self, timeout: float) -> WorldFailedError:
        """Return the timeout error with every rank's activity: running ranks first, since the others wait for them."""
        activities = {rank: self.coordinator.describe(rank) for rank in range(len(self.history))}
        running = self._stacks(self._running - self._waiting)
        activities.update({rank: f"was running in\n{text}" for rank, text in running.items()})
        return world_timed_out(timeout, activities, list(running))

    def _stacks(self, ranks: set[int]) -> dict[int, str]:
        stacks = stacks_of({rank: self._team.workers[rank] for rank in sorted(ranks)})
        return {rank: stack(text) for rank, text in stacks.items()}

    def write_record(self, failed: WorldFailedError) -> None:
        """Write the flight record, if there is a recorder."""
        if self._requests.recorder is not None:
            self._requests.recorder.write(failed)

    def failure(self) -> WorldFailedError | None:
        """Return the error of the run; an error that only reports a lost peer is listed after the peer's own error."""
        lost = self._requests.lost()
        if lost is not None and all(map(lost_peer, self.failures.values())):  # the sender may have been waiting
            failed = WorldFailedError(lost, self.failures)
            failed.__cause__ = CollectiveMismatchError(lost)
            return failed
        if not self.failures:
            return None
        causes = {rank: error for rank, error in self.failures.items() if not lost_peer(error)} or self.failures
        echoes = {rank: "lost its peer:\n" + self.traces[rank] for rank in self.failures if rank not in causes}
        activities = {**self.coordinator.aborted_in, **self.ended_in, **echoes}
        return world_failed(len(self.history), causes, activities, self.traces)


def warm_up(framework: str, module: str) -> None:
    """Let ranks of real worlds of ``framework`` start with ``module`` imported; no effect once one has started."""
    preload(SERVERS[framework], module)


def run_launched(
    body: bytes, world_size: int, framework: str, timeout: float, device: str = "cpu", *, single: bool = False
) -> LaunchedRun:
    """Run a packed pair of function and arguments on every rank of a real world, and return the results.

    Args:
        body: result of :func:`hyper_parallel.transport.serialization.pack`.
        world_size: number of ranks, at least one.
        framework: ``"torch"`` or ``"mindspore"``.
        timeout: seconds after which every rank's stack is taken and the processes are ended.
        device: ``cpu`` (gloo), ``cuda`` (NCCL) or ``npu`` (HCCL); rank i takes device i. If there are more ranks of
            PyTorch than devices, ranks share devices and communicate over gloo.
        single: start processes for this run alone, as torchrun does: they have torchrun's variables, may start
            processes, print to this process's stdout and draw different random numbers. The limit covers their start.
    """
    traced, measurement = sys.gettrace() is not None, current_measurement()
    path, folder = search_path(), str(Path.cwd())
    environments = _environments(world_size, single=single)
    tasks = [
        (RankTask(rank, world_size, body, None, path, folder, traced, measurement), environment)
        for rank, environment in enumerate(environments)
    ]
    # The time limit does not cover the start of a warm team.
    team = _Team(framework, world_size, device, single=True) if single else _check_out(framework, world_size, device)
    world = _LaunchedWorld(team, time.monotonic() + timeout)
    run = LaunchedRun()
    try:
        world.start(tasks)
        run.failure = world.failure() if world.run() else world.timed_out(timeout)
        if run.failure is not None:
            world.write_record(run.failure)
        if run.failure is None:
            run.results = [unpack(world.reports[rank].packed) for rank in range(world_size)]
        run.outputs = [team.output(rank) for rank in range(world_size)]
        run.history = [list(calls) for calls in world.history]
        reusable = run.failure is None and not single
    except BaseException:
        team.close(range(world_size))
        raise
    if reusable:
        with _LOCK:
            _IDLE.setdefault(team.key, []).append(team)
    else:
        team.close(world.busy)
    return run


def _environments(world_size: int, *, single: bool) -> list[dict[str, str]]:
    """Return the environment variables of each rank."""
    here = local_environment()
    if not single:
        return [here] * world_size
    port, usual = free_port(), {**ENVIRONMENT, "OMP_NUM_THREADS": "1", **here}
    return [{**usual, **torchrun_environment(rank, world_size, port)} for rank in range(world_size)]


def _check_out(framework: str, world_size: int, device: str) -> _Team:
    """Return a live team: an idle one if all its processes are alive, otherwise a new one."""
    with _LOCK:
        idle = _IDLE.get((framework, world_size, device, rehearsed_engine()), [])
        team = idle.pop() if idle else None
    if team is not None and team.alive():
        return team
    if team is not None:
        team.close()
    _make_room(world_size)
    return _Team(framework, world_size, device)


def _make_room(world_size: int) -> None:
    """End idle teams, the largest first, while this process would have too many ranks."""
    with _LOCK:
        idle = sorted((team for teams in _IDLE.values() for team in teams), key=lambda team: len(team.workers))
        spare = []
        while idle and world_size + sum(len(team.workers) for team in idle) > _MAX_PROCESSES:
            spare.append(idle.pop())
            _IDLE[spare[-1].key].remove(spare[-1])
    for team in spare:
        team.close()


def close_launched_teams() -> None:
    """End every idle team; the next run starts a new one."""
    with _LOCK:
        teams = [team for teams in _IDLE.values() for team in teams]
        _IDLE.clear()
    for team in teams:
        for worker in team.workers:
            worker.line.close()
    for team in teams:
        team.close()


# Like idle simulated ranks, they exit and delete their files themselves.
atexit.register(close_launched_teams)
# A forked child has copies of the teams, but they belong to its parent.
os.register_at_fork(after_in_child=_IDLE.clear)
