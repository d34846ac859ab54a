"""Runs a batch of programs on the ranks of one simulated world, and judges every program."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.errors import CollectiveMismatchError, HyperParallelError, RankFailedError, ShardMismatchError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.transport.simulated.endpoint import unwinding
from hyper_parallel.verify.fuzz.execution import Key, execute
from hyper_parallel.verify.fuzz.language import language_of
from hyper_parallel.verify.fuzz.leaves import local_array
from hyper_parallel.verify.fuzz.outcome import Outcome
from hyper_parallel.verify.fuzz.program import operands
from hyper_parallel.verify.fuzz.truth import Truth, result_of
from hyper_parallel.verify.simulate import simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.fuzz.language import Language
    from hyper_parallel.verify.fuzz.program import Program

__all__ = ["SECONDS", "run_programs"]

SECONDS = 300.0
"""After which a world that does not end is given up; ranks that wait for each other are noticed at once."""

_STATE = "_hyper_parallel_fuzz_state"
"""Attribute of an error that ended a rank: the number of programs that it had finished, and its own program's error."""

_SOME_RANKS = "on some ranks only"


@dataclass(frozen=True)
class _Piece:
    """This rank's part of a result.

    Attributes:
        array: its values.
        dtype: name of the dtype.
        shape: of the whole result.
        box: which part it is.
        problem: why it cannot be compared.
    """

    array: Any
    dtype: str
    shape: tuple[int, ...]
    box: tuple[slice, ...]
    problem: str = ""


@dataclass
class _RankRun:
    """What became of one program on one rank.

    Attributes:
        error: what it raised; empty if it ended.
        refused: it was refused by an error of this library.
        pieces: of its results; None for a gradient that does not exist.
    """

    error: str = ""
    refused: bool = False
    pieces: dict[Key, _Piece | None] = field(default_factory=dict)


def run_programs(framework: str, programs: Sequence[Program], *, timeout: float = SECONDS) -> list[Outcome]:
    """Run programs for the same number of ranks, one after the other in one world, and judge them.

    Args:
        framework: name of the framework.
        programs: what to run.
        timeout: seconds for all of them together.
    """
    outcomes: list[Outcome] = []
    while len(outcomes) < len(programs):
        outcomes += _outcomes(framework, programs[len(outcomes) :], timeout)
    return outcomes


def _outcomes(framework: str, programs: Sequence[Program], timeout: float) -> list[Outcome]:
    """Return the outcomes of the first programs, at least of one; a program that ends the world is the last."""
    platform, language = platform_named(framework), language_of(framework)
    runs, failure = _run_world(framework, programs, timeout)
    judged = [
        _judged(Truth.of(program, platform, language), ranks) for program, ranks in zip(programs, runs, strict=False)
    ]
    if failure is None:
        return judged
    if judged or len(programs) == 1:
        last = min(len(judged), len(programs) - 1)
        outcome = failure.outcome
        if outcome.text.startswith(_SOME_RANKS) and Truth.of(programs[last], platform, language).error:
            outcome = replace(outcome, kind="refused by both")
        return [*judged[:last], outcome]
    # What rank processes had finished is lost with them: the programs before the failed one run again without it, half
    # of them where it is not known which one failed.
    before = len(programs) // 2 if failure.finished is None else min(failure.finished, len(programs) - 1)
    return _outcomes(framework, programs[: max(1, before)], timeout)


@dataclass(frozen=True)
class _Failure:
    """How a program ended the world.

    Attributes:
        outcome: of that program.
        finished: how many programs all ranks had finished before; None if that is not known.
    """

    outcome: Outcome
    finished: int | None


def _run_world(
    framework: str, programs: Sequence[Program], timeout: float
) -> tuple[list[list[_RankRun]], _Failure | None]:
    """Return what became of programs per rank, and how the next one ended the world, if one did.

    Of ranks that are processes nothing is known after a failure but how many programs they had finished.
    """
    world_size = programs[0].world_size
    shared: list[list[_RankRun]] = [[] for _ in range(world_size)]
    failure = None
    try:
        per_rank = simulate(_run_rank, world_size, framework, (framework, programs, shared), timeout=timeout)
    except RankFailedError as error:
        per_rank, failure = shared, _failure(error)
    done = min(map(len, per_rank))
    return [[runs[number] for runs in per_rank] for number in range(done)], failure


def _failure(error: RankFailedError) -> _Failure:
    """Return how the program after the last that all ranks finished ended the world."""
    failures = getattr(error, "failures", {})
    cause = next(iter(failures.values()), error)
    states = [state for failed in failures.values() if (state := getattr(failed, _STATE, None)) is not None]
    finished = min((done for done, _ in states), default=None)
    texts = {text for _, text in states if text}
    if texts:
        return _Failure(Outcome("internal error", f"{_SOME_RANKS}: {min(texts)}"), finished)
    if any(isinstance(failed, (CollectiveMismatchError, TimeoutError)) for failed in failures.values()):
        text = f"{type(cause).__name__}: {error if isinstance(cause, TimeoutError) else cause}"
        return _Failure(Outcome("hang", text), finished)
    return _Failure(Outcome("internal error", f"{type(cause).__name__}: {cause}"), finished)


# -- on a rank ---------------------------------------------------------------------------------------------------------


def _run_rank(framework: str, programs: Sequence[Program], shared: Sequence[list[_RankRun]]) -> list[_RankRun]:
    """Run all programs on this rank; all ranks meet after each."""
    platform, language = platform_named(framework), language_of(framework)
    transport = platform.transport()
    meshes: dict[tuple[int, ...], Any] = {}
    runs = shared[transport.rank]
    for program in programs:
        if program.mesh not in meshes:
            names = [f"m{axis}" for axis in range(len(program.mesh))]
            meshes[program.mesh] = init_device_mesh("cpu", program.mesh, mesh_dim_names=names)
        run = _RankRun()
        try:
            _run_one(run, program, meshes[program.mesh], platform, language)
            transport.barrier(tuple(range(transport.world_size)))
        except Exception as error:
            setattr(error, _STATE, (len(runs), run.error))
            raise
        runs.append(run)
    return runs


def _run_one(run: _RankRun, program: Program, mesh: Any, platform: Platform, language: Language) -> None:
    """Run one program; ``run`` becomes what became of it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results = execute(program, _leaves(program, mesh, platform, language), platform, language)
            read = {number for step in program.steps for number in operands(step)}
            for key, tensor in results.items():
                run.pieces[key] = _piece(tensor, mesh, platform, reduced=key[0] != "value" or key[1] not in read)
    except (CollectiveMismatchError, ShardMismatchError):
        raise
    except HyperParallelError as error:
        run.error, run.refused = f"{type(error).__name__}: {error}", True
    except Exception as error:
        if unwinding(error):
            raise
        run.error = f"{type(error).__name__}: {error}\n{''.join(traceback.format_tb(error.__traceback__)[-3:])}"


def _leaves(program: Program, mesh: Any, platform: Platform, language: Language) -> dict[int, Any]:
    leaves = {}
    for number, leaf in program.leaves.items():
        layout = Layout.place(mesh, leaf.placements, leaf.array.shape)
        local = local_array(leaf.array, layout, mesh.coordinate, integral=program.integral)
        tensor = platform.from_numpy(local).to(platform.str_to_dtype(leaf.dtype))
        leaves[number] = language.leaf(platform.wrap(tensor, layout), requires_grad=leaf.requires_grad)
    return leaves


def _piece(tensor: Any, mesh: Any, platform: Platform, *, reduced: bool) -> _Piece | None:
    """Return this rank's part of a result; pending reductions are made first, unless a later step reads it."""
    if tensor is None:
        return None
    if not isinstance(tensor, platform.DTensorBase):
        return _Piece(None, "", (), (), "is a plain tensor")
    if tensor.layout.partials:
        if not reduced:
            return _Piece(None, "", (), (), "is pending")
        whole = result_of(tensor.detach().full_tensor(), platform)
        assert whole is not None
        return _Piece(whole.array, whole.dtype, whole.array.shape, (...,))  # type: ignore[arg-type] # all of it
    local = result_of(tensor._local, platform)
    assert local is not None
    box = tuple(slice(start, stop) for start, stop in tensor.layout.box_at(mesh.coordinate))
    return _Piece(local.array, local.dtype, tuple(tensor.shape), box)


# -- verdict -----------------------------------------------------------------------------------------------------------


def _judged(truth: Truth, ranks: Sequence[_RankRun]) -> Outcome:
    """Return the outcome of a program that all ranks finished."""
    errors = [run.error for run in ranks]
    if truth.error:
        if any(errors):
            return Outcome("refused by both", next(filter(None, errors)))
        return Outcome("accepted", f"a single device refuses with {truth.error}")
    if any(errors) and not all(errors):
        return Outcome("internal error", f"{_SOME_RANKS}: {next(filter(None, errors))}")
    if all(run.refused for run in ranks):
        return Outcome("refused", errors[0])
    if all(errors):
        return Outcome("internal error", next(run.error for run in ranks if not run.refused))
    return _compared(truth, ranks)


def _compared(truth: Truth, ranks: Sequence[_RankRun]) -> Outcome:
    """Return the outcome of a program that gave results on all ranks and on the single device."""
    compared = gradients = 0
    for key in truth.results:
        having = [rank for rank, run in enumerate(ranks) if run.pieces[key] is not None]
        if having and len(having) < len(ranks):
            text = f"{key[0]} of x{key[1]} exists on ranks {having} only"
            return Outcome("wrong", text, compared, gradients, truth.exact, key[1])
        for rank, run in enumerate(ranks):
            piece = run.pieces[key]
            if piece is not None and piece.problem == "is pending":
                continue
            problem = _problem(truth, key, piece)
            if problem:
                text = f"{key[0]} of x{key[1]} {problem}, on rank {rank}"
                return Outcome("wrong", text, compared, gradients, truth.exact, key[1])
            compared += piece is not None
            gradients += piece is not None and key[0] != "value"
    return Outcome("equal", "", compared, gradients, truth.exact)


def _problem(truth: Truth, key: Key, piece: _Piece | None) -> str:
    expected = truth.results[key]
    if expected is None and (piece is None or (piece.array is not None and not np.any(piece.array))):
        return ""  # a gradient that does not exist is zero
    if expected is None:
        return "exists, and a single device has none"
    if piece is None:
        missing = key[0] != "second gradient" or truth.difference(key, np.zeros_like(expected.array), ())
        return "is missing" if missing else ""  # a second gradient may be missing where rounding alone makes it
    if piece.problem or piece.shape != expected.array.shape:
        return piece.problem or f"has shape {list(piece.shape)}, should have {list(expected.array.shape)}"
    if piece.dtype != expected.dtype:
        return f"has dtype {piece.dtype}, should have {expected.dtype}"
    return truth.difference(key, piece.array, piece.box)
