"""Averages gradients of replicated parameters on MindSpore, by bucket, after a transform has computed them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mindspore import Tensor, mint, ops

from hyper_parallel.core.dtensor.dtensor import to_local
from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.contract.fully_sharded import ACCUMULATED
from hyper_parallel.platform.contract.replicated import bucketed, check_unchanged
from hyper_parallel.platform.mindspore.gradients import AVERAGED, set_unreduced

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hyper_parallel.platform.contract.replicated import ReplicatedOptions

__all__ = ["ReplicatedGradients"]


class ReplicatedGradients:
    """The gradients of one cell to which ``replicate`` was applied.

    Args:
        platform: MindSpore's platform.
        module: the cell; a forward hook is registered on it.
        options: the ranks to average over, and the buckets.

    Attributes:
        reduces: whether gradients are reduced; False to accumulate.
        buckets: lists of parameters whose gradients share a collective, in the order of reduction.
    """

    def __init__(self, platform: Any, module: Any, options: ReplicatedOptions) -> None:
        self.reduces = True
        self._platform, self._ranks = platform, options.ranks
        parameters = _unique(platform.parameters_dict(module).values())
        if options.source is not None:
            cells = [cell for _, cell in platform.get_cells_and_names(module)]
            buffers = _unique(value for cell in cells for value in platform.direct_buffers(cell).values())
            for value in (*parameters, *buffers):
                platform.update_param_data(value, platform.broadcast(_data(value), options.source, options.ranks))
        trained = [parameter for parameter in reversed(parameters) if parameter.requires_grad]
        sizes = [(each.dtype, to_local(each).size * each.itemsize) for each in trained]
        groups = bucketed(sizes, options.bucket_bytes)
        self.buckets = [[trained[index] for index in group] for group in groups]
        self._accumulated: dict[int, Tensor] = {}
        for parameter in trained:
            setattr(parameter, AVERAGED, self)
            setattr(to_local(parameter), AVERAGED, self)  # so that the reduction is not deferred
        self._trained = {id(parameter) for parameter in trained}
        module.register_forward_pre_hook(self._before_forward)

    def _before_forward(self, module: Any, args: Any) -> None:
        del args
        trained = {
            name: id(value) for name, value in self._platform.parameters_dict(module).items() if value.requires_grad
        }
        check_unchanged(trained, self._trained)

    def average(self, gradients: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return the averages over the ranks; zeros in a pass that accumulates.

        Args:
            gradients: this rank's gradients, by the ``id`` of their parameters; those of parameters that are not in a
                bucket are left out.

        Raises:
            UnsupportedOnBackend: the gradients are to be differentiated.
        """
        if self._platform.grad_enabled():
            msg = "replicate: the gradient of a gradient is not supported; gradients are averaged off the graph"
            raise UnsupportedOnBackend(msg)
        buckets = [bucket for bucket in self.buckets if any(id(parameter) in gradients for parameter in bucket)]
        totals = {id(each): self._total(each, gradients.get(id(each))) for bucket in buckets for each in bucket}
        for parameter in (parameter for bucket in buckets for parameter in bucket):
            set_unreduced(parameter, None if self.reduces else ACCUMULATED)
        if not self.reduces:
            self._accumulated.update(totals)
            return {identity: self._platform.zeros_like(total) for identity, total in totals.items()}
        # All buckets are in flight before the first is waited for.
        rows = [mint.cat([totals[id(parameter)].reshape(-1) for parameter in bucket]) for bucket in buckets]
        started = [self._platform.all_reduce(row, self._ranks, async_op=True) for row in rows]
        averages: dict[int, Tensor] = {}
        for bucket, (_, handle) in zip(buckets, started, strict=True):
            averages.update(self._split(bucket, handle.wait() / len(self._ranks)))
        return averages

    def _total(self, parameter: Any, gradient: Tensor | None) -> Tensor:
        """Return this rank's gradient plus those of passes that did not reduce; zeros if there is no gradient."""
        accumulated = self._accumulated.pop(id(parameter), None)
        if gradient is None or accumulated is None:
            present = accumulated if gradient is None else gradient
            return self._platform.zeros_like(to_local(parameter)) if present is None else present
        return accumulated + gradient

    @staticmethod
    def _split(bucket: Sequence[Any], row: Tensor) -> dict[int, Tensor]:
        """Copy the gradient of each parameter out of a bucket's row."""
        averages, start = {}, 0
        for parameter in bucket:
            local = to_local(parameter)
            averages[id(parameter)] = mint.cat([mint.narrow(row, 0, start, local.size)]).reshape(local.shape)
            start += local.size
        return averages


def _data(value: Any) -> Tensor:
    return ops.stop_gradient(to_local(value))


def _unique(values: Any) -> list[Any]:
    """Return each object once, in order."""
    return list({id(value): value for value in values}.values())
