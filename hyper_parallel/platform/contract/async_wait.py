"""The end of a pre-launched all-to-all, whose backward launches the reverse one and lets somebody else wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.platform import Platform
    from hyper_parallel.transport.base import Ranks

__all__ = ["Rebuild", "build"]


class Rebuild(NamedTuple):
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


def build(base: Any) -> Any:
    """The function over ``base``, the framework's custom autograd function."""

    class AsyncWait(base):  # type: ignore[misc] # the framework's class is known at run time only
        """Wait and rebuild; backward launches the reverse."""

        @staticmethod
        def forward(ctx: Any, x: Any, rebuild: Rebuild) -> Any:
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

    return AsyncWait
