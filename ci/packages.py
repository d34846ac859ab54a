#!/usr/bin/env python3
"""Build the source archive and the wheel from it, and try the wheel in a new environment without any framework.

    python ci/packages.py [FOLDER]      # both files go to FOLDER (dist)

The wheel is built from the source archive, so that what the archive lacks is noticed. In the new environment the
commands must start, say what is missing and how to get it, and import no framework. Needs build, virtualenv and pip.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "hyper_parallel"
IN_ARCHIVE = ("README.md", "LICENSE", "CITATION.cff", "SECURITY.md", "CONTRIBUTING.md", "pyproject.toml", "tox.ini")
IMPORTS = (
    "import sys, hyper_parallel, hyper_parallel.verify, hyper_parallel.cli; "
    "sys.exit(bool({'torch', 'mindspore'} & set(sys.modules)))"
)
LIMIT = 600.0


def main(arguments: list[str]) -> int:
    """Build, compare and try; return 0, or 1 after a line for each problem."""
    folder = Path(arguments[0] if arguments else ROOT / "dist").resolve()
    try:
        wheel, archive = build(folder)
        problems = [*differences(wheel, archive), *tried(wheel)]
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        problems = [f"{error}"]
    for problem in problems:
        print(f"packages: {problem}", file=sys.stderr)
    if not problems:
        print(f"packages: {wheel.name} and {archive.name} are complete, and the wheel runs without a framework")
    return 1 if problems else 0


def build(folder: Path) -> tuple[Path, Path]:
    """Return the paths of the new wheel and source archive; older ones in the folder are removed.

    Raises:
        ValueError: not exactly one of each was built.
    """
    for old in [*folder.glob("*.whl"), *folder.glob("*.tar.gz")]:
        old.unlink()
    environment = {**os.environ, "PIP_CONSTRAINT": str(ROOT / "ci" / "constraints.txt")}
    command = [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, env=environment, check=True, timeout=LIMIT)
    wheels, archives = list(folder.glob("*.whl")), list(folder.glob("*.tar.gz"))
    if len(wheels) != 1 or len(archives) != 1:
        raise ValueError(f"{folder} has {len(wheels)} wheels and {len(archives)} source archives, not one of each")
    return wheels[0], archives[0]


def differences(wheel: Path, archive: Path) -> list[str]:
    """Return what the wheel and the source archive lack, or should not have."""
    here = {
        str(path.relative_to(ROOT))
        for path in (ROOT / PACKAGE).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as opened:
        there = {name for name in opened.namelist() if ".dist-info/" not in name}
    with tarfile.open(archive) as opened_archive:
        archived = {name.partition("/")[2] for name in opened_archive.getnames()}
    problems = [f"{wheel.name} lacks {name}" for name in sorted(here - there)]
    problems += [f"{wheel.name} has {name}, which is not in the checkout" for name in sorted(there - here)]
    problems += [f"the description of {wheel.name} has the relative link {link}" for link in relative_links(wheel)]
    return problems + [f"{archive.name} lacks {name}" for name in sorted({*here, *IN_ARCHIVE} - archived)]


def relative_links(wheel: Path) -> list[str]:
    """Return the links and pictures of the wheel's description that lead nowhere on a package index."""
    with zipfile.ZipFile(wheel) as opened:
        metadata = next(name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        return re.findall(r"\]\((?!https?:)([^)]*)\)", opened.read(metadata).decode())


def tried(wheel: Path) -> list[str]:
    """Return what went wrong with the wheel in a new environment."""
    with tempfile.TemporaryDirectory() as folder:
        scripts = Path(folder) / "new" / "bin"
        subprocess.run([sys.executable, "-m", "virtualenv", "--quiet", str(scripts.parent)], check=True, timeout=LIMIT)
        install = ["install", "--quiet", "-c", str(ROOT / "ci" / "constraints.txt"), str(wheel)]
        subprocess.run([str(scripts / "python"), "-m", "pip", *install], check=True, timeout=LIMIT)
        return checked(scripts, Path(folder))


def checked(scripts: Path, folder: Path) -> list[str]:
    """Return the commands of an environment without frameworks that end otherwise than they should."""
    command = str(scripts / "hyper-parallel")
    problems = []
    for words, status, text in (
        ([command, "--help"], 0, "verify"),
        ([command, "verify", "model"], 2, "neither PyTorch nor MindSpore is installed"),
        ([command, "doctor"], 1, "pip install 'torch"),
        ([str(scripts / "python"), "-c", IMPORTS], 0, ""),
    ):
        done = run(words, folder)
        if done.returncode != status or text not in done.stdout + done.stderr:
            problems.append(
                f"{words[1:]}: status {done.returncode}, not {status} with {text!r}:\n{done.stdout}{done.stderr}"
            )
    findings = json.loads(run([command, "doctor", "--json"], folder).stdout)["findings"]
    wrong = [finding["what"] for finding in findings if finding["state"] == "wrong"]
    if wrong != ["frameworks"]:
        problems.append(f"doctor: {', '.join(wrong) or 'nothing'} is wrong, not the missing frameworks alone")
    return problems


def run(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of the new environment outside of the checkout, without this process's Python settings."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE"))}
    return subprocess.run(
        words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=LIMIT
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
