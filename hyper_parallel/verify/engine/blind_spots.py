"""A property of a case that hides errors, and what each of them hides."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BLIND", "BlindSpot"]

BLIND = {
    "equal-data": "a missing or doubled average over the axis",
    "equal-sizes": "a reduction over the wrong axis, a rank taken from the wrong group",
    "even-dims": "wrong boundaries of uneven shards, averages weighted wrongly",
    "constant-cotangents": "wrong scales and shapes in the backward",
    "constant-parameters": "errors in gradients that pass parameters of one value",
    "symmetric-inputs": "permuted rows, another rank's rows",
    "one-step": "stale values, weights that are not updated, replicas that drift",
    "equal-masks": "divisions by local instead of global counts",
    "contiguous-inputs": "code that ignores strides",
    "zero-gradients": "errors in gradients that are zero",
    "untrained-parameters": "errors in weights that no step changes",
}
"""What cannot be shown, by kind of blind spot."""


@dataclass(frozen=True)
class BlindSpot:
    """One property of a case that hides errors.

    Attributes:
        kind: one of :data:`BLIND`.
        subject: axis, parameter, input or output that has it; empty for the case as a whole.
        facts: what was found, with names and sizes.
        repair: what to change.
        refused: whether a program that is equal in such a case is not said to be verified.
    """

    kind: str
    subject: str
    facts: str
    repair: str
    refused: bool = False

    def __str__(self) -> str:
        """Return one line."""
        return f"{BLIND[self.kind]}: {self.facts}; {self.repair}"
