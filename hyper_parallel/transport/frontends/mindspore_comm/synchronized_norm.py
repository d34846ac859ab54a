"""The primitive behind ``nn.SyncBatchNorm`` on simulated ranks: MindSpore has a kernel for it on Ascend only."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import mindspore
from mindspore import Parameter, Tensor, mint, ops
from mindspore.communication import GlobalComm

from hyper_parallel.errors import UnsupportedOnBackend

__all__ = ["normalize", "with_group"]


def with_group(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor: on CPU the layer names no group where it means the world."""

    @wraps(init)
    def construct(self: Any, *args: Any, group: str | None = None, **kwargs: Any) -> None:
        init(self, *args, group=GlobalComm.WORLD_COMM_GROUP if group is None else group, **kwargs)

    return construct


def normalize(plain: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the call: statistics are those of the batches of all members, and so are the gradients of the inputs."""

    @wraps(plain)
    def call(self: Any, x: Tensor, scale: Tensor, offset: Tensor, mean: Parameter, variance: Parameter) -> Any:
        if type(x) not in (Tensor, Parameter):
            msg = (
                "nn.SyncBatchNorm takes the batch of each rank as a plain tensor; of a DTensor, nn.BatchNorm2d takes "
                "the statistics of the whole"
            )
            raise UnsupportedOnBackend(msg)
        return _normalized(self.init_attrs, x, scale, offset, (mean, variance))

    return call


def _normalized(
    attributes: dict[str, Any], x: Tensor, scale: Tensor, offset: Tensor, running: tuple[Parameter, Parameter]
) -> Any:
    """Return the normalized batch with the statistics; ``running`` ones are moved towards them."""
    reduce = ops.AllReduce(group=attributes["group"])
    wide = x.astype(mindspore.float32)
    dims = tuple(dim for dim in range(x.ndim) if dim != 1)
    shape = tuple(x.shape[1] if dim == 1 else 1 for dim in range(x.ndim))
    size = Tensor([x.size // x.shape[1]], mindspore.float32)
    summed = reduce(mint.cat([wide.sum(dims), size]))
    count = ops.stop_gradient(summed[-1:])
    mean = summed[:-1] / count
    centred = wide - mean.reshape(shape)
    variance = reduce((centred * centred).sum(dims)) / count
    out = centred * mint.rsqrt(variance + attributes["epsilon"]).reshape(shape)
    out = out * scale.reshape(shape) + offset.reshape(shape)
    momentum, unbiased = attributes["momentum"], variance * (count / mint.clamp(count - 1, min=1))
    for moving, batch in zip(running, (mean, unbiased), strict=True):
        value = ops.stop_gradient(moving) * (1 - momentum) + ops.stop_gradient(batch) * momentum
        moving.set_data(value.astype(moving.dtype))
    return out.astype(x.dtype), mean, variance, mean, variance
