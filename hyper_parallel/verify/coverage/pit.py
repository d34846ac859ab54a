"""The mutation report in the XML of PIT, which Jenkins' coverage plugin reads and gates."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hyper_parallel.verify.report_files import write_text

__all__ = ["write_pit"]


def write_pit(report: Mapping[str, Any], path: Path) -> Path:
    """Write a ``<mutation>`` for every mutant that claims something false.

    Equivalent mutants and those that claim more, but truly, are left out, as in the report's score.

    Args:
        report: as ``hyper-parallel verify mutants`` writes it.
        path: the file to write.

    Raises:
        ValueError: it cannot be written.
    """
    root = ET.Element("mutations")
    for operator, number, status in _mutants(report):
        mutation = ET.SubElement(root, "mutation", detected=str(status == "KILLED").lower(), status=status)
        facts = {
            "sourceFile": "rules",
            "mutatedClass": "hyper_parallel.core.shard.rules",
            "mutatedMethod": operator,
            "methodDescription": "",
            "lineNumber": str(number),
            "mutator": "rule",
            "killingTest": "verify ops --quick" if status == "KILLED" else "",
            "description": "",
        }
        for name, text in facts.items():
            ET.SubElement(mutation, name).text = text
    return write_text(path, ET.tostring(root, "unicode", xml_declaration=True))


def _mutants(report: Mapping[str, Any]) -> Iterator[tuple[str, int, str]]:
    """Operator, number and status; the plugin tells two mutants of one method apart by their line, here a number."""
    survived = Counter(one["op"] for one in report["survivors"])
    for operator, counts in report["operators"].items():
        statuses = ["KILLED"] * counts["killed"] + ["SURVIVED"] * survived[operator]
        for number, status in enumerate(statuses, 1):
            yield operator, number, status
