"""The results of mutation testing: of one mutant, and the score over all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["MutantResult", "Score"]


@dataclass(frozen=True)
class MutantResult:
    """What became of one mutant.

    Attributes:
        op: operator, and the number of the mutant among those drawn.
        platform: the framework.
        kind: what slipped.
        change: where.
        outcome: ``killed``, ``equivalent``, ``true`` (what it claims holds in the full mode), ``survived``, ``none``
            where the operator has no further mutant, or ``broken`` where the rule itself does not hold.
        detail: what noticed it, why it is equivalent, or what the full mode says.
        generated: number of mutants of the operator.
    """

    op: str
    platform: str
    kind: str = ""
    change: str = ""
    outcome: str = "none"
    detail: str = ""
    generated: int = 0

    @property
    def name(self) -> str:
        """The operator."""
        return self.op.partition("#")[0]

    def json(self) -> dict[str, Any]:
        """For the parent."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> MutantResult:
        """What :meth:`json` wrote."""
        return cls(**data)

    @classmethod
    def lost(cls, op: str, platform: str, died: str) -> MutantResult:
        """The process that ran it died, which nobody overlooks; one that was not done in time noticed nothing."""
        outcome = "survived" if died.startswith("did not finish") else "killed"
        return cls(op, platform, "death of the process", died.partition("\n")[0], outcome, "not finished")


class Score:
    """All verdicts.

    Args:
        platform: the framework.
        wanted: how many mutants were asked for.
        seed: what drew them.
    """

    def __init__(self, platform: str, wanted: int, seed: int) -> None:
        self.platform, self.wanted, self.seed = platform, wanted, seed
        self.verdicts: list[MutantResult] = []
        self.generated: dict[str, int] = {}
        self.interrupted = ""
        self.seconds = 0.0

    def add(self, verdict: MutantResult) -> None:
        """Count one."""
        self.generated[verdict.name] = max(verdict.generated, self.generated.get(verdict.name, 0))
        if verdict.outcome != "none":
            self.verdicts.append(verdict)

    @property
    def score(self) -> float:
        """Killed of those that claim what is false."""
        counts = Counter(one.outcome for one in self.verdicts)
        return counts["killed"] / max(len(self.verdicts) - counts["equivalent"] - counts["true"], 1)

    @property
    def strict(self) -> float:
        """Killed of those that are not equivalent, whether or not what they claim is true."""
        counts = Counter(one.outcome for one in self.verdicts)
        return counts["killed"] / max(len(self.verdicts) - counts["equivalent"], 1)

    def ok(self, floor: float) -> bool:
        """Whether enough were noticed of as many as were asked for, and every rule held to begin with."""
        return (
            not self.interrupted
            and len(self.verdicts) >= self.wanted
            and self.score >= floor
            and not any(one.outcome == "broken" for one in self.verdicts)
        )

    def json(self) -> dict[str, Any]:
        """For the page."""
        listed = {
            name: [
                {"op": one.name, "kind": one.kind, "change": one.change, key: one.detail}
                for one in self.verdicts
                if one.outcome == outcome
            ]
            for name, outcome, key in (
                ("survivors", "survived", "full"),
                ("true_claims", "true", "reason"),
                ("equivalents", "equivalent", "reason"),
                ("broken", "broken", "reason"),
            )
        }
        return {
            "platform": self.platform,
            "wanted": self.wanted,
            "seed": self.seed,
            "generated": sum(self.generated.values()),
            **_counts(self.verdicts),
            "score": round(self.score, 5),
            "strict": round(self.strict, 5),
            "seconds": round(self.seconds, 3),
            **({"interrupted": self.interrupted} if self.interrupted else {}),
            "kinds": _grouped(self.verdicts, "kind"),
            "operators": _grouped(self.verdicts, "name"),
            **listed,
        }

    def text(self) -> str:
        """For people."""
        data = self.json()
        lines = [
            f"survived    {one['op']}: {one['kind']}: {one['change']} (full mode: {one['full']})"
            for one in data["survivors"]
        ]
        lines.extend(f"broken      {one['op']}: the rule itself: {one['reason']}" for one in data["broken"])
        lines.append(
            f"{self.platform}: {data['mutants']} mutants of {data['generated']} (seed {self.seed}): "
            f"{data['killed']} killed, {data['survived']} survived, {data['equivalent']} equivalent, "
            f"{data['true']} true; score {100 * self.score:.2f} % ({100 * self.strict:.2f} % with true ones counted as "
            f"missed); {self.seconds:.0f} s"
        )
        if self.interrupted:
            lines.append(self.interrupted)
        return "\n".join(lines)


def _counts(verdicts: Sequence[MutantResult]) -> dict[str, int]:
    counts = Counter(one.outcome for one in verdicts)
    return {"mutants": len(verdicts), **{name: counts[name] for name in ("killed", "equivalent", "true", "survived")}}


def _grouped(verdicts: Sequence[MutantResult], by: str) -> dict[str, dict[str, int]]:
    names = sorted({getattr(one, by) for one in verdicts})
    return {name: _counts([one for one in verdicts if getattr(one, by) == name]) for name in names}
