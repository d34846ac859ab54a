"""The results of mutation testing: of one mutant, and the score over all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["MutantResult", "Score"]


@dataclass(frozen=True)
class MutantResult:
    """The result of one mutant.

    Attributes:
        op: operator or module, and the number of the mutant in the shuffled order: ``add#3``.
        platform: the framework.
        kind: kind of change.
        change: the change, with its place.
        outcome: ``killed`` (noticed), ``equivalent``, ``true`` (its claims hold in the full mode, or are proven),
            ``unproven`` (proofs were asked for, and it changes no row that has one), ``survived``,
            ``none`` where there is no mutant of this number, or ``broken`` where the unchanged rule fails.
        detail: the failure that noticed it, why it is equivalent, or the result of the full mode.
        generated: number of mutants of the operator or module.
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
        """The operator or module."""
        return self.op.partition("#")[0]

    def json(self) -> dict[str, Any]:
        """Return the result for the parent process."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> MutantResult:
        """Return the result that :meth:`json` wrote."""
        return cls(**data)

    @classmethod
    def lost(cls, op: str, platform: str, died: str) -> MutantResult:
        """Return the result of a mutant whose process died: killed, unless it ran out of time."""
        outcome = "survived" if died.startswith("did not finish") else "killed"
        return cls(op, platform, "death of the process", died.partition("\n")[0], outcome, "not finished")


class Score:
    """The results of all mutants.

    Args:
        platform: the framework.
        wanted: number of mutants that were asked for.
        seed: of the order of mutants.
    """

    def __init__(self, platform: str, wanted: int, seed: int) -> None:
        self.platform, self.wanted, self.seed = platform, wanted, seed
        self.results: list[MutantResult] = []
        self.generated: dict[str, int] = {}
        self.interrupted = ""
        self.seconds = 0.0

    def add(self, result: MutantResult) -> None:
        """Count the result of one mutant."""
        self.generated[result.name] = max(result.generated, self.generated.get(result.name, 0))
        if result.outcome != "none":
            self.results.append(result)

    @property
    def score(self) -> float:
        """Share of mutants killed, of those with a false claim."""
        counts = Counter(result.outcome for result in self.results)
        others = counts["equivalent"] + counts["true"] + counts["unproven"]
        return counts["killed"] / max(len(self.results) - others, 1)

    @property
    def strict(self) -> float:
        """Share of mutants killed, of all that are not equivalent."""
        counts = Counter(result.outcome for result in self.results)
        return counts["killed"] / max(len(self.results) - counts["equivalent"] - counts["unproven"], 1)

    def ok(self, floor: float) -> bool:
        """Whether the score reaches ``floor``, all wanted mutants ran, and every unchanged rule held."""
        return (
            not self.interrupted
            and len(self.results) >= self.wanted
            and self.score >= floor
            and not any(result.outcome == "broken" for result in self.results)
        )

    def json(self) -> dict[str, Any]:
        """Return the report for the page."""
        listed = {
            name: [
                {"op": result.name, "kind": result.kind, "change": result.change, key: result.detail}
                for result in self.results
                if result.outcome == outcome
            ]
            for name, outcome, key in (
                ("survivors", "survived", "full"),
                ("true_claims", "true", "reason"),
                ("equivalents", "equivalent", "reason"),
                ("broken", "broken", "reason"),
            )
        }
        unproven = sum(result.outcome == "unproven" for result in self.results)
        return {
            "platform": self.platform,
            "wanted": self.wanted,
            "seed": self.seed,
            "generated": sum(self.generated.values()),
            **_counts(self.results),
            **({"unproven": unproven} if unproven else {}),
            "score": round(self.score, 5),
            "strict": round(self.strict, 5),
            "seconds": round(self.seconds, 3),
            **({"interrupted": self.interrupted} if self.interrupted else {}),
            "kinds": _grouped(self.results, "kind"),
            "operators": _grouped(self.results, "name"),
            **listed,
        }

    def text(self) -> str:
        """Return the report for a terminal."""
        data = self.json()
        lines = [
            f"survived    {survivor['op']}: {survivor['kind']}: {survivor['change']} (full mode: {survivor['full']})"
            for survivor in data["survivors"]
        ]
        lines.extend(f"broken      {broken['op']}: the rule itself: {broken['reason']}" for broken in data["broken"])
        lines.append(
            f"{self.platform}: {data['mutants']} mutants of {data['generated']} (seed {self.seed}): "
            f"{data['killed']} killed, {data['survived']} survived, {data['equivalent']} equivalent, "
            f"{data['true']} true; score {100 * self.score:.2f} % ({100 * self.strict:.2f} % with true ones counted as "
            f"missed); {self.seconds:.0f} s"
        )
        if "unproven" in data:
            lines.append(f"{data['unproven']} change no row that has a proof")
        if self.interrupted:
            lines.append(self.interrupted)
        return "\n".join(lines)


def _counts(results: Sequence[MutantResult]) -> dict[str, int]:
    counts = Counter(result.outcome for result in results)
    return {"mutants": len(results), **{name: counts[name] for name in ("killed", "equivalent", "true", "survived")}}


def _grouped(results: Sequence[MutantResult], by: str) -> dict[str, dict[str, int]]:
    names = sorted({getattr(result, by) for result in results})
    return {name: _counts([result for result in results if getattr(result, by) == name]) for name in names}
