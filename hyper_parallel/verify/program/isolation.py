"""Gives the threads or a process of one run private copies of files, and denies writes to the user's files."""

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
"""Reasons why a permission may have been denied."""


@contextmanager
def run_folder() -> Iterator[Path]:
    """Yield an empty folder for the files of one run, which is deleted at the end."""
    with owned_folder("hyper_parallel_files_") as folder:
        inner = folder / "run"
        inner.mkdir()
        yield inner


@contextmanager
def files_of_threads(folder: Path, written: str = "") -> Iterator[PrivateFiles | None]:
    """Make threads that start inside this context write to ``folder``; this library writes its records to ``written``.

    Yields:
        the files, which each thread must first pass to ``denied_by_kernel``; None if the kernel cannot deny writes.
    """
    files, denies = PrivateFiles(folder, written), kernel_denies()
    with redirected(files, this_thread=False), nullcontext() if denies else audited(files, this_thread=False):
        yield files if denies else None


@contextmanager
def files_of_process(folder: Path, *, ends: bool, written: str = "", temporary_root: str = "") -> Iterator[None]:
    """Make this process write to ``folder`` inside this context; other ranks of the run may share the folder.

    Args:
        folder: folder of the run.
        ends: whether the process ends with the run, so that the kernel may deny it all writes to the user's files,
            which is permanent.
        written: folder to which this library writes records; empty if there is none.
        temporary_root: as in :class:`PrivateFiles`.
    """
    files = PrivateFiles(folder, written, temporary_root)
    denies = ends and kernel_denies()
    with redirected(files, this_thread=True), nullcontext() if denies else audited(files, this_thread=True):
        if denies:
            denied_by_kernel(files)
        yield


def keep(folder: Path, target: Path) -> None:
    """Copy the files that a run has written in its working folder to ``target``.

    Args:
        folder: folder of the run.
        target: the folder to copy to; it is created if needed.
    """
    written = PrivateFiles(folder).written_in(Path.cwd())
    if written.is_dir():
        shutil.copytree(written, target, symlinks=True, dirs_exist_ok=True)
