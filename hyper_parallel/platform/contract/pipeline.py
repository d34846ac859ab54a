"""Facet *pipeline*: micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.platform.contract.identity import is_integer
from hyper_parallel.platform.contract.tensors import TensorsFacet

__all__ = ["MicroBatch", "PipelineFacet"]


class PipelineFacet(TensorsFacet):
    """Facet *pipeline*."""

    def micro_batch(
        self,
        micro_batch_num: int,
        args_batch_dim: Sequence[int | None] | None = None,
        kwargs_batch_dim: Mapping[str, int | None] | None = None,
    ) -> MicroBatch:
        """Return a function that splits inputs into micro-batches; see :class:`MicroBatch`.

        Args:
            micro_batch_num: number of micro-batches.
            args_batch_dim: per positional argument the dim to split along; None gives every micro-batch the complete
                argument. By default tensors are split along dim 0.
            kwargs_batch_dim: the same for keyword arguments, by name; other tensors are split along dim 0.

        Raises:
            ValueError: ``micro_batch_num`` is less than 1.
        """
        if not is_integer(micro_batch_num) or micro_batch_num < 1:
            msg = f"micro_batch: micro_batch_num is {micro_batch_num!r}; it must be at least 1"
            raise ValueError(msg)
        return MicroBatch(self, micro_batch_num, args_batch_dim, kwargs_batch_dim)


class MicroBatch:
    """Splits the inputs of a step into micro-batches.

    Slices are on the graph; for a DTensor, the global tensor is sliced.
    """

    def __init__(
        self,
        platform: TensorsFacet,
        count: int,
        args_dims: Sequence[int | None] | None,
        kwargs_dims: Mapping[str, int | None] | None,
    ) -> None:
        self._platform, self._count, self._args_dims, self._kwargs_dims = platform, count, args_dims, kwargs_dims

    def __call__(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> tuple[list[list[Any]], list[dict[str, Any]]]:
        """Split the arguments of a call.

        Returns:
            one list of positional arguments and one dict of keyword arguments per micro-batch.

        Raises:
            ValueError: a size is not divisible by the number of micro-batches, a tensor does not have the dim, or a dim
                is given for an argument that the call does not have.
        """
        named = dict(kwargs or {})
        dims = [0] * len(args) if self._args_dims is None else list(self._args_dims)
        if len(dims) != len(args):
            msg = f"micro_batch: args_batch_dim names {len(dims)} arguments, {len(args)} were given"
            raise ValueError(msg)
        named_dims = dict(self._kwargs_dims or {})
        if unknown := sorted(set(named_dims) - set(named)):
            msg = f"micro_batch: kwargs_batch_dim names {', '.join(unknown)}; given are {', '.join(named) or 'none'}"
            raise ValueError(msg)
        split_args = [
            self._split(f"args[{index}]", value, dim) for index, (value, dim) in enumerate(zip(args, dims, strict=True))
        ]
        split_named = {name: self._split(name, value, named_dims.get(name, 0)) for name, value in named.items()}
        batches = range(self._count)
        return (
            [[slices[batch] for slices in split_args] for batch in batches],
            [{name: slices[batch] for name, slices in split_named.items()} for batch in batches],
        )

    def _split(self, name: str, value: Any, dim: int | None) -> list[Any]:
        platform = self._platform
        if dim is None or not platform.is_tensor(value):
            return [value] * self._count
        shape = list(value.shape)
        if not -len(shape) <= dim < len(shape):
            msg = f"micro_batch: {name} of {shape} has no dim {dim}"
            raise ValueError(msg)
        size, rest = divmod(shape[dim], self._count)
        if rest:
            msg = (
                f"micro_batch: {name} has {shape[dim]} rows along dim {dim}, "
                f"not divisible into {self._count} micro-batches"
            )
            raise ValueError(msg)
        return [platform.narrow(value, dim % len(shape), size * batch, size) for batch in range(self._count)]
