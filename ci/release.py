#!/usr/bin/env python3
"""A release from the changelog's fragments: its version, its notes, and the files that change.

    python ci/release.py notes     # prints the next version and its notes; changes nothing
    python ci/release.py prepare   # writes them to reports/release-notes.md, CHANGELOG.md, pyproject.toml, CITATION.cff

The version follows from the fragments, as docs/stability.md says: one that is breaking or added makes a minor release,
and, from 1.0 on, a breaking one a major release; otherwise it is a patch release. The first release takes the version
that pyproject.toml has: there is no CHANGELOG.md, or its first section is still marked (unreleased). Such a section is
text of our own, which stays; fragments written after it follow it. Needs towncrier.
"""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("breaking", "added", "changed", "fixed")
_VERSION = re.compile(r'^version = "(\d+)\.(\d+)\.(\d+)"$', re.MULTILINE)
_CITED = re.compile(r"^version: .*$", re.MULTILINE)
_UNRELEASED = re.compile(
    r"\A# (?P<title>hyper-parallel \S+) \(unreleased\)\n(?P<text>.*?)(?=^# |\Z)", re.MULTILINE | re.DOTALL
)
_CITED_DATE = re.compile(r"^date-released: .*$", re.MULTILINE)


def kinds_of_fragments(folder: Path) -> set[str]:
    """Return the kinds of the changes since the last release."""
    return {path.suffixes[-2][1:] for path in folder.glob("*.*.md")}


def unreleased() -> str:
    """Return the text of the section of CHANGELOG.md that is marked (unreleased), or nothing."""
    path = ROOT / "CHANGELOG.md"
    match = _UNRELEASED.match(path.read_text(encoding="utf-8")) if path.exists() else None
    return "" if match is None else match["text"].strip() + "\n"


def next_version(current: tuple[int, int, int], kinds: set[str], *, released: bool) -> tuple[int, int, int]:
    """Return the version of the next release.

    Args:
        current: the version in pyproject.toml.
        kinds: kinds of the fragments.
        released: whether there was a release before, which has ``current``.

    Raises:
        ValueError: there is nothing to release, or a fragment of an unknown kind.
    """
    if not kinds:
        raise ValueError("no fragment in ci/changelog.d: there is nothing to release")
    if kinds - set(KINDS):
        raise ValueError(f"fragments of unknown kind: {', '.join(sorted(kinds - set(KINDS)))}")
    major, minor, patch = current
    if not released:
        return current
    if "breaking" in kinds and major:
        return major + 1, 0, 0
    if kinds & {"breaking", "added"}:
        return major, minor + 1, 0
    return major, minor, patch + 1


def version_in(text: str) -> tuple[int, int, int]:
    """Return the version in the text of pyproject.toml.

    Raises:
        ValueError: it has no line with a version of three numbers.
    """
    match = _VERSION.search(text)
    if match is None:
        raise ValueError('pyproject.toml has no line like version = "0.1.0"')
    return int(match[1]), int(match[2]), int(match[3])


def notes(version: str) -> str:
    """Return the section that is written already, and what towncrier makes of the fragments."""
    written = unreleased()
    if not kinds_of_fragments(ROOT / "ci" / "changelog.d"):
        return written
    command = ["towncrier", "build", "--draft", "--version", version]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=120)
    made = done.stdout[done.stdout.index("\n## ") + 1 :]
    return f"{written}\n{made}" if written else made


def prepare(version: str, text: str) -> None:
    """Write the files of a release; fragments become a section of CHANGELOG.md and are deleted."""
    target = ROOT / "reports" / "release-notes.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text(text, encoding="utf-8")
    project, citation = ROOT / "pyproject.toml", ROOT / "CITATION.cff"
    project.write_text(_VERSION.sub(f'version = "{version}"', project.read_text(encoding="utf-8")), encoding="utf-8")
    today = datetime.now(timezone.utc).date().isoformat()
    cited = _CITED.sub(f"version: {version}", citation.read_text(encoding="utf-8"))
    citation.write_text(_CITED_DATE.sub(f"date-released: {today}", cited), encoding="utf-8")
    changelog = ROOT / "CHANGELOG.md"
    if not unreleased():
        subprocess.run(["towncrier", "build", "--yes", "--version", version], cwd=ROOT, check=True, timeout=120)
        return
    older = _UNRELEASED.sub("", changelog.read_text(encoding="utf-8"), count=1)
    changelog.write_text(
        f"# hyper-parallel {version} ({today})\n\n{text.rstrip()}\n\n{older}".rstrip() + "\n", encoding="utf-8"
    )
    for path in (ROOT / "ci" / "changelog.d").glob("*.*.md"):
        path.unlink()


def main(arguments: list[str]) -> int:
    """Print or prepare the next release; return 2 after one line with the mistake."""
    if arguments not in (["notes"], ["prepare"]):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        current = version_in((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        released = (ROOT / "CHANGELOG.md").exists() and not unreleased()
        kinds = kinds_of_fragments(ROOT / "ci" / "changelog.d")
        numbers = current if unreleased() and not kinds else next_version(current, kinds, released=released)
        version = ".".join(map(str, numbers))
        text = notes(version)
        if arguments == ["prepare"]:
            prepare(version, text)
    except (ValueError, OSError, subprocess.SubprocessError) as error:
        print(f"release: {error}", file=sys.stderr)
        return 2
    print(f"version {version}\n\n{text}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
