"""Classes of errors of distributed training programs, which the comparison tells apart by testing the numbers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CAUSES", "Cause"]

CAUSES = {
    "missing-reduction": "a reduction is missing: the ranks' values add up to the single device's",
    "repeated-reduction": "a reduction is done twice",
    "wrong-axis": "a reduction runs over another axis of the mesh",
    "average-for-sum": "an average where a sum belongs",
    "sum-for-average": "a sum where an average belongs",
    "scaled-by-size": "scaled by the size of a world or group",
    "scaled-by-count": "scaled by a ratio of local to global counts",
    "components": "only some components are wrong",
    "permuted": "slices are permuted, or those of another rank",
    "replicas-differ": "replicas differ from each other",
    "random-shared": "ranks share random numbers that must differ",
    "random-differs": "ranks draw different random numbers where they must be equal",
    "norm-counted-twice": "a norm counts a parameter several times",
    "norm-local": "a norm counts only one rank's part",
    "stale": "a value of an earlier step",
    "not-updated": "a parameter was never updated",
    "no-gradient": "a parameter has no gradient on a rank",
    "unequal-calls": "ranks call different collectives",
    "data": "the inputs differ before any computation",
    "unexplained": "none of the known causes fits the numbers",
}
"""Every class with its meaning."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a value differs, with the numbers that show it.

    Attributes:
        kind: one of :data:`CAUSES`.
        axis: name of the group or mesh axis that it concerns; empty if none.
        evidence: a sentence with the measured distances: "sum over tp of the ranks' gradients equals the reference
            within 3e-15; each alone does not".
    """

    kind: str
    axis: str = ""
    evidence: str = ""
