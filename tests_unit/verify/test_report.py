"""The header of every report."""

import json
import platform
import re
import shutil
import subprocess

import pytest

import hyper_parallel
from hyper_parallel.cli import main
from hyper_parallel.verify import report as module
from hyper_parallel.verify.pages import page
from hyper_parallel.verify.report import RunHeader, command_line, report_json, report_text, run_header

KEYS = ["date", "revision", "versions", "platform", "command"]


def git(folder, *words):
    """Run git in a folder."""
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(
        [shutil.which("git"), "-C", str(folder), *identity, *words], check=True, capture_output=True, timeout=60
    )


def test_a_header_names_date_revision_versions_platform_and_command():
    """The header has the time in UTC, the revision, versions, the platform, the quoted command line and the seed."""
    content = RunHeader(("hyper-parallel", "verify", "a b"), 7).json()
    assert list(content) == [*KEYS, "seed"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", content["date"])
    assert content["revision"]
    assert content["versions"]["python"] == platform.python_version()
    assert "numpy" in content["versions"]
    assert platform.machine() in content["platform"]
    assert (content["command"], content["seed"]) == ("hyper-parallel verify 'a b'", 7)
    assert list(RunHeader(("a",)).json()) == KEYS


def test_a_header_names_the_card_and_that_its_products_do_not_round():
    """A run on a device says that TF32 and HF32 were off, in order with the other facts; one on CPU does not."""
    assert RunHeader(("a",), device="npu").json()["device"] == "npu; TF32 and HF32 switched off"
    assert RunHeader(("a",), device="npu").text().splitlines()[-1] == "# device: npu; TF32 and HF32 switched off"
    with command_line(["tool"], 7, "cuda"):
        assert list(json.loads(report_json({}))["header"]) == [*KEYS, "seed", "device"]


def test_every_kind_of_report_of_a_command_carries_the_same_header():
    """JSON, text and page have the header of the command; afterwards the former one is back."""
    with command_line(["tool", "a<b"]) as header:
        assert run_header() is header
        assert json.loads(report_json({"ok": True})) == {"header": header.json(), "ok": True}
        assert json.loads(report_json([1])) == {"header": header.json(), "rows": [1]}
        lines = report_text("body").splitlines()
        assert [line.split(":")[0] for line in lines] == [*(f"# {key}" for key in KEYS), "body"]
        shown = page("t", "b")
        for text in (header.date, header.revision, header.platform, "tool &#39;a&lt;b&#39;"):
            assert text in shown
    assert run_header() is not header


def test_a_revision_is_a_commit_and_says_that_files_differ(tmp_path, monkeypatch):
    """In a checkout the revision is the commit, with a plus where files differ; elsewhere it is the version."""
    if shutil.which("git") is None:
        pytest.skip("[no-tool] git is not installed")
    assert module._commit(tmp_path) == ""
    git(tmp_path, "init")
    assert module._commit(tmp_path) == ""
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "a")
    assert re.fullmatch(r"[0-9a-f]{12,}", module._commit(tmp_path))
    (tmp_path / "a").write_text("2")
    assert re.fullmatch(r"[0-9a-f]{12,}\+", module._commit(tmp_path))
    monkeypatch.setattr(module.shutil, "which", lambda _: None)
    assert RunHeader(()).revision == f"version {hyper_parallel.__version__}"


def test_a_package_that_is_not_installed_has_no_version():
    """A package without metadata is left out."""
    assert module._version("no-such-package-of-this-name") is None


def test_the_command_prints_its_version(capsys):
    """``--version`` prints name and version and ends with status 0."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"hyper-parallel {hyper_parallel.__version__}\n"


def test_git_that_fails_is_no_revision(tmp_path, monkeypatch):
    """If git cannot be run, there is no commit."""
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(module.shutil, "which", lambda _: str(tmp_path / "nosuch"))
    assert module._commit(tmp_path) == ""


def test_a_framework_that_is_newer_than_tested_is_said_once():
    """A report of a framework that no suite has seen says so, and others say nothing."""
    header = RunHeader(("hyper-parallel",))
    vars(header)["versions"] = {"python": "3.11.7", "torch": "2.99.0", "mindspore": "2.10.0"}
    text = "torch 2.99.0 is newer than 2.14, the newest that this version of hyper_parallel was tested on"
    assert header.json()["untested"] == text
    assert header.text().count(text) == 1
    header.versions["torch"] = "2.13.0"
    assert "untested" not in header.json()
