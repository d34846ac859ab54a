"""Finds a model's parameters in the flat tensors that the optimizer of DeepSpeed or Megatron trains instead.

DeepSpeed's ZeRO trains float32 copies of concatenated pieces of parameters; each parameter has an attribute with the
position of its piece. In ZeRO's third stage, a rank has only its piece of the parameter itself. Megatron's distributed
optimizer trains views of pieces of the parameters' storage, or float32 copies of such pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hyper_parallel.verify.frameworks.contract.records import LocalValue, Region
from hyper_parallel.verify.frameworks.torch.local_values import local_of, read_part, read_tensor

__all__ = ["Pieces", "is_partitioned", "overwrite", "overwrite_weight", "pieces_in", "read_weight"]


_PARTITIONED = ("_hp_mapping", "ds_id", "main_param")
"""Attributes of DeepSpeed's and Megatron's parameters that refer to the flat tensors that their optimizers train."""


class Piece(NamedTuple):
    """A range of a flattened parameter that is part of a tensor that an optimizer trains.

    Attributes:
        start: index of the first element in the parameter.
        size: number of elements.
        holder: the optimizer's tensor.
        offset: index of the first element in the holder.
    """

    start: int
    size: int
    holder: Any
    offset: int

    def of(self, tensor: Any) -> Any:
        """Return the elements of the piece in a tensor of the holder's shape, as a flat view."""
        return tensor.detach().reshape(-1)[self.offset : self.offset + self.size]


class Pieces(NamedTuple):
    """The pieces of a parameter that this rank's optimizer trains.

    Attributes:
        shape: local shape of the parameter, or the global shape in ZeRO's third stage.
        parts: pieces in the order of their elements; empty if only other ranks train the parameter.
        holders: holders of the pieces, and tensors in the same storage that have none of its elements, such as padding.
    """

    shape: tuple[int, ...]
    parts: tuple[Piece, ...] = ()
    holders: tuple[Any, ...] = ()

    def read(self, tensors: Callable[[Any], Any]) -> LocalValue | None:
        """Return the parameter's pieces of tensors in the holders' shapes; a number, such as a step count, unchanged.

        Args:
            tensors: returns the tensor for a holder, such as its gradient; None if there is none.
        """
        found = [(part, value) for part in self.parts if (value := tensors(part.holder)) is not None]
        if not found:
            return None if self.parts else _read_flat(torch.empty(0), self.shape, ((0, 0),))
        for part, value in found:
            if not isinstance(value, torch.Tensor) or value.shape != part.holder.shape:
                return read_tensor(torch.as_tensor(value)) if isinstance(value, (torch.Tensor, int, float)) else None
        values = torch.cat([part.of(value) for part, value in found])
        return _read_flat(values, self.shape, _joined((part.start, part.size) for part, _ in found))


def is_partitioned(parameter: Any) -> bool:
    """Return whether DeepSpeed or Megatron trains pieces of the parameter in flat tensors instead of the parameter."""
    return any(hasattr(parameter, name) for name in _PARTITIONED)


def pieces_in(held: Iterable[Any], named: Mapping[str, Any]) -> dict[str, Pieces]:
    """Return for each parameter that an optimizer trains in flat tensors its pieces in these tensors.

    Args:
        held: tensors that the optimizer has.
        named: parameters of the program's models.
    """
    held = list(held)
    own = {id(value) for value in held}
    others = {name: value for name, value in named.items() if id(value) not in own and value.requires_grad}
    found = {name: _pieces_of(value, held) for name, value in others.items()}
    trained = any(pieces is not None and pieces.parts for pieces in found.values())
    return {name: pieces for name, pieces in found.items() if trained and pieces is not None}


def _shape_of(parameter: Any) -> tuple[int, ...]:
    """Return the local shape of a parameter, or the global shape in ZeRO's third stage."""
    return tuple(getattr(parameter, "ds_shape", None) or parameter.shape)


def _pieces_of(parameter: Any, held: Sequence[Any]) -> Pieces | None:
    """Return the pieces of a parameter in an optimizer's tensors; None if the optimizer does not train it in pieces.

    Args:
        parameter: parameter of a model.
        held: tensors that the optimizer has.
    """
    shape, master = _shape_of(parameter), _master(parameter)
    view, first = (parameter, 0) if master is None else master
    if view is None:
        return Pieces(shape)
    parts = []
    holders = [value for value in held if value is not parameter and (value is view or _share_memory(view, value))]
    for holder in holders:
        begin = max(view.storage_offset(), holder.storage_offset())
        size = min(view.storage_offset() + view.numel(), holder.storage_offset() + holder.numel()) - begin
        start = first + begin - view.storage_offset()
        size = min(size, _size(shape) - start)  # the rest is padding
        if size > 0:
            parts.append(Piece(start, size, holder, begin - holder.storage_offset()))
    parts.sort(key=lambda part: part.start)
    return Pieces(shape, tuple(parts), tuple(holders)) if holders else None


def _joined(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return spans of elements, with adjacent spans merged."""
    joined: list[tuple[int, int]] = []
    for start, size in spans:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return tuple(joined)


def read_weight(parameter: Any) -> LocalValue | None:
    """Return the local value of a parameter."""
    if not hasattr(parameter, "ds_id") or parameter.numel() == _size(_shape_of(parameter)):
        return read_part(parameter, parameter)
    start = _start_of_zero(parameter)
    size = max(0, min(parameter.ds_tensor.numel(), _size(_shape_of(parameter)) - start))
    return _read_flat(parameter.ds_tensor.detach().reshape(-1)[:size], _shape_of(parameter), ((start, size),))


def overwrite(tensor: Any, change: Callable[[Any, str], Any]) -> None:
    """Replace the local values of ``tensor`` by ``change(values, name of their dtype)``."""
    taken = read_tensor(tensor)
    if taken is not None:
        with torch.no_grad():
            local_of(tensor).copy_(torch.from_numpy(change(taken.array, taken.dtype)))


def overwrite_weight(parameter: Any, change: Callable[[Any, str], Any]) -> None:
    """Replace the local value of a parameter, and the copies of it that an optimizer trains."""
    taken = read_weight(parameter)
    if taken is None:
        return
    values = torch.from_numpy(change(taken.array, taken.dtype))
    with torch.no_grad():
        for tensor, start in _copies(parameter, taken):
            part = values.reshape(-1)[start : start + tensor.numel()]
            tensor.reshape(-1)[: part.numel()].copy_(part) if tensor.is_contiguous() else tensor.copy_(values)


def _copies(parameter: Any, taken: LocalValue) -> Iterator[tuple[Any, int]]:
    """Yield the tensors with a parameter's values on this rank, and the index of their first element in ``taken``."""
    known = 0 if taken.region is None or parameter.numel() else taken.region.start[0]
    if parameter.numel():
        yield local_of(parameter), 0
    if getattr(parameter, "ds_tensor", None) is not None:
        yield parameter.ds_tensor, _start_of_zero(parameter) - known
    master = _master(parameter)
    if master is not None and master[0] is not None:
        yield master[0], master[1] - known


def _master(parameter: Any) -> tuple[Any, int] | None:
    """Return the copy of a parameter's piece that the optimizer trains, and the piece's first index in the parameter.

    Returns:
        the pair; None if the optimizer trains no copy; ``(None, 0)`` if only other ranks train the parameter.
    """
    if hasattr(parameter, "main_param"):
        return _main_of_megatron(parameter)
    if hasattr(parameter, "ds_id"):
        optimizer = getattr(parameter, "_z3_optimizer", None)
        view = None if optimizer is None else optimizer.get_local_fp32_param(parameter)
        return None if view is None else (view, _start_of_zero(parameter))
    if not hasattr(parameter, "_hp_mapping"):
        return None
    mapping = parameter._hp_mapping  # noqa: SLF001 - no public name
    return (None, 0) if mapping is None else (mapping.hp_fragment, mapping.lp_fragment_address.start)


def _main_of_megatron(parameter: Any) -> tuple[Any, int] | None:
    """Return the float32 copy of a half-precision parameter, or of a piece of it, and the piece's first index.

    The index follows from the copy's gradient, if that shares memory with the parameter's gradient; else the result is
    None.
    """
    main = parameter.main_param
    if main is None or main.numel() == parameter.numel():
        return main, 0
    gradient = getattr(parameter, "main_grad", None)
    if gradient is None or main.grad is None or not _share_memory(gradient, main.grad):
        return None
    return main, int(main.grad.storage_offset() - gradient.storage_offset())


def _start_of_zero(parameter: Any) -> int:
    return int(parameter.ds_zero_partition_rank * parameter.ds_tensor.ds_numel)


def _share_memory(view: Any, holder: Any) -> bool:
    """Return whether a plain tensor and a flat tensor of its dtype share storage."""
    if any(type(getattr(tensor, "data", None)) is not torch.Tensor for tensor in (view, holder)):
        return False
    plain = view.layout is holder.layout is torch.strided and view.dtype is holder.dtype and holder.dim() == 1
    if not plain or not (view.is_contiguous() and holder.is_contiguous()):
        return False
    address: int = view.untyped_storage().data_ptr()
    return address != 0 and address == holder.untyped_storage().data_ptr()


def _read_flat(values: Any, shape: tuple[int, ...], spans: tuple[tuple[int, int], ...]) -> LocalValue | None:
    """Return elements of a flattened parameter with their region; a complete parameter is returned in its shape."""
    if values.numel() == _size(shape):
        return read_tensor(values.reshape(shape))
    taken = read_tensor(values)
    region = Region((_size(shape),), spans[0][:1], (), spans if len(spans) > 1 else ())
    return None if taken is None else taken._replace(region=region)


def _size(shape: Iterable[int]) -> int:
    return int(torch.Size(shape).numel())
