"""Runs a program in a world of simulated ranks or real processes, and collects the records of its ranks."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from hyper_parallel.errors import RankFailedError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.transport.frames import hide_file
from hyper_parallel.verify.engine.scratch import ScratchError
from hyper_parallel.verify.frameworks.contract.case_changes import CaseChanges
from hyper_parallel.verify.frameworks.contract.record_log import Perturbation, RecordingError, RecordLimits, sink_folder
from hyper_parallel.verify.frameworks.contract.records import RankRecords, Run
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.launch import launch as launch_processes
from hyper_parallel.verify.program.framework import imported_packages
from hyper_parallel.verify.program.guards import guarded
from hyper_parallel.verify.program.isolation import DENIED, files_of_threads, keep, run_folder
from hyper_parallel.verify.program.printed import WRITTEN, written_lines
from hyper_parallel.verify.program.private_files import PrivateFiles
from hyper_parallel.verify.program.process_ranks import run_in_process
from hyper_parallel.verify.program.program import Program, ProgramExitError, run_program, started_by_python
from hyper_parallel.verify.program.write_guard import denied_by_kernel, kernel_denies
from hyper_parallel.verify.simulate import simulate, simulate_forked
from hyper_parallel.verify.spec import error_summary

__all__ = ["World", "run_world"]

hide_file(__file__)


_OF_RANKS = (
    "hyper_parallel.verify.frameworks.torch.harness",
    "hyper_parallel.verify.frameworks.torch.hooks",
    "hyper_parallel.verify.program.process_ranks",
    "hyper_parallel.verify.simulate",
    "safetensors",
    "sqlite3",
)
"""Modules that every forked rank imports."""

_PRETENDED = "hyper_parallel.verify.frameworks.torch.pretended"
"""A package with the modules ``cuda`` and ``npu``, each of which makes the CPU stand in for that device in a process.
"""


@dataclass(frozen=True)
class World:
    """The number, kind and settings of the ranks that run a program.

    Attributes:
        size: number of ranks.
        platform: ``torch`` or ``mindspore``.
        launch: ``simulated``: on PyTorch, the ranks of a script are forked processes, and those of a function are
            threads; ``threads``: all ranks are threads; ``processes``: real ranks, which communicate over gloo, or over
            an engine such as NCCL.
        mesh: names and sizes of the axes, for functions that take a mesh.
        limits: limits of the records.
        timeout: seconds for a run.
        output: destination of the program's standard output, ``stderr`` or ``nothing``.
        device: device of the ranks' tensors: ``cpu``, ``cuda`` or ``npu``.
        keep_files: folder to which the files that the ranks write in the working folder are copied; empty for none.
    """

    size: int
    platform: str
    launch: str = "simulated"
    mesh: tuple[tuple[str, int], ...] = ()
    limits: RecordLimits = field(default_factory=RecordLimits)
    timeout: float = 300.0
    output: str = "stderr"
    device: str = "cpu"
    keep_files: str = ""

    def alone(self, output: str) -> World:
        """Return the world of one rank in which the reference runs."""
        mesh = tuple((name, 1) for name, _ in self.mesh)
        launch = "threads" if self.launch == "threads" else "simulated"
        return dataclasses.replace(self, size=1, launch=launch, mesh=mesh, output=output, keep_files="")


def run_world(
    program: Program,
    world: World,
    perturbation: Perturbation | None = None,
    changes: Sequence[CaseChanges] | None = None,
    files: Path | None = None,
) -> Run:
    """Run ``program`` on every rank of ``world``.

    Args:
        program: the program to run.
        world: the world of the ranks.
        perturbation: perturbation of a reference.
        changes: changes of the case, by rank.
        files: folder for the files that ranks write, possibly with files of an earlier run; by default a new folder.

    Raises:
        InputError: (a ValueError) the program cannot be run: it exits with a status other than 0, continues in a forked
            child, does not end in time, or its records have no room.
        RankFailedError: a rank raised an error, died, or called collectives that do not match those of the other ranks.
    """
    with run_folder() if files is None else nullcontext(files) as folder:
        try:
            ranks = _ranks(program, world, perturbation, changes, folder)
        except RankFailedError as error:
            _reraise_input_error(program, world, error)
            raise
        ranks[0].notes[WRITTEN] = written_lines(folder)
        if world.keep_files:
            keep(folder, Path(world.keep_files))
    settings = {"world size": str(world.size), "launch": world.launch}
    if perturbation is not None:
        settings["perturbation"] = getattr(perturbation, "words", "")
    return Run(ranks, settings)


def _ranks(
    program: Program,
    world: World,
    perturbation: Perturbation | None,
    changes: Sequence[CaseChanges] | None,
    folder: Path,
) -> list[RankRecords]:
    """Run the ranks, whose files are in ``folder``."""
    torch_ranks = world.platform == "torch" and world.launch != "processes"
    threads = torch_ranks and (world.launch == "threads" or not program.is_script)
    ends = (torch_ranks or world.launch == "processes") and world.device == "cpu"  # drivers of devices write files
    where = (folder, ends, tempfile.gettempdir())
    if not torch_ranks:
        arguments = (program, world.mesh, world.limits, perturbation, world.output, changes, *where)
        run = launch_processes if world.launch == "processes" else simulate
        return run(run_in_process, world.size, world.platform, arguments, timeout=world.timeout, device=world.device)
    platform_named(world.platform)  # this imports the framework, whose functions are redirected
    ranks = "one rank" if world.size == 1 else f"{world.size} ranks"
    if not threads:
        forked = (program, world.mesh, world.limits, perturbation, "stdout", changes, *where)
        pretended = [f"{_PRETENDED}.{world.limits.pretend}"] if world.limits.pretend else []
        packages = [*pretended, *_OF_RANKS, *imported_packages(Path(program.path), program.folder)]
        with started_by_python(program, world.output, ranks):
            return simulate_forked(
                run_in_process, world.size, forked, timeout=world.timeout, device=world.device, packages=packages
            )
    with (
        started_by_python(program, world.output, ranks),
        guarded(program.name),
        files_of_threads(folder, sink_folder(world.limits)) as files,
    ):
        in_thread = (program, world.mesh, world.limits, perturbation, changes, files)
        return simulate(
            _run_in_thread, world.size, world.platform, in_thread, timeout=world.timeout,
            own_modules=bool(program.path), device=world.device,
        )  # fmt: skip


def _run_in_thread(
    program: Program,
    mesh: tuple[tuple[str, int], ...],
    limits: RecordLimits,
    perturbation: Perturbation | None,
    changes: Sequence[CaseChanges] | None,
    files: PrivateFiles | None,
) -> RankRecords:
    if files is not None:
        denied_by_kernel(files)
    return run_program(program, mesh, limits, perturbation, changes=changes)


def _reraise_input_error(program: Program, world: World, error: RankFailedError) -> None:
    """Raise an InputError if a rank failed because of an error of the input; otherwise return."""
    cause = error.__cause__
    ranks = f"in a world of {world.size}"
    if isinstance(cause, (InputError, RecordingError, ScratchError)):
        raise InputError(f"{program.name}: {cause}") from error
    if isinstance(cause, ProgramExitError):
        msg = f"{program.name}: {cause} {ranks}; a program that is verified must end with status 0"
        raise InputError(msg) from error
    if kernel_denies() and "ermission denied" in str(error):
        msg = f"{program.name} {ranks}: {error_summary(cause or error)}; {DENIED}\n{error}"
        raise InputError(msg) from error
    failures = getattr(error, "failures", {})
    if failures and all(isinstance(failure, TimeoutError) for failure in failures.values()):
        msg = (
            f"{program.name} did not end within {world.timeout:g} s {ranks}; bound it with --steps, or give it more "
            f"time with --timeout\n{error}"
        )
        raise InputError(msg) from error
