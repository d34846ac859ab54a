"""Runs a program on a rank that is a process: MindSpore's ranks, whose processes are reused, and real ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hyper_parallel.platform.select import get_platform
from hyper_parallel.transport.frames import hide_file
from hyper_parallel.transport.simulated.own_modules import forget_own_modules
from hyper_parallel.verify.frameworks.contract.case_changes import CaseChanges
from hyper_parallel.verify.frameworks.contract.record_log import Perturbation, RecordLimits, sink_folder
from hyper_parallel.verify.frameworks.contract.records import RankRecords
from hyper_parallel.verify.program.guards import guarded
from hyper_parallel.verify.program.isolation import files_of_process
from hyper_parallel.verify.program.program import Program, run_program, started_by_python

__all__ = ["run_in_process"]

hide_file(__file__)


def run_in_process(
    program: Program,
    mesh: tuple[tuple[str, int], ...],
    limits: RecordLimits,
    perturbation: Perturbation | None,
    output: str,
    changes: Sequence[CaseChanges] | None,
    folder: Path,
    ends: bool,
    temporary_root: str,
) -> RankRecords:
    """Run the program on this rank as ``python FILE ARGS`` would, and restore the state of the process afterwards.

    Args:
        program: the program to run.
        mesh: names and sizes of the axes, for a function that takes a mesh.
        limits: limits of the records.
        perturbation: perturbation of a reference, or None.
        output: destination of the program's standard output, ``stderr`` or ``nothing``.
        changes: changes of the case, by rank.
        folder: folder of the files that the ranks write.
        ends: whether this process ends with the run.
        temporary_root: the caller's folder of temporary files; the server that forked this process may have a different
            one.
    """
    transport = get_platform().transport()
    ranks = "one rank" if transport.world_size == 1 else f"rank {transport.rank} of {transport.world_size}"
    with (
        started_by_python(program, output, ranks),
        guarded(program.name) if ends else forget_own_modules(),
        _environment(),
        files_of_process(folder, ends=ends, written=sink_folder(limits), temporary_root=temporary_root),
    ):
        return run_program(program, mesh, limits, perturbation, changes=changes)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set the variables that launchers set, and make MindSpore run functions without compiling them.

    Compiled code calls collectives from C++, which simulated ranks do not support.
    """
    transport = get_platform().transport()
    rank, size = str(transport.rank), str(transport.world_size)
    variables = dict.fromkeys(("RANK", "LOCAL_RANK", "RANK_ID", "DEVICE_ID"), rank)
    variables.update(WORLD_SIZE=size, RANK_SIZE=size)
    before = {name: os.environ.get(name) for name in (*variables, "MS_JIT")}
    os.environ.update(variables, MS_JIT="0")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
