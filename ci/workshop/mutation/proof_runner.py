"""Proves mutated rules: a changed row must lose its proof.

A mutant is *killed* if a row that it changes, or adds to a sample with proven rows, is not proven; *unproven* if the
rows that it changes have no proof to lose; *true* if what it claims is proven for all sizes, and the quick sweep finds
no wrong value; and it has *survived* if the sweep finds one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from hyper_parallel.core.shard.rule import Row
from hyper_parallel.platform.select import current_platform
from hyper_parallel.verify.ops.claims import claims
from hyper_parallel.verify.prove.operators import ProvenRow, SampleGraph, graphs_of, prove_sample_row
from hyper_parallel.verify.prove.plan import wrongly_reduced
from workshop.mutation.report import MutantResult
from workshop.mutation.rule_runner import OperatorMutants, run_one_of

if TYPE_CHECKING:
    from workshop.mutation.rule_mutants import Mutant

__all__ = ["run_proof_mutant"]


def run_proof_mutant(platform: str, op: str, seed: int) -> MutantResult:
    """Return the result of mutant ``name#number``, as ``run_rule_mutant`` does, by proofs."""
    return run_one_of(_ProofMutants, platform, op, seed)


class _ProofMutants(OperatorMutants):
    """All mutants of one operator, with its samples as graphs, and the proofs of its rows."""

    @cached_property
    def graphs(self) -> list[SampleGraph]:
        """The samples that could be traced."""
        return [made for made in graphs_of(current_platform(), self.op) if made.graph is not None]

    @cached_property
    def proven(self) -> dict[tuple[int, Row], bool]:
        """Whether each row of the unchanged rule is proven, by sample."""
        return {
            (made.number, row): _proof(made, row).level == "proven"
            for made in self.graphs for row in dict.fromkeys(made.answer.rows)
        }  # fmt: skip

    def judged(self, result: MutantResult, mutant: Mutant) -> MutantResult:
        """Return ``result`` with the outcome of ``mutant``; see the top of this file."""
        found = list(self._gradients(mutant) if mutant.change_claim is not None else self._rows(mutant))
        broken = next((why for why in found if why), "")
        if broken:
            return replace(result, outcome="killed", detail=broken)
        if all(why is None for why in found):
            return replace(result, outcome="unproven", detail="the rows that it changes have no proof")
        noticed = self.noticed(mutant)
        if noticed and None in found:
            return replace(result, outcome="unproven", detail=f"a row that it changes has no proof: {noticed}")
        if noticed:
            return replace(result, outcome="survived", detail=f"proven, and the quick sweep fails: {noticed}")
        return replace(result, outcome="true", detail="what it claims is proven, and the quick sweep agrees")

    def _rows(self, mutant: Mutant) -> Iterator[str | None]:
        """Yield for each changed row why it is not proven, empty if it is; None for rows that had no proof."""
        for made in self.graphs:
            assert mutant.change_strategies is not None
            answer = mutant.change_strategies(made.sample_call.call, made.answer)
            own = dict.fromkeys(made.answer.rows)
            new = [row for row in dict.fromkeys(answer.rows) if mutant.changes_adapter or row not in own]
            gone = [row for row in own if row not in answer.rows]
            if not self._had_proof(made, gone or list(own)):
                yield from [None] * len(new)
                continue
            changed = replace(made, answer=answer)
            for row in new:
                if mutant.changes_adapter and not self.proven[made.number, row]:
                    yield None
                    continue
                proof = _proof(changed, row)
                yield "" if proof.level == "proven" else f"{proof.row}: {proof.why}"

    def _had_proof(self, made: SampleGraph, rows: Sequence[Row]) -> bool:
        return any(self.proven[made.number, row] for row in rows)

    def _gradients(self, mutant: Mutant) -> Iterator[str | None]:
        """Yield for each claim with a proven row why its gradients are not reduced as they must be, or nothing."""
        rows = {(row.inputs, row.outputs) for (_, row), proven in self.proven.items() if proven}
        assert self.rule is not None
        for sample_call, strategies, _ in self._calls(self.rule, [(2,)], 1):
            for claim in claims(sample_call, strategies):
                (row,) = claim.rows
                if mutant.change_claim is None or (row.inputs, row.outputs) not in rows:
                    continue
                changed = mutant.change_claim(claim)
                if changed.choice.varying != claim.choice.varying:
                    wrong = wrongly_reduced(changed.choice, 0)
                    yield f"the gradient of operand {wrong[0]} is not reduced as it must be" if wrong else ""


def _proof(made: SampleGraph, row: Row) -> ProvenRow:
    return prove_sample_row(current_platform(), made, row)
