"""Gathers the fully sharded parameters of a MindSpore cell when it is called; reduces all gradients in one collective.

MindSpore differentiates functions and has no event when a cell's backward begins or ends. So the gathered parameters of
a call are results of an autograd function, whose backward reduces their gradients. Operators would save
the gathered parameters for backward. Placeholders are saved instead, and the first placeholder that backward reads
gathers the parameters again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import mindspore
from mindspore import Tensor, mint, ops
from mindspore.common import saved_tensors_hooks

from hyper_parallel._tree import CONTAINERS, tree_map
from hyper_parallel.core.data_parallel.plan import Slot, plan_flat, split_dim
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.parameter_paths import replacing_parameters
from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.contract.fully_sharded import ACCUMULATED, KEPT, Reduction
from hyper_parallel.platform.mindspore.gradients import set_unreduced
from hyper_parallel.platform.mindspore.sharded_members import Member, tuples_of
from hyper_parallel.platform.mindspore.versions import Function

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.platform.contract.fully_sharded import FullyShardedOptions

__all__ = ["FullyShardedGroup", "groups_within"]


class _Saved:
    """Placeholder of a gathered parameter among the tensors that are saved for backward."""

    def __init__(self, index: int) -> None:
        self.index = index


class _Call:
    """A call of the cell, from forward to the end of its backward.  Args: group: the group of the called cell."""

    def __init__(self, group: FullyShardedGroup) -> None:
        self.group = group
        self._row = group.row()  # the values of forward, even if the shards are written to before backward
        self.wholes: list[Tensor] = group.gather(self._row)
        """The gathered parameters; empty while they are freed."""
        self._places = {whole.data_ptr(): index for index, whole in enumerate(self.wholes)}
        self.exposed: list[Any] = []
        self._saving: AbstractContextManager[Any]

    def begin(self, *, saves: bool = True) -> None:
        """Gather on the graph, and set the gathered parameters in the cells.

        Args:
            saves: save placeholders for backward; False where recomputation saves tensors.
        """
        members = self.group.members
        shards = [member.local for member in self.group.trained]
        trained = iter(_Gather.apply(self, *shards) if shards else ())
        self.exposed = [
            next(trained) if member.is_trained else whole for member, whole in zip(members, self.wholes, strict=True)
        ]
        self.show()
        self._saving = saved_tensors_hooks(self._pack, self._unpack) if saves else nullcontext()
        self._saving.__enter__()

    def show(self) -> None:
        """Set the gathered parameters in the cells."""
        for member, whole in zip(self.group.members, self.exposed, strict=True):
            member.expose(whole)
        for held in self.group.tuples:
            held.show()

    def end_forward(self, *, keep: bool) -> None:
        """Drop the gathered parameters, unless they are kept for backward."""
        self._saving.__exit__(None, None, None)
        del self._saving  # it refers to this object
        self.exposed = []
        if not keep:
            self.wholes = []

    def _pack(self, tensor: Tensor) -> Any:
        index = self._places.get(tensor.data_ptr())
        if index is None or not _is_alike(tensor, self.wholes[index]):
            return tensor
        return _Saved(index)

    def _unpack(self, saved: Any) -> Tensor:
        if not isinstance(saved, _Saved):
            return saved
        if not self.wholes:
            self.wholes = self.group.gather(self._row)
        return self.wholes[saved.index]


class _Gather(Function):
    """The gathered trainable parameters; backward reduces their gradients, which are not differentiable."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *shards: Tensor) -> tuple[Tensor, ...]:
        """Return the gathered parameters of the call."""
        del shards
        ctx.call = call
        return tuple(whole for member, whole in zip(call.group.members, call.wholes, strict=True) if member.is_trained)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the shards.

        Raises:
            UnsupportedOnBackend: the gradient is to be differentiated.
        """
        if ctx.call.group.platform.grad_enabled():
            msg = "fully_shard: the gradient of a gradient is not supported; gradients are reduced off the graph"
            raise UnsupportedOnBackend(msg)
        ctx.call.wholes = []
        return (None, *ctx.call.group.reduce(gradients))


class FullyShardedGroup:
    """The parameters of one ``fully_shard`` call.

    Args:
        platform: MindSpore's platform.
        module: the cell.
        options: options of the sharding.
        parameters: for each, the original, the DTensor parameter, and its owners with attribute names.

    Attributes:
        reduces: whether backward reduces gradients; False to accumulate.
        reduction: options of the reduction.
    """

    def __init__(
        self,
        platform: Any,
        module: Any,
        options: FullyShardedOptions,
        parameters: Sequence[tuple[Any, Any, Sequence[tuple[Any, str]]]],
    ) -> None:
        self.platform, self.options, self.reduces, self.is_outermost = platform, options, True, True
        self.reduction = Reduction()
        self._kept: Tensor | None = None  # sum of this rank's row over passes that do not reduce over replicas
        dims = [split_dim(sharded.layout, options.ranks) for _, sharded, _ in parameters]
        shapes = [_row_shape(original, dim) for (original, _, _), dim in zip(parameters, dims, strict=True)]
        self._plan = plan_flat(shapes, len(options.ranks))
        self.members = [
            Member(*each, slot, dim) for each, slot, dim in zip(parameters, self._plan.slots, dims, strict=True)
        ]
        self.trained = [member for member in self.members if member.is_trained]
        self._gradient_plan = plan_flat([member.slot.shape for member in self.trained], len(options.ranks))
        self.number = next(_NUMBERS)
        self._calls: list[_Call] = []  # forward calls that have begun
        with replacing_parameters(platform, module):
            for _, sharded, owners in parameters:
                for owner, name in owners:
                    platform.set_parameter(owner, name, sharded)
        self.tuples = tuples_of(module, self.members)
        self._owners = frozenset(id(owner) for member in self.members for owner, _ in member.owners)
        _GROUPS.add(self)
        module.register_forward_pre_hook(self._before_forward, with_kwargs=True)
        module.register_forward_hook(self._after_forward, always_call=True)

    def take(self, nested: Sequence[FullyShardedGroup]) -> None:
        """Record that ``nested`` groups belong to submodules: ``reshard=None`` frees those after forward."""
        for group in nested:
            group.is_outermost = False

    # -- forward ---------------------------------------------------------------------------------------------------

    def _before_forward(self, _cell: Any, args: Any, kwargs: Any) -> Any:
        for member in self.members:
            member.check_unreplaced()
        if self.members:
            call = _Call(self)
            self._calls.append(call)
            call.begin()
        dtype = self.options.param_dtype if self.options.cast_forward_inputs else None
        return None if dtype is None else tree_map(partial(self._cast, dtype), (args, kwargs), CONTAINERS)

    def _after_forward(self, _cell: Any, args: Any, output: Any) -> Any:
        del args
        if self._calls:  # otherwise the cell raised before it was called
            reshard = self.options.reshard
            keep = self.platform.grad_enabled() and (self.is_outermost if reshard is None else not reshard)
            self._end(keep=keep)
        if self.options.output_dtype is not None:
            output = tree_map(partial(self._cast, self.options.output_dtype), output, CONTAINERS)
        return output

    def _end(self, *, keep: bool) -> None:
        self._calls.pop().end_forward(keep=keep)
        if self._calls:  # the cell calls itself
            self._calls[-1].show()
            return
        for member in self.members:
            member.hide()
        for held in self.tuples:
            held.hide()

    # -- recomputation ---------------------------------------------------------------------------------------------

    @property
    def is_gathered(self) -> bool:
        """Whether the cells compute with gathered parameters now."""
        return bool(self._calls)

    def has_parameters_of(self, cells: frozenset[int]) -> bool:
        """Whether a cell among ``cells``, which are given by ``id``, has a parameter of the group."""
        return not self._owners.isdisjoint(cells)

    @contextmanager
    def gathering(self, *, saves: bool) -> Iterator[None]:
        """Let the cells compute with gathered parameters, as in a call."""
        call = _Call(self)
        self._calls.append(call)
        call.begin(saves=saves)
        try:
            yield
        finally:
            self._end(keep=True)

    @contextmanager
    def replacing_shards(self, shards: Sequence[Tensor]) -> Iterator[None]:
        """Gather from ``shards``, one per trainable parameter, and differentiate with respect to these."""
        for member, shard in zip(self.trained, shards, strict=True):
            member.replacement = shard
        try:
            yield
        finally:
            for member in self.trained:
                member.replacement = None

    def _cast(self, dtype: Any, leaf: Any) -> Any:
        return leaf.astype(dtype) if isinstance(leaf, Tensor) and self.platform.is_floating(leaf) else leaf

    # -- collectives -----------------------------------------------------------------------------------------------

    def row(self) -> Tensor:
        """Return this rank's row: its shards, each padded to the size of the parameter's largest shard."""
        parts: list[Tensor] = []
        for member in self.members:
            _append(parts, member.flat(ops.stop_gradient(member.local)), member.slot.size)
        row = mint.cat(parts)
        return self._in_policy_dtype(row, self.options.param_dtype)

    def gather(self, row: Tensor) -> list[Tensor]:
        """Return each complete parameter, from the rows of all ranks."""
        rows = self.platform.all_gather_into_tensor(row, self.options.ranks)
        return [member.shaped(self._whole(rows, member.slot)) for member in self.members]

    def _whole(self, rows: Tensor, slot: Slot) -> Tensor:
        """Return one parameter, its split dim first, in its own storage: an autograd function would copy a view."""
        parts = [
            mint.narrow(rows, 0, rank * self._plan.row + slot.offset, size).reshape(-1, *slot.shape[1:])
            for rank, size in enumerate(slot.sizes)
            if size
        ]
        return mint.cat(parts)

    def reduce(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of the shards; zeros in a pass that accumulates, None if added to ``main_grad``.

        Args:
            gradients: gradients of the gathered trainable parameters.
        """
        totals = [
            gradient if member.accumulated is None else member.accumulated + gradient
            for member, gradient in zip(self.trained, map(self._to_reduce, gradients), strict=True)
        ]
        for member, total in zip(self.trained, totals, strict=True):
            member.accumulated = None if self.reduces else total
            set_unreduced(member.sharded, None)
        reduced = self._reduced(totals) if self.reduces else None
        if reduced is None:
            for member in self.trained:
                set_unreduced(member.sharded, KEPT if self.reduces else ACCUMULATED)
            return [None if self.reduction.on_main_grad else self.platform.zeros_like(m.local) for m in self.trained]
        if not self.reduction.on_main_grad:
            return [gradient.astype(m.local.dtype) for gradient, m in zip(reduced, self.trained, strict=True)]
        for member, gradient in zip(self.trained, reduced, strict=True):
            member.add_to_main_grad(gradient.astype(mindspore.float32))
        return [None] * len(reduced)

    def _to_reduce(self, gradient: Tensor) -> Tensor:
        return self._in_policy_dtype(gradient, self.options.reduce_dtype)

    def _in_policy_dtype(self, value: Tensor, dtype: Any) -> Tensor:
        """Return floating values in the dtype of a policy; integer and complex ones keep their own."""
        return value.astype(dtype) if dtype is not None and self.platform.is_real_floating(value) else value

    def _reduced(self, totals: Sequence[Tensor]) -> list[Tensor] | None:
        """Reduce the gradients over the ranks, in one collective, and return this rank's shard of each.

        The result is None if a later pass reduces the gradients over the replicas.
        """
        parts: list[Tensor] = []
        slots = self._gradient_plan.slots
        flat = [member.flat(total) for member, total in zip(self.trained, totals, strict=True)]
        starts = [0] * len(slots)
        for rank in range(len(self.options.ranks)):
            for index, slot in enumerate(slots):
                _append(parts, flat[index][starts[index] : starts[index] + slot.sizes[rank]], slot.size)
                starts[index] += slot.sizes[rank]
        own = self.platform.reduce_scatter_tensor(mint.cat(parts), self.options.ranks, op="sum")
        if self._kept is not None:
            own, self._kept = own + self._kept, None
        if len(self.options.replicas) > 1:
            if not self.reduction.over_replicas:
                self._kept = own
                return None
            own = self.platform.all_reduce(own, self.options.replicas)
        if self.reduction.averages:
            own = own / self.options.count
        gradients = [_own_part(own, slot, member) for slot, member in zip(slots, self.trained, strict=True)]
        return self._with_copies(gradients) if self.reduction.adds_copies else gradients

    def _with_copies(self, gradients: list[Tensor]) -> list[Tensor]:
        """Add up the gradients of copies: one collective for all parameters with copies on the same ranks."""
        for ranks in dict.fromkeys(member.copies for member in self.trained if member.copies):
            which = [index for index, member in enumerate(self.trained) if member.copies == ranks and member.local.size]
            if not which:
                continue
            total = self.platform.all_reduce(mint.cat([gradients[index].reshape(-1) for index in which]), ranks)
            start = 0
            for index in which:
                local = self.trained[index].local
                gradients[index] = mint.cat([mint.narrow(total, 0, start, local.size)]).reshape(local.shape)
                start += local.size
        return gradients

    def sharded(self) -> list[Any]:
        """Return the parameters that are sharded over the ranks."""
        return [member.sharded for member in self.members]

    def drop_gradients(self) -> None:
        """Forget the gradients of all passes."""
        self._kept = None
        for member in self.trained:
            member.drop_gradients()


_NUMBERS = count()
_GROUPS: WeakSet[FullyShardedGroup] = WeakSet()


def groups_within(cell: Any) -> list[FullyShardedGroup]:
    """Return the groups that have parameters of ``cell`` or of cells in it, outer ones first; None: all groups."""
    groups = sorted(_GROUPS, key=lambda group: group.number)
    if cell is None or not groups:
        return groups
    cells = frozenset(id(each) for _, each in cell.cells_and_names())
    return [group for group in groups if group.has_parameters_of(cells)]


def _is_alike(tensor: Tensor, whole: Tensor) -> bool:
    """Whether ``tensor``, at the same address as ``whole``, has all of its elements in the same layout."""
    return bool(tensor.shape == whole.shape and tensor.stride() == whole.stride())


def _append(parts: list[Tensor], values: Tensor, size: int) -> None:
    """Add ``values`` and zeros up to ``size`` elements."""
    if values.size:
        parts.append(values)
    if values.size < size:
        parts.append(mint.zeros((size - values.size,), dtype=values.dtype))


def _own_part(own: Tensor, slot: Slot, member: Member) -> Tensor:
    """Copy the gradient of one shard out of this rank's reduced row."""
    local = member.local
    if not local.size:
        return mint.zeros(tuple(local.shape), dtype=local.dtype)
    return member.shaped(mint.cat([mint.narrow(own, 0, slot.offset, local.size)]).reshape(-1, *slot.shape[1:]))


def _row_shape(original: Any, dim: int) -> tuple[int, ...]:
    """Return the shape that the data axis shards (for a DTensor, the local shape), with the sharded dim first."""
    shape = tuple(original.local_shape if isinstance(original, DTensor) else original.shape)
    return (*shape[dim : dim + 1], *shape[:dim], *shape[dim + 1 :])
