"""Context-parallel styles: hooks on an attention module of plain tensors, with one sequence shard per rank.

Queries, keys and values are sharded along the sequence. In groups of ``ulysses_degree`` ranks, an all-to-all replaces
the sequence shards of all heads by the group's complete sequence of some heads (Ulysses; Jacobs et al., 2023). Keys and
values are all-gathered across the groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.select import platform_of_argument

__all__ = ["AsyncContextParallel", "ContextParallel"]

_LEFT_UP, _RIGHT_DOWN = 2, 3  # sparse modes: causal aligned to the first key, and aligned to the last key
_QKV = ("query", "key", "value")
Args: TypeAlias = "tuple[Any, ...]"
Kwargs: TypeAlias = "Mapping[str, Any]"


class ContextParallel:
    """Shards a module's attention along the sequence.

    A causal fused kernel in the module (an attribute with ``sparse_mode`` 2 or 3) attends to keys up to the query's own
    position in the global sequence. If keys are gathered, a mask from the caller must have a column for each of them.

    Args:
        seq_dim: dim of the sequence.
        head_dim: dim of the heads; it may include each head's features.
        ulysses_degree: number of ranks that exchange shards of the sequence for shards of the heads. With 1, keys and
            values are only gathered; with all ranks of the axis, nothing is gathered.
        qkv_indices: positions of query, key and value among the module's arguments.
        qkv_kwarg_names: names of query, key and value if they are passed by keyword.
        use_local_output: must be true: the module returns the rank's own shard as a plain tensor.

    Raises:
        PlanError: (a ValueError) ``use_local_output`` is not true.
    """

    def __init__(
        self,
        *,
        seq_dim: int = 1,
        head_dim: int = 2,
        ulysses_degree: int = 1,
        qkv_indices: Sequence[int] = (0, 1, 2),
        qkv_kwarg_names: Sequence[str] = _QKV,
        use_local_output: bool = True,
    ) -> None:
        if not use_local_output:
            msg = (
                f"{type(self).__name__}: use_local_output=False is not supported; wrap the output by DTensor.from_local"
            )
            raise PlanError(msg)
        self.seq_dim, self.head_dim, self.ulysses_degree = seq_dim, head_dim, ulysses_degree
        self.qkv_indices, self.qkv_kwarg_names = tuple(qkv_indices), tuple(qkv_kwarg_names)

    def apply(self, module: Any, mesh: DeviceMesh) -> Any:
        """Hook ``module`` and return it.

        Args:
            module: computes attention of its arguments.
            mesh: mesh of one axis, over which the sequence is sharded.

        Raises:
            PlanError: (a ValueError) ``ulysses_degree`` does not divide the size of the axis.
        """
        exchange = self._exchange(module, mesh)
        return self._hooked(module, exchange, exchange.before)

    def _exchange(self, module: Any, mesh: DeviceMesh) -> _Exchange:
        name = type(self).__name__
        platform_of_argument(module, f"{name}: module", module=True)
        size = mesh.size()
        if mesh.ndim != 1 or not 0 < self.ulysses_degree <= size or size % self.ulysses_degree:
            msg = f"{name}: ulysses_degree={self.ulysses_degree} must divide the size of one axis, not of {mesh!r}"
            raise PlanError(msg)
        parts = (size // self.ulysses_degree, self.ulysses_degree)
        return _Exchange(module, mesh._unflatten(0, parts, ("gathered", "exchanged")), self)  # noqa: SLF001 - ours

    def _hooked(self, module: Any, exchange: _Exchange, before: Any) -> Any:
        exchange.platform.register_forward_pre_hook(module, before, with_kwargs=True)
        exchange.platform.register_forward_hook(module, exchange.after, with_kwargs=True)
        return module

    def found(self, args: Args, kwargs: Kwargs) -> list[Any]:
        """Return query, key and value from the arguments."""
        found = []
        for index, name in zip(self.qkv_indices, self.qkv_kwarg_names, strict=True):
            if name in kwargs:
                found.append(kwargs[name])
            elif index < len(args):
                found.append(args[index])
            else:
                msg = f"{type(self).__name__}: the module is called without {name}, argument {index}"
                raise PlanError(msg)
        return found

    def replaced(self, args: Args, kwargs: Kwargs, values: Sequence[Any]) -> tuple[Args, Kwargs]:
        """Return the arguments with ``values`` as query, key and value."""
        positional, named = list(args), dict(kwargs)
        for index, name, value in zip(self.qkv_indices, self.qkv_kwarg_names, values, strict=True):
            if name in named:
                named[name] = value
            else:
                positional[index] = value
        return tuple(positional), named


class AsyncContextParallel(ContextParallel):
    """A :class:`ContextParallel` that starts the exchange of each operand as soon as the operand is computed."""

    def apply(
        self, module: Any, mesh: DeviceMesh, *, q_proj: Any = None, k_proj: Any = None, v_proj: Any = None
    ) -> Any:
        """Hook ``module`` and the modules that compute its operands; return ``module``.

        Args:
            module: computes attention of its arguments.
            mesh: mesh of one axis, over which the sequence is sharded.
            q_proj: module whose output is used only as the query of ``module``; unless all three projections are given,
                the exchange starts when ``module`` is called, as in :class:`ContextParallel`.
            k_proj: module whose output is used only as the key of ``module``.
            v_proj: module whose output is used only as the value of ``module``.
        """
        producers = (q_proj, k_proj, v_proj)
        if any(producer is None for producer in producers):
            return super().apply(module, mesh)
        exchange = self._exchange(module, mesh)
        for place, producer in enumerate(producers):
            exchange.platform.register_forward_hook(producer, partial(exchange.start, place))
        return self._hooked(module, exchange, exchange.before_launched)


class _Exchange:
    """The collectives of one rank for the operands and the result of one module; a copied module gets a new object.

    Args:
        module: computes attention of its arguments.
        mesh: the axis, split into two: along ``gathered`` keys are gathered, along ``exchanged`` heads are exchanged.
        style: style of the module.
    """

    def __init__(self, module: Any, mesh: DeviceMesh, style: ContextParallel) -> None:
        self.module, self.style, self._mesh = module, style, mesh
        self._co, self._degree = mesh.size(0), mesh.size(1)
        self._launched: dict[int, Any] = {}

    @property
    def platform(self) -> Any:
        """The framework of the module."""
        return platform_of_argument(self.module, "module", module=True)

    @property
    def _group(self) -> Any:
        """The ranks that exchange."""
        return self._mesh.get_group("exchanged")

    def before(self, module: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Return the arguments that the module computes with."""
        del module
        return self.style.replaced(args, kwargs, self.entering(self.style.found(args, kwargs)))

    def before_launched(self, module: Any, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        """Wait for the exchanges in flight; return the arguments that the module computes with."""
        del module
        launched, self._launched = self._launched, {}
        operands = [self.awaited(x, launched.get(place)) for place, x in enumerate(self.style.found(args, kwargs))]
        return self.style.replaced(args, kwargs, self.gathered(operands))

    def start(self, place: int, module: Any, args: Any, output: Any) -> None:
        """Start the exchange of an operand."""
        del module, args
        self._launched[place] = self.launched(output)

    def after(self, module: Any, args: Args, kwargs: Kwargs, output: Any) -> Any:
        """Return this rank's shard of the result."""
        del module, args, kwargs
        return self.leaving(output)

    def entering(self, operands: Sequence[Any]) -> list[Any]:
        """Return the query, key and value that the module computes with."""
        return self.gathered([self._exchanged(each, self.style.head_dim, self.style.seq_dim) for each in operands])

    def launched(self, tensor: Any) -> Any:
        """Start sending each rank its share of the heads; return the argument of :meth:`awaited`."""
        if self._degree == 1:
            return None
        parts = self._parts(self.platform.detach(tensor), self.style.head_dim)
        stacked = self.platform.cat([part.reshape(1, *part.shape) for part in parts], 0)
        return self.platform.all_to_all_single(stacked, tuple(stacked.shape), self._group, async_op=True)

    def awaited(self, tensor: Any, launched: Any) -> Any:
        """Return the complete sequence of this rank's heads, from the exchange of ``tensor`` by :meth:`launched`."""
        if self._degree == 1:
            return tensor
        arriving, work = launched
        return self.platform.differentiable_async_a2a_wait(
            tensor, work, arriving, self._group, self._degree, self.style.seq_dim, self.style.head_dim
        )

    def leaving(self, output: Any) -> Any:
        """Return this rank's sequence shard of the result."""
        if self._degree == 1:
            return output
        for kernel in self._kernels():
            kernel.head_num *= self._degree
        return self._exchanged(output, self.style.seq_dim, self.style.head_dim)

    def gathered(self, operands: Sequence[Any]) -> list[Any]:
        """Return the operands with all keys and values that this rank's queries attend to; configure the kernels."""
        query, *others = operands
        kernels = self._kernels()
        for kernel in kernels:
            kernel.head_num //= self._degree
        if self._co == 1:
            return [query, *others]
        seq, group = self.style.seq_dim, self._mesh.get_group("gathered")
        others = [
            self.platform.differentiable_all_gather_concat(each, group, self._co, seq, varying=True) for each in others
        ]
        length = others[0].shape[seq]
        if any(kernel.sparse_mode == 0 and kernel.next_tokens < length - 1 for kernel in kernels):
            raise PlanError(
                f"{type(self.style).__name__}: a kernel of sparse_mode 0 counts next_tokens from a rank's first query; "
                "compress the causal mask (use_attn_mask_compression), which is sparse_mode 2"
            )
        if any(kernel.sparse_mode in (_LEFT_UP, _RIGHT_DOWN) for kernel in kernels):
            # Later keys are masked; the last key belongs to the last query.
            end = (self._mesh.get_local_rank("gathered") + 1) * query.shape[seq]
            others = [self.platform.narrow(each, seq, 0, end) for each in others]
            for kernel in kernels:
                kernel.sparse_mode = _RIGHT_DOWN
        return [query, *others]

    def _kernels(self) -> list[Any]:
        """Return the fused kernels of the module, which are its attributes with ``sparse_mode`` and ``head_num``."""
        values = vars(self.module).values()
        return [value for value in values if hasattr(value, "sparse_mode") and hasattr(value, "head_num")]

    def _exchanged(self, tensor: Any, split: int, joined: int) -> Any:
        """Exchange shards: return this rank's shard of dim ``split``, with all elements along dim ``joined``."""
        if self._degree == 1:
            return tensor
        parts = self._parts(tensor, split)
        rows = self.platform.cat([part.reshape(1, -1) for part in parts], 0)
        received = self.platform.differentiable_all_to_all_single(rows, group=self._group)
        shares = [self.platform.narrow(received, 0, rank, 1).reshape(*parts[0].shape) for rank in range(self._degree)]
        return self.platform.cat(shares, joined)

    def _parts(self, tensor: Any, dim: int) -> list[Any]:
        """Return the chunks of ``tensor`` along ``dim``, one per rank."""
        size, rest = divmod(int(tensor.shape[dim]), self._degree)
        if rest:
            name = "sequence" if dim == self.style.seq_dim else "heads"
            msg = f"dim {dim} ({name}) of {list(tensor.shape)} is not divisible by {self._degree} ranks"
            raise PlanError(f"{type(self.style).__name__}: {msg}")
        return [self.platform.narrow(tensor, dim, rank * size, size) for rank in range(self._degree)]
