"""Tests on ranks: every rank runs, the failing rank is named, and one failure affects no other test."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import hyper_parallel
from hyper_parallel.platform.select import platform_named
from hyper_parallel.pytest_plugin import ranks
from hyper_parallel.pytest_plugin.ranks import require_transport
from hyper_parallel.verify.simulate import simulate

PLUGIN = ("-p", "hyper_parallel.pytest_plugin")

HEAD = """
import os, signal, time
import numpy as np
import pytest
from hyper_parallel.platform.select import current_platform
from hyper_parallel.transport.base import active_transport

def reduce(size=3, op="sum", dtype="float32"):
    t = active_transport()
    x = current_platform().from_numpy(np.ones(size, dtype))
    return current_platform().tensor_to_numpy(t.all_reduce(x, op, tuple(range(t.world_size))))

def barrier():
    t = active_transport()
    t.barrier(tuple(range(t.world_size)))

@pytest.mark.launch("processes")
@pytest.mark.world_size(2)
def test_before(rank):
    barrier()
"""

TAIL = """
@pytest.mark.launch("processes")
@pytest.mark.world_size(2)
def test_after(rank):
    barrier()
"""


@pytest.fixture(scope="module")
def loaded(platform_name):
    """Import the inner runs' frameworks here: pytester unloads modules, and no framework can be imported twice."""
    platform_named(platform_name)
    for name in (
        "transport.real.launched_processes",
        "transport.simulated.threads",
        "transport.simulated.processes",
        "verify.simulate",
        "core.dtensor.factories",
    ):
        importlib.import_module(f"hyper_parallel.{name}")
    return platform_name


@pytest.fixture
def run(loaded, pytester, monkeypatch):
    """Run test code with the plugin on one framework."""
    monkeypatch.setenv("HP_TEST_PLATFORMS", loaded)

    def start(code, *options, head=HEAD, tail=TAIL):
        code = head + code + tail
        if 'launch("' in code:
            require_transport(loaded)
        pytester.makepyfile(code)
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *PLUGIN, *options)

    return start


def test_a_test_runs_on_every_rank_with_its_mesh(run):
    """Marked tests run once per size and launch, on every rank, with the rank's number and a mesh over the world."""
    result = run("""
@pytest.mark.launch("simulated", "processes")
@pytest.mark.world_size(1, 3)
def test_sizes(rank, world_size, mesh, device, launch_name):
    assert mesh.size() == world_size and device == "cpu" and launch_name in ("simulated", "processes")
    assert rank == active_transport().rank
    assert reduce().tolist() == [world_size] * 3

@pytest.mark.launch("processes")
@pytest.mark.mesh(2, 2, names=("rows", "columns"))
def test_grid(mesh, world_size):
    assert world_size == 4 and tuple(mesh.mesh_dim_names) == ("rows", "columns")
""")
    result.assert_outcomes(passed=7)


def test_a_failing_rank_comes_first_and_the_others_are_one_line_each(run):
    """The failing rank's traceback comes first; every other rank is one line with the collective that it waits in."""
    result = run("""
@pytest.mark.launch("processes")
@pytest.mark.world_size(3)
def test_fails(rank):
    print("I am", rank)
    time.sleep(0.5 * (rank == 1))
    assert rank != 1
    reduce()
""")
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of 3 failed",
            "--- rank 1:",
            "*assert rank != 1",
            "AssertionError: assert 1 != 1",
            "--- rank 0: * all_reduce(f32[[]3], sum)* at *test_a_failing*.py:*",
            "*.py:*: rank 1: AssertionError: assert 1 != 1",
            "*Captured stdout of rank 1*",
            "I am 1",
        ]
    )


MISTAKES = {
    "order": ("reduce() if rank else barrier()", "disagree about the operation"),
    "shape": ("reduce(3 + (rank == 1))", "disagree about the shape"),
    "dtype": ('reduce(dtype="int32" if rank else "float32")', "disagree about the dtype"),
    "reduction": ('reduce(op="max" if rank else "sum")', "disagree about the reduction"),
    "absence": ("None if rank else reduce()", "rank 1 returned without joining"),
    "crash": ("os._exit(3) if rank else barrier()", "rank 1 died with exit code 3"),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL) if rank else barrier()", "rank 1 died of SIGKILL"),
    "abort": ("os.abort() if rank else barrier()", "rank 1 died of SIGABRT"),
}


# Every day one mismatch, one rank that is absent and one that dies: transport/checks has each mismatch, and
# transport/real/test_rank_faults.py each death, without an inner run of pytest.
@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(mistake, marks=[] if mistake in ("shape", "absence", "crash") else pytest.mark.sweep)
        for mistake in MISTAKES
    ],
)
def test_a_mistake_is_reported_before_the_timeout_and_other_tests_go_on(run, monkeypatch, mistake):
    """Mismatches, absent and dead ranks are reported with rank, collective and line, and the other tests run."""
    monkeypatch.delenv("HP_RANK_LEDGER", raising=False)  # killed ranks leave no coverage, on purpose
    line, message = MISTAKES[mistake]
    result = run(f"""
@pytest.mark.launch("processes")
@pytest.mark.world_size(2)
def test_mistake(rank):
    barrier()
    {line}
""", "-vv")  # fmt: skip
    result.assert_outcomes(passed=2, failed=1)
    text = result.stdout.str()
    assert message in text
    assert ".py:" in text
    assert "barrier()" in text or "all_reduce(" in text
    assert "did not finish within" not in text


def test_a_hang_ends_at_its_timeout_with_the_stacks(run, monkeypatch):
    """A rank that never joins is shown with its stack, before those that wait for it, at its own timeout."""
    monkeypatch.delenv("HP_RANK_LEDGER", raising=False)
    result = run("""
def stuck():
    while True:
        time.sleep(0.01)

@pytest.mark.rank_timeout(1)
@pytest.mark.launch("processes")
@pytest.mark.world_size(2)
def test_hangs(rank):
    stuck() if rank else barrier()
""", "-vv")  # fmt: skip
    result.assert_outcomes(passed=2, failed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 1 of 2 did not finish within 1 s",
            "--- rank 1: was running in",
            "*in stuck",
            "--- rank 0: waited in barrier() (collective 0 of ranks (0, 1)) for ranks [[]1] at *.py:*",
        ]
    )
    assert "pytest_plugin" not in result.stdout.str()  # the frames below the test are those of the machinery


def test_the_odd_rank_out_is_named(run):
    """Of ranks that call different things, the odd one is named and is the culprit; equal tracebacks are shown once."""
    result = run("""
@pytest.mark.launch("simulated", "processes")
@pytest.mark.world_size(3)
def test_odd(rank):
    reduce(op="max" if rank == 1 else "sum")
""", "--junitxml=out.xml")  # fmt: skip
    result.assert_outcomes(passed=2, failed=2)
    odd = "rank 1 disagrees with ranks 0, 2 about the reduction of collective 0 of ranks (0, 1, 2):"
    assert result.stdout.str().count("--- ranks 0, 1, 2:") == 2
    # Once in each report; where CI is set, pytest does not shorten its summary, and they stand there again.
    reports, _, _ = result.stdout.str().partition("short test summary info")
    assert reports.count(f"rank 1: CollectiveMismatchError: {odd}") == 2
    cases = {case.get("name").split("[")[0]: case for case in ET.parse("out.xml").iter("testcase")}  # noqa: S314
    properties = {property_.get("name"): property_.get("value") for property_ in cases["test_odd"].iter("property")}
    assert properties["rank_of_failure"] == "1"


def test_fixtures_that_ask_for_ranks_run_on_ranks(run):
    """A fixture that uses rank or mesh runs on every rank, with its teardown; others run once."""
    result = run("""
@pytest.fixture
def numbers():
    return [1]

@pytest.fixture
def own(rank, numbers):
    numbers.append(rank)
    yield numbers
    print("torn down on", rank)

@pytest.fixture
def twice(own):
    return own * 2

@pytest.mark.launch("simulated", "processes")
@pytest.mark.world_size(2)
def test_own(rank, own, twice, numbers):
    assert own == [1, rank] and twice == [1, rank, 1, rank]
""", "-s", "-rA")  # fmt: skip
    result.assert_outcomes(passed=4)
    result.stdout.fnmatch_lines(["torn down on 1"])


LATE = """
@pytest.fixture
def late(request):
    request.getfixturevalue("mesh").size()

@pytest.mark.world_size(2)
def test_x(late): pass
"""

LOCK = """
import threading
@pytest.fixture
def lock():
    return threading.Lock()

@pytest.mark.world_size(2)
def test_x(lock): pass
"""

OTHER_FRAMEWORK = """
pytestmark = pytest.mark.platforms("torch")

@pytest.mark.platforms("mindspore")
def test_x(): pass
"""

WRONG_USE = [
    ("def test_x(mesh): pass", "fixture 'mesh' belongs to tests on ranks: mark the test with world_size(n)"),
    ("@pytest.mark.world_size(2)\nasync def test_x(): pass", "the test function is asynchronous"),
    (
        LOCK,
        "fixture 'lock' is a lock, which cannot be copied to the ranks (cannot pickle '_thread.lock' object); make it",
    ),
    (
        LATE,
        "fixture 'mesh' has its value on ranks only",
    ),
]


@pytest.mark.parametrize("code, message", WRONG_USE)
def test_wrong_use_is_an_error_that_says_so(run, code, message):
    """An invalid mark or fixture is an error, and no test runs on fewer ranks than its mark names."""
    result = run("import pytest\n" + code, head="", tail="")
    assert result.ret != 0
    assert message in result.stdout.str() + result.stderr.str()


@pytest.mark.platforms("torch")  # where only the other is tested, the file is left out
def test_a_test_for_a_framework_that_its_file_is_not_for_is_refused(run):
    """It would run nowhere: where its framework is tested, its file is left out."""
    result = run("import pytest\n" + OTHER_FRAMEWORK, head="", tail="")
    assert result.ret != 0
    assert (
        "mark platforms('mindspore'): the file has platforms('torch'), and is left out where mindspore is tested; move "
        "the test to another file"
    ) in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize(
    "option, message",
    [
        ("--hp-rank-timeout=0", "--hp-rank-timeout 0.0: expected a positive number of seconds"),
        ("--hp-rank-timeout=nan", "--hp-rank-timeout nan: expected a positive number of seconds"),
        ("--hp-min-executed=-3", "--hp-min-executed -3: expected a number of tests"),
    ],
)
def test_options_that_make_no_sense_are_refused(pytester, option, message):
    """An invalid time limit or floor is a usage error: status 4, nothing runs."""
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *PLUGIN, option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {message}" in result.stderr.str()


@pytest.mark.platforms("torch")  # whose ranks are threads: processes may not have started after half a second
def test_a_variable_limits_what_has_no_limit_of_its_own(pytester, monkeypatch):
    """HP_RANK_TIMEOUT applies to tests and simulations without a limit of their own; an invalid value is refused."""
    monkeypatch.setenv("HP_TEST_PLATFORMS", "torch")
    monkeypatch.setenv("HP_RANK_TIMEOUT", "soon")
    message = "HP_RANK_TIMEOUT=soon: expected a positive number of seconds"
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *PLUGIN)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert f"ERROR: {message}" in result.stderr.str()
    with pytest.raises(ValueError, match=message):
        simulate(time.sleep, 2, args=(0,))
    monkeypatch.setenv("HP_RANK_TIMEOUT", "0.5")
    pytester.makepyfile("""
        import pytest, time
        @pytest.mark.world_size(2)
        def test_one():
            time.sleep(0.01)
            while True:
                time.sleep(0.01)
    """)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *PLUGIN)
    result.assert_outcomes(failed=1)
    assert "rank 0 of 2 did not finish within 0.5 s" in result.stdout.str()


def test_ranks_skip_together_or_fail(run):
    """A skip on all ranks is a skip; a skip on some ranks is a failure."""
    result = run("""
@pytest.mark.world_size(2)
def test_all(rank):
    pytest.skip("[no-tool] nothing to do")

@pytest.mark.world_size(2)
def test_some(rank):
    if rank:
        pytest.skip("[no-tool] nothing to do")

@pytest.mark.world_size(2)
def test_expected(rank):
    pytest.xfail("known")
""", tail="")  # fmt: skip
    result.assert_outcomes(passed=1, skipped=1, failed=1, xfailed=1)
    result.stdout.fnmatch_lines(["*ranks disagree about the test: rank 0 passed; rank 1 skipped [[]no-tool]*"])


def test_junit_names_world_framework_and_culprit(run, pytester, platform_name):
    """The JUnit file has one case per test, with world size, framework, launch, and the rank that failed first."""
    run("""
@pytest.mark.launch("processes")
@pytest.mark.world_size(2)
def test_fails(rank):
    assert rank == 0
""", "--junitxml=out.xml")  # fmt: skip
    cases = {case.get("name").split("[")[0]: case for case in ET.parse("out.xml").iter("testcase")}  # noqa: S314
    properties = {property_.get("name"): property_.get("value") for property_ in cases["test_fails"].iter("property")}
    expected = {"world_size": "2", "framework": platform_name, "launch": "processes", "device": "cpu"}
    assert properties == {**expected, "rank_of_failure": "1"}
    assert cases["test_fails"].find("failure").get("message") == "rank 1: AssertionError: assert 1 == 0"
    assert {property_.get("name") for property_ in cases["test_after"].iter("property")} == set(expected)


def test_selection_and_last_failed_work(loaded, run, pytester):
    """`-k` selects ranked tests by name and parameter, and `--lf` runs again what failed."""
    require_transport(loaded)
    code = """
@pytest.mark.launch("processes")
@pytest.mark.world_size(1, 2)
def test_fails(rank, world_size):
    assert world_size == 1
"""
    pytester.makepyfile(HEAD + code + TAIL)
    pytester.runpytest_inprocess(*PLUGIN, "-k", "test_fails").assert_outcomes(passed=1, failed=1, deselected=2)
    pytester.runpytest_inprocess(*PLUGIN, "--lf").assert_outcomes(failed=1)


def test_real_ranks_without_a_carrier_are_skipped_with_their_reason(monkeypatch):
    """Without PyTorch, MindSpore's rank processes on CPU are skipped with a reason of the closed list and the fix."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    require_transport("torch")
    with pytest.raises(pytest.skip.Exception, match=r"^\[no-transport\] on CPU, .* gloo: pip install torch"):
        require_transport("mindspore")


def test_ranks_without_devices_are_skipped_with_their_reason(run):
    """With --device npu and no NPU, a ranked test is skipped with a reason of the closed list."""
    result = run("""
@pytest.mark.launch("processes")
@pytest.mark.world_size(2)
def test_card(rank): pass
""", "--device", "npu", "-rs", head="import pytest\n", tail="")  # fmt: skip
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*[[]no-device] 2 ranks need npu devices, there are none"])


def ranked(world_size, launch, device="npu", framework="torch"):
    """The world of a ranked test."""
    return ranks.RankedTest(world_size, framework, launch, device, (world_size,), ("tp",), 60.0)


@pytest.mark.parametrize(
    "test, title",
    [
        (ranked(3, "processes"), "3 real ranks of PyTorch on 2 npu devices, shared"),
        (ranked(2, "processes"), "2 real ranks of PyTorch on npu"),
        (ranked(2, "simulated"), "2 simulated ranks of PyTorch on 1 npu device, shared"),
        (ranked(1, "simulated"), "1 simulated rank of PyTorch on npu"),
        (ranked(2, "processes", "cpu"), "2 real ranks of PyTorch"),
    ],
)
def test_reports_say_which_devices_ranks_share(monkeypatch, test, title):
    """Real ranks take a device each as long as there are enough; simulated ones share one."""
    monkeypatch.setattr(ranks, "count_devices", lambda _device: 2)
    assert test.title() == title


def test_real_ranks_of_mindspore_are_skipped_where_devices_are_few(monkeypatch):
    """They take a device each, and the skip says so; simulated ones share a device, and PyTorch's in any case."""
    monkeypatch.setattr(ranks, "count_devices", lambda _device: 1)
    ranks._require_devices(ranked(3, "simulated"))
    ranks._require_devices(ranked(3, "processes"))
    ranks._require_devices(ranked(3, "simulated", framework="mindspore"))
    ranks._require_devices(ranked(1, "processes", framework="mindspore"))
    with pytest.raises(
        pytest.skip.Exception,
        match=r"^\[too-few-devices\] 3 ranks of MindSpore need a device each, but 1 are available$",
    ):
        ranks._require_devices(ranked(3, "processes", framework="mindspore"))


README = Path(hyper_parallel.__file__).parent / "pytest_plugin" / "README.md"


@pytest.mark.skipif(not README.exists(), reason="[no-tool] the README is not installed")
def test_the_readmes_examples_run(run, platform_name):
    """The README's code passes unchanged, with each launch and size."""
    code = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(code) == 2
    passed = {"torch": 6, "mindspore": 4}[platform_name]
    run("".join(code), head="", tail="").assert_outcomes(passed=passed, deselected=6 - passed)


RAW = """
import pytest, torch
import torch.distributed as dist

@pytest.fixture
def pairs(rank, world_size):
    return [dist.new_group([first, first + 1]) for first in range(0, world_size, 2)][rank // 2]

@pytest.mark.world_size(4)
def test_groups(rank, world_size, pairs):
    assert (dist.get_rank(), dist.get_world_size(), dist.get_rank(pairs)) == (rank, world_size, rank % 2)
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=pairs)
    assert total.item() == [3, 3, 7, 7][rank]
    gathered = [None] * world_size
    dist.all_gather_object(gathered, {"rank": rank})
    assert [each["rank"] for each in gathered] == [0, 1, 2, 3]

@pytest.mark.world_size(3)
def test_wrapped(rank):
    torch.manual_seed(rank)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    model(torch.full((2, 3), rank + 1.0)).sum().backward()
    assert model.module.weight.grad.tolist() == [[4.0] * 3] * 2

@pytest.mark.world_size(3)
def test_average_for_sum(rank):
    dist.all_reduce(torch.ones(5), op=dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)

@pytest.mark.world_size(3)
def test_left_out(rank):
    if rank != 1:
        dist.barrier()

@pytest.mark.world_size(3)
def test_is_torn_down():
    assert dist.is_initialized() and dist.get_world_size() == 3

def test_ordinary():
    assert not dist.is_initialized()
"""


@pytest.mark.platforms("torch")
def test_raw_torch_distributed_runs_on_simulated_ranks(run):
    """Plain `torch.distributed` code runs under the mark, its mistakes are reported by rank and line at once."""
    result = run(RAW, head="", tail="")
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.fnmatch_lines(
        [
            "on 3 simulated ranks of PyTorch:",
            "*CollectiveMismatchError: rank 1 disagrees with ranks 0, 2 about the reduction of collective 0 of ranks *",
            "  ranks 0, 2: dist.all_reduce(f32[[]5], SUM) at *.py:*",
            "  rank 1: dist.all_reduce(f32[[]5], MAX) at *.py:*",
            "*rank 1 returned without joining collective 0 of ranks (0, 1, 2), in which others wait:",
            "  ranks 0, 2: dist.barrier() at *.py:*",
            "*: rank 0: CollectiveMismatchError: rank 1 returned without *, in which others wait: ranks 0, 2: dist.b*",
        ]
    )
    result.stdout.no_fnmatch_line("*DEBUG*")


# What needs a process of its own


def fresh(folder, *options, **env):
    """Run pytest in a new process."""
    path = os.pathsep.join([str(Path(hyper_parallel.__file__).parents[1]), *sys.path])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
    environment = {**os.environ, "PYTHONPATH": path, **env}
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, capture_output=True, timeout=120, check=False
    )


def test_collection_imports_no_framework(pytester):
    """Collecting ranked tests of both frameworks imports neither framework."""
    pytester.makepyfile("""
import pytest
@pytest.mark.world_size(2)
def test_x(mesh): pass
""")
    pytester.makeconftest("""
import sys
def pytest_collection_finish(session):
    print("IMPORTED", sorted({"torch", "mindspore"} & set(sys.modules)))
""")
    text = fresh(pytester.path, *PLUGIN, "--collect-only", "-s").stdout
    assert "IMPORTED []" in text


def test_the_plugin_can_be_left_out(pytester):
    """`-p no:` disables the plugin: its options and marks are unknown then, and nothing else breaks."""
    pytester.makepyfile("def test_x(): pass")
    assert fresh(pytester.path, "-p", "no:hyper_parallel.pytest_plugin").returncode == 0
    done = fresh(pytester.path, "-p", "no:hyper_parallel.pytest_plugin", "--hp-launch", "processes")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR


@pytest.mark.sweep
@pytest.mark.platforms("torch")
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="[no-tool] pytest-xdist is not installed")
def test_processes_of_xdist_have_their_own_ranks(pytester):
    """With `-n 2` each worker runs its own warm ranks, and the run's checks count all of their tests."""
    pytester.makepyfile(HEAD + TAIL)
    done = fresh(pytester.path, *PLUGIN, "-n", "2", "--hp-min-executed", "2", HP_TEST_PLATFORMS="torch")
    assert "2 passed" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0


@pytest.mark.platforms("torch")
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="[no-tool] pytest-xdist is not installed")
@pytest.mark.parametrize("cpus", [{3, 5}, pytest.param({2, 3, 5}, marks=pytest.mark.sweep)])
def test_a_worker_of_xdist_keeps_to_one_cpu(pytester, cpus):
    """With --hp-one-cpu each worker has a CPU of its own, unless that would leave a CPU idle."""
    pytester.makeconftest(f"""
import os
from pathlib import Path
os.sched_getaffinity = lambda _: {cpus}
os.sched_setaffinity = lambda _, to: Path(f"cpu {{os.environ['PYTEST_XDIST_WORKER']}}").write_text(str(to))
""")
    pytester.makepyfile("def test_one(): pass")
    done = fresh(pytester.path, *PLUGIN, "-n", "2", "--hp-one-cpu", "-p", "conftest", PYTHONPATH=str(pytester.path))
    assert done.returncode == 0, done.stdout + done.stderr
    properties = {path.name: path.read_text() for path in pytester.path.glob("cpu *")}
    assert properties == ({"cpu gw0": "{3}", "cpu gw1": "{5}"} if len(cpus) == 2 else {})


@pytest.mark.platforms("torch")
def test_a_module_may_import_everything(pytester):
    """`from hyper_parallel.pytest_plugin import *` in a test module brings fixtures and marks, and no hook."""
    pytester.makepyfile("""
from hyper_parallel.pytest_plugin import *
def test_x(platform_name):
    assert platform_name == "torch" and not [name for name in globals() if name.startswith("pytest_")]
""")
    done = fresh(pytester.path, *PLUGIN, HP_TEST_PLATFORMS="torch")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.platforms("torch")
def test_no_rank_outlives_the_run(pytester):
    """A run that is killed leaves no rank process behind, not even one in an endless computation."""
    pytester.makepyfile("""
import os, pathlib, signal, time, pytest
@pytest.mark.launch("processes")
@pytest.mark.world_size(2)
def test_x(rank):
    pathlib.Path(f"{rank}.pid").write_text(str(os.getpid()))
    while len(list(pathlib.Path().glob("*.pid"))) < 2:
        time.sleep(0.01)
    if rank == 0:
        os.kill(int(os.environ["RUN"]), signal.SIGKILL)
    while True:
        time.sleep(0.01)
""")
    pytester.makeconftest("import os\nos.environ['RUN'] = str(os.getpid())")
    assert fresh(pytester.path, *PLUGIN, HP_TEST_PLATFORMS="torch", HP_RANK_LEDGER="").returncode == -9
    deadline = time.monotonic() + 60
    pids = [int(path.read_text()) for path in pytester.path.glob("*.pid")]
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.platforms("torch")
@pytest.mark.skipif(importlib.util.find_spec("xdist") is None, reason="[no-tool] pytest-xdist is not installed")
def test_a_worker_that_is_slow_to_end_loses_no_coverage(pytester):
    """A pytest-xdist worker saves its coverage before the controller may kill it, and is counted as a process."""
    pytester.makeini("[pytest]")
    pytester.makepyfile(measured="def double(x):\n    return 2 * x\n")
    pytester.makeconftest("""
        import atexit, time, xdist.workermanage
        xdist.workermanage.NodeManager.EXIT_TIMEOUT = 0.1
        def pytest_configure(config):
            if hasattr(config, "workerinput"):
                atexit.register(time.sleep, 900)  # runs first: coverage's own hook was registered before
    """)
    pytester.makepyfile("from measured import double\ndef test_x():\n    assert double(2) == 4\n")
    Path("settings").write_text("[run]\nparallel = true\nsource_pkgs = measured\npatch = subprocess\n")
    ledger = pytester.mkdir("ledger")
    data = str(pytester.path / ".coverage")
    names = {
        "HP_RANK_LEDGER": str(ledger),
        "COVERAGE_FILE": data,
        "COVERAGE_PROCESS_START": "",
        "COVERAGE_PROCESS_CONFIG": "",
    }
    coverage = [sys.executable, "-m", "coverage"]
    done = subprocess.run(
        [*coverage, "run", "--rcfile=settings", "-m", "pytest", *PLUGIN, "-n", "1"],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,  # less than the worker's sleep: ended by the controller, not by itself
        env={**os.environ, **names, "HP_TEST_PLATFORMS": "torch"},
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    (worker,) = ledger.iterdir()
    assert worker.read_text().startswith("pytest worker gw0, started in ")
    assert [path for path in Path().glob(".coverage.*") if f"pid{worker.name}" in path.name]
