#!/usr/bin/env python3
"""Write what is installed for the Python that runs this as a CycloneDX document (version 1.5, JSON).

    python ci/sbom.py reports/sbom.json

Every distribution with its version, package URL, licence and what it requires. The file has no date and no random
number, so two runs in one environment write the same.
"""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

SPECIFICATION = "1.5"
_REQUIRED = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*")


def normal(name: str) -> str:
    """Return the name of a package as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def component(distribution: metadata.Distribution) -> dict[str, Any]:
    """Return the entry of one distribution."""
    name, version = normal(distribution.metadata["Name"]), distribution.version
    url = f"pkg:pypi/{name}@{version}"
    entry: dict[str, Any] = {"type": "library", "bom-ref": url, "name": name, "version": version, "purl": url}
    fields: Any = distribution.metadata  # an email.message.Message, of which its declared type shows a part
    licence = fields.get("License-Expression") or fields.get("License")
    if licence and "\n" not in licence:
        entry["licenses"] = [{"license": {"name": licence}}]
    return entry


def document() -> dict[str, Any]:
    """Return the document over every distribution that is installed.

    Raises:
        ValueError: a distribution has no name: its installation is damaged.
    """
    found: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        if not distribution.metadata["Name"]:
            raise ValueError(f"a distribution without a name is installed: {distribution.locate_file('')}")
        found.setdefault(normal(distribution.metadata["Name"]), distribution)
    components = {name: component(distribution) for name, distribution in sorted(found.items())}
    dependencies = [
        {
            "ref": components[name]["bom-ref"],
            "dependsOn": sorted(
                {components[other]["bom-ref"] for other in required(distribution) if other in components}
            ),
        }
        for name, distribution in sorted(found.items())
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "version": 1,
        "metadata": {"tools": {"components": [{"type": "application", "name": "hyper-parallel ci/sbom.py"}]}},
        "components": list(components.values()),
        "dependencies": dependencies,
    }


def required(distribution: metadata.Distribution) -> list[str]:
    """Return the names that a distribution requires, those of extras included."""
    matches = (_REQUIRED.match(text) for text in distribution.requires or ())
    return [normal(match[0]) for match in matches if match]


def main(args: list[str]) -> int:
    """Write the document; 0, or 2 if the call makes no sense or the file cannot be written."""
    if len(args) != 1:
        print("sbom: name one file: python ci/sbom.py reports/sbom.json", file=sys.stderr)
        return 2
    try:
        content = document()
        Path(args[0]).parent.mkdir(parents=True, exist_ok=True)
        Path(args[0]).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"sbom: {error}", file=sys.stderr)
        return 2
    print(f"{args[0]}: {len(content['components'])} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
