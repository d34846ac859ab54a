"""Checks, over gloo, that all ranks call the same collective before it runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyper_parallel.errors import ArgumentTypeError
from hyper_parallel.platform.contract.identity import IdentityFacet
from hyper_parallel.platform.contract.tensors import TensorsFacet
from hyper_parallel.transport.base import Ranks, Transport
from hyper_parallel.transport.checks.agreement import (
    BARRIER,
    GlooAgreement,
    Proposal,
    engine_arguments,
    must_agree,
)
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint, call_site
from hyper_parallel.transport.work import Work

__all__ = ["AgreementFacet"]

_CONTRACT_DIR = f"{Path(__file__).absolute().parent}{os.sep}"


class AgreementFacet(IdentityFacet, TensorsFacet):
    """Runs collectives after a check that all ranks call the same one; see ``transport/checks``."""

    platform_type: str

    def _blocking(self, member: str, operation: str, data: Any, ranks: Ranks, argument: Any = None) -> Any:
        """Run the transport's ``operation``, in its asynchronous form if another member has started that form."""
        transport, arguments = self._transport_for(ranks), engine_arguments(operation, data, ranks, argument)
        if must_agree(transport, ranks):
            proposal = self._proposal(member, operation, data, ranks, **_argument(operation, argument))
            if self._agreement(ranks).compare(proposal):
                return transport.start(operation, *arguments).wait()
        return getattr(transport, operation)(*arguments)

    def _started(self, member: str, operation: str, data: Any, ranks: Ranks, argument: Any = None) -> Work:
        """Start a collective; a mismatch is raised by ``wait()``."""
        transport = self._transport_for(ranks)

        def begin() -> Work:
            if operation == BARRIER:
                return Work(BARRIER, lambda: None)
            return transport.start(operation, *engine_arguments(operation, data, ranks, argument))

        if not must_agree(transport, ranks):
            return begin()
        proposal = self._proposal(member, operation, data, ranks, **_argument(operation, argument))
        return self._agreement(ranks).start(proposal, begin)

    def _agree(self, member: str, data: Any, ranks: Ranks, **facts: Any) -> None:
        """Check a collective that is not asynchronous; ``data`` is None if it has no tensor.

        Raises:
            CollectiveMismatchError: members are about to call different collectives.
        """
        if must_agree(self._transport_for(ranks), ranks):
            self._agreement(ranks).compare(self._proposal(member, "", data, ranks, **facts))

    def _agree_on_rows(self, member: str, data: Any, route: Any, launch: Callable[[Any], Any]) -> Any:
        """Check an all-to-all of rows.

        Returns:
            the output, if another member has started the collective, in which case it runs here; else None.
        """
        if not must_agree(self.transport(), route.ranks):
            return None
        proposal = self._rows_proposal(member, data, route)
        return self._agreement(route.ranks).compare_rows(proposal, lambda: _launched(route, launch))

    def _rows_in_flight(self, member: str, data: Any, route: Any, launch: Callable[[Any], Any]) -> tuple[Any, Work]:
        """Return the output of ``launch(route)``, and the work to wait for; a mismatch is raised by ``wait()``."""
        if not must_agree(self.transport(), route.ranks):
            return _launched(route, launch)
        proposal = self._rows_proposal(member, data, route)
        return self._agreement(route.ranks).start_rows(proposal, lambda: _launched(route, launch))

    def _transport_for(self, ranks: Ranks) -> Transport:
        """Return the transport, after ending collectives of ``ranks`` that were agreed upon in advance."""
        transport = self.transport()
        sequence = transport.sequences.get(tuple(sorted(ranks))) if transport.sequences else None
        if sequence is not None:
            sequence.interrupt()
        return transport

    def _agreement(self, ranks: Ranks) -> GlooAgreement:
        return GlooAgreement(self.transport(), self, ranks)

    def _proposal(self, member: str, operation: str, data: Any, ranks: Ranks, **facts: Any) -> Proposal:
        members = tuple(sorted(ranks))
        tensor = () if data is None else (("shape", tuple(data.shape)), ("dtype", _name(data.dtype)))
        fingerprint = CollectiveFingerprint(member, members, (*tensor, *facts.items()), call_site(_CONTRACT_DIR))
        return Proposal(members.index(self.get_rank()), operation, fingerprint)

    def _rows_proposal(self, member: str, data: Any, route: Any) -> Proposal:
        """Return the proposal of an all-to-all of rows.

        The blocking and asynchronous forms share a name; ranks are sorted, since each rank may list them in a different
        order.
        """
        members = tuple(sorted(route.ranks))
        order = [route.ranks.index(rank) for rank in members]
        row = tuple(data.shape)[1:]
        sends, expects = (tuple((rows[index], *row) for index in order) for rows in (route.sent, route.received))
        name, facts = member.removesuffix("_async"), (("dtype", _name(data.dtype)),)
        fingerprint = CollectiveFingerprint(name, members, facts, call_site(_CONTRACT_DIR), sends, expects)
        return Proposal(members.index(self.get_rank()), "all_to_all", fingerprint)

    def _rows(self, member: str, data: Any, ranks: Ranks) -> int:
        """Return the number of rows of dim 0 for each member, which is equal for all.

        Raises:
            ValueError: dim 0 is not divisible by the number of members.
        """
        self._plain(member, data)
        size = data.shape[0] if len(data.shape) else 0
        rows, rest = divmod(size, len(ranks))
        if rest or not len(data.shape):
            msg = f"{member}: dim 0 of size {size} is not divisible by {len(ranks)} ranks"
            raise ValueError(msg)
        return rows

    def _plain(self, member: str, data: Any) -> None:
        """Raise unless ``data`` is a plain tensor; a DTensor would be ambiguous (local or global).

        Raises:
            ArgumentTypeError: ``data`` is a DTensor, or not a tensor of this framework.
        """
        if self.is_tensor(data) and not hasattr(data, "full_tensor"):
            return
        msg = f"{member}: expected a plain tensor of {self.platform_type}, got {type(data).__name__}"
        raise ArgumentTypeError(msg + ("; pass its to_local()" if hasattr(data, "full_tensor") else ""))


def _argument(operation: str, argument: Any) -> dict[str, Any]:
    """Return the reduction or the source rank, for the fingerprint."""
    return {} if argument is None else {"src" if operation == "broadcast" else "reduction": argument}


def _launched(route: Any, launch: Callable[[Any], Any]) -> tuple[Any, Work]:
    """Return the output of ``launch``, and the work that it has started."""
    route = route._replace(launched=[])
    return launch(route), route.launched[0]


def _name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2].lower()
