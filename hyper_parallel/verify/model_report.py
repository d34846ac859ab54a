"""The report of a model verification: counts, the first divergence, collectives per module; as text and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from hyper_parallel.verify.engine.noise import DISPLACED_MULTIPLE, MULTIPLE
from hyper_parallel.verify.engine.verdict import finite
from hyper_parallel.verify.report import Report
from hyper_parallel.verify.spec import from_user_frames

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.events import Event
    from hyper_parallel.verify.engine.checks import TensorCheck
    from hyper_parallel.verify.engine.verdict import Verdict
    from hyper_parallel.verify.parameter_layouts import ParameterLayout
    from hyper_parallel.verify.prove.table import ProvenCalls
    from hyper_parallel.verify.step_timeline import StepCall

__all__ = ["ModelReport", "Summary", "Traffic", "aligned", "bound_words", "table", "traffic"]

REQUIRED = ("output", "loss", "gradient", "weight")
KINDS = (*REQUIRED, "norm", "state", "buffer", "rate", "mask", "saved", "random")  # the additional kinds are optional
_OWNERS = {"loss": "(loss)", "norm": "(optimizer)", "rate": "(optimizer)"}
"""Name used instead of the module for values that belong to none."""

_GENERIC = ("unexplained", "components")
"""Classes of causes that only state that values differ."""


@dataclass(frozen=True)
class Traffic:
    """Collectives of one kind in one module, in one training step.

    Attributes:
        module: path of the module.
        phase: ``forward`` or ``backward``.
        collective: name of the collective, such as ``all_reduce``.
        axes: mesh axes over which it runs.
        count: number of collectives.
        bytes: largest number of bytes that a rank receives in all of these collectives.
        implicit: number of collectives in forward that the library inserted and the plan does not contain; those in
            backward follow from forward.
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
        module: path of the module.
        kind: kind of the checks.
        tensors: number of compared tensors.
        values: number of elements of the compared tensors.
        wrong: number of tensors that differ.
        worst: the check with the largest error, relative to its tolerance.
        first: whether the run diverged first in this module.
        since: the first step in which a tensor differs; None if all are equal.
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
class ModelReport(Report):
    """The report of one model on one mesh, framework and launch.

    Attributes:
        name: the scenario's name, or SPEC.
        platform: framework.
        launch: ``simulated`` or ``processes``.
        mesh: such as ``dp=2 x tp=2``.
        steps: number of training steps.
        checks: comparisons of all ranks; differences first, in the order of execution.
        skipped: outputs that could not be compared, and why.
        incomplete: descriptions of the single device's work that the ranks did not do; such a run is not equal.
        losses: single-device loss per step.
        traffic: collectives of one step.
        bound: description of the tolerance.
        seconds: duration of the run.
        error: the error of a run that ended early, with every rank's traceback; otherwise empty.
        cause: the error in one line.
        axes: sizes of the mesh by name.
        parallel_losses: the parallel run's loss per step.
        parameter_layouts: layouts of the parallel model's parameters.
        settings: descriptions of optimizer, plan and other settings.
        hardened: descriptions of changes that remove blind spots of the case.
        blind: descriptions of blind spots of the case.
        timeline: per rank, its calls into the transport in the last step; for simulated ranks, as if every rank had its
            own processor and transfers took no time.
        explanation: lines about the first divergence: its cause and the evidence; empty if no cause is known.
        plan_notes: descriptions of probably unintended properties of the plan.
        proofs: number of operator calls whose rule is proven for their placements; None if the ranks ended early.
    """

    has_page: ClassVar[bool] = True

    name: str
    platform: str
    launch: str
    mesh: str
    steps: int
    checks: list[TensorCheck] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    incomplete: list[str] = field(default_factory=list)
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
    hardened: list[str] = field(default_factory=list)
    blind: list[str] = field(default_factory=list)
    timeline: list[list[StepCall]] = field(default_factory=list)
    explanation: list[str] = field(default_factory=list)
    plan_notes: list[str] = field(default_factory=list)
    proofs: ProvenCalls | None = None

    @property
    def ok(self) -> bool:
        """Whether outputs, losses, gradients and weights were all compared and are all equal."""
        complete = not self.error and not self.incomplete and all(self.counts[kind] for kind in REQUIRED)
        return complete and all(check.ok for check in self.checks)

    @property
    def counts(self) -> dict[str, int]:
        """The number of tensors compared, per kind."""
        counts = Counter(check.kind for check in self.checks if check.values)
        return {kind: counts[kind] for kind in KINDS if kind in REQUIRED or counts[kind]}

    @property
    def first(self) -> TensorCheck | None:
        """The first failed check; the checks are in the order of execution."""
        return next((check for check in self.checks if not check.ok), None)

    @property
    def faulty_module(self) -> str:
        """The path of the module that diverged first, or empty."""
        return "" if self.first is None else self.first.module

    @property
    def worst(self) -> TensorCheck | None:
        """The check with the largest error, relative to its tolerance."""
        return max(self.checks, key=lambda check: check.share, default=None)

    def summaries(self, kind: str | None = None) -> list[Summary]:
        """Return the checks per module and kind: the first diverging module, then others by step, then equal ones.

        Args:
            kind: only this kind; all by default.
        """
        groups: dict[tuple[str, str], list[TensorCheck]] = {}
        for check in self.checks:
            if kind in {None, check.kind}:
                groups.setdefault((check.module, check.kind), []).append(check)
        summaries = [self._summary(module, kind, checks) for (module, kind), checks in groups.items()]
        return sorted(summaries, key=lambda summary: (not summary.first, summary.since is None, summary.since or 0))

    def _summary(self, module: str, kind: str, checks: Sequence[TensorCheck]) -> Summary:
        values, wrong = sum(check.values for check in checks), sum(not check.ok for check in checks)
        worst = max(checks, key=lambda check: (not check.ok, check.share))
        first = self.first is not None and module == self.faulty_module
        since = min((check.step for check in checks if not check.ok), default=None)
        return Summary(module, kind, len(checks), values, wrong, worst, first, since)

    def fill(self, verdict: Verdict) -> None:
        """Add the compared values, and the cause of the first value that has one."""
        self.checks = [
            replace(check, module=_OWNERS[check.kind]) if check.kind in _OWNERS else check for check in verdict.checks
        ]
        self.skipped = [*verdict.skipped, *verdict.unplaced]
        self.incomplete = list(verdict.incomplete)
        explained = [each for each in verdict.differences if each.cause is not None and each.cause.kind not in _GENERIC]
        if explained:
            lines = [] if explained[0] is verdict.first else [f"{explained[0].heading} differs, too"]
            cause: Any = explained[0].cause
            self.explanation = [*lines, f"cause: {cause}", f"evidence: {cause.evidence}"]

    # -- text and JSON ---------------------------------------------------------------------------------------------

    def verdict(self) -> str:
        """Return the verdict in one line."""
        head = f"{self.name} on {self.platform} ({self.mesh}, {self.launch}, {self.seconds:.1f} s)"
        if self.error:
            return f"{head}: ENDED: {self.cause}"
        if self.first is not None:
            return f"{head}: DIVERGED first in module {self.faulty_module}: {self.first}"
        empty = [kind for kind, count in self.counts.items() if not count]
        if empty:
            return f"{head}: NOT VERIFIED: nothing compared of kind {', '.join(empty)}"
        if self.incomplete:
            return f"{head}: NOT VERIFIED: {self.incomplete[0]}"
        worst = self.worst
        error = 0.0 if worst is None else worst.error
        return f"{head}: equal, {self._counted()}, largest error {error:.1e}"

    def _counted(self) -> str:
        values = sum(check.values for check in self.checks)
        return ", ".join(f"{count} {_plural(kind)}" for kind, count in self.counts.items()) + f" ({values} values)"

    def text(self) -> str:
        """Return the complete report."""
        lines = [self.verdict(), *(f"  {line}" for line in self.explanation)]
        lines += [f"  plan: {note}" for note in self.plan_notes]
        lines += self._loss_lines()
        if "seed" in self.settings:
            lines.append(f"  seed: {self.settings['seed']}")
        if "device" in self.settings:
            lines.append(f"  device: {self.settings['device']}")
        if self.bound:
            lines.append(f"  allowed error: {self.bound}")
        if self.proofs is not None:
            lines.append(f"  {self.proofs.line()}")
        lines.extend(f"  incomplete: {line}" for line in self.incomplete)
        lines.extend(f"  not compared: {line}" for line in self.skipped)
        lines.extend(f"  hardened: {line}" for line in self.hardened)
        lines.extend(f"  blind spot: {line}" for line in self.blind)
        wrong = [check for check in self.checks if not check.ok]
        if wrong:
            modules = list(dict.fromkeys(check.module for check in wrong))
            lines.append(f"  {len(wrong)} of {len(self.checks)} tensors differ, in {len(modules)} modules")
        lines.extend(
            table(self.traffic)
            if not self.error
            else ["  " + line for line in from_user_frames(self.error).splitlines()]
        )
        return "\n".join(lines)

    def _loss_lines(self) -> list[str]:
        """Return the losses of both runs as lines; as one line if both are printed alike."""
        single, parallel = (
            ", ".join(f"{loss:.9g}" for loss in losses) for losses in (self.losses, self.parallel_losses)
        )
        if not self.losses:
            return []
        if self.first is None or not self.parallel_losses:
            return [f"  loss per step: {single}"]
        return [f"  loss per step, one device: {single}", f"  loss per step, in parallel: {parallel}"]

    def json(self) -> dict[str, Any]:
        """Return the report as a JSON object, without the checks of equal tensors."""
        first = self.first
        return {
            "name": self.name,
            "platform": self.platform,
            "launch": self.launch,
            "mesh": self.mesh,
            "steps": self.steps,
            "ok": self.ok,
            "headline": self.verdict(),
            "compared": self.counts,
            "values": sum(check.values for check in self.checks),
            "first_divergence": None if first is None else {**asdict(first), "error": finite(first.error)},
            "faulty_module": self.faulty_module,
            "explanation": self.explanation,
            "plan_notes": self.plan_notes,
            "proofs": None if self.proofs is None else self.proofs.json(),
            "differing": [str(check) for check in self.checks if not check.ok][:100],
            "largest_error": finite(self.worst.error) if self.worst is not None else None,
            "allowed_error": self.bound,
            "losses": self.losses,
            "parallel_losses": [finite(loss) for loss in self.parallel_losses],
            "settings": self.settings,
            "not_compared": self.skipped,
            "incomplete": self.incomplete,
            "hardened": self.hardened,
            "cannot_show": self.blind,
            "collectives": [asdict(row) for row in self.traffic],
            "seconds": round(self.seconds, 3),
            "error": self.error,
        }


def bound_words(dtype: str) -> str:
    """Return a description of the tolerance of an element.

    Args:
        dtype: the coarsest floating dtype of the model.
    """
    return (
        f"{MULTIPLE:g} x the change of each element when inputs and weights change by one unit in the last place of "
        f"{dtype}, and {DISPLACED_MULTIPLE:g} x its change when earlier gradients change by as much"
    )


def traffic(events: Sequence[Event]) -> list[Traffic]:
    """Return the events of one step summed per module, phase, collective and axes, in the order of their first run."""
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
    """Return rows as lines with aligned columns.

    Args:
        rows: cells, the same number in each row.
        text: number of left-aligned columns, from the first; the others are right-aligned numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        padded = [cell.ljust(width) if column < text else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(row, widths, strict=True))]  # fmt: skip
        lines.append(("    " + "  ".join(padded)).rstrip())
    return lines


def table(rows: Sequence[Traffic], shown: Sequence[Traffic] | None = None) -> list[str]:
    """Return a table of collectives as lines of text.

    Args:
        rows: the collectives.
        shown: the same collectives, summed; by default ``rows``.
    """
    if not rows:
        return ["  no collectives"]
    cells = [("module", "phase", "collective", "over", "count", "bytes", "implicit")]
    cells += [
        (row.module or "(model)", row.phase, row.collective, ",".join(row.axes), str(row.count), str(row.bytes),
         str(row.implicit) if row.implicit else "")
        for row in (rows if shown is None else shown)
    ]  # fmt: skip
    lines = ["  collectives of one training step, bytes received by the worst rank:", *aligned(cells, text=4)]
    count, volume = sum(row.count for row in rows), sum(row.bytes for row in rows)
    return [*lines, f"    {count} collective{'s' * (count != 1)}, {volume} bytes"]


def _plural(kind: str) -> str:
    plurals = {
        "loss": "losses",
        "state": "optimizer states",
        "rate": "learning rates",
        "norm": "gradient norms",
        "random": "random states",
        "saved": "saved tensors",
    }
    return plurals.get(kind, f"{kind}s")
