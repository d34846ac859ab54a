"""Changes of the library's code that change nothing, and why; each found by hand after nothing had noticed it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyper_parallel.verify.ops.sources import SourceMutant

__all__ = ["EQUIVALENT", "Equivalent", "reason_of"]


@dataclass(frozen=True)
class Equivalent:
    """One change.

    Attributes:
        module: below ``hyper_parallel.core``.
        where: function, as ``Class.method``.
        slip: the expression before and after.
        reason: why nothing can notice it.
    """

    module: str
    where: str
    slip: str
    reason: str


EQUIVALENT: tuple[Equivalent, ...] = ()


def reason_of(mutant: SourceMutant) -> str:
    """Why ``mutant`` changes nothing, or nothing where no reason is known."""
    module = mutant.module.removeprefix("hyper_parallel.core.")
    key = (module, mutant.where, mutant.slip)
    return next((one.reason for one in EQUIVALENT if (one.module, one.where, one.slip) == key), "")
