"""Run a command with a time limit that asks the ranks first: `python ci/guarded_run.py --minutes 60 -- tox -e torch`.

When time is up, every rank that is still alive writes its stack (SIGUSR1) and the stacks are printed; then the command
gets SIGTERM, so that ranks save their coverage, and what is left after a minute gets SIGKILL. `--end` ends the ranks
that an earlier, interrupted run left behind. Processes are found by the numbers that were written down when they were
started (HP_RANK_LEDGER), never by their names. Exit status: that of the command, or 124 when time was up.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIME_IS_UP = 124
STACK_SECONDS = 1.0
RANK_WORD = "multiprocessing.forkserver"


@dataclass(frozen=True)
class Rank:
    """A process in the list of started ranks."""

    pid: int
    name: str
    stack: Path | None


def ranks(root: Path) -> list[Rank]:
    """Return the listed ranks below ``root`` that are alive, and still the process that was recorded."""
    alive = []
    for path in sorted(root.glob("coverage_reports/data/*/ranks/[0-9]*")):
        name, _, stack = path.read_text(encoding="utf-8").partition("\n")
        rank = Rank(int(path.name), name, Path(stack) if stack else None)
        if is_rank(rank.pid):
            alive.append(rank)
    return alive


def is_rank(pid: int) -> bool:
    """Return whether process ``pid`` is a rank: its number may have been given to another process since."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return False
    return RANK_WORD in command


def send(pid: int, number: signal.Signals) -> None:
    """Signal a process that may have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def show_stacks(root: Path) -> None:
    """Ask every rank for its stack, and print the answers."""
    alive = ranks(root)
    for rank in alive:
        send(rank.pid, signal.SIGUSR1)
    time.sleep(STACK_SECONDS)
    print(f"guarded_run: {len(alive)} ranks are alive")
    for rank in alive:
        print(f"--- {rank.name} (process {rank.pid}):")
        stack = rank.stack.read_text(errors="replace") if rank.stack is not None and rank.stack.exists() else ""
        print(stack.rstrip() or "(no answer)")
    sys.stdout.flush()


def end_ranks(root: Path, grace: float) -> int:
    """Send SIGTERM, then SIGKILL, to every rank that is left; return their number."""
    left = ranks(root)
    for rank in left:
        send(rank.pid, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while any(is_rank(rank.pid) for rank in left) and time.monotonic() < deadline:
        time.sleep(0.1)
    for rank in left:
        if is_rank(rank.pid):
            send(rank.pid, signal.SIGKILL)
    return len(left)


def run(command: list[str], seconds: float, grace: float, root: Path) -> int:
    """Run ``command``; return its exit status, or 124."""
    with subprocess.Popen(command, start_new_session=True) as child:
        try:
            status = child.wait(seconds)
        except subprocess.TimeoutExpired:
            print(f"guarded_run: time is up after {seconds / 60:g} minutes", flush=True)
            show_stacks(root)
            end_child(child, grace)
            status = TIME_IS_UP
        except KeyboardInterrupt:
            end_child(child, grace)
            raise
        finally:
            end_ranks(root, grace)
    return status if status >= 0 else 128 - status


def end_child(child: subprocess.Popen[bytes], grace: float) -> None:
    """Send SIGTERM to the command, and SIGKILL to its whole session if it stays."""
    child.terminate()
    try:
        child.wait(grace)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def main(arguments: list[str]) -> int:
    """Run the command, or end the ranks that are left."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--minutes", type=float, help="time limit of the command")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds between SIGTERM and SIGKILL (60)")
    parser.add_argument("--end", action="store_true", help="end the ranks that an earlier run left")
    parser.add_argument("command", nargs="*", help="after `--`")
    asked = parser.parse_args(arguments)
    if asked.end:
        print(f"guarded_run: {end_ranks(ROOT, asked.grace)} ranks were left and are ended")
        return 0
    if not asked.command or asked.minutes is None or asked.minutes <= 0:
        parser.error("give --minutes and a command after `--`, or --end")
    try:
        return run(asked.command, asked.minutes * 60, asked.grace, ROOT)
    except FileNotFoundError as error:
        print(f"guarded_run: {error.filename}: not found", file=sys.stderr)
        return 127
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
