"""Verification in the processes that torchrun has started: each runs the program, and rank 0 compares.

The program's ranks are the processes of torchrun, on their devices and with the program's own backend. Rank 0 then runs
the reference and compares. Every process receives the report, so that all exit with the same status.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyper_parallel.transport.serialization import unpack
from hyper_parallel.transport.simulated.own_modules import forget_own_modules
from hyper_parallel.verify.frameworks.contract.records import Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.isolation import files_of_process, run_folder
from hyper_parallel.verify.program.program import run_program, started_by_python

if TYPE_CHECKING:
    from hyper_parallel.verify.program.program import Program
    from hyper_parallel.verify.program.report import ProgramReport
    from hyper_parallel.verify.program.worlds import World

__all__ = ["is_first_rank", "started_by_torchrun", "verify_under_torchrun"]


def started_by_torchrun() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_first_rank() -> bool:
    """Return whether this process reports: rank 0 of torchrun, or a process that torchrun has not started."""
    return not started_by_torchrun() or os.environ.get("RANK") == "0"


def verify_under_torchrun(program: Program, world: World, compare: Callable[[Run], ProgramReport]) -> ProgramReport:
    """Run the program as this rank, and return the report that rank 0 creates from all ranks' records.

    Args:
        program: the program to run.
        world: a world of as many ranks as torchrun has processes.
        compare: function that runs the reference and compares it with the ranks; called on rank 0 only.

    Raises:
        InputError: (a ValueError) the world has a different size than torchrun's, or ``compare`` raised this error on
            rank 0; then every rank raises it.
        HyperParallelError: torchrun has no store that outlives the program's process group.
    """
    from hyper_parallel.transport.real.c10d.torchrun import TorchrunProcesses  # PyTorch's launcher

    processes = TorchrunProcesses(world.timeout)
    if world.size != processes.world_size:
        msg = f"--world-size is {world.size}, and torchrun has started {processes.world_size} processes; leave it out"
        raise InputError(msg)
    ranks = f"rank {processes.rank} of {processes.world_size}"
    with run_folder() as own_folder:
        folder = Path(processes.broadcast(str(own_folder).encode(), "folder").decode())
        with (
            processes.keep_groups(),
            started_by_python(program, "stderr", ranks),
            forget_own_modules(),
            files_of_process(folder, ends=False),
        ):
            own = run_program(program, world.mesh, world.limits, None, rank=processes.rank)
        gathered = processes.gather(pickle.dumps(own))
    if processes.rank:
        return _returned(unpack(processes.broadcast()))
    settings = {"world size": str(world.size), "launch": world.launch}
    result: ProgramReport | InputError
    try:
        result = compare(Run([unpack(data) for data in gathered], settings))
    except InputError as error:
        result = error
    processes.broadcast(pickle.dumps(result))
    return _returned(result)


def _returned(result: Any) -> ProgramReport:
    if isinstance(result, InputError):
        raise result
    report: ProgramReport = result
    return report
