"""The autograd functions behind facet *differentiable*, built once over a framework's ``Function``.

Every backward is written with these same functions, so it is differentiable as forward is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.differentiable import HookCoordinator
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.transport.base import Channel, Ranks

__all__ = ["AllToAllSpec", "AsyncWaitSpec", "AutogradFunctions", "ReductionSpec", "SwapSpec", "build"]


class ReductionSpec(NamedTuple):
    """A gather or reduction over ``ranks`` along ``dim``; ``varying`` says how its result is used afterwards."""

    platform: Platform
    ranks: Ranks
    dim: int = 0
    op: str = "sum"
    varying: bool = False

    @property
    def position(self) -> int:
        """Place of this rank."""
        return self.ranks.index(self.platform.get_rank())

    def chunks(self, data: Any) -> list[Any]:
        """Equal parts along ``dim``, one per member."""
        size = data.shape[self.dim] // len(self.ranks)
        return [self.platform.narrow(data, self.dim, size * place, size) for place in range(len(self.ranks))]


class AllToAllSpec(NamedTuple):
    """An all-to-all of rows: how many go to and come from each of ``ranks``."""

    platform: Platform
    ranks: Ranks
    sent: tuple[int, ...]
    received: tuple[int, ...]
    # Filled by a launch that does not wait; the result is then the output to come.
    launched: list[Any] | None = None

    def back(self) -> AllToAllSpec:
        """The way of the gradient."""
        return AllToAllSpec(self.platform, self.ranks, self.received, self.sent)

    def arguments(self, data: Any) -> tuple[Any, ...]:
        """What a transport's ``all_to_all`` takes."""
        chunks, start = [], 0
        for rows in self.sent:
            chunks.append(self.platform.contiguous(self.platform.narrow(data, 0, start, rows)))
            start += rows
        rest = tuple(data.shape)[1:]
        return chunks, self.ranks, [(rows, *rest) for rows in self.received]


class SwapSpec(NamedTuple):
    """An exchange with one peer."""

    platform: Platform
    peer: int
    channel: Channel


class AsyncWaitSpec(NamedTuple):
    """What is rebuilt: ``concat_dim`` was gathered, ``split_dim`` was split."""

    platform: Platform
    ranks: Ranks
    work: Any
    buffer: Any
    concat_dim: int
    split_dim: int
    box: list[Any] | None

    def join(self, buffer: Any, dim: int) -> Any:
        """Parts that are stacked along dim 0, one per rank, put one after the other along ``dim``."""
        platform = self.platform
        parts = [platform.narrow(buffer, 0, place, 1) for place in range(len(self.ranks))]
        shape = tuple(buffer.shape)[1:]
        return platform.cat([platform.reshape(part, shape) for part in parts], dim)

    def split(self, data: Any, dim: int) -> list[Any]:
        """Equal parts along ``dim``, one per rank."""
        size = data.shape[dim] // len(self.ranks)
        platform = self.platform
        return [platform.contiguous(platform.narrow(data, dim, size * one, size)) for one in range(len(self.ranks))]


class AutogradFunctions(NamedTuple):
    """One framework's functions; ``apply(tensor, description)``."""

    gather: Any
    own_slice: Any
    reduce: Any
    reduce_scatter: Any
    all_to_all: Any
    swap: Any
    meet: Any
    async_wait: Any


def build(base: Any) -> AutogradFunctions:  # noqa: C901 - one small class after the other
    """The functions over ``base``, the framework's custom autograd function."""

    class Gather(base):  # type: ignore[misc] # the framework's class is known at run time only
        """Concatenation of all parts; backward takes the own slice, or sums the ranks' different gradients."""

        @staticmethod
        def forward(ctx: Any, data: Any, call: ReductionSpec) -> Any:
            """All-gather."""
            ctx.call = call
            platform = call.platform
            parts = platform.transport().all_gather(
                platform.contiguous(data), call.ranks, [tuple(data.shape)] * len(call.ranks)
            )
            return platform.cat(parts, call.dim)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """Own slice, or reduce-scatter."""
            call = ctx.call
            return (functions.reduce_scatter if call.varying else functions.own_slice).apply(grad, call), None

    class OwnSlice(base):  # type: ignore[misc] # as above
        """This rank's part of what every rank holds; backward puts the parts together."""

        @staticmethod
        def forward(ctx: Any, data: Any, call: ReductionSpec) -> Any:
            """Slice."""
            ctx.call = call
            return call.platform.contiguous(call.chunks(data)[call.position])

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """All-gather."""
            return functions.gather.apply(grad, ctx.call._replace(varying=False)), None

    class Reduce(base):  # type: ignore[misc] # as above
        """All-reduce; the gradient of every summand is the result's."""

        @staticmethod
        def forward(ctx: Any, data: Any, call: ReductionSpec) -> Any:
            """All-reduce."""
            ctx.call = call
            total = call.platform.transport().all_reduce(data, call.op, call.ranks)
            if call.op in _EXTREMA:
                ctx.attained = _attained(call, data, total)
            return total

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """The gradient itself, where a rank's use of the result differs from others' their sum."""
            call = ctx.call
            if call.varying:
                grad = functions.reduce.apply(grad, call._replace(op="sum"))
            return _shared(grad, ctx, call), None

    class ReduceScatter(base):  # type: ignore[misc] # as above
        """This rank's part of the reduction; backward puts the parts of the gradient together."""

        @staticmethod
        def forward(ctx: Any, data: Any, call: ReductionSpec) -> Any:
            """Reduce-scatter; for max and min all-reduce and slice, since backward needs the whole."""
            ctx.call = call
            platform = call.platform
            if call.op in _EXTREMA:
                total = platform.transport().all_reduce(data, call.op, call.ranks)
                ctx.attained = _attained(call, data, total)
                return platform.contiguous(call.chunks(total)[call.position])
            chunks = [platform.contiguous(chunk) for chunk in call.chunks(data)]
            return platform.transport().reduce_scatter(chunks, call.op, call.ranks)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """All-gather."""
            call = ctx.call
            return _shared(functions.gather.apply(grad, call._replace(varying=False, op="sum")), ctx, call), None

    class AllToAll(base):  # type: ignore[misc] # as above
        """Rows to their ranks; backward sends their gradients back."""

        @staticmethod
        def forward(ctx: Any, data: Any, route: AllToAllSpec) -> Any:
            """All-to-all, or its launch."""
            ctx.route = route
            platform = route.platform
            if route.launched is None:
                return platform.cat(platform.transport().all_to_all(*route.arguments(data)), 0)
            shape = (sum(route.received), *tuple(data.shape)[1:])
            output = platform.new_tensor(shape, data.dtype, platform.device_of(data))
            pending = platform.transport().start("all_to_all", *route.arguments(data))
            route.launched.append(pending.then(lambda parts: platform.fill_(output, platform.cat(parts, 0))))
            return output

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """The reverse."""
            return functions.all_to_all.apply(grad, ctx.route.back()), None

    class SwapWithPeer(base):  # type: ignore[misc] # as above
        """The peer's tensor; backward is the same swap."""

        @staticmethod
        def forward(ctx: Any, data: Any, swap: SwapSpec) -> Any:
            """Send and receive at once."""
            ctx.swap = swap
            transport, data = swap.platform.transport(), swap.platform.contiguous(data)
            sent = transport.start("send", data, swap.peer, 0, swap.channel)
            arrived = transport.start("recv", data, swap.peer, 0, swap.channel).wait()
            sent.wait()
            return arrived

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """The same."""
            return functions.swap.apply(grad, ctx.swap), None

    class Meet(base):  # type: ignore[misc] # as above
        """Identity that meets the other thread, on its way forward and on its way back."""

        @staticmethod
        def forward(ctx: Any, data: Any, position: str, coordinator: HookCoordinator) -> Any:
            """Meet."""
            ctx.position, ctx.coordinator = position, coordinator
            coordinator.rendezvous(position, "forward")
            return data

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None, None]:
            """Meet again."""
            ctx.coordinator.rendezvous(ctx.position, "backward")
            return grad, None, None

    class AsyncWait(base):  # type: ignore[misc] # the framework's class is known at run time only
        """Wait and rebuild; backward launches the reverse."""

        @staticmethod
        def forward(ctx: Any, x: Any, rebuild: AsyncWaitSpec) -> Any:
            """The gathered tensor; ``x`` only ties the result to the graph."""
            del x
            ctx.rebuild = rebuild
            if rebuild.work is not None:
                rebuild.work.wait()
            return rebuild.join(rebuild.buffer, rebuild.concat_dim)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, None]:
            """The gradient of ``x``, now or when the box's work is waited for."""
            rebuild = ctx.rebuild
            platform = rebuild.platform
            chunks = rebuild.split(grad, rebuild.concat_dim)
            shapes = [tuple(chunk.shape) for chunk in chunks]
            pending = platform.transport().start("all_to_all", chunks, rebuild.ranks, shapes)
            if rebuild.box is None:
                return platform.cat(pending.wait(), rebuild.split_dim), None
            device = platform.device_of(grad)
            buffer = platform.new_tensor((len(chunks), *shapes[0]), grad.dtype, device)
            whole = [size * (len(chunks) if dim == rebuild.split_dim else 1) for dim, size in enumerate(shapes[0])]
            # Not zeros: a gradient that nobody waited for must be seen.
            placeholder = platform.full(tuple(whole), float("nan"), dtype=grad.dtype, device=device)

            def arrive(parts: list[Any]) -> Any:
                stacked = platform.cat([platform.reshape(part, (1, *tuple(part.shape))) for part in parts], 0)
                platform.fill_(buffer, stacked)
                return platform.fill_(placeholder, platform.cat(parts, rebuild.split_dim))

            rebuild.box.append((pending.then(arrive, placeholder), buffer))
            return placeholder, None

    functions = AutogradFunctions(Gather, OwnSlice, Reduce, ReduceScatter, AllToAll, SwapWithPeer, Meet, AsyncWait)
    return functions


_EXTREMA = ("max", "min")


def _attained(call: ReductionSpec, data: Any, total: Any) -> tuple[Any, Any]:
    """Where this rank did not attain the extremum, and how many ranks did; NaN is attained by those who hold it."""
    ones = call.platform.ones_like(data)
    attained = ones * (data == total) + ones * (data != data)  # noqa: PLR0124 - true of NaN alone
    return attained == 0, call.platform.transport().all_reduce(attained, "sum", call.ranks)


def _shared(grad: Any, ctx: Any, call: ReductionSpec) -> Any:
    """This rank's part of the gradient."""
    if call.op in _EXTREMA:
        lost, ties = ctx.attained
        # Selected, not multiplied: a gradient that is not finite must not reach ranks that lost.
        return call.platform.local_op("masked_fill")(x=grad / ties, mask=lost, value=0.0)
    return grad / len(call.ranks) if call.op == "avg" else grad
