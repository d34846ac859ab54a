"""Exception types, and the one notation in which every message writes a layout.

An error is part of the API: it names the operation and the argument, gives the facts, and ends with the
line that fixes it, computed from those facts. Each type also derives from the built-in (or framework-neutral)
exception that PyTorch raises for the same mistake, so ported ``except`` clauses keep working.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
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
    "NotPlainError",
    "PlacementError",
    "PlanError",
    "RankFailedError",
    "RendezvousError",
    "ShardMismatchError",
    "StrictModeError",
    "UnsupportedModuleError",
    "UnsupportedOnBackend",
    "UnsupportedOperatorError",
    "notation",
    "short_dtype",
]


class HyperParallelError(Exception):
    """Base of every error that this library raises on purpose."""


class MeshError(HyperParallelError, ValueError, RuntimeError):
    """A device mesh that cannot exist: wrong world size, duplicate names or ranks; or none where one is needed."""


class MeshLookupError(MeshError, KeyError, IndexError):
    """An axis or a rank that the mesh does not have."""

    def __str__(self) -> str:
        """The plain message; a KeyError would show its repr."""
        return Exception.__str__(self)


class MeshMismatchError(HyperParallelError, NotImplementedError, ValueError):
    """Operands that live on different meshes meet in one operation (NotImplementedError is a RuntimeError)."""


class LayoutError(HyperParallelError, ValueError, RuntimeError):
    """Placements that do not describe the tensor."""


class PlacementError(LayoutError, IndexError, AssertionError):
    """Not one placement per axis, or a dim that the tensor does not have; PyTorch indexes or asserts there."""


class NotPlainError(HyperParallelError, TypeError, RuntimeError):
    """Something else where a plain tensor, a module or a mesh is wanted."""


class ShardMismatchError(HyperParallelError, ValueError):
    """Local shards that cannot be pieces of one global tensor."""


class MixedTensorError(HyperParallelError, RuntimeError):
    """A plain tensor meets a DTensor and nothing says how it is placed."""


class PlanError(HyperParallelError, ValueError):
    """A parallel plan that does not fit the module."""


class UnsupportedModuleError(PlanError, NotImplementedError):
    """A module that the style cannot parallelize."""


class StrictModeError(HyperParallelError, RuntimeError):
    """An implicit redistribution inside ``strict()``, or beyond an ``implicit_budget``."""


class UnsupportedOperatorError(HyperParallelError, NotImplementedError):
    """No rule, strategy or decomposition covers the operator for these layouts."""


class UnsupportedOnBackend(HyperParallelError, NotImplementedError):  # noqa: N818 - the contract fixes this name
    """A member that this framework or device cannot serve."""


class CollectiveMismatchError(HyperParallelError, RuntimeError):
    """Ranks met in one collective with different operations, shapes, dtypes or reductions, or one never came."""


class HandleError(HyperParallelError, RuntimeError):
    """A handle that was used up: a collective waited for twice, a hook removed twice."""


class RendezvousError(HyperParallelError, TimeoutError, RuntimeError):
    """A thread that waited for its partner in vain."""


class CheckpointError(HyperParallelError, ValueError):
    """A file that is no checkpoint of the format that was asked for, or a format that does not exist."""


class CheckpointWriteError(HyperParallelError, OSError):
    """A checkpoint that could not be written; what was there before is still there."""

    def __str__(self) -> str:
        """The plain message; an OSError would look for an error number."""
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
    """Short name of a dtype of any framework: ``torch.float32`` and ``Float32`` both give ``f32``."""
    name = str(dtype).rsplit(".", maxsplit=1)[-1].lower()
    return _SHORT.get(name, name)


def notation(
    dtype: object | None,
    shape: Sequence[int],
    dim_axes: Sequence[Sequence[str]],
    partials: Sequence[tuple[str, str]],
) -> str:
    """Write a layout the one way: ``f32[16@dp, 8@tp] + Partial(sum)@ep``.

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
