"""A group of fully sharded parameters on PyTorch: gathered in one collective, freed, gradients reduced in one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from hyper_parallel.core.data_parallel.plan import Slot, plan_flat
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.select import get_torch_platform

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FullyShardedGroup"]


class _Member:
    """One parameter: its shard, which the optimizer sees, and the whole, which the module computes with.

    Args:
        original: the whole parameter before sharding; its storage is freed.
        sharded: the DTensor parameter.
        owners: modules and attribute names.
        slot: place in the rows.
    """

    def __init__(self, original: Any, sharded: Any, owners: Sequence[tuple[Any, str]], slot: Slot) -> None:
        self.sharded, self.owners, self.slot = sharded, owners, slot
        # A parameter of its own, because gradients must reach it however its storage comes and goes.
        self.whole = torch.nn.Parameter(torch.empty_like(original.detach()), requires_grad=original.requires_grad)
        self.free()

    def free(self) -> None:
        """Free the storage of the whole."""
        self.whole.untyped_storage().resize_(0)

    def fill(self, rows: torch.Tensor) -> None:
        """Allocate the whole and copy it from all ranks' ``rows`` (ranks, row)."""
        slot, whole = self.slot, self.whole
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        parts = rows[:, slot.offset : slot.offset + slot.size].reshape(slot.ranks * slot.chunk, *slot.shape[1:])
        # The values are those that forward saved, so the version that autograd compares stays.
        with torch.autograd._unsafe_preserve_version_counter(whole):  # noqa: SLF001 - no public spelling
            whole.detach().copy_(parts[: slot.shape[0]])

    def expose(self, *, whole: bool) -> None:
        """Let the modules see the whole parameter, or its shard."""
        for owner, name in self.owners:
            owner._parameters[name] = self.whole if whole else self.sharded  # noqa: SLF001


class FullyShardedGroup:
    """The parameters of one ``fully_shard`` call.

    Args:
        module: the module.
        ranks: global ranks of the data axis.
        parameters: original, DTensor parameter and owners of each.
        reshard_after_forward: free after forward; None: unless outermost.
    """

    def __init__(
        self,
        module: Any,
        ranks: tuple[int, ...],
        parameters: Sequence[tuple[Any, Any, Sequence[tuple[Any, str]]]],
        reshard_after_forward: bool | None,
    ) -> None:
        if len({original.dtype for original, _, _ in parameters}) > 1:
            names = sorted({str(original.dtype) for original, _, _ in parameters})
            msg = f"fully_shard: parameters of one module have dtypes {', '.join(names)}; shard them separately"
            raise PlanError(msg)
        self.plan = plan_flat([original.shape for original, _, _ in parameters], len(ranks))
        trainable = [original.shape for original, _, _ in parameters if original.requires_grad]
        self.gradient_plan = plan_flat(trainable, len(ranks))
        self.originals = [original for original, _, _ in parameters]
        self.members = [_Member(*each, slot) for each, slot in zip(parameters, self.plan.slots, strict=True)]
        self.trained = [member for member in self.members if member.whole.requires_grad]
        self.ranks, self.reshard_after_forward, self.is_outermost = ranks, reshard_after_forward, True
        self.is_gathered = self.in_backward = False
        self.open_calls = 0
        for member in self.members:
            member.expose(whole=False)
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        module.register_forward_hook(self._after_forward, always_call=False)

    # -- forward ---------------------------------------------------------------------------------------------------

    def _before_forward(self, _module: Any, args: Any) -> None:
        del args
        self.gather()
        for member in self.members:
            member.expose(whole=True)

    def _after_forward(self, _module: Any, args: Any, output: Any) -> None:
        for member in self.members:
            member.expose(whole=False)
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if torch.is_grad_enabled() and outputs:
            for leaf in outputs:
                leaf.register_hook(self._before_backward)
        keeps = self.is_outermost if self.reshard_after_forward is None else not self.reshard_after_forward
        if not (keeps and outputs) and not self.in_backward:
            self.free()

    def gather(self) -> None:
        """Gather all parameters, in one collective."""
        if self.is_gathered or not self.members:
            return
        first = self.members[0].sharded._local  # noqa: SLF001 - the local tensor, without effect on its gradient
        row = first.new_zeros(self.plan.row)
        for member in self.members:
            local = member.sharded._local.detach().reshape(-1)  # noqa: SLF001
            row[member.slot.offset : member.slot.offset + local.numel()] = local
        rows = get_torch_platform().all_gather_into_tensor(row, self.ranks).view(self.plan.ranks, self.plan.row)
        for member in self.members:
            member.fill(rows)
        self.is_gathered = True

    def free(self) -> None:
        """Free the storage of the gathered parameters."""
        for member in self.members:
            member.free()
        self.is_gathered = False

    # -- backward --------------------------------------------------------------------------------------------------

    def _before_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        if not self.in_backward:
            self.in_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)  # noqa: SLF001
        self.gather()
        return gradient

    def _after_backward(self) -> None:
        self.in_backward = False
        self.free()
        if self.trained:
            self._reduce()

    def _reduce(self) -> None:
        """Average the gradients over the ranks, in one collective, and add this rank's shards to the parameters'.

        One element per parameter counts the ranks that have a gradient, so that a parameter that no rank used has none.
        """
        plan, count = self.gradient_plan, len(self.trained)
        width = plan.row + count
        whole = self.trained[0].whole
        rows = torch.zeros((plan.ranks, width), dtype=whole.dtype, device=whole.device)
        for index, (member, slot) in enumerate(zip(self.trained, plan.slots, strict=True)):
            gradient, member.whole.grad = member.whole.grad, None
            if gradient is None:
                continue
            rows[:, plan.row + index] = 1
            for rank in range(plan.ranks):
                length = slot.length(rank) * slot.inner
                start = rank * slot.size
                rows[rank, slot.offset : slot.offset + length] = gradient.reshape(-1)[start : start + length]
        platform = get_torch_platform()
        own = platform.reduce_scatter_tensor(rows, self.ranks, op="sum").reshape(-1)
        for index, (member, slot) in enumerate(zip(self.trained, plan.slots, strict=True)):
            if own[plan.row + index] == 0:
                continue
            sharded = member.sharded
            shape = tuple(sharded.local_shape)
            length = sharded._local.numel()  # noqa: SLF001
            local = (own[slot.offset : slot.offset + length] / plan.ranks).reshape(shape)
            if sharded.grad is not None:
                local = local + sharded.grad.to_local()
            sharded.grad = platform.wrap(local, sharded.layout)
