"""Runs a batch of programs on the ranks of one simulated world, and determines the outcome of every program."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel._caches import empty_layout_caches
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.shard.op_plan import observing_plans
from hyper_parallel.errors import CollectiveMismatchError, HyperParallelError, ShardMismatchError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.transport.base import use_transport
from hyper_parallel.transport.simulated.endpoint import unwinding
from hyper_parallel.verify.checker.batch import Failed, World, run_batch
from hyper_parallel.verify.checker.shards import printable_shard
from hyper_parallel.verify.fuzz.execution import Key, execute
from hyper_parallel.verify.fuzz.language import language_of
from hyper_parallel.verify.fuzz.program import Outcome, operands
from hyper_parallel.verify.fuzz.truth import Truth, result_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hyper_parallel.core.shard.op_plan import OpPlan
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.verify.fuzz.language import Language
    from hyper_parallel.verify.fuzz.program import Program
    from hyper_parallel.verify.prove.table import RowsOfCall

__all__ = ["SECONDS", "rows_used", "run_programs"]

SECONDS = 300.0
"""Time limit of a world; a deadlock of its ranks is detected at once."""

_SOME_RANKS = "on some ranks only"


@dataclass(frozen=True)
class _Piece:
    """This rank's shard of a result.

    Attributes:
        array: values of the shard.
        dtype: name of the dtype.
        shape: global shape of the result.
        box: index ranges of the shard in the global result.
        problem: the reason why the shard cannot be compared.
    """

    array: Any
    dtype: str
    shape: tuple[int, ...]
    box: tuple[slice, ...]
    problem: str = ""


@dataclass
class _RankRun:
    """Outcome of one program on one rank.

    Attributes:
        error: the error that the program raised; empty if the program completed.
        refused: whether this library rejected the program with an error of its own types.
        pieces: shards of the program's results; None for a gradient that does not exist.
    """

    error: str = ""
    refused: bool = False
    pieces: dict[Key, _Piece | None] = field(default_factory=dict)


def run_programs(framework: str, programs: Sequence[Program], *, timeout: float = SECONDS) -> list[Outcome]:
    """Run programs for the same number of ranks one after the other in one world, and return their outcomes.

    Args:
        framework: name of the framework.
        programs: the programs to run.
        timeout: time limit in seconds for all programs together.
    """
    platform, language = platform_named(framework), language_of(framework)
    world = World(framework, programs[0].world_size if programs else 1, timeout)
    outcomes = []
    for program, ranks in zip(programs, run_batch(world, _prepare, (framework,), programs), strict=True):
        truth = Truth.of(program, platform, language)
        outcomes.append(_failure(ranks, truth) if isinstance(ranks, Failed) else _judged(truth, ranks))
    return outcomes


def _failure(failed: Failed, truth: Truth) -> Outcome:
    """Return the outcome of a program that ended the world."""
    failures = failed.failures
    cause = next(iter(failures.values()), failed.error)
    texts = {run.error for run in failed.results if run.error}
    if texts:
        kind = "refused by both" if truth.error else "internal error"
        return Outcome(kind, f"{_SOME_RANKS}: {min(texts)}")
    if any(isinstance(error, (CollectiveMismatchError, TimeoutError)) for error in failures.values()):
        text = f"{type(cause).__name__}: {failed.error if isinstance(cause, TimeoutError) else cause}"
        return Outcome("hang", text)
    return Outcome("internal error", f"{type(cause).__name__}: {cause}")


def rows_used(framework: str, program: Program) -> tuple[RowsOfCall, ...]:
    """Return the combinations of placements (rows) that a program's calls use; none if rank 0 cannot run alone.

    Data from other ranks is replaced by zeros, so a program whose calls depend on values may fail.
    """
    from hyper_parallel.verify.explain import rehearsed_transport
    from hyper_parallel.verify.prove.table import rows_of_call

    plans: list[OpPlan] = []
    with use_transport(rehearsed_transport(framework, program.world_size, 0)):
        empty_layout_caches()  # a call that reuses a plan of an earlier run would not be recorded
        with observing_plans(plans.append):
            run = _prepare(framework)(program)
    return () if run.error else tuple(dict.fromkeys(map(rows_of_call, plans)))


# -- on a rank ---------------------------------------------------------------------------------------------------------


def _prepare(framework: str) -> Callable[[Program], _RankRun]:
    """Return the function that runs one program on this rank."""
    platform, language = platform_named(framework), language_of(framework)
    meshes: dict[tuple[int, ...], Any] = {}

    def run(program: Program) -> _RankRun:
        if program.mesh not in meshes:
            names = [f"m{axis}" for axis in range(len(program.mesh))]
            meshes[program.mesh] = init_device_mesh("cpu", program.mesh, mesh_dim_names=names)
        return _run_one(program, meshes[program.mesh], platform, language)

    return run


def _run_one(program: Program, mesh: Any, platform: Platform, language: Language) -> _RankRun:
    run = _RankRun()
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
    return run


def _leaves(program: Program, mesh: Any, platform: Platform, language: Language) -> dict[int, Any]:
    leaves = {}
    for number, leaf in program.leaves.items():
        layout = Layout.place(mesh, leaf.placements, leaf.array.shape)
        local = printable_shard(leaf.array, layout, mesh.coordinate, integral=program.integral)
        tensor = platform.from_numpy(local).to(platform.str_to_dtype(leaf.dtype))
        leaves[number] = language.leaf(platform.wrap(tensor, layout), requires_grad=leaf.requires_grad)
    return leaves


def _piece(tensor: Any, mesh: Any, platform: Platform, *, reduced: bool) -> _Piece | None:
    """Return this rank's shard of a result; pending reductions are done first, unless a later step reads it."""
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
    """Return the outcome of a program that all ranks completed."""
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
    """Return the outcome of a program that has results on all ranks and on the single device."""
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
        return ""  # a missing gradient counts as zero
    if expected is None:
        return "exists, and a single device has none"
    if piece is None:
        missing = key[0] != "second gradient" or truth.difference(key, np.zeros_like(expected.array), ())
        return "is missing" if missing else ""  # a second gradient of only rounding errors may be missing
    if piece.problem or piece.shape != expected.array.shape:
        return piece.problem or f"has shape {list(piece.shape)}, should have {list(expected.array.shape)}"
    if piece.dtype != expected.dtype:
        return f"has dtype {piece.dtype}, should have {expected.dtype}"
    return truth.difference(key, piece.array, piece.box)
