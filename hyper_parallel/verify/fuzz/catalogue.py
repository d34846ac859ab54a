"""Catalogue of the calls in random programs: samples of operators by their public functions, and modules."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.entry import binder
from hyper_parallel.core.shard.rule import find_rule, rule_names
from hyper_parallel.core.shard.sample import DType, samples_of
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.attempt import Raised, attempt
from hyper_parallel.verify.ops.values import Slot, fill, size_choices, substitute

if TYPE_CHECKING:
    from hyper_parallel.core.shard.sample import Sample
    from hyper_parallel.verify.fuzz.language import Language
    from hyper_parallel.verify.ops.values import FilledSample

__all__ = ["Call", "Catalogue"]

_MODULE_SHARE = 0.12
_TRIED_SIZES = 2

Arguments = Callable[[Mapping[str, Any]], tuple[list[Any], dict[str, Any]]]


@dataclass(frozen=True)
class Call:
    """One public call that executes a sample.

    Attributes:
        name: name of the function, method or module.
        sample: the sample.
        arguments: turns the filled sample into positional and named arguments.
        writes: whether the call writes its first operand.
    """

    name: str
    sample: Sample
    arguments: Callable[[FilledSample], tuple[list[Any], dict[str, Any]]]
    writes: bool


class Catalogue:
    """All calls of a framework; when a sample is drawn first, its calls are tested on plain tensors.

    Args:
        framework: name of the framework.
        language: the framework's functions for random programs.

    Attributes:
        ops: canonical names of the operators that can be drawn.
        left_out: operators that cannot be drawn, with the reason.
    """

    def __init__(self, framework: str, language: Language) -> None:
        rules.load()
        self._platform, self._language = platform_named(framework), language
        self._calls: dict[tuple[str, int, bool], list[Call]] = {}
        self.left_out = Counter[str]()
        self.ops = [op for op in rule_names() if self._is_drawn(op)]
        self.modules = tuple(language.modules().items())

    def _is_drawn(self, op: str) -> bool:
        samples = samples_of(op)
        if not samples:
            self.left_out["has no sample"] += 1
        elif all(sample.random or sample.uninitialized for sample in samples):
            self.left_out["is random, or leaves its values undefined"] += 1
        else:
            return True
        return False

    def draw(self, rng: Any, *, writes: bool) -> Call | None:
        """Return a random call; None if the drawn sample has no such call.

        Args:
            rng: random number generator.
            writes: whether the call must write its first operand.
        """
        if not writes and rng.random() < _MODULE_SHARE:
            name, samples = self.modules[int(rng.integers(len(self.modules)))]
            return Call(name, samples[int(rng.integers(len(samples)))], _of_module, writes=False)
        op = self.ops[int(rng.integers(len(self.ops)))]
        samples = samples_of(op)
        number = int(rng.integers(len(samples)))
        calls = self.calls(op, number, writes=writes)
        return calls[int(rng.integers(len(calls)))] if calls else None

    def calls(self, op: str, number: int, *, writes: bool) -> list[Call]:
        """Return the calls of a sample that work on plain tensors."""
        key = (op, number, writes)
        if key not in self._calls:
            self._calls[key] = self._try_calls(op, samples_of(op)[number], writes=writes)
        return self._calls[key]

    def _try_calls(self, op: str, sample: Sample, *, writes: bool) -> list[Call]:
        rule = find_rule(op)
        if rule is None or sample.random or sample.uninitialized or (sample.writes and not writes):
            return []
        canonical = binder(rule.signature)
        working: dict[str, Call] = {}
        for dtype in sample.dtypes:
            for sizes in size_choices(sample, _TRIED_SIZES):
                filled = fill(sample, sizes, dtype, 0, integral=False, to_dtype=DType)
                if filled is None:
                    continue
                bound = canonical.bind(filled.args, filled.kwargs)
                for name, arguments in self._language.forms(op, bound, canonical, writes=writes):
                    call = Call(name, sample, _of_operator(canonical, arguments), writes)
                    if name not in working and self._works(call, filled):
                        working[name] = call
            if working:
                break
        return list(working.values())

    def _works(self, call: Call, filled: FilledSample) -> bool:
        platform = self._platform
        tensors = [platform.from_numpy(array) for array in filled.arrays]

        def value_of(leaf: Any) -> Any:
            if isinstance(leaf, Slot):
                return tensors[leaf.index]
            return platform.str_to_dtype(leaf.name) if isinstance(leaf, DType) else leaf

        args, kwargs = call.arguments(filled)

        def run() -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._language.call_named(call.name)(
                    *[substitute(value, value_of) for value in args],
                    **{name: substitute(value, value_of) for name, value in kwargs.items()},
                )
                self._language.settle()

        return not isinstance(attempt(run), Raised)  # another call may accept these arguments


def _of_module(filled: FilledSample) -> tuple[list[Any], dict[str, Any]]:
    return list(filled.args), {}


def _of_operator(canonical: Any, arguments: Arguments) -> Callable[[FilledSample], tuple[list[Any], dict[str, Any]]]:
    return lambda filled: arguments(canonical.bind(filled.args, filled.kwargs))
