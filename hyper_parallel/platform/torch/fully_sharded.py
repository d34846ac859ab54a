"""A group of fully sharded parameters on PyTorch: gathered in one collective, freed, gradients reduced in one."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves

from hyper_parallel.core.data_parallel.plan import Slot, plan_flat
from hyper_parallel.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FullyShardedGroup"]


_REPLACED = "_replaced_by_fully_shard"  # attribute of a parameter from before sharding: its module and name


@cache
def _refuse_replaced_parameters() -> None:
    """Let every optimizer step refuse parameters from before sharding, which gradients no longer reach."""
    register_optimizer_step_pre_hook(_check_step)


def _check_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    del args, kwargs
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            place = vars(parameter).get(_REPLACED)
            if place is not None:
                msg = (
                    f"optimizer step: parameter {index} of group {number} is {place} from before fully_shard, which no "
                    "longer trains; build the optimizer after fully_shard"
                )
                raise PlanError(msg)


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

    def fill(self, rows: torch.Tensor, *, unchanged: bool) -> None:
        """Allocate the whole and copy it from all ranks' ``rows`` (ranks, row).

        ``unchanged`` says that the values are those of the last time, so the version that autograd compares stays.
        """
        slot, whole = self.slot, self.whole
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        parts = rows[:, slot.offset : slot.offset + slot.size].reshape(slot.ranks * slot.chunk, *slot.shape[1:])
        with _unsafe_preserve_version_counter(whole) if unchanged else nullcontext():
            whole.detach().copy_(parts[: slot.shape[0]])

    def expose(self, *, whole: bool) -> None:
        """Let the modules see the whole parameter, or its shard."""
        for owner, name in self.owners:
            owner._parameters[name] = self.whole if whole else self.sharded  # noqa: SLF001


class _Call:
    """A call of the module: how many inputs need a gradient, and how many gradients are still to come."""

    inputs = 0
    remaining = 0


def _is_computed(leaf: Any) -> bool:
    """Return True for a tensor that is a result of a graph."""
    return isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None


class FullyShardedGroup:
    """The parameters of one ``fully_shard`` call.

    Args:
        platform: PyTorch's platform.
        module: the module.
        ranks: global ranks of the data axis.
        parameters: original, DTensor parameter and owners of each.
        reshard_after_forward: free after forward; None: unless outermost.
    """

    def __init__(
        self,
        platform: Any,
        module: Any,
        ranks: tuple[int, ...],
        parameters: Sequence[tuple[Any, Any, Sequence[tuple[Any, str]]]],
        reshard_after_forward: bool | None,
    ) -> None:
        if len({original.dtype for original, _, _ in parameters}) > 1:
            names = sorted({str(original.dtype) for original, _, _ in parameters})
            msg = f"fully_shard: parameters of one module have dtypes {', '.join(names)}; shard them separately"
            raise PlanError(msg)
        _refuse_replaced_parameters()
        for original, _, owners in parameters:
            owner, name = owners[0]
            vars(original)[_REPLACED] = f"{type(owner).__name__}.{name}"
        self.plan = plan_flat([original.shape for original, _, _ in parameters], len(ranks))
        trainable = [original.shape for original, _, _ in parameters if original.requires_grad]
        self.gradient_plan = plan_flat(trainable, len(ranks))
        self.platform = platform
        # Weak, so that the memory of the whole parameters is freed.
        self.originals = [ref(original) for original, _, _ in parameters]
        self.members = [_Member(*each, slot) for each, slot in zip(parameters, self.plan.slots, strict=True)]
        self.trained = [member for member in self.members if member.whole.requires_grad]
        self.ranks, self.reshard_after_forward, self.is_outermost = ranks, reshard_after_forward, True
        self.is_gathered = self.in_backward = False
        self.is_reduced = False
        self.versions: list[tuple[int, int]] = []
        self.entered: list[_Call] = []  # forward calls that have begun
        self.running: set[_Call] = set()  # calls whose backward has begun
        for member in self.members:
            member.expose(whole=False)
        module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
        module.register_forward_hook(self._after_forward, always_call=True)

    # -- forward ---------------------------------------------------------------------------------------------------

    def _before_forward(self, _module: Any, args: Any, kwargs: Any) -> None:
        self.gather()
        for member in self.members:
            member.expose(whole=True)
        if torch.is_grad_enabled() and not self.in_backward:
            call = _Call()
            self.entered.append(call)
            for leaf in {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if _is_computed(leaf)}.values():
                call.inputs += 1
                leaf.register_hook(partial(self._after_input, call))

    def _after_forward(self, _module: Any, args: Any, output: Any) -> None:
        del args
        for member in self.members:
            member.expose(whole=False)
        if self.in_backward:  # recomputed activations
            return
        leaves = [leaf for leaf in tree_leaves(output) if _is_computed(leaf)]
        if torch.is_grad_enabled():
            call = self.entered.pop()
            for leaf in leaves:
                leaf.register_hook(partial(self._before_backward, call))
        keeps = self.is_outermost if self.reshard_after_forward is None else not self.reshard_after_forward
        if not (keeps and leaves) and not self.entered:
            self.free()

    def gather(self) -> None:
        """Gather all parameters, in one collective."""
        versions = [(id(member.sharded._local), member.sharded._local._version) for member in self.members]  # noqa: SLF001
        is_current = versions == self.versions
        if (self.is_gathered and is_current) or not self.members:
            return
        self.versions = versions
        first = self.members[0].sharded._local
        row = first.new_zeros(self.plan.row)
        for member in self.members:
            local = member.sharded._local.detach().reshape(-1)
            row[member.slot.offset : member.slot.offset + local.numel()] = local
        rows = self.platform.all_gather_into_tensor(row, self.ranks).view(self.plan.ranks, self.plan.row)
        for member in self.members:
            member.fill(rows, unchanged=is_current)
        self.is_gathered = True

    def free(self) -> None:
        """Free the storage of the gathered parameters."""
        for member in self.members:
            member.free()
        self.is_gathered = False

    # -- backward --------------------------------------------------------------------------------------------------

    def _before_backward(self, call: _Call, gradient: torch.Tensor) -> torch.Tensor:
        if not self.in_backward:
            self.in_backward, self.is_reduced = True, False
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)  # noqa: SLF001
        call.remaining = call.inputs
        self.running.add(call)
        self.gather()
        return gradient

    def _after_input(self, call: _Call, gradient: torch.Tensor) -> torch.Tensor:
        call.remaining -= 1
        if call in self.running and call.remaining == 0:
            self.running.discard(call)
            if not self.running:
                self._finish()
        return gradient

    def _after_backward(self) -> None:
        for member in self.members:
            member.expose(whole=False)
        if not self.is_reduced or any(member.whole.grad is not None for member in self.trained):
            self._finish()
        self.in_backward = False
        self.running.clear()
        self.entered.clear()

    def _finish(self) -> None:
        self.free()
        if self.trained:
            self._reduce()
        self.is_reduced = True

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
            if gradient.requires_grad:
                msg = "fully_shard: backward(create_graph=True) is not supported; gradients are reduced off the graph"
                raise PlanError(msg)
            rows[:, plan.row + index] = 1
            for rank in range(plan.ranks):
                length = slot.length(rank) * slot.inner
                start = rank * slot.size
                rows[rank, slot.offset : slot.offset + length] = gradient.reshape(-1)[start : start + length]
        platform = self.platform
        own = platform.reduce_scatter_tensor(rows, self.ranks, op="sum").reshape(-1)
        for index, (member, slot) in enumerate(zip(self.trained, plan.slots, strict=True)):
            if own[plan.row + index] == 0:
                continue
            sharded = member.sharded
            shape = tuple(sharded.local_shape)
            length = sharded._local.numel()
            local = (own[slot.offset : slot.offset + length] / plan.ranks).reshape(shape)
            if sharded.grad is not None:
                local = local + sharded.grad.to_local()
            sharded.grad = platform.wrap(local, sharded.layout)
