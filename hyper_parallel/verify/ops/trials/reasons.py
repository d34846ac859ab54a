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


def _of(module: str, where: str, reason: str, *slips: str) -> tuple[Equivalent, ...]:
    return tuple(Equivalent(module, where, slip, reason) for slip in slips)


_UNFUSED = "only speed: the call is made by the general closure instead of the fused one"
_ASKED_AGAIN = "only speed: local_for, which is asked then, looks at both"

EQUIVALENT: tuple[Equivalent, ...] = (
    *_of("shard.entry", "Binder.bind", "only speed: names that are all known are renamed to themselves",
         "kwargs.keys() <= self.parameters.keys() -> kwargs.keys() < self.parameters.keys()"),
    *_of("shard.dispatch", "Dispatcher.binary.call", "only speed: dispatch makes the same key",
         "of in loose -> of not in loose"),
    *_of("shard.executor", "compile_plan", _UNFUSED,
         "fetch is _LOCAL or fetch is _same -> fetch is _LOCAL and fetch is _same",
         "fetch is _LOCAL -> fetch is not _LOCAL"),
    *_of("shard.executor", "_fused", _UNFUSED,
         "[True] -> [False]", "[True, False] -> [False, False]", "[True, False] -> [True, True]"),
    *_of("shard.executor", "_varying_fetch.enter", _ASKED_AGAIN,
         "needs(local) and enabled() -> needs(local) or enabled()"),
    *_of("shard.executor", "_canonical", "only speed: constants are filled in at each call, as for several tensors",
         "by_value or not scalars -> by_value and (not scalars)"),
    *_of("shard.executor", "_canonical", "only speed: arguments without containers are walked like those with",
         "type(value) is Ref or not isinstance(value, (list, tuple)) -> "
         "type(value) is Ref and (not isinstance(value, (list, tuple)))"),
    *_of("shard.executor", "_canonical.call", "only speed: numbers that the key holds are read from the call again",
         "scalars and (not by_value) -> scalars or not by_value"),
    *_of("dtensor.search", "search", "of two plans of one price the other is taken", "price < bound -> price <= bound"),
    *_of("shard.strategy", "_never_empty", "one element does not divide by what cuts twice", "size > 0 -> size > 1"),
    *_of("dtensor.redistribute", "_resumed", "only speed: a node is recorded that no gradient reaches",
         "platform.needs_grad(grad) and platform.grad_enabled() -> "
         "platform.needs_grad(grad) or platform.grad_enabled()"),
)  # fmt: skip


def reason_of(mutant: SourceMutant) -> str:
    """Why ``mutant`` changes nothing, or nothing where no reason is known."""
    module = mutant.module.removeprefix("hyper_parallel.core.")
    key = (module, mutant.where, mutant.slip)
    return next((one.reason for one in EQUIVALENT if (one.module, one.where, one.slip) == key), "")
