"""The page over all reports: what was measured, what held, and what was skipped and why. No external assets."""

from __future__ import annotations

import html
import json
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import Any

from hyper_parallel.verify.coverage.settings import Settings
from hyper_parallel.verify.coverage.store import Store

__all__ = ["skipped_tests", "write_index"]

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --bad: #c62828; --good: #2e7d32; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff8a80; --good: #a5d6a7; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 68rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.bad { color: var(--bad); font-weight: 600; } .good { color: var(--good); }
"""


def write_index(store: Store, settings: Settings, planned: tuple[str, ...] = ()) -> Path:
    """Write ``coverage_reports/index.html``.

    Args:
        store: where the reports lie.
        settings: which environments have floors; those without a report are listed as not run.
        planned: more environments that were to run.
    """
    there = store.environments()
    combined = ["combined"] if (store.folder("combined") / "coverage.json").exists() else []
    wanted = [*settings.environments, *planned]
    absent = [name for name in dict.fromkeys(wanted) if name not in there]
    body = [
        "<h1>Coverage</h1>",
        "<p>Lines and branches together, over every process of an environment, ranks included.</p>",
        _table(store, [*there, *combined]),
        _other_reports(store),
        _left_out(store, settings, there, absent),
    ]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Coverage</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style></head>\n'
        f"<body>{''.join(body)}</body></html>\n"
    )
    path = store.reports / "index.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        msg = f"{path} cannot be written: {error.strerror}"
        raise ValueError(msg) from error
    return path


def _table(store: Store, names: list[str]) -> str:
    head = "<tr><th>environment</th><th>covered</th><th>ranks</th><th>gates</th><th>reports</th></tr>"
    rows = [_row(store, name) for name in names] or ['<tr><td colspan="5">nothing was measured</td></tr>']
    return f"<table><thead>{head}</thead><tbody>{''.join(rows)}</tbody></table>"


def _row(store: Store, name: str) -> str:
    path = store.folder(name) / "gate.json"
    verdict: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    total = f"{verdict['total']:.2f} %" if verdict else "?"
    links = f'<a href="{name}/html/index.html">lines</a> · <a href="{name}/coverage.xml">Cobertura</a>'
    cells = [
        f"<td>{html.escape(name)}</td>",
        f'<td class="number">{total}</td>',
        f'<td class="number">{verdict.get("ranks", "")}</td>',
        f"<td>{_gates(verdict)}</td>",
        f"<td>{links}</td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _gates(verdict: dict[str, Any]) -> str:
    if not verdict:
        return '<span class="bad">not gated</span>'
    failures = "".join(f'<br><span class="bad">{html.escape(one)}</span>' for one in verdict["failures"])
    head = '<span class="good">held</span>' if verdict["ok"] else '<span class="bad">FAILED</span>'
    unchecked = "".join(f"<br>not checked: {html.escape(one)}" for one in verdict["unchecked"])
    return head + failures + unchecked


def _other_reports(store: Store) -> str:
    """Links to whatever else lies beside the coverage: semantic coverage, mutation."""
    known = {"operators.html": "operators by framework and direction", "mutation.html": "power of the verifier"}
    items = [
        f'<a href="{name}">{text}</a>' if (store.reports / name).exists() else f"{text}: not generated"
        for name, text in known.items()
    ]
    rows = "".join(f"<li>{item}</li>" for item in items)
    return f"<h2>Other reports</h2><ul>{rows}</ul>"


def _left_out(store: Store, settings: Settings, there: list[str], absent: list[str]) -> str:
    items = [f"{name}: no report; the environment did not run, or failed before its gate" for name in absent]
    for name in there:
        omit = settings.environment(name).omit
        items += [f"{name}: {pattern} is omitted, for it cannot run there" for pattern in omit]
        for reason, count in sorted(skipped_tests(store.root / "reports" / f"{name}.xml").items()):
            items.append(f"{name}: {count} tests were skipped: {reason}")
    rows = "".join(f"<li>{html.escape(item)}</li>" for item in items) or "<li>nothing</li>"
    return f"<h2>What was skipped, and why</h2><ul>{rows}</ul>"


def skipped_tests(junit: Path) -> Counter[str]:
    """Reasons of skipped tests in a JUnit file, with their numbers; a file that is not there has none."""
    if not junit.exists():
        return Counter()
    cases = ET.parse(junit).iter("skipped")  # noqa: S314 - written by our own run
    return Counter((one.get("message") or "without a reason") for one in cases)
