"""What a verification found: counts, the first divergence, collectives per module; as text and as JSON."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.events import Event
    from hyper_parallel.verify.compare import TensorCheck
    from hyper_parallel.verify.parameter_layouts import ParameterLayout

__all__ = ["ModelReport", "Summary", "Traffic", "aligned", "table", "traffic"]

REQUIRED = ("output", "loss", "gradient", "weight")
KINDS = (*REQUIRED, "buffer")  # a model need not have buffers


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one module, in one training step.

    Attributes:
        module: path.
        phase: ``forward`` or ``backward``.
        collective: which.
        axes: mesh axes that it runs over.
        count: how often.
        bytes: what the worst rank receives in all of them.
        implicit: how many of them in forward the library decided on by itself; backward only repays forward.
    """

    module: str
    phase: str
    collective: str
    axes: tuple[str, ...]
    count: int
    bytes: int
    implicit: int


@dataclass(frozen=True)
class Summary:
    """All comparisons of one kind in one module, over ranks and steps.

    Attributes:
        module: path.
        kind: ``output``, ``loss``, ``gradient``, ``weight`` or ``buffer``.
        tensors: compared.
        values: numbers in them.
        wrong: tensors that differ.
        worst: the largest error, relative to what was allowed.
        first: the module in which the run diverged first.
        since: the first step in which a tensor differs; None where all are equal.
    """

    module: str
    kind: str
    tensors: int
    values: int
    wrong: int
    worst: TensorCheck
    first: bool
    since: int | None


@dataclass
class ModelReport:
    """One model on one mesh, framework and way of launching.

    Attributes:
        name: of the scenario, or SPEC.
        platform: framework.
        launch: ``simulated`` or ``processes``.
        mesh: such as ``dp=2 x tp=2``.
        steps: training steps.
        checks: comparisons of all ranks.
        skipped: outputs that could not be compared, and why.
        losses: single-device loss per step.
        traffic: collectives of one step.
        bound: the allowed error, in words.
        seconds: of the whole run.
        error: what ended the run, with every rank's traceback, or empty.
        cause: the same in one line.
        axes: sizes of the mesh by name.
        parallel_losses: the parallel run's loss per step.
        placed: where the pieces of every parameter lie.
        settings: optimizer, plan and the like, in words.
    """

    name: str
    platform: str
    launch: str
    mesh: str
    steps: int
    checks: list[TensorCheck] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    traffic: list[Traffic] = field(default_factory=list)
    bound: str = ""
    seconds: float = 0.0
    error: str = ""
    cause: str = ""
    axes: dict[str, int] = field(default_factory=dict)
    parallel_losses: list[float] = field(default_factory=list)
    parameter_layouts: list[ParameterLayout] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True when outputs, losses, gradients and weights were all compared, and all of them held."""
        return not self.error and all(self.counts[kind] for kind in REQUIRED) and all(one.ok for one in self.checks)

    @property
    def counts(self) -> dict[str, int]:
        """Tensors compared, per kind."""
        found = Counter(one.kind for one in self.checks if one.values)
        return {kind: found[kind] for kind in KINDS if kind in REQUIRED or found[kind]}

    @property
    def first(self) -> TensorCheck | None:
        """The first divergence, among outputs in forward order, the loss, gradients in reverse order, then weights."""
        wrong = [(one.step, index, one.rank) for index, one in self._indexed() if not one.ok]
        if not wrong:
            return None
        step, index, rank = min(wrong)
        return next(one for i, one in self._indexed() if (one.step, i, one.rank) == (step, index, rank))

    @property
    def faulty_module(self) -> str:
        """Path of the module that diverged first, or empty."""
        return "" if self.first is None else self.first.module

    @property
    def worst(self) -> TensorCheck | None:
        """The largest error, relative to what was allowed."""
        return max(self.checks, key=lambda one: one.error / one.bound, default=None)

    def summaries(self, kind: str | None = None) -> list[Summary]:
        """Comparisons per module and kind: the module that diverged first, others as they did, and the rest."""
        groups: dict[tuple[str, str], list[TensorCheck]] = {}
        for one in self.checks:
            if kind in {None, one.kind}:
                groups.setdefault((one.module, one.kind), []).append(one)
        found = [self._summary(module, kind, checks) for (module, kind), checks in groups.items()]
        return sorted(found, key=lambda one: (not one.first, one.since is None, one.since or 0))

    def _summary(self, module: str, kind: str, checks: Sequence[TensorCheck]) -> Summary:
        values, wrong = sum(one.values for one in checks), sum(not one.ok for one in checks)
        worst = max(checks, key=lambda one: (not one.ok, one.error / one.bound))
        first = self.first is not None and module == self.faulty_module
        since = min((one.step for one in checks if not one.ok), default=None)
        return Summary(module, kind, len(checks), values, wrong, worst, first, since)

    def _indexed(self) -> Iterable[tuple[int, TensorCheck]]:
        """Checks with their position on their own rank."""
        position: Counter[int] = Counter()
        for one in self.checks:
            yield position[one.rank], one
            position[one.rank] += 1

    # -- showing ---------------------------------------------------------------------------------------------------

    def verdict(self) -> str:
        """One line."""
        head = f"{self.name} on {self.platform} ({self.mesh}, {self.launch}, {self.seconds:.1f} s)"
        if self.error:
            return f"{head}: ENDED: {self.cause}"
        if self.first is not None:
            return f"{head}: DIVERGED first in module {self.faulty_module}: {self.first}"
        empty = [kind for kind, count in self.counts.items() if not count]
        if empty:
            return f"{head}: NOT VERIFIED: nothing compared of kind {', '.join(empty)}"
        worst = self.worst
        error = 0.0 if worst is None else worst.error
        return f"{head}: equal, {self._counted()}, largest error {error:.1e}"

    def _counted(self) -> str:
        values = sum(one.values for one in self.checks)
        return ", ".join(f"{count} {_plural(kind)}" for kind, count in self.counts.items()) + f" ({values} values)"

    def text(self) -> str:
        """The whole report."""
        lines = [self.verdict()]
        if self.losses:
            lines.append(f"  loss per step: {', '.join(f'{loss:.9g}' for loss in self.losses)}")
        if self.bound:
            lines.append(f"  allowed error: {self.bound}")
        lines.extend(f"  not compared: {line}" for line in self.skipped)
        wrong = [one for one in self.checks if not one.ok]
        if wrong:
            modules = list(dict.fromkeys(one.module for one in wrong))
            lines.append(f"  {len(wrong)} of {len(self.checks)} tensors differ, in {len(modules)} modules")
        lines.extend(table(self.traffic) if not self.error else ["  " + line for line in self.error.splitlines()])
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """Everything that a program wants, without the single comparisons that held."""
        first = self.first
        return {
            "name": self.name,
            "platform": self.platform,
            "launch": self.launch,
            "mesh": self.mesh,
            "steps": self.steps,
            "ok": self.ok,
            "compared": self.counts,
            "values": sum(one.values for one in self.checks),
            "first_divergence": None if first is None else {**asdict(first), "error": _finite(first.error)},
            "faulty_module": self.faulty_module,
            "differing": [str(one) for one in self.checks if not one.ok][:100],
            "largest_error": _finite(self.worst.error) if self.worst is not None else None,
            "allowed_error": self.bound,
            "losses": self.losses,
            "parallel_losses": [_finite(one) for one in self.parallel_losses],
            "settings": self.settings,
            "not_compared": self.skipped,
            "collectives": [asdict(one) for one in self.traffic],
            "seconds": round(self.seconds, 3),
            "error": self.error,
        }


def traffic(events: Sequence[Event]) -> list[Traffic]:
    """Events of one step, summed per module, phase, collective and axes, in the order of their first running."""
    counts: Counter[tuple[str, str, str, tuple[str, ...]]] = Counter()
    volume: Counter[tuple[str, str, str, tuple[str, ...]]] = Counter()
    implicit: Counter[tuple[str, str, str, tuple[str, ...]]] = Counter()
    for event in events:
        key = (event.module, event.phase, event.collective, event.axes)
        counts[key] += 1
        volume[key] += event.bytes
        implicit[key] += event.implicit and event.phase == "forward"
    return [Traffic(*key, counts[key], volume[key], implicit[key]) for key in counts]


def aligned(rows: Sequence[Sequence[str]], text: int) -> list[str]:
    """Lines of text, a row each: the first ``text`` columns to the left, those of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = [cell.ljust(width) if column < text else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append(("    " + "  ".join(padded)).rstrip())
    return lines


def table(rows: Sequence[Traffic]) -> list[str]:
    """Lines of text, a row each."""
    if not rows:
        return ["  no collectives"]
    cells = [("module", "phase", "collective", "over", "count", "bytes", "implicit")]
    cells += [
        (one.module or "(model)", one.phase, one.collective, ",".join(one.axes), str(one.count), str(one.bytes),
         str(one.implicit) if one.implicit else "")
        for one in rows
    ]  # fmt: skip
    lines = ["  collectives of one training step, bytes received by the worst rank:", *aligned(cells, text=4)]
    count, volume = sum(one.count for one in rows), sum(one.bytes for one in rows)
    return [*lines, f"    {count} collectives, {volume} bytes"]


def _plural(kind: str) -> str:
    return "losses" if kind == "loss" else f"{kind}s"


def _finite(number: float) -> float | None:
    """JSON knows no infinity."""
    return number if math.isfinite(number) else None
