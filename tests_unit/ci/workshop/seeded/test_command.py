"""`python ci/workshop seeded`: bugs are found in the reduced models, and what is not found is reported."""

import json
import re

import pytest

from workshop.commands import main
from workshop.seeded import command
from workshop.seeded.cases import CASES
from workshop.seeded.measurement import PROGRAM, Outcome, outcome, reduced


def test_every_bug_is_one_of_the_program():
    """The program has each bug that is listed, and lists have each bug of the program once."""
    listed = [bug for case in CASES.values() for bug in case.bugs]
    assert sorted(listed) == sorted(set(re.findall(r'bug\("([a-z-]+)"\)', PROGRAM.read_text(encoding="utf-8"))))


def test_reduced_models_have_the_structure_that_bugs_need():
    """Stages do not start periods, several ranks share one of several key heads, and experts have several copies."""
    small = {name: reduced(case) for name, case in CASES.items()}
    assert small["hybrid"].config["num_hidden_layers"] // small["hybrid"].mesh["pp"] % 4
    assert 1 < small["dense"].config["num_key_value_heads"] < small["dense"].mesh["tp"]
    assert small["experts"].mesh["dp"] == 2 * small["experts"].mesh["ep"]


@pytest.mark.sweep  # two runs of eight ranks
@pytest.mark.platforms("torch")
@pytest.mark.parametrize("bug, status", [("", 0), ("window-of-one-part", 1)])
def test_a_bug_is_found_in_a_reduced_model(bug, status):
    """The reduced model passes, and fails with a bug."""
    found = outcome("context", bug, "reduced")
    assert found.status == status, found
    assert found.as_expected


@pytest.fixture
def pretended(monkeypatch):
    """Replace verifications by outcomes: everything is as expected but the names that are passed."""

    def replace(*unexpected):
        def run(case, bug, size):
            right = (case, bug, size) not in unexpected
            return Outcome(case, bug, size, 8, int(bool(bug) == right), "gradient embedding", 30.0)

        monkeypatch.setattr(command, "outcome", run)

    return replace


def test_what_only_the_full_models_show_is_named(pretended, capsys, tmp_path):
    """One bug of twelve is too many; it is named, and the report has every outcome."""
    pretended(("hybrid", "norm-of-the-ends", "reduced"))
    report = tmp_path / "seeded.json"
    assert main(["seeded", "--case", "hybrid", "--report", str(report)]) == 1
    out = capsys.readouterr().out
    assert "full: found, 30 s" in out
    assert "reduced: MISSED, 30 s" in out
    assert "12 of 12 bugs found in the full models in 6 minutes, 11 of 12 bugs found in the reduced" in out
    assert "found in the full models only: norm-of-the-ends" in out
    content = json.loads(report.read_text())
    assert (content["seeded"], content["found"], content["missed"]) == (
        12, {"full": 12, "reduced": 11}, ["norm-of-the-ends"],
    )  # fmt: skip
    assert len(content["outcomes"]) == 26


def test_bugs_that_no_model_shows_do_not_count(pretended, capsys):
    """A bug that the full model does not show either is no fault of the reduction; two of 50 are within 5 %."""
    pretended(("dense", "tied-not-reduced", "full"), ("dense", "tied-not-reduced", "reduced"))
    assert main(["seeded", "--case", "dense"]) == 0
    assert "14 of 15 bugs found in the reduced models" in capsys.readouterr().out
    pretended(("dense", "tied-not-reduced", "reduced"), ("hybrid", "norm-of-the-ends", "reduced"))
    assert main(["seeded", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["found"] == {"full": 50, "reduced": 48}


def test_a_right_program_that_fails_is_an_error(pretended, capsys):
    """The program without a bug must pass in both sizes."""
    pretended(("experts", "", "reduced"))
    assert main(["seeded", "--case", "experts", "--bug", "router-gradient-not-reduced"]) == 1
    assert "FAILED: gradient embedding" in capsys.readouterr().out
