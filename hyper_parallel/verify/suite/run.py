"""Runs a check in a separate process, so that it can be stopped and does not affect the next one."""

from __future__ import annotations

import json
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hyper_parallel.transport.processes import end_session, local_environment, python_command
from hyper_parallel.verify.program.report import REFUSED
from hyper_parallel.verify.suite.report import INVALID, CheckResult
from hyper_parallel.verify.suite.settings import SuiteCheck

__all__ = ["run_check"]

_QUIET = {"HP_PROGRESS_LINES": "0"}
_STATUSES = (0, 1, INVALID, REFUSED)
_TERM_SECONDS = 10.0
_LAST_LINES = 12


def run_check(check: SuiteCheck, words: Sequence[str], folder: Path, html: Path | None = None) -> CheckResult:
    """Run the command of a check; it is stopped after its budget of seconds.

    Args:
        check: the check to run.
        words: command line of the check, after the program's name.
        folder: working folder, which is the folder of the settings.
        html: path of its page, if its command writes one.
    """
    own, script = list(words), words.index("--") if "--" in words else len(words)
    with tempfile.TemporaryDirectory(prefix="hyper-parallel-") as place:
        text = Path(place) / "report.txt"
        own[script:script] = ["--json", "--report", str(text), *([] if html is None else ["--html", str(html)])]
        started = time.perf_counter()
        with (Path(place) / "out").open("w+b") as out, (Path(place) / "err").open("w+b") as err:
            process = subprocess.Popen(  # noqa: S603 - this interpreter, this package
                python_command("hyper_parallel", *own), cwd=folder, env={**local_environment(), **_QUIET},
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
            )  # fmt: skip
            try:
                status: int | None = process.wait(check.seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end_session(process, _TERM_SECONDS)
            seconds = time.perf_counter() - started
            out.seek(0)
            err.seek(0)
            answer, said = out.read().decode(errors="replace"), err.read().decode(errors="replace")
        command = shlex.join(["hyper-parallel", *words])
        lines = text.read_text(encoding="utf-8").splitlines() if text.exists() else []
    shown = "\n".join(line for line in lines if not line.startswith("# "))  # without the header
    if status is None:
        return CheckResult(check, command, 1, seconds, error=f"stopped after {check.seconds:g} s, its budget")
    try:
        document = json.loads(answer)
    except ValueError:
        last = "\n".join(said.strip().splitlines()[-_LAST_LINES:])
        return CheckResult(check, command, 1, seconds, error=f"ended with status {status}\n{last}".strip())
    if status not in _STATUSES:
        return CheckResult(check, command, 1, seconds, error=f"ended with status {status}")
    if set(document) <= {"ok", "error", "interrupted"}:
        return CheckResult(check, command, status, seconds, error=document["error"])
    return CheckResult(check, command, status, seconds, document, shown)
