"""Certificate of a plan: proofs of one training step at given sizes, and what they do not cover. No ranks run."""

from __future__ import annotations

import contextlib
import gc
import math
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel._caches import empty_layout_caches
from hyper_parallel._text import byte_words, first_line
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import module_path, watching
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.shard.op_plan import OpPlan, observing_plans
from hyper_parallel.core.shard.rule import LocalCall, OpCall, Operand, Row, Rule, Strategies, find_rule
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.platform.select import current_platform, use_platform
from hyper_parallel.transport.base import use_transport
from hyper_parallel.verify.explain import meta_tensors, rehearsed_transport
from hyper_parallel.verify.explained_step import ParallelStep, run_parallel_step
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.model_case import ModelCase, ParallelPlan, as_case, as_plan
from hyper_parallel.verify.model_training import plain_tensors
from hyper_parallel.verify.ops.claims import axis_rows, mesh_of, row_text, with_operands
from hyper_parallel.verify.prove.checker import prove_row
from hyper_parallel.verify.prove.compare import compared
from hyper_parallel.verify.prove.data_axes import prove_groups
from hyper_parallel.verify.prove.expressions import Expressions
from hyper_parallel.verify.prove.laws import UnprovenError
from hyper_parallel.verify.prove.paired import complete_text, conditions_met, paired
from hyper_parallel.verify.prove.plain import PlainCalls, prove_plain
from hyper_parallel.verify.prove.program import RETURNED, Program
from hyper_parallel.verify.prove.step_checker import TooManyRanksError, check_gradient, check_transition
from hyper_parallel.verify.report import Report
from hyper_parallel.verify.spec import user_function

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.events import Event, PendingRedistribution
    from hyper_parallel.core.dtensor.mesh import DeviceMesh
    from hyper_parallel.core.dtensor.transition import Transition
    from hyper_parallel.core.shard.strategy import Choice
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.frameworks.contract.primitives import Graph
    from hyper_parallel.verify.training_loop import Training

__all__ = ["CallProof", "Certificate", "certify", "wrongly_reduced"]


_NO_CALL = "no operator was called with DTensors, so nothing is proven"
STEP = "gradient clipping and the optimizer's step"
INCONCLUSIVE = 3
"""The exit status if nothing is refuted, but not everything is covered."""


@dataclass(frozen=True)
class CallProof:
    """The proof of one operator call of the program on one axis.

    Attributes:
        op: the operator.
        module: module that first made the call.
        axis: axis of the mesh.
        row: placements on the axis.
        shapes: global shapes of the operands.
        level: ``proven`` for these sizes, or ``tested``.
        why: the reason why it is not proven, or empty.
        conditions: conditions on sizes, all of which these sizes meet.
    """

    op: str
    module: str
    axis: str
    row: str
    shapes: tuple[tuple[int, ...], ...]
    level: str
    why: str = ""
    conditions: tuple[str, ...] = ()


@dataclass
class Certificate(Report):
    """Proofs of a plan.

    Attributes:
        model: name of the model.
        mesh: sizes of the mesh by axis.
        calls: operator calls, each once per axis, placement and shape.
        reductions: number of collectives that reduce pending sums and gradients, by module, collective and axes.
        moves: number of other collectives, in the same form.
        changes: number of steps of redistributions and of their gradients, by kind and proof.
        gradients: number of gradients whose layouts match those of their parameters.
        plain: number of proven calls on plain tensors.
        updates: number of parameters whose new values are proven equal to those of one device, including clipping.
        compared: number of losses, gradients and new values with the same expression as on one device.
        open: gaps that no proof covers, with the module.
        wrong: differences from one device.
        notes: properties of the plan that are probably unintended.
        seconds: duration.
        peak_bytes: peak memory of the process.
    """

    model: str
    mesh: dict[str, int]
    calls: list[CallProof] = field(default_factory=list)
    reductions: Counter[str] = field(default_factory=Counter)
    moves: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)
    gradients: int = 0
    plain: int = 0
    updates: int = 0
    compared: int = 0
    open: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether the plan has a certificate."""
        return self.status == 0

    @property
    def status(self) -> int:
        """The exit status: 0 with a certificate, 1 if something is refuted, 3 if something is not covered."""
        return 1 if self.wrong else INCONCLUSIVE if self.open or not self.calls else 0

    def text(self) -> str:
        """Return the certificate as readable text."""
        ranks = math.prod(self.mesh.values())
        mesh = ", ".join(f"{name}={size}" for name, size in self.mesh.items())
        levels = Counter(call.level for call in self.calls)
        lines = [f"{self.model} on {ranks} ranks ({mesh})"]
        lines += [f"no certificate: {line}" for line in self.wrong]
        lines.append(f"proven for these sizes: {levels['proven']} of {len(self.calls)} rows of operators")
        if self.plain:
            lines.append(f"proven for these sizes: {self.plain} calls with plain tensors")
        lines += [_line(call) for call in self.calls if call.level != "proven"]
        lines.append(f"{self.gradients} gradients are laid out as their parameters ask")
        if self.updates:
            lines.append(f"proven for these sizes: the optimizer's step of {self.updates} parameters")
        lines += [f"reduced: {what}{_times(count)}" for what, count in self.reductions.items()]
        lines += [f"moved: {what}{_times(count)}" for what, count in self.moves.items()]
        lines += [f"changes of placement: {what}{_times(count)}" for what, count in self.changes.items()]
        lines += [f"not covered: {line}" for line in self.open]
        lines += [f"note: {line}" for line in self.notes]
        lines.append(f"{self.seconds:.1f} s, {byte_words(self.peak_bytes)}")
        lines.append(self._verdict(len(self.calls) - levels["proven"]))
        return "\n".join(lines)

    def _verdict(self, unproven: int) -> str:
        if self.wrong:
            return f"REFUTED: {self.wrong[0]}{_more(self.wrong)}"
        if self.open:
            return f"INCONCLUSIVE: not covered: {self.open[0]}{_more(self.open)}"
        if not self.calls:
            return f"INCONCLUSIVE: {_NO_CALL}"
        rows = "1 row of an operator that rests" if unproven == 1 else f"{unproven} rows of operators that rest"
        tests = f", except {rows} on tests" if unproven else ""
        return (
            f"certificate: all calls are proven{tests}; they are those of one device: "
            f"{self.compared} losses, gradients and values of parameters and buffers have the same expressions"
        )

    def json(self) -> dict[str, Any]:
        """Return the certificate as a JSON object."""
        counters = {name: dict(value) for name, value in vars(self).items() if isinstance(value, Counter)}
        fields = {**vars(self), **counters}
        return {"ok": self.ok, "status": self.status, **fields, "calls": [asdict(call) for call in self.calls]}


def _line(call: CallProof) -> str:
    where = call.module or "(model)"
    return f"{call.level}: {call.op} in {where} on {call.axis}: {call.row}: {call.why}"


def _more(lines: Sequence[str]) -> str:
    return f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""


def _times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""


def certify(
    spec: str | Callable[[], Any],
    plan: str | Callable[[Any], Any],
    mesh_shape: Sequence[int],
    mesh_names: Sequence[str],
    *,
    name: str | None = None,
) -> Certificate:
    """Return the certificate of a plan of a PyTorch model.

    Args:
        spec: model, batches and loss, as for ``explain_model``; one step runs on meta tensors, as the first rank.
        plan: as for ``explain_model``.
        mesh_shape: sizes of the mesh's axes.
        mesh_names: names of the mesh's axes.
        name: name of the model in the text.

    Raises:
        InputError: the model does not run on meta tensors under the plan.
    """
    started = time.monotonic()
    shape, names = tuple(mesh_shape), tuple(mesh_names)
    make_case, make_plan = user_function(spec, "SPEC"), user_function(plan, "PLAN")
    found = Certificate(name or str(spec), dict(zip(names, shape, strict=True)))
    planned: list[tuple[str, OpPlan]] = []
    with use_platform("torch"), _uncollected():
        run, alone = partial(_run, make_case, names=names), (1,) * len(shape)
        table = Expressions()
        parallel, single = (Program(current_platform(), table, single=each) for each in (False, True))
        differing = _of_one_device(run, alone, single)  # before the plan, which may replace functions of modules
        one, why = _one_rank(run, make_plan, alone)
        empty_layout_caches()
        with (
            observing_plans(lambda each: planned.append((module_path(), each))),
            _border(found),
            watching(_Changes(found)),
        ):
            step, recorded = run(make_plan, shape, program=parallel, like=one)
        found.gradients = step.gradients
        found.wrong += step.wrong
        for event in step.events:
            _count(found, event)
        axes_of = partial(_axes_of, shape=shape, names=names)
        groups = prove_groups(harness_of(current_platform()).sharded_groups(recorded.model), step.events, axes_of)
        found.wrong += groups.wrong
        found.changes += groups.steps
        _prove_calls(found, current_platform(), planned)
        followed = _prove_plain(found, partial(run, make_plan), shape, recorded, one, why)
        _compare(found, parallel, single, differing)
        own = Counter((each.module, each.collective, each.axes) for each in step.events if not each.source)
        if followed:
            own.subtract((each.module, "all_reduce", axes_of(each.ranks)) for each in recorded.reductions)
        found.open += [
            f"{module or '(model)'}: {collective} over {', '.join(axes)}, which no change of placement runs"
            for (module, collective, axes), count in sorted(own.items())
            if count > 0 and (module, collective, axes) not in groups.collectives
        ]
        axes = groups.axes | {name for _, each in planned for name in each.call.mesh.names}
        found.notes += [f"axis {name}: no operator has DTensors on it" for name in names if name not in axes]
    found.seconds = time.monotonic() - started
    found.peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Disable the garbage collector, which would traverse all recorded events repeatedly."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _recorded_case(made: ModelCase, calls: PlainCalls) -> ModelCase:
    """Return a case that records its model, batches and losses in ``calls``."""
    batches = [plain_tensors(calls.platform, batch) for batch in made.batches]
    calls.batch = [each for batch in batches for each in batch]

    def build() -> Any:
        calls.model = made.build()
        if calls.program is not None:
            calls.program.batch = calls.batch
            calls.program.built(calls.model)
        return calls.model

    def loss(output: Any, batch: tuple[Any, ...]) -> Any:
        value = made.loss(output, batch)
        calls.finish(value)
        return value

    return replace(made, build=build, batches=batches, loss=loss)


def _recorded_plan(made: ParallelPlan, case: ModelCase, program: Program) -> ParallelPlan:
    """Return a plan that records the parallel model, and the loss that the user's ``step`` returns."""
    own, step = made.hooks or case.hooks, made.step or case.step

    def hooks(model: Any) -> None:
        program.begin(model)
        if own is not None:
            own(model)

    def stepped(training: Training) -> Any:
        result = None if step is None else step(training)
        if program.platform.is_tensor(result):
            program.ends[RETURNED] = program.number(result)
        return result

    return replace(made, hooks=hooks, step=None if step is None else stepped)


def _run(
    make_case: Callable[[], Any],
    make_plan: Callable[[Any], Any],
    shape: tuple[int, ...],
    names: tuple[str, ...],
    program: Program | None = None,
    like: PlainCalls | None = None,
) -> tuple[ParallelStep, PlainCalls]:
    """Run a step as the first rank of a mesh; return its record, and its events on plain tensors."""
    transport = rehearsed_transport("torch", math.prod(shape), 0)
    # Ranks exchange only the sizes of their shards; these are assumed to be equal on all ranks.
    transport.all_gather_object = lambda obj, ranks: [obj] * len(ranks)  # type: ignore[method-assign]
    calls = PlainCalls(current_platform(), program, like)
    cases: list[ModelCase] = []

    def case() -> ModelCase:
        cases.append(_recorded_case(as_case(make_case()), calls))
        return cases[0]

    def plan(mesh: DeviceMesh) -> ParallelPlan:
        made = as_plan(make_plan(mesh), mesh.names)
        return made if program is None else _recorded_plan(made, cases[0], program)

    with use_transport(transport), meta_tensors(), calls.recording():
        step = run_parallel_step(case, plan, shape, names)
        if program is not None:
            program.finish()
        return step, calls


def _one_rank(
    run: Callable[..., tuple[ParallelStep, PlainCalls]], make_plan: Callable[[Any], Any], alone: tuple[int, ...]
) -> tuple[PlainCalls | None, str]:
    """Run the plan on one rank; return the events on plain tensors, or the reason why the plan does not run."""
    try:
        return run(make_plan, alone)[1], ""
    except (HyperParallelError, InputError) as error:
        return None, _not_run(error)


def _not_run(error: Exception) -> str:
    return f"one device does not run the plan: {first_line(error)}"


def _of_one_device(run: Callable[..., Any], alone: tuple[int, ...], program: Program) -> str:
    """Record the step of one device, without the plan; return the reason why it does not run, or an empty text."""
    try:
        run(lambda _: ParallelPlan(lambda model, _: model), alone, program=program)
    except (HyperParallelError, InputError) as error:
        return first_line(error).replace("SPEC: the model under PLAN", "the model")
    return ""


def _compare(found: Certificate, parallel: Program, single: Program, failed: str) -> None:
    """Compare the calls of the parallel run with those of one device."""
    if failed:
        found.open.append(f"whether these are the calls of one device, which does not run the program: {failed}")
        return
    comparison = compared(current_platform(), parallel, single)
    found.compared = comparison.equal
    found.wrong += comparison.wrong
    found.open += comparison.open


def _prove_plain(
    found: Certificate,
    run: Callable[..., tuple[ParallelStep, PlainCalls]],
    shape: tuple[int, ...],
    own: PlainCalls,
    whole: PlainCalls | None,
    later: str,
) -> bool:
    """Prove the calls on plain tensors, on each axis; return whether the part after backward is proven."""
    split = [axis for axis, size in enumerate(shape) if size > 1]
    followed = True
    graphs: dict[Any, Graph | str] = {}
    try:
        for axis in split if whole is not None else ():
            assert whole is not None
            alone = tuple(size if each == axis else 1 for each, size in enumerate(shape))
            local = own if alone == shape else run(alone)[1]
            name = list(found.mesh)[axis]
            proof = prove_plain(current_platform(), local, whole, name, shape[axis], graphs)
            found.plain += proof.proven
            found.wrong += proof.wrong
            found.open += proof.open
            followed, later = followed and proof.followed, later or proof.step
    except (HyperParallelError, InputError) as error:
        whole, later = None, _not_run(error)
    if whole is None:
        if any(event.kind == "leaves" for event in own.events[: own.after]):
            found.open.append(f"plain tensors: {later}")
        followed = False
    if followed:
        found.open = [line for line in found.open if "plain" not in line]
    on_dtensors = any(event.kind == "dispatched" for event in own.events)
    rested = ", ".join(sorted({call.op for call in found.calls if call.level != "proven"}))
    tested = on_dtensors and bool(rested)
    if later:
        found.open.append(f"{STEP}: {later}")
    elif tested:
        found.notes.append(f"{STEP}: it is computed on DTensors, and rows of {rested} rest on tests")
    found.updates = 0 if later or tested else len(own.trained)
    return not later


def _axes_of(ranks: Sequence[int], shape: tuple[int, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of the mesh axes along which these ranks differ."""
    places = np.unravel_index(list(ranks), shape)
    return tuple(name for name, indices in zip(names, places, strict=True) if len(set(indices.tolist())) > 1)


def _count(found: Certificate, event: Event) -> None:
    reduces = event.collective in {"all_reduce", "reduce_scatter", "reduce_exchange"}
    what = f"{event.phase} {event.collective} over {', '.join(event.axes)} for {event.op}"
    (found.reductions if reduces else found.moves)[what] += 1


class _Changes:
    """Checks the steps of every redistribution that communicates; equal redistributions are checked once."""

    def __init__(self, found: Certificate) -> None:
        self.found = found
        self.seen: set[Transition] = set()

    def on_redistribution(self, redistribution: PendingRedistribution) -> None:
        """Add the proofs of its steps to the certificate."""
        transition, where = redistribution.transition, redistribution.module or "(model)"
        if transition in self.seen:
            return
        self.seen.add(transition)
        check = check_gradient if redistribution.phase == "backward" else check_transition
        try:
            self.found.changes.update(f"{kind} {proof}" for kind, proof in check(transition))
        except TooManyRanksError as error:
            self.found.open.append(f"{where}: {error}")
        except UnprovenError as error:
            self.found.wrong.append(f"{where}: {error}")


@contextlib.contextmanager
def _border(found: Certificate) -> Iterator[None]:
    """Record as gaps the calls of ``to_local`` and ``from_local`` by the program."""
    leave, enter = DTensor.to_local, DTensor.from_local
    noted: dict[str, None] = {}

    def to_local(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        partials, where = self.layout.partials, module_path()
        if not where and getattr(self._local, "is_leaf", False):
            return leave(self, *args, **kwargs)  # the harness reads a parameter or gradient
        where = where or "(model)"
        if partials:
            axes = ", ".join(self.layout.mesh.names[axis] for axis, _ in partials)
            line = (
                f"{where}: a value that is a pending {partials[0][1]} over {axes} leaves as a plain tensor, not reduced"
            )
            if line not in found.wrong:
                found.wrong.append(line)
        elif not self.layout.is_replicated:
            noted[f"{where}: what is computed with its plain output {self.layout.notation()}"] = None
        return leave(self, *args, **kwargs)

    def from_local(*args: Any, **kwargs: Any) -> Any:
        result = enter(*args, **kwargs)
        if not result.layout.is_replicated:
            noted[f"{module_path() or '(model)'}: that a plain tensor is {result.layout.notation()}"] = None
        return result

    DTensor.to_local, DTensor.from_local = to_local, staticmethod(from_local)  # type: ignore[method-assign]
    try:
        yield
    finally:
        DTensor.to_local, DTensor.from_local = leave, staticmethod(enter)  # type: ignore[method-assign]
        found.open += noted


def _prove_calls(found: Certificate, platform: Platform, planned: Sequence[tuple[str, OpPlan]]) -> None:
    graphs: dict[Any, Graph | str] = {}
    known: dict[Any, CallProof] = {}
    for module, plan in planned:
        mesh = plan.call.mesh
        for axis, row in axis_rows(plan):
            shapes = tuple(operand.shape for operand in plan.call.operands)
            key = (plan.call.op, row, shapes, mesh.shape[axis], complete_text(plan.call.args))
            if key not in known:
                level, why, conditions = _prove(platform, plan.call, row, mesh.shape[axis], graphs)
                known[key] = CallProof(
                    plan.call.op, module, mesh.names[axis], row_text(row), shapes, level, why, conditions
                )
            _check_varying(found, module, plan, axis)
    found.calls = list(known.values())


def _check_varying(found: Certificate, module: str, plan: OpPlan, axis: int) -> None:
    """Record operands whose gradient lacks a reduction, or is reduced although all ranks have the complete gradient."""
    found.wrong += [
        f"{module}: {plan.call.op} does not reduce the gradient of operand {index} as it must"
        for index in wrongly_reduced(plan.choice, axis)
    ]


def wrongly_reduced(choice: Choice, axis: int) -> list[int]:
    """Return the operands whose gradient is a pending sum over ``axis`` but not reduced, or replicated but reduced."""
    places = [layout.placement_on(axis) for layout in choice.targets]
    differs = not all(place.is_replicate() for place in places)
    return [
        index for index, place in enumerate(places)
        if (axis in choice.varying[index]) != (place.is_replicate() and differs)
    ]  # fmt: skip


def _prove(
    platform: Platform, call: OpCall, row: Row, ranks: int, graphs: dict[Any, Any]
) -> tuple[str, str, tuple[str, ...]]:
    """Return level, reason and conditions of one row of a call with numeric sizes."""
    rule = find_rule(call.op)
    if not isinstance(rule, Rule):
        return "tested", "its rule is the user's", ()
    level: tuple[str, str, tuple[str, ...]] = ("tested", "", ())
    seen = set[Any]()
    for rank in _representative_ranks(row, call.operands, ranks):
        mesh = mesh_of((ranks,)).for_rank(rank)
        try:
            layouts = tuple(
                Layout.place(mesh, [place], operand.shape)
                for place, operand in zip(row.inputs, call.operands, strict=True)
            )
            whole, part = _graphs(platform, rule, call, row, mesh, layouts, graphs)
            if id(part) in seen:
                continue
            seen.add(id(part))
            proof = prove_row(
                paired(whole, part, ranks=ranks), conditions_met(row, [each.shape for each in call.operands], ranks)
            )
        except (UnprovenError, HyperParallelError, ValueError) as error:
            return "tested", _on(rank, first_line(error)), ()
        why = proof.forward or (proof.backward and f"backward: {proof.backward}")
        if why:
            return "tested", _on(rank, why), proof.conditions
        level = ("proven", "", proof.conditions)
    return level


def _on(rank: int, why: str) -> str:
    return f"rank {rank} of the axis: {why}" if rank else why


def _representative_ranks(row: Row, operands: Sequence[Operand], ranks: int) -> list[int]:
    """Return one rank of an axis for each combination of local sizes.

    The library gives the first ranks shards of equal size, at most one rank the remainder, and the others nothing.
    """
    found = {0, ranks - 1}
    for place, operand in zip(row.inputs, operands, strict=True):
        if isinstance(place, Shard) and operand.shape[place.dim]:
            size = operand.shape[place.dim]
            rest = size // -(-size // ranks)
            found |= {min(rest, ranks - 1), min(rest + 1, ranks - 1)}
    return sorted(found)


def _graphs(
    platform: Platform,
    rule: Rule,
    call: OpCall,
    row: Row,
    mesh: DeviceMesh,
    layouts: Sequence[Layout],
    graphs: dict[Any, Any],
) -> tuple[Graph, Graph]:
    """Return the graphs of a call on one device and of the local call of the rank that ``mesh`` belongs to."""
    operands = tuple(
        Operand(each.name, layout, each.dtype, each.floating, each.needs_grad)
        for each, layout in zip(call.operands, layouts, strict=True)
    )
    own = OpCall(call.op, mesh, operands, call.args)
    answer = rule.strategies(own)
    if not isinstance(answer, Strategies):
        msg = "its rule answers with whole layouts"
        raise UnprovenError(msg)
    outputs = tuple(
        Layout.place(mesh, [place], shape) for place, shape in zip(row.outputs, answer.outputs, strict=True)
    )
    local = answer.localize(own, tuple(layouts), outputs) if answer.localize else None
    whole = _graph(platform, call, [each.shape for each in operands], None, graphs)
    return whole, _graph(platform, call, [layout.local_shape for layout in layouts], local, graphs)


def _graph(
    platform: Platform, call: OpCall, shapes: Sequence[Sequence[int]], local: LocalCall | None, graphs: dict[Any, Any]
) -> Graph:
    """Return the graph of a call, with numeric sizes."""
    named = None if local is None else repr(local)
    key = (
        call.op,
        tuple(map(tuple, shapes)),
        complete_text(call.args),
        named,
        tuple(each.dtype for each in call.operands),
    )
    if key not in graphs:
        func = platform.local_op(call.op)

        def run(leaves: Sequence[Any], _: Any) -> Any:
            args = {**with_operands(call.args, leaves), **((local.args or {}) if local else {})}
            return local.run(platform, args) if local is not None and local.run is not None else func(**args)

        pairs = [(tuple(shape), each.dtype) for shape, each in zip(shapes, call.operands, strict=True)]
        wanted = [each.floating and each.needs_grad for each in call.operands]
        try:
            graphs[key] = harness_of(platform).primitives(run, pairs, wanted, lambda _: None)
        except Exception as error:  # noqa: BLE001 - any operator may fail on sizes alone in its own way
            graphs[key] = f"not traced: {(str(error) or type(error).__name__).splitlines()[0]}"
    if isinstance(graphs[key], str):
        raise UnprovenError(graphs[key])
    found: Graph = graphs[key]
    return found
