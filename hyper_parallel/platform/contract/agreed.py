"""How the members of a collective agree on it over gloo, before it is carried out (``agreement`` says why)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.errors import CollectiveMismatchError, NotPlainError, short_dtype
from hyper_parallel.platform.contract.agreement import (
    BARRIER,
    LABEL,
    Statement,
    Transfer,
    claim,
    claimed,
    compare,
    label,
    started,
    text_of,
)
from hyper_parallel.platform.contract.identity import IdentityFacet
from hyper_parallel.platform.contract.tensors import TensorsFacet
from hyper_parallel.transport.base import Ranks
from hyper_parallel.transport.work import Work

__all__ = ["AgreedFacet"]


class AgreedFacet(IdentityFacet, TensorsFacet):
    """Collectives over gloo that are the same on every member, or an error on every member.

    Elsewhere nothing is asked: the simulation compares by itself, and on an accelerator it would cost as much as a
    small collective.
    """

    platform_type: str

    def _blocking(
        self, member: str, operation: str, data: Any, ranks: Ranks, fact: Any = None, chunks: list[Any] | None = None
    ) -> Any:
        """Carry out what the transport does, in the form in which it was started where another member has."""
        transport, arguments = self.transport(), self._arguments(operation, data, ranks, fact, chunks)
        if self._speaks(ranks):
            mine = self._statement(member, operation, data, ranks, fact)
            if self._meet(str(mine), mine, ranks):
                return transport.start(operation, *arguments).wait()
        return getattr(transport, operation)(*arguments)

    def _started(self, member: str, operation: str, data: Any, ranks: Ranks, fact: Any = None) -> Work:
        """Begin a collective; members that do different things learn of it when they wait.

        That costs a visit to the store and a second, small collective.
        """
        if not self._speaks(ranks):
            return self._carried(operation, data, ranks, fact)
        mine = self._statement(member, operation, data, ranks, fact)
        earlier, said = self._claims(mine, ranks), self._said(str(mine), ranks, begun=True)
        if not earlier or mine.same(earlier[0]):
            pending = self._carried(operation, data, ranks, fact)
        else:
            pending = self._joined(mine, earlier, ranks)

        def finish() -> Any:
            (told, _), result = said.wait(), pending.wait()
            compare(ranks, told)
            return result

        return Work(operation, finish, pending.output)

    def _agree(self, member: str, data: Any, ranks: Ranks, *facts: str) -> None:
        """Compare what the members of a collective that is never started are about to do."""
        if self._speaks(ranks):
            dtype = short_dtype(data.dtype)
            text = f"{member}({', '.join((f'{dtype}{list(data.shape)}', *map(str, facts)))})"
            self._meet(text, self._statement(member, "", data, ranks), ranks)

    def _agree_without(self, member: str, ranks: Ranks) -> None:
        """The same where no tensor is given."""
        if self._speaks(ranks):
            self._meet(f"{member}()", self._statement(member, BARRIER, None, ranks), ranks)

    def _agree_on_rows(self, member: str, data: Any, route: Any, launch: Callable[[Any], Any]) -> Any:
        """Compare who sends how many rows, and which, with who expects how many.

        Returns:
            the output where another member has started it, which then is launched here, too; else None.
        """
        if not self._speaks(route.ranks):
            return None
        mine = self._transfer(data, route)
        ranks = tuple(sorted(route.ranks))
        said = self._said(_row(member, data), ranks)
        told, begun = said.wait()
        if begun:
            again = Work(member, lambda: (told, begun))
            output, pending = self._rows_begun(member, data, route, launch, mine, self._claims(mine, ranks), again)
            pending.wait()
            return output
        compare(ranks, told)
        _compare_rows(member, ranks, self._counted(mine, ranks).wait())
        return None

    def _rows_in_flight(self, member: str, data: Any, route: Any, launch: Callable[[Any], Any]) -> tuple[Any, Work]:
        """The output of ``launch(route)``, and what to wait for; members learn of it then, as in :meth:`_started`."""
        if not self._speaks(route.ranks):
            route = route._replace(launched=[])
            return launch(route), route.launched[0]
        mine, ranks = self._transfer(data, route), tuple(sorted(route.ranks))
        earlier, said = self._claims(mine, ranks), self._said(_row(member, data), ranks, begun=True)
        return self._rows_begun(member, data, route, launch, mine, earlier, said)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _speaks(self, ranks: Ranks) -> bool:
        """Whether the members say what they do."""
        return self.transport().backend == "gloo" and len(ranks) > 1

    def _place(self, ranks: Ranks) -> int:
        return sorted(ranks).index(self.get_rank())

    def _statement(self, member: str, operation: str, data: Any, ranks: Ranks, fact: Any = None) -> Statement:
        dtype, shape = ("", ()) if data is None else (_name(data.dtype), tuple(data.shape))
        return Statement(self._place(ranks), member, operation, dtype, shape, fact)

    def _transfer(self, data: Any, route: Any) -> Transfer:
        """The route with members in the order of their numbers: each may name them in an order of its own."""
        order = sorted(range(len(route.ranks)), key=route.ranks.__getitem__)
        sent, received = (tuple(one[place] for place in order) for one in (route.sent, route.received))
        return Transfer(self._place(route.ranks), sent, received, _name(data.dtype), tuple(data.shape)[1:])

    def _meet(self, text: str, mine: Statement, ranks: Ranks) -> bool:
        """Say what this member does, wait for what the others say, and compare; whether one of them has started it."""
        told, begun = self._said(text, ranks).wait()
        if begun:
            earlier = self._claims(mine, ranks)
            if len(set(told)) > 1:
                self._joined(mine, earlier, ranks).wait()
        compare(ranks, told)
        return bool(begun)

    def _claims(self, mine: Statement | Transfer, ranks: Ranks) -> list[Statement | Transfer]:
        """Claim the collective; what those have claimed that came before."""
        return [claimed(one) for one in self.transport().claim(claim(mine), ranks)]

    def _said(self, text: str, ranks: Ranks, *, begun: bool = False) -> Work:
        """What every member says, and whether one of them goes on without waiting for the others."""
        mine = self.from_numpy(label(text, started=begun))
        labels = self.transport().start("all_gather", mine, ranks, [(LABEL,)] * len(ranks))

        def read(parts: list[Any]) -> tuple[list[str], bool]:
            found = [self.tensor_to_numpy(one) for one in parts]
            return [text_of(one) for one in found], any(started(one) for one in found)

        return labels.then(read)

    def _carried(self, operation: str, data: Any, ranks: Ranks, fact: Any) -> Work:
        """Begin what the transport does."""
        if operation == BARRIER:
            return Work(BARRIER, lambda: None)
        return self.transport().start(operation, *self._arguments(operation, data, ranks, fact))

    def _arguments(
        self, operation: str, data: Any, ranks: Ranks, fact: Any, chunks: list[Any] | None = None
    ) -> tuple[Any, ...]:
        """What the transport's method takes; ``chunks`` are the rows for each member, where they are cut already."""
        if operation in ("all_reduce", "broadcast"):
            return data, fact, ranks
        if operation == "all_gather":
            return data, ranks, [tuple(data.shape)] * len(ranks)
        chunks = chunks or self._rows(operation, data, ranks)
        if operation == "reduce_scatter":
            return chunks, fact, ranks
        return chunks, ranks, [tuple(chunks[0].shape)] * len(ranks)

    def _joined(self, mine: Statement | Transfer, earlier: Sequence[Statement | Transfer], ranks: Ranks) -> Work:
        """Begin, with zeros, what the member that came first has begun, though this one means something else."""
        first = earlier[0]
        if isinstance(first, Transfer):
            return self._rows_joined(mine.transfer(len(ranks)), earlier, tuple(sorted(ranks)))
        zeros = None if first.operation == BARRIER else self.zeros(first.shape, dtype=self.str_to_dtype(first.dtype))
        return self._carried(first.operation, zeros, ranks, first.fact)

    def _rows_joined(self, mine: Transfer, earlier: Sequence[Statement | Transfer], ranks: Ranks) -> Work:
        counted = self._counted(mine, ranks)
        fitting = mine.after([one.transfer(len(ranks)) for one in earlier])
        dtype = self.str_to_dtype(fitting.dtype)
        chunks = [self.zeros((rows, *fitting.rest), dtype=dtype) for rows in fitting.sent]
        shapes = [(rows, *fitting.rest) for rows in fitting.received]
        pending = self.transport().start("all_to_all", chunks, ranks, shapes)
        return Work("all_to_all", lambda: (counted.wait(), pending.wait())[0])

    def _rows_begun(
        self,
        member: str,
        data: Any,
        route: Any,
        launch: Callable[[Any], Any],
        mine: Transfer,
        earlier: Sequence[Statement | Transfer],
        said: Work,
    ) -> tuple[Any, Work]:
        """Launch the rows, or join what the first member has begun; the output, and what to wait for."""
        ranks, count = tuple(sorted(route.ranks)), len(route.ranks)
        fits = mine.after([one.transfer(count) for one in earlier]) == mine
        if fits and all(isinstance(one, Transfer) for one in earlier[:1]):
            counted, route = self._counted(mine, ranks), route._replace(launched=[])
            output, pending = launch(route), route.launched[0]
        else:
            counted = self._joined(mine, earlier, ranks) if earlier else self._rows_joined(mine, earlier, ranks)
            output, pending = self.zeros((sum(route.received), *mine.rest), dtype=data.dtype), None

        def finish() -> Any:
            (told, _), counts = said.wait(), counted.wait()
            result = output if pending is None else pending.wait()
            compare(ranks, told)
            _compare_rows(member, ranks, counts)
            return result

        return output, Work(member, finish, None if pending is None else pending.output)

    def _counted(self, mine: Transfer, ranks: Ranks) -> Work:
        """How many rows each member sends and expects."""
        import numpy as np

        rows = self.from_numpy(np.array([mine.sent, mine.received], np.int64))
        counted = self.transport().start("all_gather", rows, ranks, [(2, len(ranks))] * len(ranks))
        return counted.then(lambda parts: [self.tensor_to_numpy(one).tolist() for one in parts])

    def _rows(self, member: str, data: Any, ranks: Ranks) -> list[Any]:
        self._plain(member, data)
        size = data.shape[0] if len(data.shape) else 0
        rows, rest = divmod(size, len(ranks))
        if rest or not len(data.shape):
            msg = f"{member}: dim 0 of size {size} does not divide by {len(ranks)} ranks"
            raise ValueError(msg)
        return [data[rows * index : rows * (index + 1)] for index in range(len(ranks))]

    def _plain(self, member: str, data: Any) -> None:
        """Refuse what is no plain tensor: of a DTensor it is not said whether its piece or its whole is meant."""
        if self.is_tensor(data) and not hasattr(data, "full_tensor"):
            return
        msg = f"{member}: expected a plain tensor of {self.platform_type}, got {type(data).__name__}"
        raise NotPlainError(msg + ("; give its to_local()" if hasattr(data, "full_tensor") else ""))


def _name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2].lower()


def _row(member: str, data: Any) -> str:
    """What every member's rows must be alike in."""
    return f"{member.removesuffix('_async')}(rows of {short_dtype(data.dtype)}{list(data.shape)[1:]})"


def _compare_rows(member: str, ranks: Ranks, found: Sequence[Sequence[Sequence[int]]]) -> None:
    for sender, (sent, _) in enumerate(found):
        for receiver, (_, received) in enumerate(found):
            if sent[receiver] != received[sender]:
                msg = (
                    f"{member}: rank {ranks[sender]} sends {sent[receiver]} rows to rank {ranks[receiver]}, "
                    f"which expects {received[sender]}"
                )
                raise CollectiveMismatchError(msg)
