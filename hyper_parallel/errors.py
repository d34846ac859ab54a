"""Exception types, and the notation of layouts in messages.

An error is part of the API: it names the operation and the argument, states the facts, and ends with the line that
fixes it, computed from those facts. Each type also derives from the built-in exception that PyTorch raises for the same
mistake, so ported ``except`` clauses keep working.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ArgumentTypeError",
    "CheckpointError",
    "CheckpointWriteError",
    "CollectiveMismatchError",
    "HandleError",
    "HyperParallelError",
    "LayoutError",
    "MeshError",
    "MeshLookupError",
    "MeshMismatchError",
    "MixedTensorError",
    "ModuleError",
    "PlacementError",
    "PlanError",
    "RankFailedError",
    "RendezvousError",
    "ShardMismatchError",
    "StrictModeError",
    "StyleError",
    "UnsupportedModuleError",
    "UnsupportedOnBackend",
    "UnsupportedOperatorError",
    "WorldNotJoinedError",
    "notation",
    "short_dtype",
]


class HyperParallelError(Exception):
    """Base of every error that this library raises on purpose."""


class MeshError(HyperParallelError, ValueError, RuntimeError):
    """A device mesh that cannot exist (wrong world size, duplicate names or ranks), or a missing mesh."""


class WorldNotJoinedError(MeshError):
    """A launcher started this process as one of several ranks, and it communicates without having joined their world.

    Attributes:
        rank: rank that the launcher gave this process; None if the launcher leaves the number to the framework.
        world_size: number of ranks that the launcher started.

    Args:
        launched_as: role in which the launcher started this process, and how that is known.
        rank: see the attribute.
        world_size: see the attribute.
    """

    def __init__(self, launched_as: str, rank: int | None, world_size: int) -> None:
        super().__init__(
            f"a launcher started this process as {launched_as}, and it has not joined their world: make the mesh with "
            "init_device_mesh, or call get_platform().init_process_group(), first"
        )
        self.rank, self.world_size = rank, world_size


class MeshLookupError(MeshError, KeyError, IndexError):
    """An axis or a rank that the mesh does not have."""

    def __str__(self) -> str:
        """Return the plain message; a KeyError would show its repr."""
        return Exception.__str__(self)


class MeshMismatchError(HyperParallelError, NotImplementedError, ValueError):
    """Operands of one operation are on different meshes."""


class LayoutError(HyperParallelError, ValueError, RuntimeError):
    """Placements or a layout that do not match the tensor."""


class PlacementError(LayoutError, IndexError, AssertionError):
    """A wrong number of placements, or a dim that the tensor does not have; PyTorch indexes or asserts there."""


class ArgumentTypeError(HyperParallelError, TypeError, RuntimeError):
    """An argument of the wrong type where a plain tensor, a module or a mesh is required."""


class ShardMismatchError(HyperParallelError, ValueError):
    """Local tensors that cannot be shards of one global tensor."""


class MixedTensorError(HyperParallelError, RuntimeError):
    """A plain tensor and a DTensor in one operation; the placement of the plain tensor is unknown."""


class ModuleError(HyperParallelError, RuntimeError, ValueError):
    """A module that cannot be distributed, for example because it is distributed already."""


class StyleError(HyperParallelError, ValueError, AssertionError):
    """Options of a style that contradict each other, or values that it cannot convert; PyTorch asserts some of them."""


class PlanError(HyperParallelError, ValueError):
    """A parallel plan that does not match the module."""


class UnsupportedModuleError(PlanError, NotImplementedError):
    """A module that the style cannot parallelize."""


class StrictModeError(HyperParallelError, RuntimeError):
    """An implicit redistribution inside ``strict()``, or beyond an ``implicit_budget``."""


class UnsupportedOperatorError(HyperParallelError, NotImplementedError):
    """No rule, strategy or decomposition covers the operator for these layouts."""


class UnsupportedOnBackend(HyperParallelError, NotImplementedError):  # noqa: N818 - the contract fixes this name
    """A platform function that this framework or device does not support."""


class CollectiveMismatchError(HyperParallelError, RuntimeError):
    """Ranks called a collective with different operations, shapes, dtypes or reductions, or one did not call it.

    Attributes:
        odd_ranks: ranks that differ from the majority or did not call; empty if there is no majority.
    """

    odd_ranks: tuple[int, ...] = ()


class HandleError(HyperParallelError, RuntimeError):
    """A handle used twice: a collective waited for twice, a hook removed twice."""


class RendezvousError(HyperParallelError, TimeoutError, RuntimeError):
    """A rendezvous timed out: the other thread never arrived."""


class CheckpointError(HyperParallelError, ValueError):
    """A file that is not a checkpoint of the requested format, or a format that does not exist."""


class CheckpointWriteError(HyperParallelError, OSError):
    """A checkpoint that could not be written; an existing file is left unchanged."""

    def __str__(self) -> str:
        """Return the plain message; an OSError would look for an error number."""
        return Exception.__str__(self)


class RankFailedError(HyperParallelError, RuntimeError):
    """At least one rank of a simulated or launched run raised, died or never finished."""


_SHORT = {
    "float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16",
    "int64": "i64", "int32": "i32", "int16": "i16", "int8": "i8",
    "uint64": "u64", "uint32": "u32", "uint16": "u16", "uint8": "u8",
    "bool": "b8", "bool_": "b8", "complex64": "c64", "complex128": "c128",
}  # fmt: skip


def short_dtype(dtype: object) -> str:
    """Return the short name of a dtype of any framework: ``torch.float32`` and ``Float32`` both give ``f32``."""
    name = str(dtype).rsplit(".", maxsplit=1)[-1].lower()
    return _SHORT.get(name, name)


def notation(
    dtype: object | None,
    shape: Sequence[int],
    dim_axes: Sequence[Sequence[str]],
    partials: Sequence[tuple[str, str]],
) -> str:
    """Return a layout in the notation of messages: ``f32[16@dp, 8@tp] + Partial(sum)@ep``.

    Args:
        dtype: element type, or None to leave it out.
        shape: global sizes, one per dim.
        dim_axes: per dim, the names of the mesh axes that split it, outermost first.
        partials: pairs of reduction and axis name.
    """
    dims = ", ".join(
        str(size) + "".join(f"@{axis}" for axis in axes) for size, axes in zip(shape, dim_axes, strict=True)
    )
    head = f"{'' if dtype is None else short_dtype(dtype)}[{dims}]"
    return head + "".join(f" + Partial({op})@{axis}" for op, axis in partials)
