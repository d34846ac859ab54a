"""A call of a canonical operator, with tensors replaced by what a rule may know of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.layout import Layout
    from hyper_parallel.core.dtensor.mesh import DeviceMesh

__all__ = ["LocalCall", "OpCall", "Operand", "Ref", "UnknownOperandError"]


class UnknownOperandError(TypeError):
    """The operator does not know the other operand, and leaves it to that one to answer."""


@dataclass(frozen=True)
class Operand:
    """One tensor argument: where it stands, and its layout (with global shape).

    Attributes:
        name: parameter name, with the position in a list: ``tensors[1]``.
        layout: placement and global shape before any redistribution.
        dtype: the framework's own dtype object.
        floating: True for floating and complex tensors.
    """

    name: str
    layout: Layout
    dtype: Any = None
    floating: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Global sizes."""
        return self.layout.shape  # type: ignore[return-value] # operands always carry one

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.layout.dim_axes)


@dataclass(frozen=True)
class Ref:
    """Stands in bound arguments for operand number ``index``."""

    index: int


@dataclass(frozen=True)
class OpCall:
    """A canonical operator with its operands and its other arguments.

    Attributes:
        op: canonical name.
        mesh: the mesh that every operand lives on.
        operands: tensor arguments, flattened, in the order in which they were bound.
        args: every argument by canonical name; tensors are :class:`Ref`, lists keep their nesting.
    """

    op: str
    mesh: DeviceMesh
    operands: tuple[Operand, ...]
    args: dict[str, Any] = field(hash=False)

    def __getitem__(self, name: str) -> Any:
        """The argument ``name``: an :class:`Operand` where it is a tensor, the value (or list of those) otherwise."""
        return self._resolve(self.args.get(name))

    def _resolve(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.operands[value.index]
        if isinstance(value, (list, tuple)):
            return type(value)(self._resolve(item) for item in value)
        return value

    def index_of(self, name: str) -> int | None:
        """Operand number of the tensor argument ``name``, or None where it is no tensor."""
        value = self.args.get(name)
        return value.index if isinstance(value, Ref) else None


@dataclass(frozen=True)
class LocalCall:
    """What to call on locals when it is not the caller's own call.

    Attributes:
        args: canonical arguments that replace the bound ones.
        run: ``run(platform, args) -> output`` on bound local arguments; None calls the canonical operator.
    """

    args: dict[str, Any] | None = None
    run: Any = None
