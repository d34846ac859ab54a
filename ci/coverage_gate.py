"""Gate and publish the coverage of one tox environment.

    python ci/coverage_gate.py ENV --erase   # before the tests: drop the data of earlier runs
    python ci/coverage_gate.py ENV           # after them: combine, write the reports, compare with the floors

Floors live in `pyproject.toml` under `[tool.hyper_parallel.coverage.ENV]`: `total`, `omit` and, per file, `files`.
An environment without an entry gets reports and no gate. Reports go to `coverage_reports/ENV/`, data files to
`coverage_reports/data/ENV/`.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

# Python 3.10 has no tomllib; coverage[toml] brings the same parser under its old name.
tomllib = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
ROOT = Path(__file__).resolve().parents[1]


def settings(env: str, pyproject: Path = ROOT / "pyproject.toml") -> dict[str, Any]:
    """Read the entry of one environment, empty if it has none."""
    table = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    entry: dict[str, Any] = table["tool"]["hyper_parallel"]["coverage"].get(env, {})
    return entry


def percent(summary: dict[str, Any]) -> float:
    """Percentage of a summary from coverage's JSON report, lines and branches together; nothing to cover is 100."""
    todo = summary["num_statements"] + summary.get("num_branches", 0)
    done = summary["covered_lines"] + summary.get("covered_branches", 0)
    return 100.0 * done / todo if todo else 100.0


def failures(report: dict[str, Any], floors: dict[str, Any]) -> list[str]:
    """Compare a JSON report with floors; each failure names file, floor, actual value and missing lines."""
    files = report["files"]
    if not files:
        return ["no file was measured"]
    found = []
    total = percent(report["totals"])
    if total < floors.get("total", 0):
        found.append(f"total: {total:.2f} % is below the floor of {floors['total']} %")
    for name, floor in floors.get("files", {}).items():
        if name not in files:
            found.append(f"{name}: has a floor of {floor} % but was not measured")
        elif (actual := percent(files[name]["summary"])) < floor:
            lines = ", ".join(map(str, files[name]["missing_lines"]))
            found.append(f"{name}: {actual:.2f} % is below the floor of {floor} %; missing lines: {lines}")
    return found


def coverage(*args: str) -> None:
    """Run the coverage tool in the checkout; its own failure is a failure of the gate."""
    subprocess.run([sys.executable, "-m", "coverage", *args], check=True, cwd=ROOT)


def publish(env: str, omit: list[str]) -> dict[str, Any]:
    """Combine the data of all processes and write text, HTML, XML and JSON; return the JSON report."""
    out, data = ROOT / "coverage_reports" / env, ROOT / "coverage_reports" / "data" / env
    out.mkdir(parents=True, exist_ok=True)
    file = f"--data-file={data / '.coverage'}"
    hidden = [f"--omit={','.join(omit)}"] if omit else []
    coverage("combine", "--quiet", file, str(data))
    coverage("report", file, *hidden)
    coverage("html", "--quiet", file, f"--directory={out / 'html'}", *hidden)
    coverage("xml", "--quiet", file, "-o", str(out / "coverage.xml"), *hidden)
    coverage("json", "--quiet", file, "-o", str(out / "coverage.json"), *hidden)
    report: dict[str, Any] = json.loads((out / "coverage.json").read_text(encoding="utf-8"))
    return report


def erase(env: str) -> None:
    """Drop data and reports of earlier runs: an old data file must not lift today's number."""
    for folder in (ROOT / "coverage_reports" / env, ROOT / "coverage_reports" / "data" / env):
        shutil.rmtree(folder, ignore_errors=True)
    (ROOT / "coverage_reports" / "data" / env).mkdir(parents=True)


def main(args: list[str]) -> int:
    """Gate one environment; the exit status is 1 if a floor does not hold."""
    env = args[0]
    if "--erase" in args[1:]:
        erase(env)
        return 0
    floors = settings(env)
    try:
        found = failures(publish(env, floors.get("omit", [])), floors)
    except subprocess.CalledProcessError as error:
        found = [f"`coverage {error.cmd[3]}` failed; its message is above"]
    for failure in found:
        print(f"coverage gate, {env}: {failure}", file=sys.stderr)
    if not found:
        print(f"coverage gate, {env}: {'every floor holds' if floors else 'reported; no floor is set'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
