#!/usr/bin/env python3
"""Fetch every pinned package once, and accept only files whose SHA-256 is written in `ci/hashes.json`.

    python ci/wheelhouse.py FOLDER          # fetch what the folder lacks, and check every file in it
    python ci/wheelhouse.py --add FOLDER    # the same, but write the hashes of files that are not known yet

`ci/bootstrap.py test` calls this, and everything after it is installed from the folder, without an index. pip fetches
from wherever it is configured to; nothing that it fetches is run or installed before it is checked: only wheels are
accepted, for a source archive would run code to tell its name. One name may have several hashes, since builds of one
version differ between indexes. `--add` never gives a known name another hash: that is done by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

CI = Path(__file__).resolve().parent
CONSTRAINTS, HASHES = CI / "constraints.txt", CI / "hashes.json"
COMPLETE = "complete"  # this file is written into the folder when pip has fetched everything
PIN = re.compile(r'(?P<name>[\w.-]+)==(?P<version>[\w.+!]+)(?: ; python_version (?P<sense><|>=) "3\.(?P<minor>\d+)")?')


class WheelhouseError(Exception):
    """A file is not what was pinned, or could not be fetched; the message says what to do."""


def pins(text: str, minor: int | None = None) -> list[tuple[str, str]]:
    """Return names, normalized, and versions of all lines, or of those for Python 3.``minor``.

    Raises:
        WheelhouseError: a line is neither a comment nor an exact pin.
    """
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        match = PIN.fullmatch(line.strip())
        if match is None:
            raise WheelhouseError(
                f"constraints.txt, line {number}: {line!r} is not of the form `name==version` or "
                '`name==version ; python_version < "3.11"`'
            )
        if minor is not None and match["sense"] and (minor < int(match["minor"])) is not (match["sense"] == "<"):
            continue
        found.append((normalized(match["name"]), match["version"]))
    return found


def normalized(name: str) -> str:
    """Return the one spelling of a package's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def identity(file: str) -> tuple[str, str]:
    """Return name and version of a wheel, without the part of the version that names a build.

    Raises:
        WheelhouseError: it is no wheel.
    """
    parts = file.removesuffix(".whl").split("-")
    if not file.endswith(".whl") or len(parts) not in {5, 6}:
        raise WheelhouseError(f"{file} is no wheel, and only wheels can be checked before they run code; remove it")
    return normalized(parts[0]), parts[1].partition("+")[0]


def sha256(path: Path) -> str:
    """Return the hash of a file in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def check(folder: Path, hashes: dict[str, list[str]], wanted: list[tuple[str, str]]) -> dict[str, str]:
    """Return the files that have no hash yet, with the computed ones; all others have been compared.

    Args:
        folder: the wheels.
        hashes: for each file's name, the accepted hashes.
        wanted: name and version of every pin, each of which must have a file.

    Raises:
        WheelhouseError: a file differs from its hashes, is no wheel or another version than pinned, or a pin has none.
    """
    files = sorted(path for path in folder.iterdir() if path.name != COMPLETE)
    versions = dict(wanted)
    new = {}
    for path in files:
        name, version = identity(path.name)
        if versions.get(name, version) != version:
            raise WheelhouseError(f"{path.name}: ci/constraints.txt pins {name}=={versions[name]}; remove {path}")
        here = sha256(path)
        if path.name not in hashes:
            new[path.name] = here
        elif here not in hashes[path.name]:
            raise WheelhouseError(
                f"{path.name} is not the file that was pinned: its sha256 is {here}, and ci/hashes.json accepts "
                f"{', '.join(hashes[path.name])}. Nothing was installed. Remove {path} and run this again; if it "
                "happens again, the index serves another file: find out why before you accept it in ci/hashes.json."
            )
    missing = sorted(set(wanted) - {identity(path.name) for path in files})
    if missing:
        lacking = ", ".join("==".join(pin) for pin in missing)
        raise WheelhouseError(f"{folder} has no wheel of {lacking}; remove {folder} and run this again")
    return new


def refuse(new: dict[str, str], folder: Path) -> None:
    """Do nothing if every file has a hash.

    Raises:
        WheelhouseError: with the computed hashes, and the command that adds them.
    """
    if new:
        lines = "".join(f"\n  {name} sha256:{digest}" for name, digest in new.items())
        raise WheelhouseError(
            f"ci/hashes.json has no hash of {len(new)} files that the index of this machine serves; "
            f"nothing was installed:{lines}\nIf you trust where they came from, accept them with:  "
            f"{sys.executable} {CI / 'wheelhouse.py'} --add {folder}"
        )


def fetch(folder: Path, minor: int) -> None:
    """Let pip download all pins for Python 3.``minor``, and what they need on this machine beyond the pins.

    Raises:
        WheelhouseError: pip failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    requirements = [f"{name}=={version}" for name, version in pins(CONSTRAINTS.read_text(), minor)]
    command = [
        sys.executable,
        "-I",
        "-m",
        "pip",
        "download",
        "--quiet",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
    ]
    extra = os.environ.get("HP_WHEELHOUSE")
    command += ["--find-links", extra] if extra else []
    if subprocess.run([*command, *requirements], check=False, stdout=2).returncode:
        raise WheelhouseError("pip could not fetch the pinned packages (its message is above)")
    (folder / COMPLETE).touch()


def main(arguments: list[str]) -> int:
    """Fetch and check; return 0, or 1 after a message, or 2 if the call makes no sense."""
    add = arguments[:1] == ["--add"]
    if len(arguments) != 1 + add:
        print(__doc__)
        return 2
    folder, minor = Path(arguments[-1]).resolve(), sys.version_info[1]
    try:
        hashes: dict[str, list[str]] = json.loads(HASHES.read_text())
        if not (folder / COMPLETE).exists():
            fetch(folder, minor)
        new = check(folder, hashes, pins(CONSTRAINTS.read_text(), minor))
        if not add:
            refuse(new, folder)
    except (WheelhouseError, OSError, ValueError) as error:
        print(f"wheelhouse: {error}", file=sys.stderr)
        return 1
    if new:
        # Files of versions that are no longer pinned leave; files that no line names, such as CUDA libraries, stay.
        every: dict[str, set[str]] = {}
        for name, version in pins(CONSTRAINTS.read_text()):
            every.setdefault(name, set()).add(version)
        kept = {file: known for file, known in hashes.items() if pinned(file, every)}
        known = {**kept, **{name: [digest] for name, digest in new.items()}}
        HASHES.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
        print(f"wheelhouse: added {len(new)} files to {HASHES}", file=sys.stderr)
    return 0


def pinned(file: str, every: dict[str, set[str]]) -> bool:
    """Return whether a file is of a pinned version, or of a package that no line names."""
    name, version = identity(file)
    return name not in every or version in every[name]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
