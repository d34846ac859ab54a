"""The values that a recorder reads from a run of a program, as plain data that can be sent between processes.

A framework's recorder makes these records on each rank without communication, because communication would change the
program that is recorded. The comparison combines the ranks' values later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.errors import HyperParallelError

__all__ = [
    "APPLIED",
    "DECISIONS",
    "DRAWS",
    "HALF_BITS",
    "KINDS",
    "OBSERVED",
    "OWN_GRADIENTS",
    "THRESHOLDS",
    "Group",
    "LoaderPass",
    "LocalValue",
    "Pending",
    "RankRecords",
    "Record",
    "RecordingError",
    "Region",
    "Run",
    "region_of",
    "used_bits",
]

KINDS = ("value", "output", "mask", "loss", "norm", "gradient", "state", "weight", "buffer", "rate", "saved")
"""Kinds of values, in this order: a value passed to `record()`, the output of a module, the mask of a dropout module, a
loss on which backward was called, the norm that a clipping function returned, a gradient at the start of the
optimizer's step, state of the optimizer, a weight and a buffer after a step (step -1: before the first), the learning
rate of a parameter group, a tensor that the program saves."""

THRESHOLDS = ("margin", "side")
"""Kinds of records of an operator such as ReLU: the distance of each number from the nearest threshold, and whether the
number is above this threshold (:mod:`hyper_parallel.verify.engine.thresholds`)."""

APPLIED = ("operand", "applied")
"""Kinds of records of a function that applies targets or a mask: the logits or attention scores, and the targets or the
mask (:mod:`hyper_parallel.verify.engine.applied`)."""

OBSERVED = ("input", "collective", "call")
"""Kinds of records that only recordings have: inputs of models, inputs of collectives, and arguments and results of
operators in a log of PyTorch's DebugMode."""

DECISIONS = ("scores", "choice", "draw", *THRESHOLDS, *APPLIED)
"""Kinds of records that are not compared as results: the rows from which an operator such as top-k chooses, the chosen
indices of each row (:mod:`hyper_parallel.verify.engine.decisions`), random numbers of modules, thresholds, targets and
masks."""


OWN_GRADIENTS = "gradients as backward has left them"
"""Key of a note for a run in which no optimizer made a step: its gradients were recorded after backward, and the
program may reduce them later."""


class RecordingError(HyperParallelError, ValueError):
    """The values of a program cannot be recorded: they have too many bytes, or one is not a tensor."""


@dataclass(frozen=True, slots=True)
class Pending:
    """A reduction that a partial value still needs.

    Attributes:
        reduction: ``sum``, ``avg``, ``max`` or ``min``.
        ranks: ranks of the reduction, in order.
    """

    reduction: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Region:
    """The index box of a rank's shard in a global tensor.

    Attributes:
        shape: shape of the global tensor.
        start: first index of the box in each dim; the sizes of the box are the sizes of the value.
        pending: reductions that the value still needs.
        spans: first element and size of each piece, if the value consists of several pieces of the flattened tensor;
            empty for a box.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    pending: tuple[Pending, ...] = ()
    spans: tuple[tuple[int, int], ...] = ()


def region_of(value: Any) -> Region:
    """Return the box of the rank's shard of ``value``, a DTensor of this library."""
    layout = value._layout
    pending = tuple(Pending(reduction, tuple(layout.mesh.ranks_along((axis,)))) for axis, reduction in layout.partials)
    return Region(tuple(layout.shape), tuple(interval[0] for interval in layout.local_box()), pending)


HALF_BITS = {"bfloat16": 16, "float16": 13}
"""Number of trailing zero bits in half-precision numbers that are stored as float32."""


def used_bits(array: Any) -> int:
    """Return a bit mask of the bits that are set in at least one number of a float32 array."""
    return int(np.bitwise_or.reduce(np.ascontiguousarray(array).view(np.uint32), axis=None))


class LocalValue(NamedTuple):
    """A rank's shard of a tensor, as read by a recorder.

    Attributes:
        array: copy of the local tensor as a NumPy array; bfloat16 and float16 as float32.
        region: index box of the shard in the global tensor; None for a plain tensor.
        dtype: ``bfloat16`` or ``float16`` if the tensor has this dtype; otherwise empty.
    """

    array: Any
    region: Region | None = None
    dtype: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """One value of one rank.

    Attributes:
        kind: one of :data:`KINDS`.
        name: name of a parameter, such as ``layers.0.attention.wq.weight``. For outputs the module's path, then
            `` (no_grad)`` if the model was called for evaluation, and the position if the output has several tensors.
            For the optimizer's state the parameter's name, a colon and the entry, ``wq.weight:exp_avg``. For values
            the name that the user passed to ``record()``.
        module: path of the module to which the value belongs; empty for the model itself, and without a module.
        step: number of optimizer steps completed before, from 0; -1 before training.
        call: number of earlier records of this kind and name in the same step (micro-batches, modules called twice).
        value: copy of the rank's local value as a NumPy array.
        region: index box of the value in the global tensor; None for a plain tensor.
        site: ``file:line`` of the user's call of ``record()``, backward or clipping; otherwise empty.
        dtype: ``bfloat16`` or ``float16`` if the value had this dtype; otherwise empty.
    """

    kind: str
    name: str
    module: str
    step: int
    call: int
    value: Any
    region: Region | None = None
    site: str = ""
    dtype: str = ""

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Kind, name, step and call: equal for the same value in different runs and on different ranks."""
        return self.kind, self.name, self.step, self.call

    @property
    def is_initial_weight(self) -> bool:
        """Whether the record is a weight before training."""
        return self.kind == "weight" and self.step == -1


@dataclass(frozen=True, slots=True)
class Group:
    """A process group that the program created, and its mesh axis if it has one.

    Attributes:
        name: name of the mesh axis, ``world``, or the group's description; never empty.
        ranks: ranks of the group, in order.
    """

    name: str
    ranks: tuple[int, ...]


DRAWS = "passes over data loaders"
"""Key of the note with a list of :class:`LoaderPass`."""


@dataclass
class LoaderPass:
    """One pass of a rank over a data loader: an epoch, unless the program stops it early.

    Attributes:
        loader: number of the loader, in order of the first passes on the rank.
        number: number of the pass over this loader, from 0.
        dataset: class name of the dataset.
        sampler: class name of the sampler; empty if the loader has none.
        size: number of samples of the dataset; None if it has no length.
        drops: whether the loader or its sampler drops an incomplete last batch.
        replaces: whether the sampler draws with replacement.
        reorders: whether the sampler shuffles with an epoch number that the program sets.
        step: number of optimizer steps completed at the start of the pass.
        site: ``file:line`` of the program's loop.
        trains: whether the model is trained with its samples; None if no model was called.
        indexed: whether samples have indices.
        indices: drawn indices, in order.
        last: number of indices in the last batch drawn.
        complete: whether the sampler was exhausted.
    """

    loader: int
    number: int
    dataset: str
    sampler: str
    size: int | None
    drops: bool
    replaces: bool
    reorders: bool
    step: int
    site: str
    trains: bool | None = None
    indexed: bool = True
    indices: list[Any] = field(default_factory=list)
    last: int = 0
    complete: bool = False


@dataclass
class RankRecords:
    """Everything that was recorded on one rank.

    Attributes:
        rank: number of the rank.
        records: records in order of execution.
        groups: process groups that this rank belongs to.
        notes: facts for messages by key: optimizer classes, frozen parameters, parameters that the optimizer does not
            have, random draws.
    """

    rank: int
    records: list[Record] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass
class Run:
    """One run of a program on a world.

    Attributes:
        ranks: records by rank.
        settings: settings of the run by name, as text for the report.
    """

    ranks: list[RankRecords]
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)
