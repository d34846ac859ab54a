"""Collectives in a traced graph: the transport records each one as an opaque operator during the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import get_torch_platform
from hyper_parallel.transport.base import ForwardingTransport, Parts, Ranks, Shape
from hyper_parallel.transport.work import Work

__all__ = ["COLLECTIVE", "TracingTransport", "recorded_call"]


@dataclass(frozen=True)
class RecordedCall:
    """A collective of a graph, without its tensors.

    Attributes:
        method: method of the transport.
        arguments: the method's arguments after the first, which is the tensors.
        outputs: local shapes of the results.
    """

    method: str
    arguments: tuple[Any, ...]
    outputs: tuple[Shape, ...]

    @property
    def takes_list(self) -> bool:
        """Whether the method's first argument is a list with a tensor per member."""
        return self.method == "reduce_scatter"

    def bound(self) -> Callable[[Any], Any]:
        """Return the collective as a function of its tensor or list of tensors, on this rank's transport."""
        read, arguments, transport = attrgetter(self.method), self.arguments, get_torch_platform().transport

        def run(tensors: Any) -> Any:
            return read(transport())(tensors, *arguments)

        return run

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the collective as an operator."""
        result = self.bound()(list(tensors) if self.takes_list else tensors[0])
        return list(result) if isinstance(result, (list, tuple)) else [result]


_CALLS: dict[str, RecordedCall] = {}
"""Recorded calls by their descriptions: a backend may store graphs on disk, and another process then finds them."""


def recorded_call(name: str) -> RecordedCall:
    """Return the recorded call with this name, which is an argument of the operator."""
    return _CALLS[name]


_LIBRARY = torch.library.Library("hyper_parallel", "FRAGMENT")
_LIBRARY.define("collective(Tensor[] tensors, str call) -> Tensor[]")


def _run(tensors: Sequence[torch.Tensor], call: str) -> list[torch.Tensor]:
    return _CALLS[call].run(tensors)


def _shapes(tensors: Sequence[torch.Tensor], call: str) -> list[torch.Tensor]:
    return [tensors[0].new_empty(shape) for shape in _CALLS[call].outputs]


_LIBRARY.impl("collective", _run, "CompositeExplicitAutograd")
torch.library.register_fake("hyper_parallel::collective", _shapes, lib=_LIBRARY)
COLLECTIVE = torch.ops.hyper_parallel.collective.default
"""``(tensors, name of a recorded call) -> tensors``."""
torch.fx.node.has_side_effect(COLLECTIVE)  # other members wait for it even if its result is unused


def _collective(tensors: Sequence[Any], method: str, arguments: tuple[Any, ...], outputs: Sequence[Shape]) -> list[Any]:
    call = RecordedCall(method, _hashable(arguments), tuple(tuple(map(int, shape)) for shape in outputs))
    name = f"{method} {call.arguments} -> {call.outputs}"
    _CALLS[name] = call
    results: list[Any] = COLLECTIVE(list(tensors), name)
    return results


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


class TracingTransport(ForwardingTransport):
    """Records collectives in the graph that is being traced.

    Objects are exchanged during the trace, because they determine what is traced. ``exchanges`` lists the results; a
    later call of the graph must get the same ones.

    Args:
        inner: the transport of this rank.
        known: results of earlier exchanges, in order.
    """

    def __init__(self, inner: Any, known: Sequence[list[Any]] = ()) -> None:
        super().__init__(inner)
        self.exchanges: list[tuple[Any, Ranks, list[Any]]] = []
        self._known = list(known)

    def rewind(self) -> None:
        """Start over: the tracer runs a function several times, but objects are exchanged once."""
        self._known += [result for _, _, result in self.exchanges[len(self._known) :]]
        self.exchanges = []

    def all_reduce(self, x: Any, op: str, ranks: Ranks) -> Any:
        """See :class:`Transport`."""
        return _collective([x], "all_reduce", (op, ranks), [x.shape])[0]

    def all_gather(self, x: Any, ranks: Ranks, shapes: Sequence[Shape]) -> list[Any]:
        """See :class:`Transport`."""
        return _collective([x], "all_gather", (ranks, shapes), shapes)

    def all_gather_rows(self, x: Any, ranks: Ranks, shapes: Any) -> Any:
        """See :class:`Transport`."""
        return _collective([x], "all_gather_rows", (ranks, shapes), [(len(ranks), *x.shape)])[0]

    def reduce_scatter(self, chunks: Sequence[Any], op: str, ranks: Ranks) -> Any:
        """See :class:`Transport`."""
        return _collective(chunks, "reduce_scatter", (op, ranks), [chunks[ranks.index(self.rank)].shape])[0]

    def reduce_scatter_rows(self, rows: Any, op: str, ranks: Ranks, shapes: Any) -> Any:
        """See :class:`Transport`."""
        return _collective([rows], "reduce_scatter_rows", (op, ranks, shapes), [rows.shape[1:]])[0]

    def all_to_all(self, x: Any, ranks: Ranks, sends: Parts, expects: Parts) -> Any:
        """See :class:`Transport`."""
        return _collective([x], "all_to_all", (ranks, sends, expects), [(expects.total,)])[0]

    def all_to_all_rows(self, rows: Any, ranks: Ranks, sends: Any, expects: Any) -> Any:
        """See :class:`Transport`."""
        return _collective([rows], "all_to_all_rows", (ranks, sends, expects), [rows.shape])[0]

    def broadcast(self, x: Any, src: int, ranks: Ranks) -> Any:
        """See :class:`Transport`."""
        return _collective([x], "broadcast", (src, ranks), [x.shape])[0]

    def send(self, x: Any, dst: int, tag: int = 0, channel: Any = None) -> None:
        """Refuse: a message has no result by which a graph could order it."""
        del x, dst, tag, channel
        raise _refused("a message to another rank")

    def recv(self, like: Any, src: int, tag: int = 0, channel: Any = None) -> Any:
        """Refuse, as :meth:`send`."""
        del like, src, tag, channel
        raise _refused("a message from another rank")

    def barrier(self, ranks: Ranks) -> None:
        """Refuse, as :meth:`send`."""
        del ranks
        raise _refused("a barrier")

    def all_gather_object(self, obj: Any, ranks: Ranks) -> list[Any]:
        """Exchange objects now, unless that has already been done; see the class."""
        index = len(self.exchanges)
        result = self._known[index] if index < len(self._known) else self._inner.all_gather_object(obj, ranks)
        self.exchanges.append((obj, ranks, result))
        return result

    def start(self, operation: str, *args: Any) -> Work:
        """Record the collective as complete, since nothing in a graph runs concurrently."""
        result = getattr(self, operation)(*args)
        return Work(operation, lambda: result)


def _refused(what: str) -> UnsupportedOperatorError:
    msg = f"compile: a compiled region cannot hold {what}; leave it out of the compiled module"
    return UnsupportedOperatorError(msg)
