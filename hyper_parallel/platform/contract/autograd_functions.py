"""The autograd functions of differentiable collectives, built once from the ``Function`` class of a framework.

Every backward calls these same functions, so it is differentiable too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel.transport.base import Parts

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.differentiable import HookCoordinator
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.transport.base import Channel, Ranks

__all__ = [
    "AllToAllSpec",
    "AsyncWaitSpec",
    "AutogradFunctions",
    "PeerExchangeSpec",
    "ReductionSpec",
    "make_autograd_functions",
]


class ReductionSpec(NamedTuple):
    """A gather or reduction over ``ranks`` along ``dim``; ``varying`` if ranks use the result in different ways."""

    platform: Platform
    ranks: Ranks
    dim: int = 0
    op: str = "sum"
    varying: bool = False

    @property
    def position(self) -> int:
        """Position of this rank among ``ranks``."""
        return self.ranks.index(self.platform.get_rank())

    def chunks(self, data: Any) -> list[Any]:
        """Return equal chunks along ``dim``, one per member."""
        size = data.shape[self.dim] // len(self.ranks)
        return [self.platform.narrow(data, self.dim, size * member, size) for member in range(len(self.ranks))]


class AllToAllSpec(NamedTuple):
    """An all-to-all of rows: how many are sent to and received from each of ``ranks``."""

    platform: Platform
    ranks: Ranks
    sent: tuple[int, ...]
    received: tuple[int, ...]
    # If this is a list, the function appends the work to it and returns before completion; the result is filled later.
    launched: list[Any] | None = None

    def reversed(self) -> AllToAllSpec:
        """Return the all-to-all of the gradient."""
        return AllToAllSpec(self.platform, self.ranks, self.received, self.sent)

    def arguments(self, data: Any) -> tuple[Any, ...]:
        """Return the arguments of a transport's ``all_to_all``."""
        row = tuple(data.shape)[1:]
        sends, expects = (Parts.of([(rows, *row) for rows in counts]) for counts in (self.sent, self.received))
        return self.platform.contiguous(data), self.ranks, sends, expects

    def shape(self, data: Any) -> tuple[int, ...]:
        """Return the shape of the result of exchanging ``data``."""
        return (sum(self.received), *tuple(data.shape)[1:])


class PeerExchangeSpec(NamedTuple):
    """A symmetric exchange with one peer."""

    platform: Platform
    peer: int
    channel: Channel


class AsyncWaitSpec(NamedTuple):
    """The end of a pre-launched all-to-all that split ``split_dim`` and gathers ``concat_dim``."""

    platform: Platform
    ranks: Ranks
    work: Any
    buffer: Any
    concat_dim: int
    split_dim: int
    handle_box: list[Any] | None

    def join(self, buffer: Any, dim: int) -> Any:
        """Concatenate along ``dim`` the parts that ``buffer`` has stacked along dim 0."""
        platform = self.platform
        parts = [platform.narrow(buffer, 0, member, 1) for member in range(len(self.ranks))]
        shape = tuple(buffer.shape)[1:]
        return platform.cat([platform.reshape(part, shape) for part in parts], dim)

    def split(self, data: Any, dim: int) -> Any:
        """Return equal chunks of ``data`` along ``dim``, one per member, stacked along dim 0."""
        platform, size = self.platform, data.shape[dim] // len(self.ranks)
        chunks = [platform.narrow(data, dim, size * member, size) for member in range(len(self.ranks))]
        return platform.cat([platform.reshape(chunk, (1, *chunk.shape)) for chunk in chunks], 0)


class AutogradFunctions(NamedTuple):
    """One framework's autograd functions; each has ``apply(tensor, spec)``."""

    gather: Any
    own_slice: Any
    reduce: Any
    reduce_scatter: Any
    all_to_all: Any
    exchange: Any
    rendezvous: Any
    async_wait: Any


def make_autograd_functions(base: Any) -> AutogradFunctions:  # noqa: C901 - one small class after the other
    """Return the functions over ``base``, the framework's class of custom autograd functions."""

    class AllGatherFunction(base):  # type: ignore[misc] # the framework's class is known at run time only
        """Concatenate the members' tensors; backward takes this rank's slice, or reduce-scatters for varying use."""

        @staticmethod
        def forward(ctx: Any, data: Any, spec: ReductionSpec) -> Any:
            """All-gather."""
            ctx.spec = spec
            platform = spec.platform
            parts = platform.transport().all_gather(
                platform.contiguous(data), spec.ranks, [tuple(data.shape)] * len(spec.ranks)
            )
            return platform.cat(parts, spec.dim)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """Return this rank's slice, or reduce-scatter."""
            spec = ctx.spec
            return (functions.reduce_scatter if spec.varying else functions.own_slice).apply(grad, spec), None

    class OwnSliceFunction(base):  # type: ignore[misc] # as above
        """Take this rank's chunk of a tensor that every rank holds; backward gathers."""

        @staticmethod
        def forward(ctx: Any, data: Any, spec: ReductionSpec) -> Any:
            """Slice."""
            ctx.spec = spec
            return spec.platform.function_result(spec.platform.contiguous(spec.chunks(data)[spec.position]))

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """All-gather."""
            return functions.gather.apply(grad, ctx.spec._replace(varying=False)), None

    class AllReduceFunction(base):  # type: ignore[misc] # as above
        """Reduce the partial values; each partial value's gradient is that of the result."""

        @staticmethod
        def forward(ctx: Any, data: Any, spec: ReductionSpec) -> Any:
            """All-reduce."""
            ctx.spec = spec
            result = spec.platform.transport().all_reduce(data, spec.op, spec.ranks)
            if spec.op in _EXTREMA:
                ctx.attained = _attained(spec, data, result)
            return spec.platform.function_result(result)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """Return the gradient; if ranks use the result in different ways, the sum of their gradients."""
            spec = ctx.spec
            if spec.varying:
                grad = functions.reduce.apply(grad, spec._replace(op="sum"))
            return _own_share(grad, ctx, spec), None

    class ReduceScatterFunction(base):  # type: ignore[misc] # as above
        """Reduce the partial values and take this rank's chunk; backward gathers."""

        @staticmethod
        def forward(ctx: Any, data: Any, spec: ReductionSpec) -> Any:
            """Reduce-scatter; for max and min all-reduce and slice, since backward needs the complete result."""
            ctx.spec = spec
            platform = spec.platform
            if spec.op in _EXTREMA:
                result = platform.transport().all_reduce(data, spec.op, spec.ranks)
                ctx.attained = _attained(spec, data, result)
                return platform.function_result(platform.contiguous(spec.chunks(result)[spec.position]))
            chunks = [platform.contiguous(chunk) for chunk in spec.chunks(data)]
            return platform.function_result(platform.transport().reduce_scatter(chunks, spec.op, spec.ranks))

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """All-gather."""
            spec = ctx.spec
            return _own_share(functions.gather.apply(grad, spec._replace(varying=False, op="sum")), ctx, spec), None

    class AllToAllFunction(base):  # type: ignore[misc] # as above
        """Send rows to their ranks; backward sends their gradients back."""

        @staticmethod
        def forward(ctx: Any, data: Any, spec: AllToAllSpec) -> Any:
            """Run the all-to-all, or launch it."""
            ctx.spec = spec
            platform = spec.platform
            shape = spec.shape(data)
            if spec.launched is None:
                received = platform.transport().all_to_all(*spec.arguments(data))
                return platform.function_result(platform.reshape(received, shape))
            output = platform.new_tensor(shape, data.dtype, platform.device_of(data))
            work = platform.transport().start("all_to_all", *spec.arguments(data))
            spec.launched.append(work.then(lambda flat: platform.fill_(output, platform.reshape(flat, shape))))
            return output

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """Run the reverse all-to-all."""
            return functions.all_to_all.apply(grad, ctx.spec.reversed()), None

    class PeerExchangeFunction(base):  # type: ignore[misc] # as above
        """Return the peer's tensor and send this one; backward is the same exchange."""

        @staticmethod
        def forward(ctx: Any, data: Any, spec: PeerExchangeSpec) -> Any:
            """Send and receive at the same time."""
            ctx.spec = spec
            transport, data = spec.platform.transport(), spec.platform.contiguous(data)
            sending = transport.start("send", data, spec.peer, 0, spec.channel)
            received = transport.start("recv", data, spec.peer, 0, spec.channel).wait()
            sending.wait()
            return spec.platform.function_result(received)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """Exchange the gradients."""
            return functions.exchange.apply(grad, ctx.spec), None

    class RendezvousFunction(base):  # type: ignore[misc] # as above
        """Identity whose forward and backward each wait for the other thread of a coordinator."""

        @staticmethod
        def forward(ctx: Any, data: Any, position: str, coordinator: HookCoordinator) -> Any:
            """Wait for the other thread."""
            ctx.position, ctx.coordinator = position, coordinator
            coordinator.rendezvous(position, "forward")
            return data

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None, None]:
            """Wait for the other thread."""
            ctx.coordinator.rendezvous(ctx.position, "backward")
            return grad, None, None

    class AsyncWaitFunction(base):  # type: ignore[misc] # as above
        """Wait for a pre-launched all-to-all and join its parts; backward launches the reverse one."""

        @staticmethod
        def forward(ctx: Any, x: Any, spec: AsyncWaitSpec) -> Any:
            """Return the gathered tensor; ``x`` only ties the result to the graph."""
            del x
            ctx.spec = spec
            if spec.work is not None:
                spec.work.wait()
            return spec.join(spec.buffer, spec.concat_dim)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """Return the gradient of ``x``, or a placeholder that is filled when the work in the box is waited for."""
            spec = ctx.spec
            platform = spec.platform
            stacked = spec.split(grad, spec.concat_dim)
            parts = Parts.of([tuple(stacked.shape)[1:]] * len(spec.ranks))
            work = platform.transport().start("all_to_all", stacked, spec.ranks, parts, parts)

            def arrived(flat: Any) -> Any:
                return platform.reshape(flat, tuple(stacked.shape))

            if spec.handle_box is None:
                return spec.join(arrived(work.wait()), spec.split_dim), None
            device = platform.device_of(grad)
            buffer = platform.new_tensor(tuple(stacked.shape), grad.dtype, device)
            whole = [
                size * (len(spec.ranks) if dim == spec.split_dim else 1) for dim, size in enumerate(parts.shapes[0])
            ]
            # NaN, not zeros: a gradient that nobody waited for must be noticed.
            placeholder = platform.full(tuple(whole), float("nan"), dtype=grad.dtype, device=device)

            def fill(flat: Any) -> Any:
                platform.fill_(buffer, arrived(flat))
                return platform.fill_(placeholder, spec.join(buffer, spec.split_dim))

            spec.handle_box.append((work.then(fill, placeholder), buffer))
            return placeholder, None

    functions = AutogradFunctions(
        AllGatherFunction,
        OwnSliceFunction,
        AllReduceFunction,
        ReduceScatterFunction,
        AllToAllFunction,
        PeerExchangeFunction,
        RendezvousFunction,
        AsyncWaitFunction,
    )
    return functions


_EXTREMA = ("max", "min")


def _attained(spec: ReductionSpec, data: Any, result: Any) -> tuple[Any, Any]:
    """Return a mask of where this rank lacks the extremum, and how many ranks have it; NaN equals NaN here."""
    ones = spec.platform.ones_like(data)
    attained = ones * (data == result) + ones * (data != data)  # noqa: PLR0124 - true of NaN alone
    return attained == 0, spec.platform.transport().all_reduce(attained, "sum", spec.ranks)


def _own_share(grad: Any, ctx: Any, spec: ReductionSpec) -> Any:
    """Return this rank's share of the gradient.

    For max and min, ranks that have the extremum share it equally, and others get zero. For avg, each of n ranks gets
    one nth; for sum, each gets all of it.
    """
    if spec.op in _EXTREMA:
        lost, ties = ctx.attained
        # Masked instead of multiplied by zero: a non-finite gradient must not reach ranks without the extremum.
        return spec.platform.local_op("masked_fill")(x=grad / ties, mask=lost, value=0.0)
    return grad / len(spec.ranks) if spec.op == "avg" else grad
