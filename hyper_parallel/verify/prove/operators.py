"""Proves the rules of operators: checks each row (placements of operands and results) on the graph of a sample call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.shard.rule import LocalCall, Ref, Row, Rule, Strategies, find_rule
from hyper_parallel.core.shard.sample import Sample, Size, Value, exemption, samples_of
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.primitives import Graph, kinds
from hyper_parallel.verify.ops.claims import bind_sample, mesh_of, row_text, with_operands
from hyper_parallel.verify.ops.values import fill, seed_of, substitute
from hyper_parallel.verify.prove.checker import Proof, prove_row
from hyper_parallel.verify.prove.seen import SeenCall
from hyper_parallel.verify.prove.tested import EmptyParts, TestedRows

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.ops.claims import SampleCall

__all__ = ["LEVELS", "ProvenRow", "SampleGraph", "answered", "family_of", "graphs_of", "prove_operator"]

LEVELS = ("proven", "tested", "assumed", "refuted")
HINTS = (11, 13, 17, 19, 23, 29, 31)
"""Sizes that replace the letters of a sample's shapes: all different, and different from the numbers in samples."""
OTHER_HINT = 37
"""A second size for a letter whose size determines the number of results."""


@dataclass
class ProvenRow:
    """A row of a rule with its level of proof.

    Attributes:
        op: the operator.
        sample: number of the sample.
        row: the row as text.
        level: ``proven``, ``tested``, ``assumed``, or ``refuted`` by a test.
        why: the reason why it is not proven, or empty.
        conditions: conditions on global sizes under which the proof is valid.
        sizes: local sizes that the proof does not cover.
    """

    op: str
    sample: int
    row: str
    level: str
    why: str = ""
    conditions: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()


@dataclass
class SampleGraph:
    """A sample call of an operator as a graph of primitives.

    Attributes:
        number: number of the sample.
        sample_call: the call with replicated operands.
        answer: the return value of the rule, with its rows.
        graph: graph of primitives; None if the call could not be traced.
        why: the reason why the call could not be traced.
        sample: the sample.
        letters: the size of each letter in the sample's shapes.
        numbers: sizes that the trace has as constants, not as symbols, if the operator reads them.
        empties: tests of the local calls on empty shards.
    """

    number: int
    sample_call: SampleCall
    answer: Strategies
    graph: Graph | None
    why: str = ""
    sample: Sample | None = None
    letters: dict[str, int] = field(default_factory=dict)
    numbers: frozenset[int] = frozenset()
    empties: EmptyParts | None = None


def family_of(op: str) -> str:
    """Return the family of an operator, which is the file of its rule."""
    found = find_rule(op)
    run: Any = getattr(found, "strategies", None) or getattr(found, "run", None)
    return str(run.__module__).rpartition(".")[2]


def graphs_of(platform: Platform, op: str) -> Iterator[SampleGraph]:
    """Yield the sample calls of ``op`` as graphs of primitives."""
    rule = find_rule(op)
    if not isinstance(rule, Rule):
        return
    for number, sample in enumerate(samples_of(op)):
        found = _sample_graph(platform, rule, number, sample)
        if found is not None:
            yield found


def prove_operator(platform: Platform, op: str) -> list[ProvenRow]:
    """Return every row of the rule of ``op`` on each of its samples, with its level."""
    rows: dict[tuple[int, str], ProvenRow] = {}
    for made in graphs_of(platform, op):
        tests: TestedRows | None = None
        for row in dict.fromkeys(made.answer.rows):
            proven = prove_sample_row(platform, made, row)
            if proven.level == "tested":
                tests = tests or TestedRows(platform, op, made.number)
                _test(proven, tests)
            rows[(made.number, proven.row)] = proven
    if not rows:
        reason = exemption(op) or "its rule answers with whole layouts"
        rows[(0, "-")] = ProvenRow(op, 0, "all", "assumed", reason)
    return list(rows.values())


def _test(row: ProvenRow, tests: TestedRows) -> None:
    """Set the level of a row that is not proven, from the results of its tests."""
    if row.row in tests.failed:
        row.level, row.why = "refuted", tests.failed[row.row]
    elif tests.result(row.row):
        row.level, row.why = "assumed", f"{row.why}; {tests.result(row.row)}"


def prove_sample_row(platform: Platform, made: SampleGraph, row: Row) -> ProvenRow:
    """Prove one row on the graph of a sample call; return the row with its level."""
    op, text = made.sample_call.call.op, row_text(row)
    if _same_call(made, row):
        return ProvenRow(op, made.number, text, "proven")
    if row.cut:
        return ProvenRow(op, made.number, text, "tested", "it depends on the axes before it")
    graph, why = made.graph, made.why
    assert made.sample is not None
    local = made.answer.localize is not None
    if graph is None and not (local and made.sample.random):
        return ProvenRow(op, made.number, text, "tested", why)
    if local:
        graph, why = _traced(platform, made, row)
        if graph is None:
            return ProvenRow(op, made.number, text, "tested", f"its local call is not the caller's: {why}")
    assert graph is not None  # a random call is traced again
    proof = prove_row(graph, row)
    why = _why(proof) or _on_empty_parts(made, row)
    return ProvenRow(op, made.number, text, "tested" if why else "proven", why, proof.conditions, proof.sizes)


def _on_empty_parts(made: SampleGraph, row: Row) -> str:
    """Return why a row is wrong for a rank with an empty shard, or "".

    A row with a condition on the size of the sharded dim is not tested: its conditions exclude empty shards.
    """
    operands = made.sample_call.call.operands
    split = [(index, place.dim) for index, place in enumerate(row.inputs) if isinstance(place, Shard)]
    if not split or {*split} & {*row.full, *row.even, *((index, dim) for index, dim, _ in row.sizes)}:
        return ""
    index, dim = split[0]
    assert made.empties is not None
    problem = made.empties.problem(row, operands[index].shape[dim])
    return problem and f"an empty part: {problem}"


def _same_call(made: SampleGraph, row: Row) -> bool:
    """Whether each rank makes the caller's call, on replicated operands and without randomness: nothing is to prove."""
    random = made.sample is not None and made.sample.random
    places = (*row.inputs, *row.outputs)
    return made.answer.localize is None and not random and all(place.is_replicate() for place in places)


def _why(proof: Proof) -> str:
    return proof.forward or (proof.backward and f"backward: {proof.backward}")


def answered(
    platform: Platform, rule: Rule, number: int, sample: Sample, letters: dict[str, int] | None = None
) -> tuple[SampleCall, Strategies] | None:
    """Return a sample as a call on one rank, with the rows that its rule returns; None if there are no rows.

    Args:
        platform: the framework.
        rule: the operator's rule.
        number: number of the sample.
        sample: the sample.
        letters: sizes of its letters; by default :data:`HINTS`.
    """
    sizes = letters or dict(zip(_letters(sample), HINTS, strict=False))
    seed = seed_of(rule.op, number)
    filled = None
    for integral in (False, True):
        filled = filled or fill(
            sample, sizes, sample.dtypes[0], seed, integral=integral, to_dtype=platform.str_to_dtype
        )
    if filled is None:
        return None
    tensors = [platform.from_numpy(array) for array in filled.arrays]
    sample_call = bind_sample(platform, rule, filled, mesh_of((1,)), tensors)
    try:
        answer = rule.strategies(sample_call.call)
    except (ValueError, HyperParallelError):
        return None
    return (sample_call, answer) if isinstance(answer, Strategies) and not answer.open else None


def _sample_graph(platform: Platform, rule: Rule, number: int, sample: Sample) -> SampleGraph | None:
    letters = dict(zip(_letters(sample), HINTS, strict=False))
    made = _made(platform, rule, number, sample, letters)
    if made is None or made.graph is not None or sample.random:
        return made
    counted = {letter: OTHER_HINT for letter in letters if _counts(platform, rule, number, sample, letters, letter)}
    if not counted:
        return made
    first, second = (
        _made(platform, rule, number, sample, sizes, counted=frozenset(sizes[letter] for letter in counted))
        for sizes in (letters, letters | counted)
    )
    if first is None or second is None or first.graph is None or second.graph is None:
        return made
    return first if kinds(first.graph) == kinds(second.graph) else replace(made, why="its results are not alike")


def _counts(platform: Platform, rule: Rule, number: int, sample: Sample, letters: dict[str, int], letter: str) -> bool:
    """Whether the size of a letter determines the number of results."""
    found = [answered(platform, rule, number, sample, letters | more) for more in ({}, {letter: OTHER_HINT})]
    first, second = (-1 if each is None else len(each[1].outputs) for each in found)
    return first != second and -1 not in {first, second}


def _made(
    platform: Platform,
    rule: Rule,
    number: int,
    sample: Sample,
    letters: dict[str, int],
    *,
    counted: frozenset[int] = frozenset(),
) -> SampleGraph | None:
    found = answered(platform, rule, number, sample, letters)
    if found is None:
        return None
    numbers = frozenset(_numbers(sample)) - set(letters.values()) | counted
    empties = EmptyParts(platform, rule, sample, letters)
    made = SampleGraph(number, *found, None, sample=sample, letters=letters, numbers=numbers, empties=empties)
    if sample.random:
        made.why = "it draws random numbers"
    else:
        made.graph, made.why = _traced(platform, made, None)
    return made


def _traced(platform: Platform, made: SampleGraph, row: Row | None) -> tuple[Graph | None, str]:
    """Return the graph of the local call for ``row``, or of the sample call if None; or why it could not be traced."""
    call, sample, rule = made.sample_call.call, made.sample, made.sample_call.rule
    assert sample is not None
    filled = made.sample_call.filled
    func = platform.local_op(rule.op)
    tensors = [platform.from_numpy(array) for array in filled.arrays]
    arguments = (
        platform.from_numpy(np.zeros(tuple(made.letters.values())[:4] or (1,), np.float32)) if made.letters else None
    )

    def symbolic(shapes: Sequence[Sequence[Any]]) -> tuple[dict[str, Any], LocalCall | None]:
        known = dict(zip(made.letters, shapes[len(tensors)], strict=False)) if made.letters else {}
        args = _arguments(platform, rule, sample, known)
        if row is None or made.answer.localize is None:
            return args, None
        seen = SeenCall(call, made.answer, row, known, made.letters, shapes)
        return args, made.answer.localize(seen.call(args), seen.operands(), seen.outputs())

    def run(leaves: Sequence[Any], given: tuple[dict[str, Any], LocalCall | None]) -> Any:
        args, local = given
        written = next((name for name, value in args.items() if value == Ref(0)), "") if sample.writes else ""
        args = with_operands(args, leaves)
        if written:
            args[written] = platform.local_op("clone")(x=args[written], memory_format=None)
        if local is not None:
            args = {**args, **(local.args or {})}
            if local.run is not None:
                return local.run(platform, args)
        out = func(**args)
        return args[written] if written and out is None else out

    wanted = list(filled.requires_grad)
    if arguments is not None:
        tensors_and_sizes, wanted = [*tensors, arguments], [*wanted, False]
    else:
        tensors_and_sizes = tensors
    try:
        graph = harness_of(platform).primitives(run, tensors_and_sizes, wanted, symbolic, made.numbers)
    except Exception as error:  # noqa: BLE001 - any operator may fail on symbolic sizes in its own way
        return None, f"not traced: {(str(error) or type(error).__name__).splitlines()[0]}"
    if len(graph.outputs) != len(made.answer.outputs):
        return None, "its results are not those of the rule"
    sizes = zip(graph.result_sizes, made.answer.outputs, strict=True)
    return next(((None, f"result {at} has size {list(found)}, {list(wanted)} is the rule's")
                 for at, (found, wanted) in enumerate(sizes) if found != tuple(wanted)), (graph, ""))  # fmt: skip


def _arguments(platform: Platform, rule: Rule, sample: Sample, known: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name, with a ``Ref`` in place of each operand, and with symbolic sizes."""
    from hyper_parallel.core.shard.entry import binder
    from hyper_parallel.core.shard.sample import DType

    count = iter(range(1000))

    def leaf(value: Any) -> Any:
        if isinstance(value, Value):
            return Ref(next(count))
        if isinstance(value, Size):
            return math.prod(int(c) if c.isdigit() else known[c] for c in value.letters) + value.plus
        if isinstance(value, DType):
            return platform.str_to_dtype(value.name)
        return value

    args = tuple(substitute(value, leaf) for value in sample.args)
    kwargs = {name: substitute(value, leaf) for name, value in sample.kwargs.items()}
    return binder(rule.signature).bind(args, kwargs)


def _numbers(sample: Sample) -> set[int]:
    """Return the sizes in the sample's shapes that are numbers, not letters."""
    found = set[int]()

    def collect(leaf: Any) -> None:
        if isinstance(leaf, Value):
            found.update(dim for dim in leaf.shape if isinstance(dim, int))

    substitute((sample.args, sample.kwargs), collect)
    return found


def _letters(sample: Sample) -> list[str]:
    from hyper_parallel.verify.ops.values import size_choices

    return list(size_choices(sample, 1)[0])
