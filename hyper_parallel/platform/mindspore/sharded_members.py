"""Parameters of a fully sharded cell on MindSpore, and the attributes through which the cell reaches them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspore import ParameterTuple, Tensor

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.platform.contract.fully_sharded import replaced_parameter
from hyper_parallel.platform.mindspore.gradients import set_unreduced

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hyper_parallel.core.data_parallel.plan import Slot
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.transport.base import Ranks

__all__ = ["HeldTuple", "Member", "tuples_of"]


class Member:
    """One parameter: its shard, which the optimizer sees, and its place in the rows.

    Args:
        original: the parameter before sharding.
        sharded: the DTensor parameter.
        owners: cells and attribute names.
        slot: place in the rows.
        dim: dim that the data axis splits.
    """

    def __init__(self, original: Any, sharded: Any, owners: Sequence[tuple[Any, str]], slot: Slot, dim: int) -> None:
        self.sharded, self.owners, self.slot = sharded, owners, slot
        self.is_trained = bool(original.requires_grad)
        self.accumulated: Any = None
        """Sum of the gradients of passes that did not reduce."""
        self.replacement: Tensor | None = None
        """The tensor that replaces the shard in a recomputation, which differentiates with respect to it."""
        self._layout: Layout | None = original.layout if isinstance(original, DTensor) else None
        self.copies = _copies(self._layout)
        """Ranks that hold copies of the tensor that the data axis shards; empty if only this rank holds it."""
        self.dim = dim  # this dim comes first in rows

    @property
    def local(self) -> Tensor:
        """This rank's shard."""
        return self.sharded._local if self.replacement is None else self.replacement

    def expose(self, whole: Any) -> None:
        """Let the cells compute with ``whole``, or, with tensor parallelism, with the DTensor whose shard it is.

        The value in the cell's ``__dict__`` hides the registered parameter, which optimizers still train.
        """
        if self._layout is not None:
            whole = self.sharded._platform.wrap(whole, self._layout)
        for owner, name in self.owners:
            vars(owner)[name] = whole

    def flat(self, values: Tensor) -> Tensor:
        """Return the elements of the shard, of the complete parameter or of a gradient, in the order of rows."""
        return (values.movedim(self.dim, 0) if self.dim and values.size else values).reshape(-1)

    def shaped(self, values: Tensor) -> Tensor:
        """Return ``values``, which have the split dim first, with their dims in the order of the parameter."""
        return values.movedim(0, self.dim).contiguous() if self.dim else values

    def hide(self) -> None:
        """Let the cells compute with the shard."""
        for owner, name in self.owners:
            del vars(owner)[name]

    def add_to_main_grad(self, gradient: Tensor) -> None:
        """Add a gradient of the shard to ``main_grad``, a DTensor in the layout of the parameter."""
        present = getattr(self.sharded, "main_grad", None)
        total = gradient if present is None else present._local + gradient
        self.sharded.main_grad = self.sharded._platform.wrap(total, self.sharded.layout)

    def drop_gradients(self) -> None:
        """Forget the gradients."""
        self.accumulated = self.sharded.main_grad = self.local._grad = None
        set_unreduced(self.sharded, None)

    def check_unreplaced(self) -> None:
        """Check that the cells have the parameter that was sharded.

        Raises:
            PlanError: an assignment has replaced the parameter.
        """
        for owner, name in self.owners:
            if owner._params.get(name) is not self.sharded:
                raise replaced_parameter(name, owner)


def _copies(layout: Layout | None) -> Ranks:
    """Return the ranks that hold the same shard as this one, if there are others."""
    if layout is None:
        return ()
    splitting = {axis for axes in layout.dim_axes for axis in axes}
    ranks = layout.mesh.ranks_along(tuple(axis for axis in range(layout.mesh.ndim) if axis not in splitting))
    return ranks if len(ranks) > 1 else ()


class HeldTuple:
    """A ``ParameterTuple`` of a cell, which has the gathered parameters when the cell's attributes do.

    Args:
        owner: the cell.
        name: name of its attribute.
        members: the group's parameters, by their place in the tuple.
    """

    def __init__(self, owner: Any, name: str, members: dict[int, Member]) -> None:
        self._owner, self._name, self._members = owner, name, members
        self._held = vars(owner)[name]

    def show(self) -> None:
        """Put the gathered parameters into the tuple, where another group may have put its own."""
        self._set({place: vars(member.owners[0][0])[member.owners[0][1]] for place, member in self._members.items()})

    def hide(self) -> None:
        """Put the shards back into the tuple."""
        self._set({place: member.sharded for place, member in self._members.items()})

    def _set(self, shown: dict[int, Any]) -> None:
        now = tuple(shown.get(place, value) for place, value in enumerate(vars(self._owner)[self._name]))
        is_held = all(value is own for value, own in zip(now, self._held, strict=True))
        vars(self._owner)[self._name] = self._held if is_held else now


def tuples_of(module: Any, members: Sequence[Member]) -> list[HeldTuple]:
    """Return the tuples of cells in ``module`` that hold parameters of ``members``."""
    sharded = {id(member.sharded): member for member in members}
    held = []
    for _, cell in module.cells_and_names():
        for name, value in vars(cell).items():
            if isinstance(value, ParameterTuple):
                places = {place: sharded[id(param)] for place, param in enumerate(value) if id(param) in sharded}
                held += [HeldTuple(cell, name, places)] if places else []
    return held
