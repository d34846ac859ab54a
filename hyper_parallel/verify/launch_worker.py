"""The process of a launched rank: it reads its task, joins the world, runs the task, writes its report and exits."""

from __future__ import annotations

import dataclasses
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path

import numpy as np

from hyper_parallel.transport.base import Transport
from hyper_parallel.transport.checks.flight_recorder import RankFlight, RecordedLine
from hyper_parallel.transport.frames import hide_file, trace
from hyper_parallel.transport.measurement import dump_stack_on_sigterm
from hyper_parallel.transport.processes import SharedFile, rehearsed_engine, torchrun_environment
from hyper_parallel.transport.real.coordinator_server import connect
from hyper_parallel.transport.real.launched_rank import RankSetup, guarded, real_world
from hyper_parallel.transport.serialization import pack_error, unpack
from hyper_parallel.transport.simulated.rank_pool import register_rank
from hyper_parallel.transport.simulated.rank_process import PipeEndpoint, RankReport, RankTask, run_rank
from hyper_parallel.verify.attempt import Raised, attempt

__all__ = ["CLUSTER", "DEVICE", "SOCKET", "serve"]

hide_file(__file__)

SOCKET = "line"
"""Name of the coordinator's socket in the folder of a world."""

DEVICE = "device"
"""Name of the file that names the device of a world."""

CLUSTER = "cluster"
"""Name of the file with the port of the scheduler, where ranks meet in MindSpore's cluster."""


def serve(folder_name: str, rank: int, platform: str, output: SharedFile) -> None:
    """Run ``rank`` of the task in ``folder_name`` and exit: with 0 if its function returned, with 1 if it raised."""
    multiprocessing.set_start_method(None, force=True)  # the server's would import the program again
    os.setsid()  # a Ctrl-C in the terminal reaches the launcher alone, which ends its ranks
    folder = Path(folder_name)
    task: RankTask
    task, environment, port = unpack((folder / "task").read_bytes())
    os.environ.clear()  # the fork server's
    os.environ.update({**environment, **torchrun_environment(rank, task.world_size, port)})
    pid = folder / f"{rank}.pid"
    pid.write_text(str(os.getpid()))
    os.dup2(output.number, 1)
    with (folder / f"{rank}.stderr").open("wb") as errors:
        os.dup2(errors.fileno(), 2)
    register_rank(os.getpid(), str(folder / f"{rank}.stack"))
    with (folder / f"{rank}.stack").open("w", encoding="utf-8") as stack:
        faulthandler.enable(file=stack, all_threads=False)
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        dump_stack_on_sigterm(stack)
        flight = RankFlight(rank, task.world_size, int((folder / "launcher").read_text()))
        flight.begin()
        threading.Thread(target=flight.leave_with_parent, args=(os._exit,), daemon=True).start()
        report, world = _run(folder, dataclasses.replace(task, rank=rank), platform, flight)
        partial = folder / f"{rank}.report.part"
        partial.write_bytes(pickle.dumps(report))
        partial.rename(folder / f"{rank}.report")
        del world  # a line that closed before there was a report would tell of a rank that died
        pid.unlink()
        sys.stdout.flush()
        sys.stderr.flush()
        # The frameworks' exit hooks may wait for peers that have ended already.
        os._exit(0 if report.how == "returned" else 1)


def _run(folder: Path, task: RankTask, platform: str, flight: RankFlight) -> tuple[RankReport, Transport | None]:
    """Return the report of the rank, and its transport, with the line to the coordinator; None if it did not join."""
    sys.path[:] = task.path
    os.chdir(task.folder)
    # The state that ranks have copied from the fork server; in processes of their own they would differ.
    random.seed()
    np.random.seed()  # noqa: NPY002 - the global state that rank code may sample from
    transport = attempt(_join, folder, task, platform, flight)
    if isinstance(transport, Raised):
        return RankReport("raised", pack_error(transport.error), trace(transport.error)), None
    return run_rank(task, transport), transport


def _join(folder: Path, task: RankTask, platform: str, flight: RankFlight) -> Transport:
    device, port = (folder / DEVICE).read_text(), (folder / CLUSTER).read_text()
    store = str(folder / "store")
    setup = RankSetup(platform, device, task.rank, task.world_size, store, "", os.getppid(), rehearsed_engine(), port)
    real = real_world(setup)
    line = RecordedLine(connect(folder / SOCKET, task.rank), flight)
    transport = guarded(real, platform, PipeEndpoint(line))
    if platform == "mindspore":
        import_module("hyper_parallel.transport.real.mindspore.transport").seed_rank()
    return transport
