#!/usr/bin/env python3
"""Hold the packages of an SBOM against advisories in a file, without a network.

    python ci/advisories.py reports/sbom.json advisories.json

The SBOM is one of `ci/sbom.py`, or any CycloneDX JSON with package URLs of PyPI. Advisories are in the OSV format: a
file with one, with a list, or with one per line, or a folder of such files, as the PyPI advisory database is exported.
Exit status: 0 if no package is affected, 1 if one is or that cannot be decided, 2 if something cannot be read or
nothing was compared.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version


def packages(sbom: Path) -> dict[str, str]:
    """Return the versions of an SBOM's packages, by name.

    Raises:
        ValueError: it is no such document, or has no package of PyPI.
    """
    content = load(sbom)
    entries = content.get("components") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{sbom} is not a CycloneDX document: it has no list of components")  # noqa: TRY004 - one type
    urls = [str(entry.get("purl", "")) for entry in entries if isinstance(entry, dict)]
    named = [url.removeprefix("pkg:pypi/").split("?")[0].rpartition("@") for url in urls if url.startswith("pkg:pypi/")]
    versions: dict[str, str] = {canonicalize_name(unquote(name)): unquote(version) for name, _, version in named}
    if not versions:
        raise ValueError(f"{sbom} names no package of PyPI")
    return versions


def load(path: Path) -> Any:
    """Return the content of a JSON file, or of one with a document per line.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
        try:
            return json.loads(text)
        except ValueError:
            return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def advisories(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the advisories in a file or a folder; those that were withdrawn are left out.

    Raises:
        ValueError: a file cannot be read, or has something else.
    """
    for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
        content = load(file)
        for entry in content if isinstance(content, list) else [content]:
            if not isinstance(entry, dict) or "id" not in entry or not isinstance(entry.get("affected", []), list):
                raise ValueError(f"{file} has something that is no advisory in the OSV format")
            if not entry.get("withdrawn"):
                yield entry


def verdict(version: Version, affected: dict[str, Any]) -> bool | None:
    """Return whether an advisory's entry covers a version; None if that cannot be decided from it."""
    listed = affected.get("versions") or []
    ranges = [span for span in affected.get("ranges") or [] if span.get("type") in {"ECOSYSTEM", "SEMVER"}]
    if any(Version(text) == version for text in listed if _is_version(text)):
        return True
    if any(_covers(version, span.get("events") or []) for span in ranges):
        return True
    return False if listed or ranges else None


def _is_version(text: str) -> bool:
    try:
        Version(text)
    except InvalidVersion:
        return False
    return True


def _covers(version: Version, events: list[dict[str, str]]) -> bool:
    """Return whether a version lies in a range: after the last event that it has reached, it is affected or not."""
    state = False
    for kind, text in sorted(
        ((kind, text) for event in events for kind, text in event.items() if text == "0" or _is_version(text)),
        key=lambda pair: (Version(pair[1]), pair[0] != "introduced"),
    ):
        bound = Version(text)
        if kind == "introduced" and version >= bound:
            state = True
        elif (kind == "fixed" and version >= bound) or (kind == "last_affected" and version > bound):
            state = False
    return state


def findings(versions: dict[str, str], path: Path) -> tuple[list[str], int]:
    """Return a line per package that an advisory affects or may affect, and the number of advisories that were read."""
    lines, count = [], 0
    for advisory in advisories(path):
        count += 1
        for affected in advisory.get("affected", []):
            name = canonicalize_name(str(affected.get("package", {}).get("name", "")))
            if affected.get("package", {}).get("ecosystem") != "PyPI" or name not in versions:
                continue
            # The part after + names a build, such as cpu: it is no later version.
            answer = verdict(Version(Version(versions[name]).public), affected)
            if answer is not False:
                state = "is affected by" if answer else "may be affected, no version is named, by"
                summary = " ".join(str(advisory.get("summary", "")).split())
                lines.append(f"{name} {versions[name]} {state} {advisory['id']}{summary and ': '}{summary}")
    return sorted(set(lines)), count


def main(args: list[str]) -> int:
    """Compare, print what is affected, and return the exit status."""
    if len(args) != 2:
        print("advisories: name the SBOM and the file or folder of advisories", file=sys.stderr)
        return 2
    try:
        versions = packages(Path(args[0]))
        lines, count = findings(versions, Path(args[1]))
    except (ValueError, AttributeError, TypeError) as error:
        print(f"advisories: {error}", file=sys.stderr)
        return 2
    if not count:
        print(f"advisories: {args[1]} has no advisory: nothing was compared", file=sys.stderr)
        return 2
    print("\n".join([*lines, f"{len(versions)} packages, {count} advisories, {len(lines)} findings"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
