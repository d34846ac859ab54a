"""Every coverage gate fires: each fault below is injected into a report that would otherwise pass."""

import configparser
import re
from pathlib import Path

import pytest

from workshop.coverage.baseline import read_baseline
from workshop.coverage.gates import (
    check_baseline,
    check_exceptions,
    check_floors,
    check_ranks,
    check_shared,
    check_started,
    exceptions_over,
    percent,
)
from workshop.coverage.settings import EnvironmentSettings, SharedSettings, read_settings


def entry(lines, covered, branches=0, taken=0, missing=(), executed=(), missing_branches=()):
    """Return one file as in coverage's JSON report."""
    summary = {"num_statements": lines, "covered_lines": covered, "num_branches": branches, "covered_branches": taken}
    rows = {"missing_lines": list(missing), "executed_lines": list(executed)}
    return {"summary": summary, **rows, "missing_branches": list(missing_branches)}


def report(**changes):
    """Return a report of two files, with changes."""
    files = {
        "core/a.py": entry(5, 5, 5, 5, executed=[1, 2, 3]),
        "core/b.py": entry(5, 3, 5, 3, missing=[7, 9, 10], executed=[1, 2], missing_branches=[[3, 7], [8, -1]]),
        **changes,
    }
    return {"totals": entry(10, 8, 10, 8)["summary"], "files": {name: file for name, file in files.items() if file}}


def floors(total=0, **files):
    """Return the settings of an environment."""
    return EnvironmentSettings(total, (), {name.replace("__", "/"): floor for name, floor in files.items()})


EXCEPTED = EnvironmentSettings(80, (), {"core/*": 61}, exceptions=1)
SHARED = SharedSettings(("torch", "mindspore"), ("core/*",), 50)


def test_a_good_report_passes_every_gate():
    """Floors and a baseline equal to the actual values pass, and no rank is lost."""
    settings = EnvironmentSettings(80, (), {"core/*": 60, "core/a.py": 100})
    assert check_floors(report(), settings) == []
    assert check_baseline(report(), {"core/b.py": 60, "gone.py": 90}, 0, ["core/b.py"]) == []
    assert check_floors(report(), EXCEPTED, ["core/b.py"]) == []
    assert check_exceptions(report(), EXCEPTED, ["core/b.py"]) == []
    assert check_shared({"torch": report(), "mindspore": report()}, SHARED) == []
    assert check_ranks({7: "rank-0"}, [7, 8]) == []
    assert check_started({7: "rank-0"}, 1, "ranks", "torch") == check_started({}, 0, "ranks", "torch") == []


def _fault_total():
    return check_floors(report(), EnvironmentSettings(80.5)), "total: 80.00 % is below the floor of 80.5 %"


def _fault_file():
    message = "core/b.py: 60.00 % is below the floor of 61 %; missing lines: 7, 9-10; missing branches: 3->7, 8->exit"
    return check_floors(report(), EnvironmentSettings(0, (), {"core/b.py": 61})), message


def _fault_pattern():
    failures = check_floors(report(), EnvironmentSettings(0, (), {"*": 0, "core/*": 61}))
    return [failure.split(";")[0] for failure in failures], "core/b.py: 60.00 % is below the floor of 61 %"


def _fault_floor_without_file():
    failures = check_floors(report(), EnvironmentSettings(0, (), {"core/c.py": 10}))
    return failures, "core/c.py: has a floor of 10 % but matches no measured file"


def _fault_nothing_measured():
    return check_floors({"totals": entry(0, 0)["summary"], "files": {}}, EnvironmentSettings(0)), "no file was measured"


def _fault_branch():
    failures = check_floors(report(**{"core/a.py": entry(5, 5, 5, 4)}), EnvironmentSettings(0, (), {"core/a.py": 100}))
    return failures, "core/a.py: 90.00 % is below the floor of 100 %; no line is missing"


def _fault_ratchet():
    failures = check_baseline(report(), {"core/b.py": 62}, 1, ["core/b.py"])
    return [failure.split(";")[0] for failure in failures], "core/b.py: fell from 62.00 % to 60.00 %"


def _fault_ratchet_unmeasured():
    failures = check_baseline(report(**{"core/b.py": None}), {"core/b.py": 60}, 1, ["core/b.py"])
    return failures, "core/b.py: had 60.00 % and was not measured this time"


def _fault_exception_too_many():
    message = "1 files are excepted from their floor, at most 0 may be: add tests instead"
    return check_exceptions(report(), EnvironmentSettings(0, (), {"core/*": 61}), ["core/b.py"]), message


def _fault_exception_without_file():
    failures = check_exceptions(report(), EXCEPTED, ["core/c.py"])
    return failures, "core/c.py: is excepted from its floor, but was not measured: remove the exception"


def _fault_exception_without_floor():
    failures = check_exceptions(report(), EnvironmentSettings(exceptions=1), ["core/b.py"])
    return failures, "core/b.py: is excepted from its floor, but has no floor: remove the exception"


def _fault_other_file_than_excepted():
    failures = check_floors(report(), EnvironmentSettings(0, (), {"*": 61}), ["core/a.py"])
    return [failure.split(";")[0] for failure in failures], "core/b.py: 60.00 % is below the floor of 61 %"


def _fault_shared_low():
    low = report(**{"core/b.py": entry(5, 1, missing=[3])})
    failures = check_shared({"torch": report(), "mindspore": low}, SHARED)
    return failures, "shared code: core/b.py: mindspore reaches 20.00 %, below the floor of 50 %"


def _fault_shared_file_absent():
    failures = check_shared({"torch": report(), "mindspore": report(**{"core/b.py": None})}, SHARED)
    return failures, "shared code: core/b.py: mindspore reaches 0.00 %, below the floor of 50 %"


def _fault_shared_environment_absent():
    return check_shared({"torch": report()}, SHARED), "shared code: there is no report of mindspore"


def _fault_shared_pattern():
    settings = SharedSettings(("torch",), ("cone/*",), 50)
    return check_shared({"torch": report()}, settings), "shared code: cone/* match no measured file"


def _fault_lost_rank():
    failures = check_ranks({7: "rank-0", 8: "rank-1"}, [7, 9])
    return failures, "1 of 2 started ranks left no coverage data: rank-1 (process 8)"


def _fault_broken_data():
    return check_ranks(
        {7: "rank-0"}, [7], [".coverage.host.pid8.Xa"]
    ), "1 data files are broken: .coverage.host.pid8.Xa"


def _fault_all_ranks_lost():
    failures = check_ranks(dict.fromkeys(range(30), "rank"), [])
    return [
        failure[:50] + failure[-12:] for failure in failures
    ], "30 of 30 started ranks left no coverage data: rank and 10 more"


HOW = "run `python ci/workshop coverage erase torch` before the tests, and the tests with HP_RANK_LEDGER=ranks"


def _fault_no_ledger():
    message = f"ranks: there is no folder ranks, which names those that were started; {HOW}"
    return check_started(None, 0, "ranks", "torch"), message


def _fault_no_rank_started():
    counted = "ranks: ranks names 0 that were started, fewer than the required 1"
    fix = "where the environment starts fewer, set `ranks` of env.torch in pyproject.toml"
    return check_started({}, EnvironmentSettings().ranks, "ranks", "torch"), f"{counted}; {HOW}; {fix}"


FAULTS = [value for name, value in sorted(globals().items()) if name.startswith("_fault_")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda failure: failure.__name__)
def test_an_injected_fault_turns_its_gate_red(fault):
    """Each fault gives one failure that names the file, floor, actual value and missing lines."""
    failures, message = fault()
    assert failures == [message]


def test_there_are_enough_faults():
    """There are at least twelve faults, each caught by the test above."""
    assert len(FAULTS) >= 12


def test_obsolete_exceptions_are_named():
    """An exception is obsolete when its file reaches the floor, and needed while it is below or not measured."""
    assert exceptions_over(report(), EXCEPTED, ["core/b.py", "core/a.py", "core/c.py"]) == ["core/a.py"]


def test_lines_and_branches_count_together():
    """All lines and half of the branches are 75 %; a file without code is 100 %."""
    assert percent(entry(10, 10, 10, 5)["summary"]) == 75
    assert percent(entry(0, 0)["summary"]) == 100


# Settings

GOOD = """
[tool.hyper_parallel.coverage]
combined = []
[tool.hyper_parallel.coverage.env.torch]
total = 80
omit = ["x/*"]
[tool.hyper_parallel.coverage.env.torch.files]
"core/*" = 95
"core/a.py" = 100
[tool.hyper_parallel.coverage.shared]
environments = ["torch"]
files = ["core/*"]
floor = 40
"""


@pytest.fixture
def project(tmp_path):
    """Write a pyproject.toml and read its settings."""

    def write(text):
        path = tmp_path / "pyproject.toml"
        path.write_text(text)
        return read_settings(path)

    return write


def test_floors_are_read_from_pyproject(project):
    """Environments, patterns, shared code and the ratchet come from one table; the longest pattern counts."""
    settings = project(GOOD)
    torch = settings.environment("torch")
    assert (torch.floor("core/a.py"), torch.floor("core/b.py"), torch.floor("z.py")) == (100, 95, None)
    assert settings.environment("lint") == EnvironmentSettings()
    assert settings.shared.covers("core/x/y.py")
    assert settings.slack == 0


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("total = 80", "total = 180", r"env.torch.total = 180 is not a percentage"),
        ("total = 80", 'total = "80"', r"env.torch.total = '80' is not a percentage"),
        ('"core/*" = 95', '"core/*" = true', r"env.torch.files.core/\* = True is not a percentage"),
        ("floor = 40", "floor = -1", r"shared.floor = -1 is not a percentage"),
        ("total = 80", "exceptions = -1", r"env.torch.exceptions = -1 must be a number of files"),
        ("total = 80", "exceptions = true", r"env.torch.exceptions = True must be a number of files"),
        ("total = 80", "ranks = false", r"env.torch.ranks = False must be a number of ranks"),
        ("total = 80", "totl = 80", r"env.torch.totl is unknown; known: total, omit, exceptions, ranks, files"),
        ("combined = []", "combine = []", r"combine is unknown; known: combined, ratchet, shared, env"),
        ("combined = []", "ratchet = 3", r"ratchet is 3; it must be a table"),
    ],
)
def test_a_floor_that_cannot_be_held_is_refused(project, old, new, message):
    """A mistyped floor must not turn its gate off."""
    with pytest.raises(ValueError, match=message):
        project(GOOD.replace(old, new))


def test_a_file_that_does_not_parse_is_named(project, tmp_path):
    """The parser's message is reported with the path of the file."""
    with pytest.raises(
        ValueError, match=f"^{re.escape(str(tmp_path / 'pyproject.toml'))} cannot be read: Invalid value"
    ):
        project("x = [")


def test_a_project_without_floors_is_refused(project, tmp_path):
    """A missing table or file is an error, because a gate without floors would always pass."""
    with pytest.raises(ValueError, match="no floors are configured"):
        project("[project]\nname = 'x'")
    with pytest.raises(ValueError, match="give --root"):
        read_settings(tmp_path / "nowhere.toml")


PROJECT = Path(__file__).resolve().parents[4]


def test_the_projects_own_floors():
    """Each framework's environment has a floor, and omits only files tested with the other framework only."""
    settings = read_settings(PROJECT / "pyproject.toml")
    others = {
        "torch": (
            95,
            "platform/mindspore/*",
            "transport/frontends/mindspore_comm/*",
            "transport/real/mindspore/*",
            "verify/bugs/mindspore/*",
            "verify/frameworks/mindspore/*",
        ),
        "mindspore": (
            84,
            "platform/torch/*",
            "transport/checks/torch_distributed.py",
            "transport/frontends/c10d/*",
            "transport/host/torch/*",
            "transport/real/c10d/*",
            "verify/bugs/torch/*",
            "verify/frameworks/torch/*",
            "verify/pages/*",
            "verify/fuzz/*",
            "verify/prove/*",
        ),
    }
    for name, (least, *patterns) in others.items():
        own = settings.environment(name)
        assert own.total >= least
        assert own.omit == tuple(f"hyper_parallel/{failure}" for failure in patterns)
    assert settings.shared.environments == ("torch", "mindspore")
    assert settings.shared.covers("hyper_parallel/core/shard/rule.py")


@pytest.mark.parametrize(
    "name, floor",
    [
        ("core/shard/dispatch.py", 95),
        ("core/shard/rules/index.py", 100),
        ("core/dtensor/transition.py", 100),
        ("core/dtensor/steps.py", 100),
        ("core/dtensor/layout.py", 100),
        ("core/dtensor/mesh.py", 95),
        ("transport/real/launched_processes.py", 95),
        ("verify/ops/sweep.py", 95),
        ("platform/torch/autograd.py", 90),
        ("platform/mindspore/ops/norm.py", 90),
        ("cli/doctor.py", 90),
    ],
)
def test_the_floor_of_every_room(name, floor):
    """No file of the project is without a floor, and nothing is left out of the combined report."""
    combined = read_settings(PROJECT / "pyproject.toml").environment("combined")
    assert combined.floor(f"hyper_parallel/{name}") == floor
    assert combined.omit == ()
    assert combined.total >= 95


def test_the_committed_baseline_names_real_files():
    """Every file of the baseline is there, and there are no more exceptions than pyproject.toml allows."""
    settings = read_settings(PROJECT / "pyproject.toml")
    baseline = read_baseline(PROJECT / settings.baseline, "combined")
    gone = [name for name in {*baseline.files, *baseline.exceptions} if not (PROJECT / name).exists()]
    assert gone == []
    assert len(baseline.files) > 200
    assert len(baseline.exceptions) <= settings.environment("combined").exceptions


def test_the_everyday_check_runs_the_combined_gate():
    """The default list of tox runs environment `coverage`, after all environments that it combines."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(PROJECT / "tox.ini")
    wanted = set(read_settings(PROJECT / "pyproject.toml").combined)
    listed = {name.strip() for name in tox["tox"]["env_list"].split(",")}
    assert wanted | {"coverage"} <= listed
    assert wanted <= {name.strip() for name in tox["testenv:coverage"]["depends"].split(",")}
    assert "python {tox_root}/ci/workshop coverage combine {posargs}\n" in tox["testenv:coverage"]["commands"]
