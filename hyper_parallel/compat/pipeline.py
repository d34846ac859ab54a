"""Micro-batches, and pipeline stages and schedules, under the names that programs import.

Stages and schedules raise when an object of them is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from hyper_parallel.compat.refusals import refused_class
from hyper_parallel.platform.contract.pipeline import MicroBatch
from hyper_parallel.platform.select import get_platform

__all__ = [
    "CommComputeOverlap",
    "HookCoordinator",
    "HookRole",
    "MetaStepType",
    "PipelineStage",
    "Schedule1F1B",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "_MicroBatch",
]

_REASON = "pipeline parallelism is not supported; set pipeline_parallel to 1"
_OVERLAP = "overlap of communication and computation is not supported; set pipeline_parallel_overlap_b_f to false"
_WHOLE = -1

CommComputeOverlap = refused_class("CommComputeOverlap", _OVERLAP)
HookCoordinator = refused_class("HookCoordinator", _OVERLAP)
PipelineStage = refused_class("PipelineStage", _REASON)
Schedule1F1B = refused_class("Schedule1F1B", _REASON)
ScheduleGPipe = refused_class("ScheduleGPipe", _REASON)
ScheduleInterleaved1F1B = refused_class("ScheduleInterleaved1F1B", _REASON)


class HookRole(Enum):
    """What a hook of a schedule that overlaps waits for."""

    COMPUTE = auto()
    COMM = auto()


class MetaStepType(Enum):
    """Kinds of steps of a schedule for which a program may register a function."""

    OVERLAP_B_F = auto()


def _MicroBatch(  # noqa: N802 - the name that programs import
    micro_batch_num: int, args_batch_dim: Sequence[int] | None = None, kwargs_batch_dim: Mapping[str, int] | None = None
) -> MicroBatch:
    """Return a function that splits inputs into equal micro-batches; see :meth:`.PipelineFacet.micro_batch`.

    Args:
        micro_batch_num: number of micro-batches.
        args_batch_dim: per positional argument the dim to split along; -1 gives every micro-batch all of it.
        kwargs_batch_dim: the same for keyword arguments, by name.
    """
    dims = None if args_batch_dim is None else [_or_all(dim) for dim in args_batch_dim]
    named = None if kwargs_batch_dim is None else {name: _or_all(dim) for name, dim in kwargs_batch_dim.items()}
    return get_platform().micro_batch(micro_batch_num, dims, named)


def _or_all(dim: Any) -> int | None:
    return None if dim == _WHOLE else dim
