"""A small training program in NumPy on a mesh, with faults that can be switched on: what the comparison is tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hyper_parallel.verify.engine.bounds import Bounds
from hyper_parallel.verify.engine.noise import displace, perturb, seed_of
from hyper_parallel.verify.frameworks.contract.records import Group, RankRecords, Record, Run

ROWS, WIDTH, HIDDEN, OUT, STEPS, RATE = 5, 4, 7, 3, 3, 0.1
ORDER = ("scale.weight", "up.weight", "down.weight", "down.bias")


@dataclass
class Program:
    """Scales its input, multiplies it by a column-sharded and a row-sharded weight, and trains with momentum.

    Attributes:
        mesh: sizes of axes ``dp`` and ``tp``.
        change: called with the place and the values of all ranks, ``{rank: array}``, which it may change.
        moved, displaced: perturbations of a reference.
        clip: norm that gradients are clipped to; 0 does not.
    """

    mesh: dict[str, int]
    change: Callable[[str, int, dict[int, Any]], None] = lambda _place, _step, _values: None
    moved: tuple[int, int] | None = None
    displaced: Any = None
    clip: float = 0.0
    records: dict[int, list[Record]] = field(default_factory=dict)

    def __post_init__(self):
        self.dp, self.tp = self.mesh["dp"], self.mesh["tp"]
        self.world = range(self.dp * self.tp)
        self.records = {rank: [] for rank in self.world}
        self.rows = {r: np.array_split(np.arange(ROWS), self.dp)[r // self.tp] for r in self.world}
        self.columns = {r: np.array_split(np.arange(HIDDEN), self.tp)[r % self.tp] for r in self.world}
        self.lines = {
            "dp": [[r for r in self.world if r % self.tp == t] for t in range(self.tp)],
            "tp": [[r for r in self.world if r // self.tp == d] for d in range(self.dp)],
        }

    def record(self, kind, name, step, values):
        """Record a value of every rank."""
        self.change(f"{kind} {name}", step, values)
        for rank, value in values.items():
            if value is not None:
                module = name.partition(".")[0] if "." in name or kind == "output" else ""
                self.records[rank].append(Record(kind, name, module, step, 0, np.array(value)))

    def total(self, axis, values, place="", step=0):
        """Return the sum over an axis, unless a fault leaves it out."""
        wanted = {"axis": axis}
        self.change(f"reduce {place}", step, wanted)
        if wanted["axis"] is None:
            return dict(values)
        groups = {rank: group for group in self.lines[wanted["axis"]] for rank in group}
        return {rank: sum(values[other] for other in groups[rank]) for rank in values}

    def initial(self):
        """Return the weights of every rank before training."""
        rng = np.random.default_rng(1)
        shapes = {"scale.weight": (WIDTH,), "up.weight": (HIDDEN, WIDTH), "down.weight": (OUT, HIDDEN)}
        whole = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
        whole["down.bias"] = rng.standard_normal(OUT)
        if self.moved:
            whole = {name: perturb(value, seed_of(self.moved[0], name), self.moved[1]) for name, value in whole.items()}
        part = {"up.weight": lambda w, c: w[c], "down.weight": lambda w, c: w[:, c]}
        return {
            name: {r: part.get(name, lambda w, _: w)(value, self.columns[r]).copy() for r in self.world}
            for name, value in whole.items()
        }

    def run(self):
        """Train, and return the records."""
        weights, rng = self.initial(), np.random.default_rng(2)
        momentum = {name: {r: np.zeros_like(value) for r, value in weights[name].items()} for name in ORDER}
        for name in ORDER:
            self.record("weight", name, -1, weights[name])
        for step in range(STEPS):
            x, y = rng.standard_normal((ROWS, WIDTH)), rng.standard_normal((ROWS, OUT))
            if self.moved:
                x = perturb(x, seed_of(self.moved[0], "x", step), self.moved[1])
            gradients = self.gradients(step, weights, {r: x[self.rows[r]] for r in self.world}, y)
            if self.clip:
                gradients = self.clipped(step, gradients)
            self.update(step, gradients, weights, momentum)
        groups = {
            r: [Group(a, tuple(g)) for a, lines in self.lines.items() for g in lines if r in g] for r in self.world
        }
        return Run([RankRecords(r, self.records[r], groups[r]) for r in self.world])

    def update(self, step, gradients, weights, momentum):
        """Make one step of the optimizer, and record what it sees and leaves behind."""
        for name in ORDER:
            self.record("gradient", name, step, gradients[name])
            if self.displaced:
                allowed = self.displaced[1][name, step]
                gradients[name] = {0: displace(gradients[name][0], allowed, None, self.displaced[0])}
        self.record("rate", "optimizer 0, group 0", step, {r: np.asarray(RATE) for r in self.world})
        for name in ORDER:
            for r in self.world:
                if gradients[name].get(r) is not None:
                    momentum[name][r] = 0.9 * momentum[name][r] + gradients[name][r]
            self.record("state", f"{name}:momentum", step, momentum[name])
        for name in ORDER:
            before = {r: value.copy() for r, value in weights[name].items()}
            for r in self.world:
                weights[name][r] = weights[name][r] - RATE * momentum[name][r]
            self.change(f"update {name}", step, {"before": before, "after": weights[name]})
            self.record("weight", name, step, weights[name])

    def gradients(self, step, weights, x, y):
        """Run forward and backward, and return the gradients by name and rank."""
        w, b, ranks = weights, weights["down.bias"], self.world
        scaled = {r: x[r] * w["scale.weight"][r] for r in ranks}
        self.record("output", "scale", step, scaled)
        hidden = {r: np.tanh(scaled[r] @ w["up.weight"][r].T) for r in ranks}
        self.record("output", "up", step, hidden)
        partial = {r: hidden[r] @ w["down.weight"][r].T for r in ranks}
        self.record("output", "partial", step, partial)
        out = {r: value + b[r] for r, value in self.total("tp", partial, "output", step).items()}
        self.record("output", "down", step, out)
        off = {r: out[r] - y[self.rows[r]] for r in ranks}
        loss = {r: np.asarray((off[r] ** 2).sum() / ROWS) for r in ranks}
        self.record("loss", "loss", step, loss)
        d = {r: 2 * off[r] / ROWS for r in ranks}
        inner = {r: (d[r] @ w["down.weight"][r]) * (1 - hidden[r] ** 2) for r in ranks}
        back = self.total("tp", {r: inner[r] @ w["up.weight"][r] for r in ranks}, "input gradient", step)
        local = {
            "scale.weight": {r: (back[r] * x[r]).sum(0) for r in ranks},
            "up.weight": {r: inner[r].T @ scaled[r] for r in ranks},
            "down.weight": {r: d[r].T @ hidden[r] for r in ranks},
            "down.bias": {r: d[r].sum(0) for r in ranks},
        }
        return {name: self.total("dp", local[name], name, step) for name in ORDER}

    def clipped(self, step, gradients):
        """Clip by the norm, and record it."""
        sharded, single = ("up.weight", "down.weight"), ("scale.weight", "down.bias")
        squares = {r: sum((gradients[n][r] ** 2).sum() for n in sharded) for r in self.world}
        once = {r: sum((gradients[n][r] ** 2).sum() for n in single) for r in self.world}
        norms = {r: np.sqrt(s + once[r]) for r, s in self.total("tp", squares, "norm", step).items()}
        self.change("norm", step, {"norms": norms, "squares": squares, "once": once})
        self.record("norm", "gradient norm", step, norms)
        factors = {r: min(1.0, self.clip / norms[r]) for r in self.world}
        return {n: {r: factors[r] * g for r, g in values.items()} for n, values in gradients.items()}


def runs(change=None, mesh=None, clip=0.0, reference_change=None):
    """Return a reference, its perturbed repeats, and a parallel run with a fault."""
    alone = {"dp": 1, "tp": 1}
    extra = {"change": reference_change} if reference_change else {}
    reference = Program(alone, clip=clip, **extra).run()
    repeats = [Program(alone, clip=clip, moved=(n, s), **extra).run() for n in (0, 1) for s in (1, -1)]
    bounds = Bounds(reference, repeats)
    allowed = {(key[1], key[2]): bounds.allowed(key) for key in bounds.reference if key[0] == "gradient"}
    for sign in (1, -1):
        repeats.append(Program(alone, clip=clip, displaced=(sign, allowed), **extra).run())
        repeats[-1].settings = {"perturbation": "displaced gradients"}
    faulty = {"change": change} if change else {}
    return reference, repeats, Program(mesh or {"dp": 2, "tp": 3}, clip=clip, **faulty).run()


@pytest.fixture(name="runs")
def runs_fixture():
    """The function that makes the three runs."""
    return runs
