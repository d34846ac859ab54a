"""`python ci/workshop coverage`: from data files of several processes to a verdict and pages."""

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from workshop.commands import main
from workshop.conformance.results import ContractOutcome
from workshop.coverage.baseline import read_baseline

pytest.importorskip("coverage", reason="[no-tool] coverage is not installed")

PYPROJECT = """
[tool.coverage.run]
branch = true
parallel = true
relative_files = true
source = ["lib"]
[tool.hyper_parallel.coverage]
combined = []
[tool.hyper_parallel.coverage.shared]
environments = ["torch", "mindspore"]
files = ["lib/*"]
floor = 50
[tool.hyper_parallel.coverage.env.torch]
total = 60
omit = ["lib/other.py"]
[tool.hyper_parallel.coverage.env.mindspore]
total = 60
"""
LIBRARY = "def f(x):\n    if x:\n        return 1\n    return 2\n"

SVG = "http://www.w3.org/2000/svg"
"""The name of a vocabulary, at which nothing is fetched."""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project with one file, as a git repository of one commit."""
    for name in [name for name in os.environ if name.startswith(("COVERAGE", "COV_", "GIT_"))]:
        monkeypatch.delenv(name)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "__init__.py").write_text("")
    (tmp_path / "lib" / "shared.py").write_text(LIBRARY)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    for command in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-qm", "first"]):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(["git", *identity, *command], cwd=tmp_path, check=True)  # noqa: S607
    return tmp_path


@pytest.fixture
def command(project, capsys):
    """Run the command in the project: exit status, stdout and stderr."""

    def start(*arguments):
        status = main(["coverage", arguments[0], "--root", str(project), *arguments[1:]])
        return status, *capsys.readouterr()

    return start


def measure(project, environment, code="f(1)\nf(0)"):
    """Run code as a rank of an environment, recorded in its list of ranks; return its process number."""
    data = project / "coverage_reports" / "data" / environment
    script = project / "run.py"
    script.write_text(f"import os\nfrom lib.shared import f\n{code}\nprint(os.getpid())\n")
    done = subprocess.run(
        [sys.executable, "-m", "coverage", "run", "run.py"],
        cwd=project,
        env={**os.environ, "COVERAGE_FILE": str(data / ".coverage"), "PYTHONPATH": str(project)},
        text=True,
        capture_output=True,
        check=True,
    )
    pid = done.stdout.strip()
    (data / "ranks" / pid).write_text("rank-0")
    return int(pid)


def test_a_run_is_gated_and_published(project, command):
    """erase, tests, gate: data of all processes is combined, every report is written, and the verdict is kept."""
    assert command("erase", "torch")[0] == 0
    measure(project, "torch", "f(1)")
    measure(project, "torch", "f(0)")
    status, out, _ = command("gate", "torch")
    assert status == 0, out
    assert "coverage of torch: 100.00 % of lines and branches" in out
    assert "held: data of 2 started ranks" in out
    assert "not checked: ratchet: ci/coverage_baseline.json has no entry for torch" in out
    folder = project / "coverage_reports" / "torch"
    assert {path.name for path in folder.iterdir()} == {"coverage.json", "coverage.xml", "gate.json", "html"}
    assert json.loads((folder / "gate.json").read_text())["ok"] is True


def test_no_floor_is_held_against_a_part_of_the_tests(project, command):
    """With pytest's own arguments the gate reports what it measured, and says that floors are of all tests."""
    (project / "pyproject.toml").write_text(PYPROJECT.replace("total = 60", "total = 99\nranks = 5"))
    command("erase", "torch")
    measure(project, "torch", "f(1)")
    status, out, err = command("gate", "torch", "--", "tests_unit/a.py", "-k", "x or y")
    assert (status, "error" in err) == (0, False)
    arguments = "tests_unit/a.py -k 'x or y'"
    assert f"  not checked: floors and ratchet: they are of all tests, and this run had `{arguments}`\n" in out
    assert "held: data of 1 started ranks" in out
    assert "held: floors" not in out


def test_an_environment_without_floors_must_have_measured(project, command):
    """An environment without floors passes if it measured anything; verdict and index list its floors as unchecked."""
    command("erase", "docs")
    measure(project, "docs")
    status, out, err = command("gate", "docs")
    assert status == 0, err
    assert "floors: docs has none" in out + err
    assert "not checked: floors: docs has none" in Path(command("html")[1].strip()).read_text()


def test_the_index_shows_what_failed(project, command):
    """A failed gate is shown with its reasons, and data without a gate as not gated."""
    for name in ("torch", "mindspore"):
        command("erase", name)
        measure(project, name, "f(1)")
    (project / "pyproject.toml").write_text(PYPROJECT.replace("total = 60", "total = 99"))
    assert command("gate", "torch")[0] == 1
    page = Path(command("html")[1].strip()).read_text()
    assert '<span class="bad">FAILED</span>' in page
    assert "below the floor of 99 %" in page


def test_a_lost_rank_is_red(project, command):
    """A rank that was started and left no data fails the gate, though every line is covered."""
    command("erase", "torch")
    measure(project, "torch")
    (project / "coverage_reports" / "data" / "torch" / "ranks" / "999999").write_text("rank-3")
    status, _, err = command("gate", "torch")
    assert status == 1
    assert "FAILED: 1 of 2 started ranks left no coverage data: rank-3 (process 999999)" in err


@pytest.mark.parametrize("lost, status", [(1, 0), (2, 1)])
def test_one_rank_of_a_hundred_may_leave_no_data(project, command, lost, status):
    """Up to a hundredth of the ranks is listed without data; more of them fail the gate."""
    command("erase", "torch")
    pid = measure(project, "torch")
    data = project / "coverage_reports" / "data" / "torch"
    (measured,) = data.glob(".coverage.*")
    for number in range(100_000, 100_099):
        copy = measured.with_name(measured.name.replace(f"pid{pid}", f"pid{number}"))
        copy.write_bytes(measured.read_bytes())
        (data / "ranks" / str(number)).write_text("rank-1")
    for number in range(900_000, 900_000 + lost):
        (data / "ranks" / str(number)).write_text("rank-3, started in test_a")
    actual, out, err = command("gate", "torch")
    assert actual == status
    assert ("not checked: data of rank-3, started in test_a (process 900000), which left none\n" in out) == (lost == 1)
    words = "FAILED: 2 of 102 started ranks left no coverage data: rank-3, started in test_a (process 900000), "
    assert (words in err) == (lost == 2)


def test_a_gate_that_counts_no_ranks_is_red(project, command):
    """The gate fails without the list of ranks that `erase` makes, because no lost rank could be noticed.

    An empty list fails as well, unless the settings allow an environment without ranks: then it is reported.
    """
    (project / "pyproject.toml").write_text(PYPROJECT.replace("env.torch]", "env.torch]\nranks = 0"))
    command("erase", "torch")
    ledger = project / "coverage_reports" / "data" / "torch" / "ranks"
    (ledger / str(measure(project, "torch"))).unlink()
    ledger.rmdir()
    status, _, err = command("gate", "torch")
    how = f"run `python ci/workshop coverage erase torch` before the tests, and the tests with HP_RANK_LEDGER={ledger}"
    assert status == 1
    assert f"FAILED: ranks: there is no folder {ledger}, which names those that were started; {how}\n" in err
    assert "held: data of" not in err

    command("erase", "torch")
    (ledger / str(measure(project, "torch"))).unlink()
    status, out, _ = command("gate", "torch")
    assert status == 0
    assert "not checked: ranks: none was started, and none need be\n" in out


def test_a_floor_that_does_not_hold_is_red(project, command):
    """A total below its floor fails."""
    command("erase", "torch")
    measure(project, "torch", "pass")
    status, out, _ = command("gate", "torch", "--json")
    verdict = json.loads(out)
    assert status == 1
    assert verdict["failures"] == ["total: 16.67 % is below the floor of 60 %"]


def test_the_ratchet_holds_what_was_reached(project, command):
    """A baseline that was written once fails a later run that reaches less; a failed run raises nothing."""
    (project / "ci").mkdir()
    command("erase", "torch")
    measure(project, "torch")
    assert command("gate", "torch", "--update-baseline")[0] == 0
    baseline = project / "ci" / "coverage_baseline.json"
    assert json.loads(baseline.read_text())["torch"]["files"]["lib/shared.py"] == 100.0
    before = baseline.read_text()
    command("erase", "torch")
    measure(project, "torch", "f(1)")
    status, _, err = command("gate", "torch", "--update-baseline")
    assert status == 1
    assert "lib/shared.py: fell from 100.00 % to 66.67 %; missing lines: 4; missing branches: 2->4" in err
    assert baseline.read_text() == before


def test_the_ratchet_is_lowered_when_asked_only(project, command):
    """`--lower-baseline` writes what this run reached and lists the files that fell; the run itself fails."""
    (project / "ci").mkdir()
    for code, option in (("f(1)\nf(0)", "--update-baseline"), ("f(1)", "--lower-baseline")):
        command("erase", "torch")
        measure(project, "torch", code)
        status, _, err = command("gate", "torch", option)
    assert status == 1
    assert "lib/shared.py: lowered from 100.00 % to 66.66 %\n" in err
    assert command("gate", "torch")[0] == 2  # its data is combined already
    command("erase", "torch")
    measure(project, "torch", "f(1)")
    assert command("gate", "torch")[0] == 0


def test_changed_lines_are_gated(project, command):
    """New lines that no test ran fail diff-cover, with the project's own settings, and are listed."""
    pytest.importorskip("diff_cover", reason="[no-tool] diff-cover is not installed")
    (project / "lib" / "shared.py").write_text(LIBRARY + "def g():\n    return 3\n")
    command("erase", "torch")
    measure(project, "torch")
    command("gate", "torch")

    def diff_cover(*options):
        settings = Path(__file__).resolve().parents[4] / "pyproject.toml"
        return subprocess.run(
            [sys.executable, "-m", "diff_cover.diff_cover_tool", "coverage_reports/torch/coverage.xml",
             "--config-file", str(settings), "--show-uncovered", *options],
            cwd=project, capture_output=True, text=True, check=False,
        )  # fmt: skip

    done = diff_cover("--compare-branch", "main")
    assert done.returncode == 1
    assert "lib/shared.py (50.0%): Missing lines 6" in done.stdout
    assert "Failure. Coverage is below 90" in done.stderr + done.stdout
    assert diff_cover("--compare-branch", "main", "--fail-under", "50").returncode == 0
    assert diff_cover("--compare-branch", "nowhere").returncode != 0


def test_shared_code_must_be_reached_from_each_framework(project, command):
    """`combine` fails where one environment hardly reaches a shared file, and passes where both do."""
    for name, code in (("torch", "f(1)"), ("mindspore", "f(1)")):
        command("erase", name)
        measure(project, name, code)
        command("gate", name)
    assert command("combine")[0] == 0
    command("erase", "mindspore")
    measure(project, "mindspore", "pass")
    command("gate", "mindspore")
    status, _, err = command("combine", "torch", "mindspore")
    assert status == 1
    assert "shared code: lib/shared.py: mindspore reaches 16.67 %, below the floor of 50 %" in err


def test_environments_of_versions_join_the_combined_report_where_asked_for(project, command, monkeypatch):
    """`combine --versions` adds their data, each line with the environment as its context; without it, it stays out."""
    from coverage import CoverageData

    text = PYPROJECT.replace("combined = []", 'combined = ["torch"]')
    (project / "pyproject.toml").write_text(text.replace("branch =", 'context = "${HP_COVERAGE_CONTEXT}"\nbranch ='))
    for name, code in (("torch", "f(1)"), ("py312-torch214", "f(0)"), ("py310-torch210", "f(0)")):
        monkeypatch.setenv("HP_COVERAGE_CONTEXT", name)
        command("erase", name)
        measure(project, name, code)
        if name != "py310-torch210":  # whose tests never ended
            command("gate", name, "--", "a_part")
    assert "coverage of combined: 66.67 %" in "".join(command("combine")[1:])
    assert "coverage of combined: 100.00 %" in "".join(command("combine", "--versions")[1:])
    data = CoverageData(str(project / "coverage_reports" / "data" / "combined" / ".coverage"))
    data.read()
    assert data.measured_contexts() == {"torch", "py312-torch214"}


COMBINED = """
[tool.hyper_parallel.coverage.env.combined]
total = 60
exceptions = 2
[tool.hyper_parallel.coverage.env.combined.files]
"lib/*" = 90
"""


def test_every_file_has_its_floor_in_the_combined_report(project, command):
    """`combine` checks floors, exceptions and ratchet only over the data of all the named environments."""
    text = PYPROJECT.replace("combined = []", 'combined = ["torch", "mindspore"]')
    (project / "pyproject.toml").write_text(text + COMBINED)
    for name in ("torch", "mindspore"):
        command("erase", name)
        measure(project, name, "f(1)")
        command("gate", name)
    status, _, err = command("combine")
    assert status == 1
    missing = "missing lines: 4; missing branches: 2->4"
    assert f"FAILED: lib/shared.py: 66.67 % is below the floor of 90 %; {missing}\n" in err
    status, out, _ = command("combine", "torch")
    assert "not checked: floors and ratchet: they need the data of mindspore as well\n" in out

    command("erase", "mindspore")
    status, _, err = command("combine")
    assert status == 1
    assert "FAILED: no data of mindspore: its tests did not end; run `tox -e mindspore`\n" in err
    assert "coverage of combined: 66.67 % of lines and branches\n" in err
    measure(project, "mindspore", "f(1)")
    command("gate", "mindspore")

    baseline = project / "ci" / "coverage_baseline.json"
    baseline.parent.mkdir()
    excepted = {"exceptions": {"lib/shared.py": "needs a device"}}
    needless = {"exceptions": {**excepted["exceptions"], "lib/__init__.py": "is over"}}
    baseline.write_text(json.dumps({"combined": needless, "torch": {"files": {}}}))
    status, out, _ = command("combine", "--update-baseline")
    assert status == 0
    assert "not checked: needless exceptions, which reach their floor: lib/__init__.py\n" in out
    assert "held: exceptions: 2 files may be below their floor, each with its reason\n" in out
    written = json.loads(baseline.read_text())
    assert written == {
        "combined": {**excepted, "files": {"lib/__init__.py": 100.0, "lib/shared.py": 66.66}},
        "torch": {"files": {}},
    }

    written["combined"]["files"]["lib/shared.py"] = 80.0
    baseline.write_text(json.dumps(written))
    assert f"FAILED: lib/shared.py: fell from 80.00 % to 66.67 %; {missing}\n" in command("combine")[2]


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is not JSON: Expecting property name"),
        ('{"torch": {"lib/shared.py": 100.0}}', "torch must have `files` and `exceptions` only"),
        ('{"torch": []}', "torch must have `files` and `exceptions` only"),
        ('{"torch": {"exceptions": {"a.py": " "}}}', "torch: the exception of a.py has no reason"),
    ],
)
def test_a_broken_baseline_is_an_error(tmp_path, text, message):
    """A baseline that cannot be read, or an exception without a reason, must not turn a gate off."""
    path = tmp_path / "coverage_baseline.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}") + ":? " + re.escape(message)):
        read_baseline(path, "torch")


def test_the_index_says_what_was_skipped_and_why(project, command):
    """The page lists each environment with its verdict, and everything that was not run, omitted or skipped."""
    command("erase", "torch")
    measure(project, "torch")
    command("gate", "torch")
    (project / "reports").mkdir()
    (project / "reports" / "torch.xml").write_text(
        '<testsuite><testcase><skipped message="[no-device] needs 8"/></testcase></testsuite>'
    )
    status, out, _ = command("html")
    assert status == 0
    page = Path(out.strip()).read_text()
    for text in (
        '<a href="torch/html/index.html">lines</a>',
        "100.00 %",
        "mindspore: no report; the environment did not run",
        "torch: lib/other.py is omitted",
        "torch: 1 tests were skipped: [no-device] needs 8",
        "prefers-color-scheme: dark",
    ):
        assert text in page
    assert "lib/__init__.py" in page  # with its bar
    assert "://" not in page.replace(SVG, "")  # no external address, so that the page works without a network


def test_what_other_commands_reported_becomes_pages(project, command):
    """Reports on operators and on the verifier's power become pages beside the index, which links to them."""
    page = Path(command("html")[1].strip())
    assert "operators by framework and direction: not generated" in page.read_text()
    assert "API reference, from the docstrings (tox -e docs): not generated" in page.read_text()
    assert not (page.parent / "operators.html").exists()
    reports = project / "reports"
    reports.mkdir()
    counts = dict.fromkeys(("mutants", "killed", "equivalent", "survived"), 0)
    (reports / "operators-torch.json").write_text(json.dumps({"ok": True, "columns": ["forward"], "operators": []}))
    lists = {"kinds": {}, "operators": {}, "survivors": [], "equivalents": []}
    (reports / "mutation.json").write_text(json.dumps({**counts, **lists, "score": 0.0}))
    (page.parent / "my-model.html").write_text("a page of another command")
    assert command("html")[0] == 0
    assert '<a href="my-model.html">my model</a>' in page.read_text()
    assert '<a href="operators.html">' in page.read_text()
    assert '<a href="mutation.html">' in page.read_text()
    assert "no operator was checked" in (page.parent / "operators.html").read_text()
    assert "0 of 0 changed rules noticed" in (page.parent / "mutation.html").read_text()


def test_a_report_of_another_version_is_an_error(project, command):
    """A report without the page's keys is an error that names the file and the fix."""
    path = project / "reports" / "operators-torch.json"
    path.parent.mkdir()
    path.write_text("{}")
    status, out, err = command("html")
    command = "hyper-parallel verify ops --report operators-torch.json"
    message = f"{path} has no columns, operators: it is not a report of `{command}`, or another version wrote it"
    assert (status, out, err) == (2, "", f"python ci/workshop: error: {message}\n")


def test_the_contract_has_a_page(project, command):
    """Results of the platform contract become a page that the index links to; a broken result is named."""
    outcome = ContractOutcome("torch", "cpu", "simulated", 3, {"get_rank": "served"}, [], "today")
    path = outcome.write(project / "reports")
    status, out, _ = command("html")
    assert status == 0
    assert '<a href="contract.html">platform contract by framework' in Path(out.strip()).read_text()
    shown = Path(out.strip()).with_name("contract.html").read_text()
    assert "torch / cpu / simulated" in shown
    assert "http:" not in shown
    assert "https:" not in shown
    path.write_text("not data")
    status, _, err = command("html")
    assert status == 2
    assert f"{path} is not a result of `python ci/workshop contract`" in err


def test_half_a_data_file_is_red(project, command):
    """A rank with a broken data file counts as lost, although the coverage tool would skip the file."""
    command("erase", "torch")
    measure(project, "torch")
    data = project / "coverage_reports" / "data" / "torch"
    (data / ".coverage.host.pid999999.Xhalf").write_bytes(b"")
    (data / "ranks" / "999999").write_text("rank-3")
    status, _, err = command("gate", "torch")
    assert status == 1
    assert "left no coverage data: rank-3 (process 999999)" in err
    assert "1 data files are broken: .coverage.host.pid999999.Xhalf" in err


# Bad input


def test_a_run_without_data_is_an_error(command):
    """If nothing was measured, the gate exits with status 2 and the tool's own message."""
    command("erase", "torch")
    status, _, err = command("gate", "torch")
    assert status == 2
    assert "`coverage combine` failed: No data to combine" in err


def test_data_of_another_version_is_an_error(project, command):
    """A data file that cannot be read ends with status 2, never with a lower number."""
    command("erase", "torch")
    (project / "coverage_reports" / "data" / "torch" / ".coverage.host.pid1.Xabcdefx").write_text("not a database")
    status, _, err = command("gate", "torch")
    assert status == 2
    assert "failed: " in err


def test_data_of_another_format_is_an_error(project, command):
    """A data file of another format, which the coverage tool would skip with a warning, gives status 2."""
    command("erase", "torch")
    measure(project, "torch", "f(1)")
    measure(project, "torch", "f(0)")
    data = sorted((project / "coverage_reports" / "data" / "torch").glob(".coverage.*"))
    with contextlib.closing(sqlite3.connect(data[0])) as database, database:
        (here,) = database.execute("select version from coverage_schema").fetchone()
        database.execute("update coverage_schema set version = 99")
    status, out, err = command("gate", "torch")
    assert (status, out) == (2, "")
    assert err == (
        f"python ci/workshop: error: {data[0]} was written by another version of the coverage tool (format 99, here "
        f"{here}); run `python ci/workshop coverage erase torch` and the tests again\n"
    )


def test_two_runs_in_one_folder_are_refused(project, command):
    """While another run owns the folder, erase refuses; the leftovers of a dead one are taken over."""
    command("erase", "torch")
    owner = project / "coverage_reports" / "data" / "torch" / "owner"
    owner.write_text("1")
    status, _, err = command("erase", "torch")
    assert status == 2
    where = project / "coverage_reports"
    message = f"process 1 is writing coverage of torch in {where}: two runs cannot share it"
    assert err == f"python ci/workshop: error: {message}\n"
    for leftover in ("99999999", "", "half a num"):
        owner.write_text(leftover)
        assert command("erase", "torch")[0] == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["combine"], "there is no combined data of any environment"),
        (["combine", "torch"], "there is no combined data of torch"),
    ],
)
def test_input_that_makes_no_sense_is_an_error(command, arguments, message):
    """Invalid input gives status 2, the missing thing and the fix."""
    status, _, err = command(*arguments)
    assert status == 2
    assert message in err


def test_a_baseline_that_is_no_json_is_an_error(project, command):
    """A broken baseline must not turn the ratchet off."""
    (project / "ci").mkdir()
    (project / "ci" / "coverage_baseline.json").write_text("{")
    command("erase", "torch")
    measure(project, "torch")
    status, _, err = command("gate", "torch")
    assert status == 2
    assert "is not JSON" in err


def test_a_folder_that_cannot_be_written_is_an_error(project, command):
    """A report folder that is a file is an error of one line."""
    (project / "coverage_reports").write_text("")
    status, _, err = command("erase", "torch")
    assert status == 2
    assert err == f"python ci/workshop: error: {project / 'coverage_reports'} cannot be written: Not a directory\n"


@pytest.mark.parametrize("name", ["../outside", ".", "..", "", "data", "torch/html"])
def test_only_an_environment_is_erased(project, command, name):
    """A path in place of an environment's name is refused, and nothing is erased."""
    kept = [project / "outside" / "work", project / "coverage_reports" / "data" / "torch" / ".coverage"]
    for path in kept:
        path.parent.mkdir(parents=True)
        path.touch()
    status, _, err = command("erase", name)
    assert status == 2
    assert err == f"python ci/workshop: error: {name!r} is not the name of an environment, such as torch\n"
    assert all(path.exists() for path in kept)


def test_half_a_data_file_of_a_process_that_is_no_rank_is_reported(project, command):
    """A broken data file of a process that is not a rank is reported, and does not count as a lost rank."""
    command("erase", "torch")
    measure(project, "torch")
    (project / "coverage_reports" / "data" / "torch" / ".coverage.host.pid999999.Xhalf").write_bytes(b"")
    _, out, err = command("gate", "torch")
    assert "half data files of processes that are no ranks: .coverage.host.pid999999.Xhalf" in out + err
    assert "data files are broken" not in out + err
