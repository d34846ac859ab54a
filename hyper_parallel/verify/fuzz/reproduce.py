"""Writes a program as plain user code that ends with a non-zero status if the library is wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.boxes import coordinates
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Partial
from hyper_parallel.verify.checker.shards import printable_shard
from hyper_parallel.verify.fuzz.idioms import MOVE
from hyper_parallel.verify.fuzz.program import TensorRef
from hyper_parallel.verify.ops.claims import mesh_of

if TYPE_CHECKING:
    from pathlib import Path

    from hyper_parallel.core.dtensor.placements import Placement
    from hyper_parallel.verify.fuzz.language import Language
    from hyper_parallel.verify.fuzz.program import Leaf, Outcome, Program, Step

__all__ = ["MOST_LINES", "SHOWN_SECONDS", "fails", "source_of"]

MOST_LINES = 20
"""Maximum number of lines of a reproducer; a longer one gets several statements per line."""

SHOWN_SECONDS = 120.0
"""Time limit of a reproducer; one that exceeds it counts as a hang."""

_MOVED = "x.redistribute(placements=p) if isinstance(x, DTensor) else x"
_WIDTH = 110
_BOUNDS = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-3}
"""Tolerances of reproducers by dtype. They confirm findings; a finding with a smaller difference is not confirmed."""


def source_of(program: Program, outcome: Outcome, framework: str, language: Language) -> str:
    """Return a program as source.

    Args:
        program: what to run.
        outcome: outcome of the program.
        framework: name of the framework.
        language: the framework's functions for random programs.
    """
    lines = _lines(program, outcome, framework, language, _body(program, language))
    if len(lines) > MOST_LINES:
        body = _joined(_body(program, language), MOST_LINES - len(lines))
        lines = _lines(program, outcome, framework, language, body)
    return "\n".join([*lines, ""])


def _body(program: Program, language: Language) -> list[str]:
    """Return the lines of the function that runs a program on leaves."""
    return language.body_source(
        [_step(step, language) for step in program.steps],
        [f"x{number}" for step in program.steps for number in step.outs],
        program.mode,
        [f"x{number}" for number in program.outputs],
        [f"x{number}" for number in program.differentiated],
        [f"x{number}" for number in program.cotangents],
        {f"x{number}": f"x{seed}" for number, seed in program.second},
    )


def _joined(lines: Sequence[str], surplus: int) -> list[str]:
    """Return the lines, some joined by semicolons if there are too many; ``surplus`` is minus the excess of lines."""
    joined: list[str] = []
    for line in lines:
        statement = line.lstrip()
        last = joined[-1] if joined else "def:"
        alike = len(last) - len(last.lstrip()) == len(line) - len(statement) and not last.endswith(":")
        fits = alike and len(last) + len(statement) < _WIDTH
        if surplus < 0 and fits and not statement.startswith(("def ", "return ")):
            joined[-1] += f"; {statement}"
            surplus += 1
        else:
            joined.append(line)
    return joined


def _lines(program: Program, outcome: Outcome, framework: str, language: Language, body: Sequence[str]) -> list[str]:
    """Return the lines of the file: leaves, the program, and the comparison with a single device."""
    seed, number = program.seed
    headline = f"# hyper-parallel fuzz --seed {seed}, program {number}: {outcome.kind}: {outcome.text}"
    move = f"move = lambda x, p: {language.COPY.format(_MOVED)}"
    return [
        headline.partition("\n")[0][:118],
        language.HEAD,
        "from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh",
        "from hyper_parallel.verify import simulate",
        *([move] if any(step.call == MOVE for step in program.steps) else []),
        f"def program({', '.join(f'x{number}' for number in program.leaves)}):",
        *(f"    {line}" for line in body),
        "def values():",
        f"    return [{', '.join(_plain(leaf, language) for leaf in program.leaves.values())}]",
        "def on_rank():",
        f'    mesh, x = init_device_mesh("cpu", {program.mesh}), values()',
        f"    leaves = [{', '.join(_placed(program, language))}]",
        "    return [None if y is None else y.detach().full_tensor() for y in program(*leaves)]",
        *_checked(program, framework, language, exact=outcome.exact),
    ]


def _checked(program: Program, framework: str, language: Language, *, exact: bool) -> list[str]:
    run = f'simulate(on_rank, {program.world_size}, "{framework}")'
    bounds = [0.0 if exact else _BOUNDS.get(leaf.dtype, 0.0) for leaf in program.leaves.values()]
    bound = max(bounds, default=0.0)
    return [
        f"for results in {run}:",
        "    for y, z in zip(results, program(*values()), strict=True):",
        f"        {language.ASSERTION.format(bound=bound)}",
    ]


def _plain(leaf: Leaf, language: Language) -> str:
    return language.leaf_source(language.values_of(leaf.array, leaf.dtype), requires_grad=leaf.requires_grad)


def _placed(program: Program, language: Language) -> list[str]:
    """Return the leaves on a rank as source; each rank has its own partial value of a pending leaf."""
    mesh, texts = mesh_of(program.mesh), []
    for index, leaf in enumerate(program.leaves.values()):
        places = _places(leaf.placements)
        if not any(isinstance(placement, Partial) for placement in leaf.placements):
            text = f"distribute_tensor({language.detached_source(f'x[{index}]')}, mesh, {places})"
            texts.append(language.leaf_source(text, requires_grad=leaf.requires_grad))
            continue
        layout = Layout.place(mesh, leaf.placements, leaf.array.shape)
        parts = ", ".join(
            language.values_of(printable_shard(leaf.array, layout, at, integral=program.integral), leaf.dtype)
            for at in coordinates(mesh)
        )
        shape = tuple(leaf.array.shape)
        text = f"DTensor.from_local([{parts}][mesh.get_rank()], mesh, {places}, shape={shape})"
        texts.append(language.leaf_source(text, requires_grad=leaf.requires_grad))
    return texts


def _places(placements: Sequence[Placement]) -> str:
    texts = (f"Partial({p.reduce_op!r})" if isinstance(p, Partial) else repr(p) for p in placements)
    return f"[{', '.join(texts)}]"


def _step(step: Step, language: Language) -> str:
    def text_of(value: Any) -> str:
        if isinstance(value, TensorRef):
            return f"x{value.number}"
        if isinstance(value, slice):
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(text_of(part) for part in parts)})"
        if isinstance(value, (list, tuple)):
            inner = ", ".join(text_of(item) for item in value)
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
        return language.literal(value)

    args = [text_of(value) for value in step.args]
    if step.call == MOVE:
        placements: Any = step.args[1]
        return f"x{step.outs[0]} = move({args[0]}, {_places(placements)})"
    call = language.source(step.call, args, {name: text_of(value) for name, value in step.kwargs.items()})
    if not step.outs:
        return call
    if call.partition(" ")[2][:2] in {"+=", "-=", "*=", "/="}:
        return f"{call}; x{step.outs[0]} = {args[0]}"
    targets = ", ".join(f"x{number}" for number in step.outs)
    return f"{targets}{',' if step.several and len(step.outs) == 1 else ''} = {call}"


def fails(path: Path, seconds: float = SHOWN_SECONDS) -> bool:
    """Whether a reproducer ends with a non-zero status, or exceeds its time limit."""
    try:
        ended = subprocess.run(  # noqa: S603 - this interpreter, our own file
            [sys.executable, str(path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    return ended.returncode != 0
