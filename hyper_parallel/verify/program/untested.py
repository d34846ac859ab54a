"""Checks that fit a program and were not requested of `verify program`: micro-batches, checkpoints."""

from __future__ import annotations

from hyper_parallel.verify.engine.samples import calls_of_first_step
from hyper_parallel.verify.frameworks.contract.records import Run
from hyper_parallel.verify.program.program import Program

__all__ = ["untested_relations"]


def untested_relations(program: Program, run: Run, *, accumulates: bool, resumes: bool) -> list[str]:
    """Return what one rank and several may get wrong alike, and how to test it; a sentence each.

    Args:
        program: a function has no arguments by which it could run in another way.
        run: on one rank.
        accumulates: whether its micro-batches are compared with one batch.
        resumes: whether it is started again.
    """
    rank = run.ranks[0]
    lines: list[str] = []
    if not program.is_script:
        return lines
    calls = calls_of_first_step(rank.notes)
    if calls > 1 and not accumulates:
        lines.append(
            f"it calls its model {calls} times before the first optimizer step: if these are micro-batches, whether "
            "they train like one batch; give the script's arguments for one batch with --accumulate"
        )
    anew = any(record.kind == "state" and not record.step and record.call for record in rank.records)
    saves = any(record.kind == "saved" for record in rank.records)
    if (saves or anew) and not resumes:
        what = "it saves tensors" if saves else "two optimizers train a parameter, the second from its own first step"
        lines.append(
            f"{what}: whether it goes on from what it has saved as if it had not been stopped; give the script's "
            "arguments for that with --resume"
        )
    return lines
