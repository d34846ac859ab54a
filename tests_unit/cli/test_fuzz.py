"""``hyper-parallel fuzz``: its output, reports, exit status and refusals."""

import json

import pytest

from hyper_parallel.cli import INTERRUPTED, main
from hyper_parallel.verify.fuzz import campaign
from hyper_parallel.verify.fuzz.report import Finding, FuzzReport

pytestmark = pytest.mark.platforms("torch")


def ran(capsys, *arguments):
    """Return the exit status and the output."""
    status = main(["fuzz", "--platform", "torch", *map(str, arguments)])
    return status, *capsys.readouterr()


def test_programs_run_in_a_worker_and_are_reported(capsys, tmp_path):
    """Counts are printed and written as JSON and as a page; programs that were compared and equal are a good run."""
    report, page = tmp_path / "fuzz.json", tmp_path / "fuzz.html"
    options = ["--seed", 7, "--count", 8, "--findings", tmp_path, "--report", report, "--html", page]
    status, out, _ = ran(capsys, *options)
    document = json.loads(report.read_text())
    assert (status, document["programs"], document["seed"]) == (0 if document["ok"] else 1, 8, 7)
    assert out.startswith("torch: 8 programs: ")
    assert "Random programs" in page.read_text()


@pytest.fixture
def found(monkeypatch):
    """Make every run end with a report; return the report."""
    report = FuzzReport(3, ("torch",), {"torch": campaign.Counter(equal=1)}, compared=2)
    monkeypatch.setattr(campaign, "run_campaign", lambda *_: report)
    return report


def test_the_exit_status_tells_what_was_found(capsys, found, tmp_path):
    """0 if all is well; 1 with a finding, or if nothing was compared; 130 after Ctrl-C."""
    folder = ["--findings", tmp_path]
    assert ran(capsys, *folder)[0] == 0
    found.findings.append(Finding("torch", "wrong", "text", 3, 0))
    status, out, _ = ran(capsys, *folder, "--json")
    assert (status, json.loads(out)["ok"]) == (1, False)
    found.findings.clear()
    found.compared = 0
    assert ran(capsys, *folder)[0] == 1
    found.note = "interrupted: a partial report"
    status, _, err = ran(capsys, *folder, "--report", tmp_path / "fuzz.txt")
    assert status == INTERRUPTED
    assert "interrupted: a partial report" in err
    assert (tmp_path / "fuzz.txt").read_text().endswith("interrupted: a partial report\n")


DTYPES = "bool, uint8, int8, int16, int32, int64, bfloat16, float16, float32, float64"


@pytest.mark.parametrize(
    "options, message",
    [
        (["--count", "0"], "--count: '0' must be an integer from 1 to 1000000000"),
        (["--minutes", "nan"], "--minutes: 'nan' must be a number above 0 and at most 10080"),
        (["--jobs", "-1"], "--jobs: '-1' must be an integer from 1 to 256"),
        (["--seed", "-1"], "--seed: '-1' must be an integer from 0 to 4294967295"),
        (["--first", "-1"], "--first: '-1' must be an integer from 0 to 1000000000"),
        (["--dtypes", "bool,int4"], f"--dtypes: 'int4' is none of {DTYPES}; did you mean int64 or int8?"),
        (["--dtypes", "bool,"], f"--dtypes: an empty name is none of {DTYPES}"),
    ],
)
def test_numbers_out_of_range_are_refused(capsys, options, message):
    """A number that makes no sense is an error before anything runs."""
    status, _, err = ran(capsys, *options)
    assert (status, err) == (2, f"hyper-parallel fuzz: error: argument {message} (see hyper-parallel fuzz --help)\n")


@pytest.mark.parametrize("option", ["--report", "--html", "--findings"])
def test_what_cannot_be_written_is_refused(capsys, option, tmp_path):
    """Reports and findings that cannot be written are an error before anything runs."""
    (tmp_path / "file").write_text("")
    status, _, err = ran(capsys, option, tmp_path / "file" / "below")
    assert status == 2
    assert f"{option} {tmp_path}/file/below cannot be written" in err
