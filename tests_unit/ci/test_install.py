"""`ci/install.py`: environments share files through uv, with pip's settings; pip installs where uv does not."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "ci" / "install.py"


@pytest.fixture
def install(script):
    """The script as a module."""
    return script("install")


def test_the_environment_wins_over_files_and_install_over_global(install):
    """The order of the lines does not matter: the setting that pip itself would follow is the one handed over."""
    listing = ":env:.find-links='/here'\nglobal.find-links='/there'\ninstall.timeout='9'\nglobal.timeout='5'\n"
    assert install.settings(listing) == {"find-links": "/here", "timeout": "9"}


def test_settings_of_pip_become_options_of_uv(install):
    """Lists are split, switches are read as pip reads them, and settings unknown to uv are left out."""
    lists = {"find-links": "/a\n/b", "extra-index-url": "https://one https://two"}
    arguments = [*install.options({**lists, "pre": "0", "user": "1"})]
    two = ["--find-links", "/a", "--find-links", "/b", "--index", "https://one", "--index", "https://two"]
    assert arguments == two


def test_without_an_index_no_index_is_handed_over(install):
    """Where pip is told to ask no index, uv gets none either, though a file of pip's settings names some."""
    values = {"find-links": "/checked", "index-url": "https://one", "extra-index-url": "https://two", "no-index": "1"}
    assert install.options(values) == ["--find-links", "/checked", "--no-index"]


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Make a stand-in for uv that records its calls and exits with the given status; pip's calls are recorded too."""
    bin_folder, notes = tmp_path / "bin", tmp_path / "notes"
    bin_folder.mkdir()
    monkeypatch.setenv("PATH", str(bin_folder))
    monkeypatch.delenv("UV_CACHE_DIR", raising=False)
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    real = subprocess.run

    def run(command, **options):
        if "install" in command and "pip" in command and command[0] == sys.executable:
            notes.open("a").write("pip " + " ".join(command[5:]) + "\n")
            return subprocess.CompletedProcess(command, 0)
        return real(command, **options)

    monkeypatch.setattr(subprocess, "run", run)

    def make(status):
        program = bin_folder / "uv"
        program.write_text(f'#!/bin/sh\necho "uv $UV_CACHE_DIR $*" >> {notes}\nexit {status}\n')
        program.chmod(0o755)

    return make, notes


def test_uv_installs_with_links_into_a_cache_beside_the_environments(install, tool):
    """The cache lies on the disk of the environments, and pip's folder of wheels is used."""
    make, notes = tool
    make(0)
    assert install.main(["torch"]) == 0
    (line,) = notes.read_text().splitlines()
    assert line.startswith(f"uv {install.SHARED} pip install --python {sys.executable} --index-strategy")
    assert " --find-links /wheels " in line
    assert line.endswith(" torch")


@pytest.mark.parametrize("status", [None, 1])
def test_pip_installs_where_uv_is_missing_or_fails(install, tool, capfd, status):
    """Without uv, or if it fails, pip installs; a failure is reported."""
    make, notes = tool
    if status is not None:
        make(status)
    assert install.main(["-c", "pins", "torch"]) == 0
    assert notes.read_text().splitlines()[-1] == "pip --no-compile -c pins torch"
    assert ("uv failed" in capfd.readouterr().err) is (status is not None)
