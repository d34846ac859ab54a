"""Results of an audit of another library's distributed tensors: counts, findings, and programs that reproduce them."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from hyper_parallel.transport.processes import python_command

__all__ = ["OUTCOMES", "TARGETS", "WORLDS", "AuditFinding", "OperatorAudit", "Target", "confirm", "summary"]


class Target(NamedTuple):
    """A library to audit.

    Attributes:
        framework: name of the framework that the library belongs to.
        peer: module with the class ``Peer``, which wraps the library, and the function ``public_calls``.
        reproducer: module with the functions that write programs; run as a script, it confirms them.
    """

    framework: str
    peer: str
    reproducer: str


TARGETS = {
    "torch-dtensor": Target(
        "torch",
        "hyper_parallel.verify.frameworks.torch.torch_dtensor_audit",
        "hyper_parallel.verify.frameworks.torch.torch_dtensor_reproducer",
    )
}

WORLDS = (2, 3)
"""World sizes that every sample runs on."""

OUTCOMES = ("crash", "wrong", "plain", "rejects", "ok")
"""Outcomes of one tuple of placements: unexpected error, wrong value, plain result, refusal, correct; worst first."""

_CONFIRMERS = 2


@dataclass
class AuditFinding:
    """The first failure of one kind in an operator.

    Attributes:
        kind: ``crash``, ``wrong`` or ``plain``.
        text: sample, sizes, world, placements, and what went wrong.
        world: number of ranks.
        error: name of the exception with which a program ends if it reproduces the failure.
        programs: candidate programs: the call alone, then the call after each earlier call, because the failure may be
            caused by what the library cached in an earlier call.
        program: the shortest candidate, or the one that reproduced the failure.
        printed: what that program printed on real processes; empty if none failed.
    """

    kind: str
    text: str
    world: int
    error: str
    programs: list[str] = field(default_factory=list)
    program: str | None = None
    printed: str = ""

    def lines(self) -> list[str]:
        """Return the finding as lines of text."""
        text = [f"    {self.kind}: {self.text}"]
        if self.program is None:
            return [*text, "    no program of 15 lines shows it"]
        seen = f"prints {self.printed}"[:200] if self.printed else "did not fail on real processes by itself"
        return [*text, f"    reproducer, {seen}", *(f"        {line}" for line in self.program.split("\n"))]


@dataclass
class OperatorAudit:
    """The audit of one operator.

    Attributes:
        op: canonical name.
        spellings: number of samples per public function that was called.
        counts: number of tuples of placements by outcome, see :data:`OUTCOMES`.
        backward: number of correct tuples of placements whose gradients were compared too.
        findings: the first failure of each kind, in outputs and in gradients.
        skipped: samples and placements that were not tried, by reason.
        exempt: the reason why the operator is not part of the audit; else empty.
    """

    op: str
    spellings: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    backward: int = 0
    findings: list[AuditFinding] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    exempt: str = ""

    @property
    def outcome(self) -> str:
        """The most severe outcome; ``exempt`` or ``unexercised`` if nothing was tried."""
        if self.exempt:
            return "exempt"
        return next((outcome for outcome in OUTCOMES if self.counts[outcome]), "unexercised")

    @property
    def holds(self) -> bool:
        """Whether something was tried, and every result was correct or refused."""
        return self.outcome in {"ok", "rejects", "exempt"}

    def text(self) -> str:
        """Return one line for the operator, and for each finding a paragraph with a program."""
        counts = (
            ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items())) or self.exempt or "no check"
        )
        spelled = f" ({', '.join(sorted(self.spellings))})" if self.spellings else ""
        return "\n".join(
            [
                f"{self.outcome:<12}{self.op}{spelled}: {counts}",
                *(f"    not tried: {reason} ({count})" for reason, count in self.skipped.items()),
                *(line for finding in self.findings for line in finding.lines()),
            ]
        )

    def json(self) -> dict[str, Any]:
        """Return the audit as a JSON object."""
        counters = {name: dict(getattr(self, name)) for name in ("spellings", "counts", "skipped")}
        findings = [asdict(finding) for finding in self.findings]
        return {**vars(self), **counters, "findings": findings, "outcome": self.outcome}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> OperatorAudit:
        """Rebuild the audit from the JSON object that a worker sent."""
        fields = {name: value for name, value in data.items() if name != "outcome"}
        counters = {name: Counter(fields[name]) for name in ("spellings", "counts", "skipped")}
        return cls(**{**fields, **counters, "findings": [AuditFinding(**item) for item in fields["findings"]]})

    @classmethod
    def lost(cls, op: str, platform: str, died: str) -> OperatorAudit:
        """Return the audit of an operator whose process died."""
        del platform
        return cls(op, counts=Counter(crash=1), findings=[AuditFinding("crash", f"its process {died}", 0, "")])


def confirm(target: str, audits: Sequence[OperatorAudit]) -> None:
    """Run the programs of every finding on real processes, and keep the first program that fails as expected."""
    findings = [finding for audit in audits for finding in audit.findings if finding.programs]
    shares = [findings[start::_CONFIRMERS] for start in range(_CONFIRMERS)]
    with ThreadPoolExecutor(_CONFIRMERS) as pool:
        list(pool.map(lambda share: _confirm(TARGETS[target], share), shares))


def _confirm(target: Target, findings: Sequence[AuditFinding]) -> None:
    lines = [
        json.dumps({"programs": finding.programs, "world": finding.world, "error": finding.error})
        for finding in findings
    ]
    if not lines:
        return
    ended = subprocess.run(  # noqa: S603 - this interpreter, this package
        python_command(target.reproducer), input="\n".join(lines) + "\n", stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env={"OMP_NUM_THREADS": "1", **os.environ}, check=False,
    )  # fmt: skip
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    for number, finding in enumerate(findings):
        answer = answers[number] if number < len(answers) else None
        finding.program = finding.programs[0 if answer is None else answer["index"]]
        finding.printed = "" if answer is None else answer["printed"]


def summary(target: str, audits: Sequence[OperatorAudit]) -> str:
    """Return the numbers of operators and placements by outcome, and the operators that were not exercised."""
    outcomes = Counter(audit.outcome for audit in audits)
    checks = sum((audit.counts for audit in audits), Counter[str]())
    operators = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
    placements = ", ".join(f"{count} {name}" for name, count in checks.most_common())
    backward = sum(audit.backward for audit in audits)
    worlds = " and ".join(map(str, WORLDS))
    lines = [
        f"{target}: {len(audits)} operators ({operators})",
        f"{sum(checks.values())} placements on worlds of {worlds}: {placements or 'none'}; {backward} with gradients",
    ]
    unexercised = [audit.op for audit in audits if audit.outcome == "unexercised"]
    if unexercised:
        lines.append(f"not exercised: {', '.join(unexercised)}")
    samples = sum((audit.skipped for audit in audits), Counter[str]())
    if samples:
        lines.append(f"not tried: {sum(samples.values())} samples or placements, by reason in the report")
    return "\n".join(lines)
