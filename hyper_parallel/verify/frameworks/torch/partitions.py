"""Where parameters lie in the flat tensors that a stack's optimizer trains in their place.

DeepSpeed's ZeRO trains float32 copies of pieces of parameters that it has put one after the other, and says on each
parameter where its piece is; its third stage keeps no more than a piece of the parameter itself. Megatron's distributed
optimizer trains views of pieces of the parameters' own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from hyper_parallel.verify.frameworks.contract.records import LocalValue, Region
from hyper_parallel.verify.frameworks.torch.local_values import local_of, read_part, read_tensor

__all__ = ["Piece", "is_partitioned", "overwrite", "overwrite_weight", "pieces_in", "read_weight"]


_PARTITIONED = ("_hp_mapping", "ds_id", "main_param")
"""Attributes by which DeepSpeed's and Megatron's parameters lead to the partitions that their optimizers train."""


class Piece(NamedTuple):
    """A piece of a parameter, flattened, inside a tensor that an optimizer has.

    Attributes:
        shape: of the parameter on this rank, or of the global one of ZeRO's third stage.
        start: the piece's first element in the parameter.
        size: number of elements; 0 if this rank's optimizer has none of the parameter.
        holder: the optimizer's tensor; None if ``size`` is 0.
        offset: the piece's first element in it.
    """

    shape: tuple[int, ...]
    start: int
    size: int
    holder: Any = None
    offset: int = 0

    def of(self, tensor: Any) -> Any:
        """Return the view of the piece in a tensor of the holder's shape, flat."""
        return tensor.detach().reshape(-1)[self.offset : self.offset + self.size]

    def read(self, tensor: Any) -> LocalValue | None:
        """Return the piece's part of a tensor of the holder's shape, and any other tensor as it is."""
        if self.holder is None:
            return _read_flat(torch.empty(0), self.shape, self.start)
        if not isinstance(tensor, torch.Tensor) or tensor.shape != self.holder.shape:
            return read_tensor(torch.as_tensor(tensor)) if isinstance(tensor, (torch.Tensor, int, float)) else None
        return _read_flat(self.of(tensor), self.shape, self.start)


def is_partitioned(parameter: Any) -> bool:
    """Return whether a stack trains a parameter by flat partitions, which its optimizer has instead."""
    return any(hasattr(parameter, name) for name in _PARTITIONED)


def pieces_in(optimizer: Any, named: Mapping[str, Any]) -> dict[str, Piece]:
    """Return pieces of parameters that an optimizer trains in place of the parameters themselves.

    Args:
        optimizer: of the program.
        named: parameters of its models.
    """
    held = [value for group in optimizer.param_groups for value in group["params"]]
    own = {id(value) for value in held}
    others = {name: value for name, value in named.items() if id(value) not in own and value.requires_grad}
    found = {name: _piece_of(value, held) for name, value in others.items()}
    trained = any(piece is not None and piece.size for piece in found.values())
    return {name: piece for name, piece in found.items() if trained and piece is not None}


def _shape_of(parameter: Any) -> tuple[int, ...]:
    """Return the shape of a parameter on this rank, or of the global one of ZeRO's third stage."""
    return tuple(getattr(parameter, "ds_shape", None) or parameter.shape)


def _piece_of(parameter: Any, held: Iterable[Any]) -> Piece | None:
    """Return the piece of a parameter in the tensors of an optimizer; None if they do not train it by pieces.

    Args:
        parameter: of a model.
        held: tensors that an optimizer has.
    """
    shape, master = _shape_of(parameter), _master(parameter)
    nothing = Piece(shape, _size(shape), 0)
    view, start = (parameter, 0) if master is None else master
    if view is None:
        return nothing
    found = nothing if master is not None else None
    for holder in held:
        if holder is parameter or not _share_memory(view, holder):
            continue
        first = max(view.storage_offset(), holder.storage_offset())
        size = min(view.storage_offset() + view.numel(), holder.storage_offset() + holder.numel()) - first
        found = nothing
        if size > 0:
            start += first - view.storage_offset()
            size = max(0, min(size, _size(shape) - start))  # what follows is padding
            return Piece(shape, start, size, holder, first - holder.storage_offset())
    return found


def read_weight(parameter: Any) -> LocalValue | None:
    """Return what this rank holds of a parameter."""
    if not hasattr(parameter, "ds_id") or parameter.numel() == _size(_shape_of(parameter)):
        return read_part(parameter, parameter)
    start = _start_of_zero(parameter)
    size = max(0, min(parameter.ds_tensor.numel(), _size(_shape_of(parameter)) - start))
    return _read_flat(parameter.ds_tensor.detach().reshape(-1)[:size], _shape_of(parameter), start)


def overwrite(tensor: Any, change: Callable[[Any, str], Any]) -> None:
    """Replace the local values of ``tensor`` by what ``change`` makes of them and the name of their dtype."""
    taken = read_tensor(tensor)
    if taken is not None:
        with torch.no_grad():
            local_of(tensor).copy_(torch.from_numpy(change(taken.array, taken.dtype)))


def overwrite_weight(parameter: Any, change: Callable[[Any, str], Any]) -> None:
    """Replace what this rank holds of a parameter, and the copies of it that an optimizer trains."""
    taken = read_weight(parameter)
    if taken is None:
        return
    values = torch.from_numpy(change(taken.array, taken.dtype))
    with torch.no_grad():
        for tensor, start in _copies(parameter, taken):
            part = values.reshape(-1)[start : start + tensor.numel()]
            tensor.reshape(-1)[: part.numel()].copy_(part) if tensor.is_contiguous() else tensor.copy_(values)


def _copies(parameter: Any, taken: LocalValue) -> Iterator[tuple[Any, int]]:
    """Yield the tensors that hold a parameter's values on this rank, with the first element of them in ``taken``."""
    known = 0 if taken.region is None or parameter.numel() else taken.region.start[0]
    if parameter.numel():
        yield local_of(parameter), 0
    if getattr(parameter, "ds_tensor", None) is not None:
        yield parameter.ds_tensor, _start_of_zero(parameter) - known
    master = _master(parameter)
    if master is not None and master[0] is not None:
        yield master[0], master[1] - known


def _master(parameter: Any) -> tuple[Any, int] | None:
    """Return the copy of a parameter's piece that DeepSpeed trains, and where it begins; None if it has none.

    Returns:
        None instead of the copy if other ranks have all of the parameter.
    """
    if hasattr(parameter, "ds_id"):
        optimizer = getattr(parameter, "_z3_optimizer", None)
        view = None if optimizer is None else optimizer.get_local_fp32_param(parameter)
        return None if view is None else (view, _start_of_zero(parameter))
    if not hasattr(parameter, "_hp_mapping"):
        return None
    mapping = parameter._hp_mapping  # noqa: SLF001 - no public name
    return (None, 0) if mapping is None else (mapping.hp_fragment, mapping.lp_fragment_address.start)


def _start_of_zero(parameter: Any) -> int:
    return int(parameter.ds_zero_partition_rank * parameter.ds_tensor.ds_numel)


def _share_memory(view: Any, holder: Any) -> bool:
    """Return whether a plain tensor and a flat one of its type are pieces of the same memory."""
    if any(type(getattr(tensor, "data", None)) is not torch.Tensor for tensor in (view, holder)):
        return False
    plain = view.layout is holder.layout is torch.strided and view.dtype is holder.dtype and holder.dim() == 1
    if not plain or not (view.is_contiguous() and holder.is_contiguous()):
        return False
    address: int = view.untyped_storage().data_ptr()
    return address != 0 and address == holder.untyped_storage().data_ptr()


def _read_flat(values: Any, shape: tuple[int, ...], start: int) -> LocalValue | None:
    """Return elements of a flattened parameter with their place, and all of them in its shape."""
    if values.numel() == _size(shape):
        return read_tensor(values.reshape(shape))
    taken = read_tensor(values)
    return None if taken is None else taken._replace(region=Region((_size(shape),), (start,)))


def _size(shape: Iterable[int]) -> int:
    return int(torch.Size(shape).numel())
