"""Times the commands as users run them: commands in processes of their own, each with a budget of seconds.

A command that fails is over its budget, however short it took.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.platform.select import current_platform
from hyper_parallel.transport.processes import python_command
from hyper_parallel.verify.simulate import simulate

__all__ = ["Figure", "Timing", "figures", "recorded", "warm_start"]

_WARM_RANKS, _WARM_RUNS = 4, 5

_REPORTED = 5.0  # seconds within which a failure is reported
_HANG = "rank hangs"
_HANG_SECONDS = 2.0  # the time limit under which self-test lets a rank hang

_RANKED_TESTS = """\
import numpy as np
import pytest


@pytest.mark.mesh(4)
@pytest.mark.launch("processes")
@pytest.mark.parametrize("number", range(200))
def test_every_rank_gets_the_whole(number, mesh):
    from hyper_parallel import Shard, distribute_tensor
    from hyper_parallel.platform.select import current_platform

    platform, values = current_platform(), np.arange(7.0) + number
    spread = distribute_tensor(platform.from_numpy(values), mesh, [Shard(0)])
    assert platform.tensor_to_numpy((spread * 2).full_tensor()).tolist() == (2 * values).tolist()
"""

_OPERATOR = """\
from hyper_parallel import DFunction, DistributedOp, Partial
from hyper_parallel.errors import LayoutError
from hyper_parallel.verify import operator_sample, real


class Scale(DFunction):
    _op_name = "timed_scale"

    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


class ScaleRule(DistributedOp):
    def infer_layout(self, layouts, extra_args=None):
        if any(p.is_partial() and p not in (Partial("sum"), Partial("avg")) for p in layouts[0].placements):
            raise LayoutError("timed_scale: only sums can be scaled; x = x.redistribute() first")
        return layouts[0]


ScaleRule("timed_scale")


def scale(x):
    return Scale.apply(x)


operator_sample(scale, real("ab"))
"""


@dataclass(frozen=True)
class Timing:
    """One measured figure.

    Attributes:
        name: what was timed.
        seconds: of wall time.
        budget: seconds that are allowed.
        problem: why the figure is invalid, or empty.
    """

    name: str
    seconds: float
    budget: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        """Whether the command succeeded within its budget."""
        return not self.problem and self.seconds <= self.budget


@dataclass(frozen=True)
class Figure:
    """A figure to measure.

    Attributes:
        name: what is timed.
        budget: seconds that are allowed.
        measure: returns seconds, and what went wrong, or empty.
    """

    name: str
    budget: float
    measure: Callable[[], tuple[float, str]]

    def timed(self) -> Timing:
        """Measure it once."""
        seconds, problem = self.measure()
        return Timing(self.name, seconds, self.budget, problem)


def figures(platforms: Sequence[str]) -> list[Figure]:
    """Return the figures of these frameworks, the shortest first."""
    result = [Figure("import hyper_parallel", 0.1, _import)]
    for name in platforms:
        sweep = _hyper("verify", "ops", "--quick", "--platform", name)
        result += [
            Figure(f"a user's operator on all meshes, {name}", 10.0, partial(_operator, name)),
            Figure(f"slowest report of a failing rank, {name}", _REPORTED, partial(_slowest_report, name)),
            Figure(f"quick sweep of operators, {name}", 60.0, partial(_command, sweep)),
        ]
    if "torch" in platforms:
        result.append(Figure("200 tests on four ranks over gloo, torch", 60.0, _ranked_tests))
    model = _hyper("verify", "model", "--platform", ",".join(platforms))
    return [*result, Figure(f"verify model, {' and '.join(platforms)}", 60.0, partial(_command, model))]


def recorded(reports: Path) -> Iterator[Timing]:
    """Yield the duration of the last run of the unit tests, if it left its JUnit files in ``reports``."""
    paths = [reports / f"{name}.xml" for name in ("torch", "mindspore")]
    if not all(path.exists() for path in paths):
        return
    roots = [ET.parse(path).getroot() for path in paths]  # noqa: S314 - written by our own run
    suites = [suite for root in roots for suite in root.iter("testsuite")]
    failed = sum(int(suite.get(kind, "0")) for suite in suites for kind in ("failures", "errors"))
    seconds = sum(float(suite.get("time", "0")) for suite in suites)
    problem = f"{failed} tests failed" if failed else ""
    yield Timing("unit tests of both frameworks, last run", seconds, 900.0, problem)


def warm_start() -> Figure:
    """Return the figure of MindSpore's simulated ranks: a world of four, after one of as many has run."""
    return Figure(f"warm start of {_WARM_RANKS} simulated ranks", 1.0, _warm_start)


# -- measurements -----------------------------------------------------------------------------------------------------


def _hyper(*words: str) -> list[str]:
    return python_command("hyper_parallel", *words)


def _run(command: Sequence[str], folder: str | None = None) -> tuple[float, str, subprocess.CompletedProcess[str]]:
    start = time.perf_counter()
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
    seconds = time.perf_counter() - start
    last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
    return seconds, f"exit status {done.returncode}: {last}" if done.returncode else "", done


def _warm_start() -> tuple[float, str]:
    """Return the median of some runs, from the call to the ranks' results: each makes a mesh and gathers a tensor."""
    seconds = []
    for _ in range(_WARM_RUNS + 1):
        start = time.perf_counter()
        wholes = simulate(_gathered, _WARM_RANKS, "mindspore", (_WARM_RANKS,))
        seconds.append(time.perf_counter() - start)
    right = all(whole == list(range(_WARM_RANKS)) for whole in wholes)
    return statistics.median(seconds[1:]), "" if right else f"the ranks gathered {wholes}"


def _gathered(count: int) -> list[float]:
    """Gather one number of each rank."""
    platform = current_platform()
    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("ranks",))
    values = distribute_tensor(platform.from_numpy(np.arange(count, dtype=np.float32)), mesh, [Shard(0)])
    whole: list[float] = platform.tensor_to_numpy(values.full_tensor()).tolist()
    return whole


def _command(command: Sequence[str]) -> tuple[float, str]:
    seconds, problem, _ = _run(command)
    return seconds, problem


def _import() -> tuple[float, str]:
    """Return the best of some processes, to exclude noise from disk and other programs."""
    runs = [_run(python_command("timeit", "-n1", "-r1", "-u", "sec", "import hyper_parallel")) for _ in range(5)]
    problem = next((problem for _, problem, _ in runs if problem), "")
    return (0.0, problem) if problem else (min(float(done.stdout.split()[-4]) for _, _, done in runs), "")


def _operator(platform: str) -> tuple[float, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scale.py"
        path.write_text(_OPERATOR)
        return _command(_hyper("verify", "ops", str(path), "--platform", platform))


def _slowest_report(platform: str) -> tuple[float, str]:
    _, problem, done = _run(_hyper("self-test", "--json", "--launch", "processes", "--platform", platform))
    if problem:
        return 0.0, problem
    rows = [row for row in json.loads(done.stdout)["results"][1:] if row["name"] != "lost coverage"]
    return max(row["seconds"] - _HANG_SECONDS * (row["name"] == _HANG) for row in rows), ""


def _ranked_tests() -> tuple[float, str]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "test_ranked.py").write_text(_RANKED_TESTS)
        options = ["-q", "-p", "no:cacheprovider", "--hp-platforms", "torch", "test_ranked.py"]
        seconds, problem, done = _run(python_command("pytest", *options), folder)
        return seconds, problem or ("" if "200 passed" in done.stdout else "200 tests did not pass")
