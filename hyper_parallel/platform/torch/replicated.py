"""Averages the gradients of replicated parameters on PyTorch, bucket by bucket, while backward computes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.errors import PlanError
from hyper_parallel.platform.contract.fully_sharded import ACCUMULATED
from hyper_parallel.platform.contract.replicated import bucketed, check_unchanged
from hyper_parallel.platform.torch.deferred_hooks import DeferredHooks, local_leaf
from hyper_parallel.platform.torch.dtensor import TorchDTensor
from hyper_parallel.platform.torch.optimizer_steps import refuse_wrong_steps, set_unreduced
from hyper_parallel.platform.torch.row_carrier import RowCarrier
from hyper_parallel.platform.torch.versions import current_graph_task_id, execution_engine
from hyper_parallel.transport.checks.sequence import AgreedSequence, Step

if TYPE_CHECKING:
    from hyper_parallel.platform.contract.replicated import ReplicatedOptions

__all__ = ["ReplicatedGradients"]

_UNFINISHED = "a backward has raised; run zero_grad() and backward again"


class _Bucket:
    """Parameters whose gradients are reduced in one collective.

    Args:
        name: name that is equal on all ranks.
        parameters: parameters of one dtype and device.
        ranks: number of ranks.
    """

    def __init__(self, name: str, parameters: list[Any], ranks: int) -> None:
        self.parameters = parameters
        self.leaves = [local_leaf(parameter) for parameter in parameters]
        self.ready: set[int] = set()
        self.hooks: list[DeferredHooks] = []
        self._before: dict[int, torch.Tensor | None] = {}
        self.sizes = [leaf.numel() for leaf in self.leaves]
        self._ranks = ranks
        width = sum(self.sizes) + len(self.leaves) + ranks
        self.step = Step("all_reduce", name, width, self.leaves[0].dtype)

    @property
    def is_complete(self) -> bool:
        """Whether all parameters have their gradients of this backward."""
        return len(self.ready) == len(self.leaves)

    @torch.no_grad()
    def row(self) -> torch.Tensor:
        """Return all gradients (zeros for absent ones), per parameter 1 if it has one, and a zero flag per rank."""
        first = self.leaves[0]
        gradients = [leaf.grad for leaf in self.leaves]
        parts = [
            first.new_zeros(size) if gradient is None else gradient.reshape(-1)
            for size, gradient in zip(self.sizes, gradients, strict=True)
        ]
        counts = first.new_tensor([gradient is not None for gradient in gradients])
        return torch.cat([*parts, counts, first.new_zeros(self._ranks)])

    @torch.no_grad()
    def finish(self, row: torch.Tensor) -> None:
        """Set the averages as gradients; a parameter of which no rank has a gradient keeps none."""
        total = sum(self.sizes)
        counts = row[total : total + len(self.sizes)].tolist()
        averages = (row[:total] / self._ranks).split(self.sizes)
        for leaf, count, average in zip(self.leaves, counts, averages, strict=True):
            if count:
                if leaf.grad is None:
                    leaf.grad = average.view(leaf.shape).clone()
                else:
                    leaf.grad.copy_(average.view(leaf.shape))

    def set_aside(self) -> None:
        """At the start of backward: set accumulated gradients of parameters with hooks aside."""
        self.ready.clear()
        self._before = {}
        for index, (leaf, hooks) in enumerate(zip(self.leaves, self.hooks, strict=True)):
            if hooks:
                self._before[index], leaf.grad = leaf.grad, None

    @torch.no_grad()
    def call_hooks(self) -> None:
        """At the end of backward: call the hooks of users, with averages, and add what was set aside."""
        for index, before in self._before.items():
            leaf, hooks = self.leaves[index], self.hooks[index]
            if leaf.grad is None:
                leaf.grad = before
                continue
            gradient = hooks.changed(leaf.grad)
            leaf.grad = gradient if before is None else before.add_(gradient)
            hooks.announce()
        self._before = {}


class ReplicatedGradients:
    """The gradients of one module to which ``replicate`` was applied.

    Args:
        platform: PyTorch's platform.
        module: the module; hooks are registered on it.
        options: the ranks to average over, and the buckets.

    Attributes:
        reduces: whether backward reduces gradients; False to accumulate.
        buckets: buckets in the order in which they are reduced.
    """

    def __init__(self, platform: Any, module: Any, options: ReplicatedOptions) -> None:
        self.reduces = True
        parameters = list(module.parameters())
        self._platform, self._ranks = platform, options.ranks
        if options.source is not None:
            self._broadcast([*parameters, *module.buffers()], options.source)
        self._prepare(platform, options, [parameter for parameter in parameters if parameter.requires_grad])
        module.register_forward_pre_hook(self._before_forward, prepend=True)

    def __getstate__(self) -> tuple[Any, ...]:
        """Return the state for copying and pickling, without gradients and hooks, as for parameters.

        Raises:
            PlanError: backward of the module runs.
        """
        if self._open:
            msg = "replicate: a module cannot be copied while its backward runs, or after one that has raised"
            raise PlanError(msg)
        return self._options, [parameter for bucket in self.buckets for parameter in bucket.parameters], self.reduces

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Initialise with the copied parameters, which are in order of reduction."""
        options, parameters, self.reduces = state
        self._prepare(TorchDTensor._platform, options, parameters[::-1])

    def _prepare(self, platform: Any, options: ReplicatedOptions, trained: list[Any]) -> None:
        self._platform, self._ranks, self._options = platform, options.ranks, options
        self._trained = {id(local_leaf(parameter)) for parameter in trained}
        self.buckets = _buckets(trained, options)
        self._open = False
        self._next = 0
        device = self.buckets[0].leaves[0].device if self.buckets else None
        self._sequence = AgreedSequence(RowCarrier(platform, device, "replicate"), options.ranks, "replicate")
        refuse_wrong_steps()
        for bucket in self.buckets:
            for parameter, leaf in zip(bucket.parameters, bucket.leaves, strict=True):
                hooks = DeferredHooks(leaf, self._before_gradient)
                hooks.after_accumulation(partial(self._ready, bucket, parameter))
                bucket.hooks.append(hooks)

    @torch.no_grad()
    def _broadcast(self, tensors: list[Any], source: int) -> None:
        for tensor in tensors:
            leaf = local_leaf(tensor)
            leaf.copy_(self._platform.broadcast(leaf.detach(), source, self._ranks))

    def _before_forward(self, module: Any, args: Any) -> None:
        del args
        trained = {name: id(local_leaf(value)) for name, value in module.named_parameters() if value.requires_grad}
        check_unchanged(trained, self._trained)
        if self._open and current_graph_task_id() == -1:
            self._open = False  # its backward has raised
            self._sequence.close()

    def _before_gradient(self, gradient: torch.Tensor) -> None:
        """Autograd is about to accumulate the gradient of a parameter with hooks."""
        del gradient
        if not self.reduces:
            msg = (
                "replicate: a parameter has hooks, which are called with averaged gradients, and those of this "
                "backward are accumulated under no_sync(); remove the hooks, or let each backward reduce"
            )
            raise PlanError(msg)
        if not self._open:
            self._begin()

    def _ready(self, bucket: _Bucket, parameter: Any, leaf: torch.Tensor) -> None:
        """Note the gradient of a parameter, and begin the collectives of the buckets that are complete."""
        if not self.reduces:
            set_unreduced(parameter, "replicate", ACCUMULATED)
            return
        if not self._open:
            self._begin()
        if id(leaf) in bucket.ready:
            msg = (
                "replicate: a parameter got a second gradient in one backward, but the first may be reduced already; "
                "use torch.utils.checkpoint with use_reentrant=False"
            )
            raise PlanError(msg)
        bucket.ready.add(id(leaf))
        while self._next < len(self.buckets) and self.buckets[self._next].is_complete:
            self._launch()

    def _begin(self) -> None:
        self._next = 0
        for bucket in self.buckets:
            bucket.set_aside()
        self._mark(_UNFINISHED)
        self._sequence.open("backward")
        self._open = True
        execution_engine.queue_callback(self._after_backward)

    def _launch(self) -> None:
        bucket = self.buckets[self._next]
        self._next += 1
        self._sequence.run(bucket.step, bucket.row(), bucket.finish)
        self._sequence.record(bucket.step)

    def _after_backward(self) -> None:
        while self._next < len(self.buckets):
            self._launch()
        self._open = False
        self._sequence.close()
        self._mark(None)
        for bucket in self.buckets:
            bucket.call_hooks()

    def _mark(self, reason: str | None) -> None:
        """Record on all parameters why their gradients are not reduced; None if they are reduced."""
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                set_unreduced(parameter, "replicate", reason)


def _buckets(parameters: list[Any], options: ReplicatedOptions) -> list[_Bucket]:
    """Return buckets of the parameters, the last ones first: backward reaches them first."""
    ordered = list(reversed(parameters))
    leaves = [local_leaf(parameter) for parameter in ordered]
    sizes = [((leaf.dtype, leaf.device), leaf.numel() * leaf.element_size()) for leaf in leaves]
    groups = bucketed(sizes, options.bucket_bytes)
    return [
        _Bucket(str(number), [ordered[index] for index in group], len(options.ranks))
        for number, group in enumerate(groups)
    ]
