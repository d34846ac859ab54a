"""`python ci/workshop self-test`: every injection is caught, and a miss is reported."""

import json

import pytest

from hyper_parallel.pytest_plugin.ranks import require_transport
from workshop.commands import main
from workshop.self_test import injections as self_test


# Simulated ranks of MindSpore take two minutes; every day PyTorch's show the same, and MindSpore's real ones.
@pytest.mark.parametrize("launch", ["simulated", "processes"])
def test_every_injection_is_caught(platform_name, launch, monkeypatch, capsys):
    """Wrong models, hangs, crashes, mismatches and lost coverage are caught; a run without a fault passes."""
    if launch == "processes":
        require_transport(platform_name)
    monkeypatch.delenv("HP_RANK_LEDGER", raising=False)  # ranks are killed on purpose
    status = main(["self-test", "--platform", platform_name, "--launch", launch, "--json"])
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["message"] for row in rows if not row["caught"]] == []
    assert status == 0
    names = {row["name"] for row in rows}
    expected = {"nothing (must pass)", "rank raises", "rank hangs", "mismatched reduction"}
    only = {"processes": {"rank calls os._exit", "rank gets SIGKILL", "lost coverage"}}
    assert expected | only.get(launch, {"wrong model: drop-allreduce"}) <= names


def test_a_miss_is_reported_and_is_the_exit_status(monkeypatch, capsys):
    """An injection that is not caught is named, and the status is 1."""
    injected = [
        self_test.Injection("a", lambda: (True, "reported\nmore")),
        self_test.Injection("b", lambda: (False, "nothing was noticed")),
    ]
    monkeypatch.setattr(self_test, "injections", lambda _platform, _launch: injected)
    monkeypatch.setattr("hyper_parallel.cli.verify_model.require_framework", lambda _name: None)
    assert main(["self-test", "--platform", "torch", "--launch", "simulated"]) == 1
    out = capsys.readouterr().out
    assert "MISSED" in out
    assert "b on torch (simulated): nothing was noticed" in out
    assert "1 of 2 as expected" in out


@pytest.mark.parametrize(
    "run, expected",
    [
        (lambda *_: None, "nothing was noticed"),
        (lambda *_: RuntimeError("rank 1 failed"), "was noticed, but the report lacks: culprit"),
    ],
)
def test_a_harness_that_is_blind_or_mute_fails_the_test(run, expected):
    """A run that does not fail, or whose error does not name the culprit, counts as missed."""
    caught, message = self_test._check_report(run, "torch", None, ("culprit",))
    assert not caught
    assert message.startswith(expected)


def test_an_interrupted_self_test_reports_its_progress(monkeypatch, capsys):
    """Ctrl-C between injections reports how many ran, and the status is not 0."""

    class Stopped:
        name = "stopped"

        def run(self):
            raise KeyboardInterrupt

    monkeypatch.setattr("workshop.self_test.command._platforms", lambda _: ["torch"])
    monkeypatch.setattr("workshop.self_test.injections.injections", lambda *_: [Stopped()] * 3)
    assert main(["self-test", "--launch", "simulated", "--json"]) == 130
    message = "partial report: 0 of 3 injections ran, 0 of them as expected"
    captured = capsys.readouterr()
    assert captured.err == f"python ci/workshop: interrupted: {message}\n"
    assert json.loads(captured.out) == {"ok": False, "interrupted": message}
