"""Provides a program as of a commit, in a temporary git worktree; the user's checkout is not changed."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.program import Program

__all__ = ["at_revision"]

_SECONDS = 120.0


@contextlib.contextmanager
def at_revision(program: Program, revision: str, option: str) -> Iterator[Program]:
    """Yield the program with its file and its modules as of a commit.

    Args:
        program: a script in a checkout.
        revision: a name of a commit; if it is empty, the program is yielded unchanged.
        option: the option that named the commit, for messages.

    Raises:
        InputError: the program is not a script in a repository, or the commit does not exist or lacks the script.
    """
    if not revision:
        yield program
        return
    if not program.path:
        msg = f"{option} {revision}: {program.name} is a function of this process; only a script has other revisions"
        raise InputError(msg)
    path = Path(program.path).absolute()
    root = _git(option, path.parent, "rev-parse", "--show-toplevel")
    if revision.startswith("-"):
        msg = f"{option} {revision!r} is not the name of a commit"
        raise InputError(msg)
    commit = _git(option, path.parent, "rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    with tempfile.TemporaryDirectory(prefix="hyper_parallel_revision_") as folder:
        tree = Path(folder).resolve() / "tree"
        _git(option, path.parent, "worktree", "add", "--quiet", "--detach", str(tree), commit)
        try:
            file = tree / path.resolve().relative_to(Path(root).resolve())
            if not file.is_file():
                msg = f"{option} {revision}: the commit {commit[:12]} has no {file.relative_to(tree)}"
                raise InputError(msg)
            moved = (str(Path(root).resolve()), str(tree))
            yield dataclasses.replace(program, path=str(file), moved=moved)
        finally:
            _git(option, path.parent, "worktree", "remove", "--force", str(tree))


def _git(option: str, folder: Path, *words: str) -> str:
    """Return the output of a git command.

    Raises:
        InputError: git fails or is not installed.
    """
    git = shutil.which("git")
    if git is None:
        msg = f"{option} needs git, which is not installed"
        raise InputError(msg)
    done = subprocess.run(  # noqa: S603 - the words are ours, a resolved commit and paths
        [git, "-C", str(folder), *words], capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode:
        said = done.stderr.strip().removeprefix("fatal: ") or "there is no such commit"
        msg = f"{option}: git {words[0]} fails in {folder}: {said}"
        raise InputError(msg)
    return done.stdout.strip()
