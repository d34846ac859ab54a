"""Classes of errors of distributed training programs, which the comparison distinguishes by numbers."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CAUSES", "Cause"]

CAUSES = {
    "missing-reduction": "each rank has only the value of its own shard or samples; it was not reduced over the ranks",
    "repeated-reduction": "a reduction is done twice, or ranks with the same samples add up their gradients",
    "wrong-axis": "a reduction runs over the wrong axis of the mesh",
    "average-for-sum": "an average where a sum belongs",
    "sum-for-average": "a sum where an average belongs",
    "scaled-by-size": "wrong by a factor that is the size of the world or a group",
    "scaled-by-count": "divided by a local count where the global one belongs, or the other way around",
    "scaled": "wrong by a factor that no size or count explains",
    "components": "elements are wrong, and not all by the same factor",
    "boundary": "only rows at the border of a rank's shard are wrong: a neighbour's rows are missing or wrong",
    "permuted": "right values in the wrong place: permuted slices, or those of another rank",
    "replicas-differ": "replicas differ from each other",
    "random-shared": "ranks draw the same random numbers where they must differ",
    "random-differs": "ranks draw different random numbers where they must be equal",
    "norm-counted-twice": "a norm counts a parameter several times",
    "norm-local": "a norm counts only the shards of one rank",
    "micro-batches-lost": "gradients of some micro-batches are lost before the optimizer's step",
    "stale": "a value from another step or call is used or added",
    "not-restored": "after a restart, a value is not the one that the program had saved",
    "not-updated": "a parameter was never updated",
    "skipped-step": "ranks skip an optimizer step that the single device takes",
    "untied": "one weight shared by two modules is two weights on the ranks",
    "optimizer": "gradients and states are right, but the optimizer's step is wrong",
    "padding": "rows that pad a parameter take part in the computation",
    "backward": "the forward is right, but gradients are wrong from one module back to the first",
    "loss": "every output is right, but the loss is not: its formula or its targets",
    "auxiliary-loss": "auxiliary loss of the rank's own tokens: its mean over the ranks is not the loss of all tokens",
    "targets": "the targets that enter the loss are not the single device's",
    "hidden": "a mask hides other attention scores than on the single device",
    "no-gradient": "a parameter has no gradient on some ranks",
    "dtype": "a value does not have its declared dtype",
    "samples-repeated": "a sample is drawn twice in one epoch",
    "samples-lost": "a sample is drawn by no rank in an epoch",
    "unequal-calls": "ranks call different collectives",
    "other-weights": "the runs start from different weights",
    "other-samples": "the runs train on different samples in the first step",
    "data": "the ranks train on different data from the single device",
    "unexplained": "no known cause fits the numbers",
}
"""Every class and its meaning."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of a difference, with the numbers that support it.

    Attributes:
        kind: one of :data:`CAUSES`.
        axis: name of the mesh axis or group over which the error occurs; empty if there is none.
        evidence: a sentence with the measured distances: "sum over tp of the ranks' gradients equals the reference
            within 3e-15; each alone does not".
    """

    kind: str
    axis: str = ""
    evidence: str = ""

    def __str__(self) -> str:
        """Return kind, axis and meaning, in one line."""
        axis = f" over {self.axis}" if self.axis else ""
        return f"{self.kind}{axis}: {CAUSES[self.kind]}"
