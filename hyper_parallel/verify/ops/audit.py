"""Audit of another library: the sweep's samples on its distributed tensors, on two real processes.

``python -m hyper_parallel.verify.ops.audit MODULE RANK STORE add relu`` is one rank; rank 0 prints a line of JSON when
it begins an operator, and one when it is done with it. MODULE has a class ``Peer`` that wraps the library.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Partial, Placement, Replicate, Shard
from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.rule import Rule, find_rule
from hyper_parallel.core.shard.sample import samples_of
from hyper_parallel.platform.select import use_platform
from hyper_parallel.transport.processes import python_command
from hyper_parallel.verify.ops.claims import mesh_of
from hyper_parallel.verify.ops.compare import difference
from hyper_parallel.verify.ops.reference import Caller, as_list
from hyper_parallel.verify.ops.report import OperatorReport
from hyper_parallel.verify.ops.selection import QUICK
from hyper_parallel.verify.ops.shards import can_be_partial, local_shards
from hyper_parallel.verify.ops.sweep import Sweep
from hyper_parallel.verify.ops.values import seed_of, size_choices

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hyper_parallel.core.shard.sample import Sample

__all__ = ["TARGETS", "WORLD", "OperatorAudit", "audit", "main", "summary"]

TARGETS = {"torch-dtensor": ("torch", "hyper_parallel.platform.torch.torch_dtensor_audit")}
"""Libraries to audit: the framework that each needs, and the module with its ``Peer``."""

_CONFIRM = {"torch-dtensor": "hyper_parallel.platform.torch.torch_dtensor_reproducer"}
_MOST_SECONDS = 120.0

_SECONDS = 90.0

WORLD = 2
_MOST = 40  # tuples of placements per sample
_COLLECTIVE_SECONDS = 20
_EARLIER = 100  # calls of the same operator whose cached results may matter
_ORDER = ("crash", "wrong", "plain", "rejects", "ok")
_REFUSALS = ("strategy", "not supported", "not implemented", "unsupported", "DTensor", "lacement", "redistribute")
Places = tuple[Placement, ...]
Where = tuple[str, int]


def main(module: str, rank: int, store: str, ops: Sequence[str]) -> None:
    """Check ``ops`` as one rank."""
    warnings.simplefilter("ignore")
    peer = importlib.import_module(module).Peer(rank, WORLD, store, _COLLECTIVE_SECONDS)
    rules.load()
    for op in ops:
        _print_line(rank, {"begin": op})
        with use_platform("torch"):
            counts, shown, programs = _RankAudit(op, peer, rank).run()
        _print_line(rank, {"op": op, "counts": counts, "shown": shown, "programs": programs})
    peer.close()


def _print_line(rank: int, line: dict[str, Any]) -> None:
    if rank == 0:
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


class _RankAudit:
    """The audit of one operator on one rank.

    Args:
        op: canonical name; it has a rule.
        peer: wraps the other library.
        rank: of this process.
    """

    def __init__(self, op: str, peer: Any, rank: int) -> None:
        self.op, self.peer, self.rank = op, peer, rank
        self.where: Where = ("", 0)  # of the last wrong value: an output or a gradient, and which
        self.rule = find_rule(op)
        self.sweep = Sweep(OperatorReport(op, "torch"), "torch", op, self.rule, samples_of(op), QUICK)

    def run(self) -> tuple[dict[str, int], list[str], list[str]]:
        """Return counts of outcomes, the first failure of each kind, and programs that may show a wrong value."""
        counts: Counter[str] = Counter()
        shown: dict[str, str] = {}
        programs: list[str] = []
        earlier: list[tuple[Any, Sample, Places]] = []
        for number, sample in enumerate(self.sweep.samples if isinstance(self.rule, Rule) else ()):
            sizes = size_choices(sample, 1)[0]
            case = None if sample.random or sample.writes else self.sweep.case(number, sample, sizes, first=True)
            if case is None or case.reference.sample_call is None:
                continue
            for places in _tuples(case.filled.arrays, seed_of(self.op, number)):
                outcome, text, where = self._agreed(*self._check(case, sample, places))
                counts[outcome] += 1
                if outcome == "wrong" and "wrong" not in shown and self.rank == 0:
                    programs = self._programs(case, sample, places, where, earlier)
                earlier.append((case, sample, places))
                if outcome in {"wrong", "crash", "plain"}:
                    placements = ", ".join(map(str, places))
                    shown.setdefault(outcome, f"sample {number} {sizes or ''} [{placements}]: {text}"[:400])
        return dict(counts), [f"{kind}: {text}" for kind, text in shown.items()], programs

    def _programs(self, case: Any, sample: Sample, places: Places, where: Where, earlier: Sequence[Any]) -> list[str]:
        """Return programs of the call alone, and after each earlier call, whose cached results may be the cause."""
        kind, index = where
        gradient = kind == "gradient"
        right = (case.reference.grads if gradient else case.reference.outputs)[index]
        tail = (case.reference.cotangents, gradient, index, right)
        finding = self._written(case, sample, places)
        befores = [None, *(self._written(*call) for call in reversed(earlier[-_EARLIER:]))]
        programs = (self.peer.program(finding, *tail, before) for before in befores)
        return list(dict.fromkeys(text for text in programs if text is not None))

    def _written(self, case: Any, sample: Sample, places: Places) -> Any:
        caller = Caller(self.sweep.platform, case.reference.sample_call, sample)
        pieces = [self._pieces(number, place, case) for number, place in enumerate(places)]
        return self.peer.call(lambda operands: caller(operands, None), case.filled, pieces, places)

    def _agreed(self, outcome: str, text: str) -> tuple[str, str, Where]:
        """Return the worst result of all ranks."""
        worst: tuple[str, str, Where] = min(
            self.peer.gathered((outcome, text, self.where)), key=lambda result: _ORDER.index(result[0])
        )
        return worst

    def _check(self, case: Any, sample: Sample, places: Places) -> tuple[str, str]:
        try:
            return self._compare(case, sample, places)
        except Exception as error:  # noqa: BLE001 - whatever it raises is what became of the check
            text = f"{type(error).__name__}: {error}"
            refused = isinstance(error, (RuntimeError, NotImplementedError, ValueError, AssertionError))
            return "rejects" if refused and any(word in text for word in _REFUSALS) else "crash", text

    def _compare(self, case: Any, sample: Sample, places: Places) -> tuple[str, str]:
        reference, filled = case.reference, case.filled
        leaves = [
            self._distributed(index, place, case, differentiated=want)
            for index, (place, want) in enumerate(zip(places, filled.requires_grad, strict=True))
        ]
        outs = as_list(Caller(self.sweep.platform, reference.sample_call, sample)(leaves, None))
        if not all(self.peer.is_wrapped(out) for out in outs):
            return "plain", "a result is a plain tensor"
        for index, (out, wanted) in enumerate(zip(outs, reference.outputs, strict=True)):
            problem = "" if sample.uninitialized else self._difference(out, wanted, reference)
            if problem:
                self.where = ("output", index)
                return "wrong", f"output {index} {list(out.placements)} {problem}"
        return self._gradients(leaves, outs, case)

    def _gradients(self, leaves: Sequence[Any], outs: Sequence[Any], case: Any) -> tuple[str, str]:
        seeds = [
            None if seed is None else self.peer.wrap(np.array(seed), Replicate(), seed.shape)
            for seed in case.reference.cotangents
        ]
        self.peer.backward(outs, seeds)
        for index, (leaf, wanted) in enumerate(zip(leaves, case.reference.grads, strict=True)):
            if not leaf.requires_grad or not any(out.requires_grad for out in outs):
                continue
            if leaf.grad is None:
                problem = "is none" if wanted.any() else ""
            elif not self.peer.is_wrapped(leaf.grad):
                return "plain", f"gradient of operand {index} is a plain tensor"
            else:
                problem = self._difference(leaf.grad, wanted, case.reference)
            if problem:
                self.where = ("gradient", index)
                return "wrong", f"gradient of operand {index} {problem}"
        return "ok", ""

    def _distributed(self, index: int, place: Placement, case: Any, *, differentiated: bool) -> Any:
        piece = self._pieces(index, place, case)[self.rank]
        return self.peer.wrap(piece, place, case.filled.arrays[index].shape, differentiated=differentiated)

    def _pieces(self, index: int, place: Placement, case: Any) -> Sequence[Any]:
        """Return the local shard of every rank."""
        array = case.filled.arrays[index]
        layout = Layout.place(mesh_of((WORLD,)), [place], array.shape)
        rng = np.random.default_rng([case.seed, index])
        return local_shards(array, layout, rng, integral=case.filled.integral)

    def _difference(self, actual: Any, expected: Any, reference: Any) -> str:
        return difference(self.peer.whole(actual), expected, exact=reference.exact, eps=reference.eps) or ""


def _tuples(arrays: Sequence[Any], seed: int) -> Iterator[Places]:
    """Yield all placements of all operands; a random sample where there are too many."""
    options: list[list[Placement]] = []
    for array in arrays:
        kinds: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(array.ndim))]
        if array.dtype.kind in "fc" and can_be_partial(array, "sum"):
            kinds.append(Partial("sum"))
        options.append(kinds)
    tuples = list(itertools.islice(itertools.product(*options), 20000))
    if len(tuples) > _MOST:
        order = np.random.default_rng(seed).permutation(len(tuples))[:_MOST]
        tuples = [tuples[int(index)] for index in sorted(order)]
    return iter(tuples)


@dataclass
class OperatorAudit:
    """The audit of one operator.

    Attributes:
        op: canonical name.
        counts: placements by outcome: ``ok``, ``rejects``, ``wrong``, ``crash``, ``plain``.
        shown: the first failure of each kind.
        program: prints the first wrong value; None if it would be too long.
        printed: its output on two new processes, or empty.
    """

    op: str
    counts: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)
    program: str | None = None
    printed: str = ""

    @property
    def outcome(self) -> str:
        """The worst outcome; ``unexercised`` without any."""
        return next(
            (outcome for outcome in ("wrong", "crash", "plain", "rejects", "ok") if self.counts[outcome]), "unexercised"
        )

    def text(self) -> str:
        """Return a line, one for each kind of failure, and a program that shows the wrong value."""
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items())) or "no sample"
        return "\n".join(
            [
                f"{self.outcome:<12}{self.op}: {counts}",
                *(f"    {line}" for line in self.shown),
                *self._reproducer_lines(),
            ]
        )

    def _reproducer_lines(self) -> list[str]:
        if not self.counts["wrong"]:
            return []
        if self.program is None:
            return ["    no program of few lines shows it"]
        seen = f"prints {self.printed}"[:200] if self.printed else "needs what the operators before it left behind"
        return [f"    reproducer, {seen}", *(f"        {line}" for line in self.program.split("\n"))]

    def json(self) -> dict[str, Any]:
        """Return the audit as a JSON object."""
        return {"op": self.op, "outcome": self.outcome, "counts": dict(self.counts), "shown": self.shown,
                "program": self.program, "printed": self.printed}  # fmt: skip


def audit(target: str, ops: Sequence[str]) -> Iterator[OperatorAudit]:
    """Yield one audit per operator, even if the processes crash."""
    left = list(ops)
    while left:
        current = left[0]
        with tempfile.TemporaryDirectory() as folder:
            for line in _lines(target, left, Path(folder) / "store"):
                if "begin" in line:
                    current = line["begin"]
                else:
                    left.remove(line["op"])
                    program, printed = reproduced(target, line.get("programs", []))
                    yield OperatorAudit(line["op"], Counter(line["counts"]), line["shown"], program, printed)
        if left:  # the processes died or hang
            left.remove(current)
            yield OperatorAudit(
                current, Counter(crash=1), [f"crash: its processes died or did not finish in {_SECONDS:g} s"]
            )


def reproduced(target: str, programs: Sequence[str]) -> tuple[str | None, str]:
    """Return the first of ``programs`` that prints a wrong value on two new processes, with its output.

    If none does, the first program and no output.
    """
    if not programs:
        return None, ""
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    try:
        ended = subprocess.run(  # noqa: S603 - this interpreter, this package
            python_command(_CONFIRM[target]),
            input=json.dumps(list(programs)), capture_output=True, text=True, env=environment,
            timeout=_MOST_SECONDS, check=True,
        )  # fmt: skip
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return programs[0], ""
    wrong = json.loads(ended.stdout)
    return (programs[0], "") if wrong is None else (programs[wrong["index"]], wrong["printed"])


def summary(target: str, audits: Sequence[OperatorAudit]) -> str:
    """Return the numbers of operators by outcome, of placements, and of lines of failures."""
    counts = Counter(audit.outcome for audit in audits)
    checks = sum((audit.counts for audit in audits), Counter[str]())
    operators = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    placements = ", ".join(f"{count} {name}" for name, count in checks.most_common())
    lines = sum(audit.text().count("\n") + 1 for audit in audits if audit.outcome != "ok")
    return f"{target}: {len(audits)} operators ({operators}); placements: {placements}; {lines} lines of findings"


def _lines(target: str, ops: Sequence[str], store: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of rank 0 until it ends or is silent for too long."""
    _, module = TARGETS[target]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    ranks = [
        subprocess.Popen(  # noqa: S603 - this interpreter, this package
            python_command("hyper_parallel.verify.ops.audit", module, str(rank), str(store), *ops),
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment,
        )
        for rank in range(WORLD)
    ]  # fmt: skip
    try:
        assert ranks[0].stdout is not None
        yield from _read_lines(ranks[0].stdout.fileno())
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        assert ranks[0].stdout is not None
        ranks[0].stdout.close()


def _read_lines(source: int) -> Iterator[dict[str, Any]]:
    rest, until = b"", time.monotonic() + _SECONDS
    with selectors.DefaultSelector() as chosen:
        chosen.register(source, selectors.EVENT_READ)
        while chosen.select(max(until - time.monotonic(), 0.0)):
            data = os.read(source, 1 << 16)
            if not data:
                return
            *lines, rest = (rest + data).split(b"\n")
            until = time.monotonic() + _SECONDS
            yield from map(json.loads, lines)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4:])
