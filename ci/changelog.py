"""Changelog fragments: one file per change, so that two changes never conflict.

    python ci/changelog.py check            # every fragment is well formed
    python ci/changelog.py build VERSION    # print the section for a release, from all fragments

A fragment is `ci/changelog.d/<what>.<kind>.md`: see the README there.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "changelog.d"
KINDS = {"breaking": "Breaking changes", "added": "Added", "changed": "Changed", "fixed": "Fixed"}
NAME = re.compile(rf"[a-z0-9][a-z0-9-]*\.(?P<kind>{'|'.join(KINDS)})\.md")
LONGEST = 600


def fragments(folder: Path) -> list[Path]:
    """List everything in the folder that should be a fragment."""
    return sorted(path for path in folder.iterdir() if path.name != "README.md" and not path.name.startswith("."))


def problem(path: Path) -> str | None:
    """Say what is wrong with one fragment, or return None."""
    if NAME.fullmatch(path.name) is None:
        return f"name it <what>.<kind>.md, lower case with hyphens, kind one of {', '.join(KINDS)}"
    text = path.read_text(encoding="utf-8").strip()
    if not text.endswith((".", "`", ")")):
        return "write whole sentences: it ends without a full stop"
    if text.startswith(("#", "- ", "* ")):
        return "write plain sentences: `build` adds the heading and the bullet"
    if len(text) > LONGEST:
        return f"{len(text)} characters; {LONGEST} are enough to say what changes for a user"
    return None


def problems(folder: Path) -> list[str]:
    """Check every fragment of a folder."""
    found = ((path, problem(path)) for path in fragments(folder))
    return [f"{path.name}: {text}" for path, text in found if text]


def build(folder: Path, version: str) -> str:
    """Write the section of one release, grouped by kind in the order of `KINDS`."""
    groups: dict[str, list[str]] = defaultdict(list)
    for path in fragments(folder):
        text = " ".join(path.read_text(encoding="utf-8").split())
        groups[path.name.split(".")[1]].append(f"- {text}")
    parts = [f"## {version}"]
    parts += [f"### {title}\n\n" + "\n".join(groups[kind]) for kind, title in KINDS.items() if groups[kind]]
    return "\n\n".join(parts) + "\n"


def main(args: list[str], folder: Path = FOLDER) -> int:
    """Check the fragments and, if asked, print the section."""
    if not (args == ["check"] or (len(args) == 2 and args[0] == "build")):
        print(__doc__, file=sys.stderr)
        return 2
    found = problems(folder)
    for text in found:
        print(f"changelog: {text}", file=sys.stderr)
    if found:
        return 1
    print(build(folder, args[1]) if args[0] == "build" else f"changelog: {len(fragments(folder))} fragments are fine")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
