"""What became of a program."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FINDINGS", "OUTCOMES", "Outcome"]

OUTCOMES = ("equal", "refused", "refused by both", "accepted", "wrong", "internal error", "hang")
"""Results are the single device's; the library refused in words; the single device refuses, and so does the library;
the single device refuses, the library does not, and there is nothing to compare with; a value differs; an error that is
no refusal; ranks that wait for each other, do not call the same collectives, or do not end."""

FINDINGS = ("wrong", "internal error", "hang")
"""The outcomes that are defects."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of one program.

    Attributes:
        kind: one of :data:`OUTCOMES`.
        text: the first difference, or the error.
        compared: number of results that were compared on all ranks.
        gradients: how many of them are gradients.
        exact: whether they were compared to the bit.
        first: number of the first tensor that differs, -1 if none.
    """

    kind: str
    text: str = ""
    compared: int = 0
    gradients: int = 0
    exact: bool = False
    first: int = -1

    @property
    def is_finding(self) -> bool:
        """Whether it is a defect."""
        return self.kind in FINDINGS
