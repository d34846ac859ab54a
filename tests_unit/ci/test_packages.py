"""`ci/packages.py`: what a wheel or a source archive lacks, and a command that ends otherwise, are named."""

import json
import subprocess
import tarfile
import zipfile

import pytest

DESCRIPTION = "Name: a\n\nSee [the pages](https://a.b/c), `docs/b.md`.\n"


@pytest.fixture
def packages(monkeypatch, tmp_path, script):
    """The script, on a checkout of two files."""
    module = script("packages")
    monkeypatch.setattr(module, "ROOT", tmp_path)
    (tmp_path / "hyper_parallel" / "__pycache__").mkdir(parents=True)
    (tmp_path / "hyper_parallel" / "__pycache__" / "a.pyc").write_text("")
    for name in ("a.py", "py.typed"):
        (tmp_path / "hyper_parallel" / name).write_text("")
    return module


def made(folder, wheel_names, archive_names):
    """Return a wheel and a source archive with files of these names."""
    with zipfile.ZipFile(folder / "a.whl", "w") as wheel:
        for name in wheel_names:
            wheel.writestr(name, DESCRIPTION if name.endswith("METADATA") else "")
    with tarfile.open(folder / "a.tar.gz", "w:gz") as archive:
        for name in archive_names:
            archive.addfile(tarfile.TarInfo(f"a-1/{name}"))
    return folder / "a.whl", folder / "a.tar.gz"


def test_missing_and_foreign_files_are_named(packages, tmp_path):
    """A wheel has the package's files and no other; a source archive has them and the project's own."""
    own = ["hyper_parallel/a.py", "hyper_parallel/py.typed"]
    wheel, archive = made(tmp_path, [*own, "a.dist-info/METADATA"], [*own, *packages.IN_ARCHIVE])
    assert packages.differences(wheel, archive) == []
    wheel, archive = made(
        tmp_path, [own[0], "tests_unit/b.py", "a.dist-info/METADATA"], [*own, *packages.IN_ARCHIVE[1:]]
    )
    assert packages.differences(wheel, archive) == [
        "a.whl lacks hyper_parallel/py.typed",
        "a.whl has tests_unit/b.py, which is not in the checkout",
        "a.tar.gz lacks README.md",
    ]


def test_links_that_a_package_index_cannot_follow_are_named(packages, monkeypatch, tmp_path):
    """The description on a package index has no link or picture relative to the checkout."""
    own = ["hyper_parallel/a.py", "hyper_parallel/py.typed"]
    monkeypatch.setitem(globals(), "DESCRIPTION", "Name: a\n\n![A page](docs/a.png) [b](docs/b.md#c) [d](https://e)\n")
    wheel, archive = made(tmp_path, [*own, "a.dist-info/METADATA"], [*own, *packages.IN_ARCHIVE])
    assert packages.differences(wheel, archive) == [
        "the description of a.whl has the relative link docs/a.png",
        "the description of a.whl has the relative link docs/b.md#c",
    ]


@pytest.mark.parametrize("wrong, problems", [
    (["frameworks"], []),
    (["frameworks", "numpy"], ["doctor: frameworks, numpy is wrong, not the missing frameworks alone"]),
    ([], ["doctor: nothing is wrong, not the missing frameworks alone"]),
])  # fmt: skip
def test_commands_are_tried(packages, monkeypatch, tmp_path, wrong, problems):
    """Each command must end with its status and say what is missing; doctor must find that and nothing else."""
    findings = [{"what": name, "state": "wrong"} for name in wrong]
    outputs = {"--help": (0, "verify"), "model": (2, "neither PyTorch nor MindSpore is installed"),
               "doctor": (1, "pip install 'torch>=2'"), "--json": (1, json.dumps({"findings": findings}))}  # fmt: skip

    def run(words, folder):
        status, text = outputs.get(words[-1], (0, ""))
        return subprocess.CompletedProcess(words, status, text, "")

    monkeypatch.setattr(packages, "run", run)
    assert packages.checked(tmp_path, tmp_path) == problems
    outputs["model"] = (1, "Traceback")
    first = packages.checked(tmp_path, tmp_path)[0]
    assert first.startswith("['verify', 'model']: status 1, not 2 with 'neither PyTorch nor MindSpore is installed':")


def test_a_failed_build_is_one_line(packages, monkeypatch, tmp_path, capsys):
    """A tool that fails, and a folder without both files, end with status 1 and a line."""
    monkeypatch.setattr(packages.subprocess, "run", lambda *_, **__: None)
    assert packages.main([str(tmp_path / "dist")]) == 1
    assert capsys.readouterr().err.endswith("has 0 wheels and 0 source archives, not one of each\n")


def test_a_command_runs_outside_of_the_checkout(packages, monkeypatch, tmp_path):
    """Settings of this process's Python do not reach the new environment."""
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    done = packages.run(["env"], tmp_path)
    assert done.returncode == 0
    assert "PYTHONPATH" not in done.stdout
