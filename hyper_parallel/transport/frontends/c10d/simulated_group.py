"""The process group of simulated ranks: ``torch.distributed``'s collectives on the coordinator of the simulation.

The class derives from ``ProcessGroup`` in Python, so that functional collectives, DDP's reducer and everything else in
C++ calls it as well. Outputs are written through ``.data``: a real engine writes memory without autograd noticing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from hyper_parallel.errors import CollectiveMismatchError, MeshError, UnsupportedOnBackend
from hyper_parallel.transport.base import Ranks, active_transport
from hyper_parallel.transport.checks.fingerprint import CollectiveFingerprint
from hyper_parallel.transport.checks.torch_distributed import OPERATIONS
from hyper_parallel.transport.frontends.c10d.arguments import (
    Tensors,
    check_count,
    check_same,
    described,
    inner,
    listed,
    op_of,
    private_copy,
    root_of,
    write,
)
from hyper_parallel.transport.frontends.c10d.comm_debug import count_collective
from hyper_parallel.transport.frontends.c10d.reduction import premultiplied, reduce_parts, reduction_name
from hyper_parallel.transport.frontends.c10d.simulated_work import SimulatedWork
from hyper_parallel.transport.simulated.endpoint import Contribution
from hyper_parallel.transport.simulated.transport import SimulatedTransport

if TYPE_CHECKING:
    from hyper_parallel.transport.simulated.threads import ThreadEndpoint

__all__ = ["CollectiveGroup"]

_ProcessGroup: Any = dist.ProcessGroup
_Finish = Callable[[list[Any]], list[torch.Tensor]]


class _Part:
    """A member's private copies of its tensors; ``reduced`` caches the reduction of all members' tensors."""

    __slots__ = ("reduced", "tensors")

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.tensors = tensors
        self.reduced: list[torch.Tensor] | None = None


class CollectiveGroup(_ProcessGroup):  # type: ignore[misc]  # its stubs have signatures per overload
    """The collectives of one rank in one group.

    Attributes:
        transport: transport of the simulated rank.
        ranks: global ranks of the members, in the order of their group ranks.
    """

    transport: SimulatedTransport
    ranks: Ranks
    _coalesced: list[SimulatedWork] | None

    # -- reductions ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        """Reduce each tensor in the order of the members, in place."""
        tensors, op = listed(tensors), op_of(opts)
        name = "all_reduce" if len(tensors) == 1 else "all_reduce_coalesced"
        arguments = {"tensor": tensors[0], "tensors": tensors, "op": op}
        return self._reduce_into(self._fingerprint(name, arguments), tensors, op)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Any, root: Any = 0, op: Any = None) -> SimulatedWork:
        """Reduce a tensor in the order of the members, in place on the root only."""
        if isinstance(root, dist.ReduceOptions):
            root, op = root.rootRank, root.reduceOp
        tensors, op = listed(tensors), op_of(op)
        fingerprint = self._fingerprint("reduce", {"tensor": tensors[0], "op": op, "group_dst": root})
        return self._reduce_into(fingerprint, tensors, op, writes=root == self.rank())

    def _reduce_into(
        self, fingerprint: CollectiveFingerprint, tensors: Tensors, op: Any, *, writes: bool = True
    ) -> SimulatedWork:
        name = reduction_name(op)
        part = _Part([private_copy(premultiplied(x, op)) for x in tensors])

        def finish(parts: list[_Part]) -> list[torch.Tensor]:
            if not writes:
                return list(tensors)
            return write(tensors, _reduced(parts, name))

        return self._begin(fingerprint, [part] * len(self.ranks), finish)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        """Member ``i`` gets the reduction of all members' input ``i``."""
        (output,), (chunks,) = listed(outputs), inputs if isinstance(inputs[0], list | tuple) else [inputs]
        check_count("reduce_scatter", chunks, self.ranks)
        check_same("reduce_scatter", [output], [chunks[self.rank()]])
        fingerprint = self._fingerprint("reduce_scatter", {"input_list": chunks, "op": op_of(opts)})
        return self._scatter_reduced(fingerprint, [output], [list(chunks)], op_of(opts))

    def reduce_scatter_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> SimulatedWork:
        """Member ``i`` gets the reduction of part ``i`` of all members' tensors."""
        chunks = self._parts_of("reduce_scatter_tensor", x, output)
        fingerprint = self._fingerprint("reduce_scatter_tensor", {"output": output, "op": op_of(opts)})
        return self._scatter_reduced(fingerprint, [output], [chunks], op_of(opts))

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """:meth:`reduce_scatter_single` of several tensors at once."""
        pairs = zip(outputs, inputs, strict=True)
        chunks = [self._parts_of("reduce_scatter_tensor_coalesced", x, output) for output, x in pairs]
        fingerprint = self._fingerprint("reduce_scatter", {"input_list": list(outputs), "op": op_of(opts)})
        fingerprint.operation = "dist.reduce_scatter_tensor_coalesced"
        return self._scatter_reduced(fingerprint, outputs, chunks, op_of(opts))

    def _scatter_reduced(
        self, fingerprint: CollectiveFingerprint, outputs: Tensors, chunks: list[list[torch.Tensor]], op: Any
    ) -> SimulatedWork:
        """Reduce ``chunks[k][i]`` into ``outputs[k]`` of member ``i``."""
        name = reduction_name(op)
        payloads = [
            _Part([private_copy(premultiplied(several[place], op)) for several in chunks])
            for place in range(len(self.ranks))
        ]
        return self._begin(fingerprint, payloads, lambda parts: write(outputs, _reduced(parts, name)))

    # -- gathering and scattering ----------------------------------------------------------------------------------

    def broadcast(self, tensors: Any, opts: Any = None) -> SimulatedWork:
        """Every member gets the root's tensor."""
        tensors, root = listed(tensors), root_of(opts)
        fingerprint = self._fingerprint("broadcast", {"tensor": tensors[0], "src": None, "group_src": root})
        mine = _Part([private_copy(x) for x in tensors]) if root == self.rank() else None

        def finish(parts: list[_Part]) -> list[torch.Tensor]:
            return list(tensors) if mine is not None else write(tensors, parts[root].tensors)

        return self._begin(fingerprint, [mine] * len(self.ranks), finish)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        """Every member gets all members' tensors."""
        del opts
        (x,) = listed(inputs)
        (places,) = outputs if isinstance(outputs[0], list | tuple) else [outputs]
        check_count("all_gather", places, self.ranks)
        check_same("all_gather", [places[self.rank()]], [x])
        fingerprint = self._fingerprint("all_gather", {"tensor": x})
        if any(place.shape != x.shape for place in places):
            fingerprint.facts = (("dtype", str(x.dtype)), ("shapes", tuple(tuple(place.shape) for place in places)))
        return self._gather(fingerprint, [[place] for place in places], [x])

    def all_gather_single(self, output: torch.Tensor, x: torch.Tensor, opts: Any = None) -> SimulatedWork:
        """Every member gets all members' tensors, concatenated."""
        del opts
        places = self._parts_of("all_gather_into_tensor", output, x)
        fingerprint = self._fingerprint("all_gather_into_tensor", {"input_tensor": x})
        return self._gather(fingerprint, [[place] for place in places], [x], [output])

    def allgather_coalesced(self, outputs: list[list[torch.Tensor]], inputs: Tensors, opts: Any = None) -> Any:
        """:meth:`allgather` of several tensors at once: ``outputs[i]`` gets the tensors of member ``i``."""
        del opts
        check_count("all_gather_coalesced", outputs, self.ranks)
        for places in outputs:
            check_same("all_gather_coalesced", places, inputs)
        fingerprint = self._fingerprint("all_gather_coalesced", {"input_tensor_list": list(inputs)})
        return self._gather(fingerprint, outputs, inputs)

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """:meth:`all_gather_single` of several tensors at once."""
        del opts
        name = "all_gather_into_tensor_coalesced"
        columns = [self._parts_of(name, output, x) for output, x in zip(outputs, inputs, strict=True)]
        places = [list(row) for row in zip(*columns, strict=True)]
        fingerprint = self._fingerprint("all_gather_coalesced", {"input_tensor_list": list(inputs)})
        fingerprint.operation = f"dist.{name}"
        return self._gather(fingerprint, places, inputs, outputs)

    def _gather(
        self,
        fingerprint: CollectiveFingerprint,
        places: Sequence[Tensors],
        inputs: Tensors,
        outputs: Tensors | None = None,
    ) -> SimulatedWork:
        """Write the inputs of member ``i`` into ``places[i]``."""
        mine = _Part([private_copy(x) for x in inputs])

        def finish(parts: list[_Part]) -> list[torch.Tensor]:
            for place, part in zip(places, parts, strict=True):
                write(place, part.tensors)
            return list(outputs) if outputs is not None else [x for place in places for x in place]

        return self._begin(fingerprint, [mine] * len(self.ranks), finish)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        """The root gets all members' tensors."""
        (x,), root = listed(inputs), root_of(opts)
        places = inner(outputs)
        if root == self.rank():
            check_count("gather", places, self.ranks)
            check_same("gather", places, [x] * len(places))
        fingerprint = self._fingerprint("gather", {"tensor": x, "group_dst": root, "dst": None})
        mine = _Part([private_copy(x)])

        def finish(parts: list[_Part]) -> list[torch.Tensor]:
            return write(places, [part.tensors[0] for part in parts]) if root == self.rank() else []

        return self._begin(fingerprint, [mine] * len(self.ranks), finish)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> SimulatedWork:
        """Member ``i`` gets the root's tensor ``i``."""
        (output,), root = listed(outputs), root_of(opts)
        chunks = inner(inputs)
        if root == self.rank():
            check_count("scatter", chunks, self.ranks)
            check_same("scatter", [output] * len(chunks), chunks)
        fingerprint = self._fingerprint("scatter", {"tensor": output, "group_src": root, "src": None})
        payloads = [_Part([private_copy(x)]) for x in chunks] if root == self.rank() else [None] * len(self.ranks)
        return self._begin(fingerprint, payloads, lambda parts: write([output], parts[root].tensors))

    # -- all-to-all ------------------------------------------------------------------------------------------------

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> SimulatedWork:
        """Send tensor ``i`` to member ``i``."""
        del opts
        arguments = {"input_tensor_list": list(inputs), "output_tensor_list": list(outputs)}
        fingerprint = self._fingerprint("all_to_all", arguments)
        return self._exchange(fingerprint, outputs, inputs, list(outputs))

    def all_to_all_single(
        self,
        output: torch.Tensor,
        x: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = None,
    ) -> SimulatedWork:
        """Send rows of ``x`` to each member, with counts ``input_splits``, or in equal parts."""
        del opts
        sends = self._rows("all_to_all_single", x, input_splits)
        comes = self._rows("all_to_all_single", output, output_splits)
        arguments = {"input": x, "output": output, "input_split_sizes": sends, "output_split_sizes": comes}
        fingerprint = self._fingerprint("all_to_all_single", arguments)
        return self._exchange(fingerprint, output.split(comes), x.split(sends), [output])

    def _exchange(
        self, fingerprint: CollectiveFingerprint, places: Tensors, chunks: Tensors, outputs: list[torch.Tensor]
    ) -> SimulatedWork:
        def finish(parts: list[_Part]) -> list[torch.Tensor]:
            for place, part in zip(places, parts, strict=True):
                place.data.copy_(part.tensors[0].view_as(place))
            return outputs

        return self._begin(fingerprint, [_Part([private_copy(x)]) for x in chunks], finish)

    def _rows(self, name: str, x: torch.Tensor, splits: Any) -> list[int]:
        """Numbers of rows per member."""
        count, rows = len(self.ranks), x.shape[0] if x.dim() else 0
        if isinstance(splits, torch.Tensor):
            msg = (
                f"{name}(): incompatible function arguments: split sizes are a tensor; PyTorch takes a list or an array"
            )
            raise TypeError(msg)
        sizes = [] if splits is None else [int(size) for size in splits]
        if not sizes:
            if rows % count:
                msg = f"{name}: {rows} rows cannot be split evenly over {count} ranks; pass the split sizes"
                raise CollectiveMismatchError(msg)
            return [rows // count] * count
        if len(sizes) != count or sum(sizes) != rows:
            msg = f"{name}: split sizes {sizes} must be {count} numbers whose sum is {rows}, the number of rows"
            raise CollectiveMismatchError(msg)
        return sizes

    # -- barriers --------------------------------------------------------------------------------------------------

    def barrier(self, opts: Any = None) -> SimulatedWork:
        """Wait until every member calls it."""
        del opts
        return self._begin(self._fingerprint("barrier", {}), [None] * len(self.ranks), _nothing)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait until every member calls it; a member that never does is named at once, without a timeout."""
        del timeout, wait_all_ranks
        fingerprint = self._fingerprint("monitored_barrier", {})
        self._begin(fingerprint, [None] * len(self.ranks), _nothing).wait()

    # -- inside ----------------------------------------------------------------------------------------------------

    def _fingerprint(self, name: str, arguments: dict[str, Any]) -> CollectiveFingerprint:
        self.check_owner()
        return OPERATIONS[name]({**arguments, "group": self})

    def check_owner(self) -> None:
        """Raise an error if another rank built the group: ranks that are threads share global variables.

        Raises:
            MeshError: another simulated rank built this group, or a thread that is not the rank's uses it.
        """
        transport, owner = active_transport(), self.transport
        if transport is None:
            msg = (
                f"thread {threading.current_thread().name!r}, which simulated rank {owner.rank} started, communicates: "
                "only the rank's own thread may; communicate there (dcp.save instead of dcp.async_save)"
            )
            owner.refused = UnsupportedOnBackend(msg)
            raise owner.refused
        if transport is not owner:
            msg = (
                f"a group of simulated rank {owner.rank} is used by rank {transport.rank}: simulated ranks are threads "
                "that share global variables; keep groups in objects that each rank creates"
            )
            raise MeshError(msg)

    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the works of the calls that follow, until :meth:`_end_coalescing`."""
        del device
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> SimulatedWork:
        """The work that waits for all collectives since :meth:`_start_coalescing`."""
        del device
        works, self._coalesced = self._coalesced or [], None

        def finish() -> list[torch.Tensor]:
            return [x for work in works for x in work.result()]

        return SimulatedWork(finish, lambda: all(work.is_completed() for work in works))

    def _given(self, work: SimulatedWork) -> SimulatedWork:
        """Return the work of a call, and remember it between start and end of coalescing."""
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _begin(self, fingerprint: CollectiveFingerprint, payloads: Sequence[Any], finish: _Finish) -> SimulatedWork:
        """Start a collective; ``finish`` gets each member's payload for this rank."""
        count_collective(fingerprint.operation.removeprefix("dist."))
        if len(self.ranks) == 1:
            return self._given(SimulatedWork(lambda: finish(list(payloads)), lambda: True))
        started = self.transport.begin(Contribution(fingerprint, payloads))
        endpoint = cast("ThreadEndpoint", self.transport.endpoint)
        work = SimulatedWork(lambda: finish(started.wait()), lambda: endpoint.ready(started.ticket))
        return self._given(work)

    def _parts_of(self, name: str, whole: torch.Tensor, part: torch.Tensor) -> list[torch.Tensor]:
        """Return the members' parts of a tensor, each shaped like ``part``; views if the layout allows."""
        count = len(self.ranks)
        if whole.numel() != part.numel() * count or whole.dtype != part.dtype:
            msg = (
                f"{name}: the complete tensor is {described(whole)} and a part {described(part)}; over {count} ranks "
                f"the complete tensor must have {count} times the elements of a part, of the same dtype"
            )
            raise CollectiveMismatchError(msg)
        if not whole.is_contiguous():
            msg = f"{name}: the tensor {described(whole)} of all parts must be contiguous; call .contiguous() first"
            raise CollectiveMismatchError(msg)
        return list(whole.detach().view(count, *part.shape).unbind())


def _nothing(parts: list[Any]) -> list[torch.Tensor]:
    del parts
    return []


def _reduced(parts: list[_Part], name: str) -> list[torch.Tensor]:
    first = parts[0]
    if first.reduced is None:
        first.reduced = [reduce_parts(several, name) for several in zip(*(part.tensors for part in parts), strict=True)]
    return first.reduced
