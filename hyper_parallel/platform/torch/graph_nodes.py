"""The nodes of autograd's graph that users of DTensors see: they can be read, but do not accept hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch.autograd.graph import Node

from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.torch.versions import WrappedHook

__all__ = ["LocalNode", "node_to_read"]


def node_to_read(node: Any) -> LocalNode | None:
    """Return ``node``, of the graph of local tensors, without its hooks, or None if ``node`` is None."""
    return None if node is None else LocalNode(node)


class LocalNode(Node):
    """A node of the graph of local tensors. Hooks on it would get local values, so they are refused.

    Args:
        node: autograd's own node.
    """

    def __init__(self, node: Any) -> None:
        self.autograds = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self.autograds, name)

    def __eq__(self, other: object) -> bool:
        # The node itself may be compared, too: a walk from a plain tensor's node finds those of DTensors.
        return self.autograds is (other.autograds if isinstance(other, LocalNode) else other)

    def __hash__(self) -> int:
        return hash(self.autograds)

    def __repr__(self) -> str:
        return f"<local {self.autograds!r}>"

    def name(self) -> str:
        """Return autograd's name of the local operation."""
        name: str = self.autograds.name()
        return name

    @property
    def next_functions(self) -> tuple[tuple[LocalNode | None, int], ...]:
        """The nodes of the local operands."""
        return tuple((node_to_read(node), number) for node, number in self.autograds.next_functions)

    def metadata(self) -> dict[Any, Any]:
        """Return what others have attached to the node."""
        metadata: dict[Any, Any] = self.autograds.metadata
        return metadata

    def _sequence_nr(self) -> int:
        number: int = self.autograds._sequence_nr()  # of the class that this class replaces
        return number

    @property
    def _input_metadata(self) -> list[Any]:
        metadata: list[Any] = self.autograds._input_metadata  # noqa: SLF001 - of the class that this class replaces
        return metadata

    def _register_hook_dict(self, tensor: Any) -> None:
        del tensor
        self._refuse("_register_hook_dict")

    def register_hook(self, fn: Callable[..., Any]) -> None:  # type: ignore[override] # refused
        """Refused: it would get the local gradients of one local operation."""
        if not isinstance(fn, WrappedHook):  # module_hooks.py rejects Module.register_backward_hook
            self._refuse("register_hook")

    def register_prehook(self, fn: Callable[..., Any]) -> NoReturn:
        """Refused, as :meth:`register_hook`."""
        del fn
        self._refuse("register_prehook")

    def _refuse(self, method: str) -> NoReturn:
        msg = (
            f"{method} of grad_fn of a DTensor: {self.name()} is the node of a local operation, whose hooks would see "
            "local gradients; call register_hook on the DTensor"
        )
        raise UnsupportedOperatorError(msg)
