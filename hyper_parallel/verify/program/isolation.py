"""The files of one run: a private copy for its threads or for one of its processes, and the guard around it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from hyper_parallel.transport.owned_folders import owned_folder
from hyper_parallel.verify.program.file_functions import redirected
from hyper_parallel.verify.program.private_files import PrivateFiles
from hyper_parallel.verify.program.write_guard import audited, denied_by_kernel, kernel_denies

__all__ = ["DENIED", "files_of_process", "files_of_threads", "keep", "run_folder"]

DENIED = (
    "a program's files are redirected to a private copy of each run, so that nothing of yours is overwritten, and what "
    "cannot be redirected is denied: files that native code (other than torch.save, safetensors and sqlite3) or a "
    "subprocess writes. Save by Python's open(), or in a temporary folder (tempfile.gettempdir())"
)
"""Why a permission may have been denied."""


@contextmanager
def run_folder() -> Iterator[Path]:
    """Yield an empty folder for the files of one run, which is deleted at the end."""
    with owned_folder("hyper_parallel_files_") as folder:
        inner = folder / "run"
        inner.mkdir()
        yield inner


@contextmanager
def files_of_threads(folder: Path, written: str = "") -> Iterator[PrivateFiles | None]:
    """Inside, threads that are started write to ``folder``; this library writes its records to ``written``.

    Yields:
        what each of them is to pass to ``denied_by_kernel`` first; None where the kernel cannot deny.
    """
    files, denies = PrivateFiles(folder, written), kernel_denies()
    with redirected(files, this_thread=False), nullcontext() if denies else audited(files, this_thread=False):
        yield files if denies else None


@contextmanager
def files_of_process(folder: Path, *, ends: bool, written: str = "", temporary_root: str = "") -> Iterator[None]:
    """Inside, this process writes to ``folder``, which other ranks of the run may share.

    Args:
        folder: of the run.
        ends: whether the process ends with the run, so that the kernel may deny it to write the user's files for good.
        written: folder that this library writes its records to; empty if there is none.
        temporary_root: as in :class:`PrivateFiles`.
    """
    files = PrivateFiles(folder, written, temporary_root)
    denies = ends and kernel_denies()
    with redirected(files, this_thread=True), nullcontext() if denies else audited(files, this_thread=True):
        if denies:
            denied_by_kernel(files)
        yield


def keep(folder: Path, target: Path) -> None:
    """Copy what a run has written in its working folder to ``target``.

    Args:
        folder: of the run.
        target: is made if needed.
    """
    written = PrivateFiles(folder).written_in(Path.cwd())
    if written.is_dir():
        shutil.copytree(written, target, symlinks=True, dirs_exist_ok=True)
