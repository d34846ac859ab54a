"""A group of fully sharded parameters on PyTorch: one collective gathers them, and one reduces their gradients."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from hyper_parallel.core.data_parallel.plan import Slot, plan_flat, split_dim
from hyper_parallel.errors import PlanError
from hyper_parallel.platform.contract.fully_sharded import ACCUMULATED, KEPT
from hyper_parallel.platform.torch.dtensor import TorchDTensor
from hyper_parallel.platform.torch.optimizer_steps import refuse_wrong_steps, set_replaced, set_unreduced
from hyper_parallel.platform.torch.sharded_parameter import ShardedParameter
from hyper_parallel.platform.torch.sharded_schedule import ShardedSchedule
from hyper_parallel.platform.torch.versions import execution_engine, tree_leaves, tree_map
from hyper_parallel.transport.checks.sequence import Step

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hyper_parallel.platform.contract.fully_sharded import FullyShardedOptions

__all__ = ["FullyShardedGroup"]


class _Call:
    """A call of the module: how many inputs need a gradient, and how many gradients are still to come."""

    inputs = 0
    remaining = 0


class _Gathering:
    """An all-gather in flight: the versions of its shards, its number, and the rows once they have arrived."""

    def __init__(self, versions: list[tuple[int, int]]) -> None:
        self.versions = versions
        self.number = 0
        self.rows: Sequence[torch.Tensor] = ()

    def arrive(self, rows: Sequence[torch.Tensor]) -> None:
        """Keep the rows that have arrived."""
        self.rows = rows


def _leaves(tree: Any) -> Iterator[Any]:
    """The leaves of a structure of PyTorch's pytree, and of dataclasses in it."""
    for leaf in tree_leaves(tree):
        if is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _leaves([getattr(leaf, field.name, None) for field in fields(leaf)])
        else:
            yield leaf


def _cast(dtype: torch.dtype, leaf: Any) -> Any:
    """Cast a floating tensor, and the fields of a copy of a dataclass, to ``dtype``; return anything else unchanged."""
    if isinstance(leaf, torch.Tensor):
        return leaf.to(dtype) if leaf.is_floating_point() else leaf
    tensors = [each for each in _leaves(leaf) if isinstance(each, torch.Tensor)]  # several for a dataclass
    if any(_cast(dtype, each) is not each for each in tensors):
        platform: Any = TorchDTensor._platform
        return platform.tree_map(partial(_cast, dtype), leaf)
    return leaf


def _policy_dtype(policy: torch.dtype | None, own: torch.dtype) -> torch.dtype:
    """Return the dtype of a policy for values of dtype ``own``: integer and complex ones keep their own."""
    return policy if policy is not None and own.is_floating_point else own


def _local_shape(original: Any) -> tuple[int, ...]:
    """Return the shape that the data axis shards; for a DTensor, the local shape."""
    return tuple(original.local_shape if isinstance(original, TorchDTensor) else original.shape)


def _is_dry_run(platform: Any) -> bool:
    """Whether one rank runs alone, without values, for a plan or an explanation."""
    return bool(platform.transport().backend == "fake")


def _is_computed(leaf: Any) -> bool:
    """Return True for a tensor that is a result of a graph."""
    return isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None


_GATHERED = (
    "the parameter is the gathered one of unshard(), which gets no gradient; build the optimizer after reshard()"
)

_KEPT = (
    "options", "ranks", "plan", "members", "modules", "kind", "name", "reduces", "reduces_over_replicas",
    "keeps_after_backward", "divide_factor", "is_outermost", "schedule",
)  # fmt: skip
"""Attributes that are copied."""


class FullyShardedGroup:
    """The parameters of one ``fully_shard`` call.

    Args:
        platform: PyTorch's platform.
        modules: the module, or several modules that share the group.
        options: options of the sharding.
        parameters: for each, the original, the DTensor parameter, and its owners with attribute names; all of one
            dtype.
    """

    def __init__(
        self,
        platform: Any,
        modules: Any,
        options: FullyShardedOptions,
        parameters: Sequence[tuple[Any, Any, Sequence[tuple[Any, str]]]],
    ) -> None:
        self.platform = platform
        refuse_wrong_steps()
        for original, _, owners in parameters:
            owner, name = owners[0]
            set_replaced(original, f"{type(owner).__name__}.{name}")
        shapes = [_local_shape(original) for original, _, _ in parameters]
        self.options, self.ranks, self.is_outermost = options, options.ranks, True
        dims = [split_dim(sharded._layout, self.ranks) for _, sharded, _ in parameters]
        self.plan = plan_flat(shapes, len(self.ranks), dims)
        self.members = [
            ShardedParameter(*each, slot, _policy_dtype(options.param_dtype, each[0].dtype))
            for each, slot in zip(parameters, self.plan.slots, strict=True)
        ]
        self.modules = list(modules) if isinstance(modules, (list, tuple)) else [modules]
        self.kind = type(self.modules[0]).__name__
        self.reduces, self.reduces_over_replicas, self.name = True, True, ""
        self.keeps_after_backward = False
        self.divide_factor: float | None = None
        self.schedule: ShardedSchedule  # set by take
        self._begin()
        self._structure: _Structure | None = _Structure(self.modules)
        self._expose(whole=False)
        for module in self.modules:
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after_forward, always_call=True)

    def _begin(self) -> None:
        """Initialise, with freed parameters."""
        self._plan_gradients()
        self._structure = None
        self._over_replicas: torch.Tensor | None = None  # reduced over the data axis, but not yet over the replicas
        self.is_gathered = self.in_backward = self.is_reduced = False
        # A dry run computes without values.
        self.is_meta = any(member.local.is_meta for member in self.members) and not _is_dry_run(self.platform)
        self.versions: list[tuple[int, int]] = []
        self.pending: _Gathering | None = None
        self.entered: list[_Call] = []  # forward calls that have begun
        self.running: set[_Call] = set()  # calls whose backward has begun
        if self.members:
            self._prepare_rows()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, without gradients and gathered parameters.

        Raises:
            PlanError: forward or backward of the module runs.
        """
        if self.in_backward or self.entered or any(member.is_exposed for member in self.members):
            msg = f"fully_shard: module group {self.name} cannot be copied while its forward or backward runs"
            raise PlanError(msg)
        return {name: getattr(self, name) for name in _KEPT}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Initialise a copy, in a schedule with the groups that are copied together with it."""
        self.__dict__.update(state, platform=TorchDTensor._platform)
        refuse_wrong_steps()
        self._begin()
        self.schedule.readopt(self)

    @property
    def device(self) -> torch.device | None:
        """Device of the shards; None if there are none, or if parameters are still on the meta device."""
        local = self.members[0].local if self.members else None
        return None if local is None or (local.is_meta and self.is_meta) else local.device

    def _materialize(self) -> None:
        """Replace shards on the meta device by the parameters that the program has since materialized on a device."""
        for member in self.members:
            if member.local.is_meta:
                member.materialize()
        self._plan_gradients()
        self._prepare_rows()
        self.schedule.set_device(self.device)
        self.is_meta = False

    def _plan_gradients(self) -> None:
        self.trained = [member for member in self.members if member.whole.requires_grad]
        self.gradient_plan = plan_flat(
            [member.slot.shape for member in self.trained],
            len(self.ranks),
            [member.slot.dim for member in self.trained],
        )

    def _prepare_rows(self) -> None:
        first = self.members[0].local
        dtype = self.members[0].whole.dtype
        self.tail = first.new_zeros(len(self.ranks))
        self.gather_step = ("all_gather", self.plan.row + len(self.ranks), dtype)
        width = self.gradient_plan.row + len(self.trained) + len(self.ranks)
        self.reduce_step = ("reduce_scatter", width, _policy_dtype(self.options.reduce_dtype, dtype))
        for member in self.trained:
            member.watch_whole(self._check_in_backward)
        self.paddings = [first.new_zeros(member.slot.size - member.local.numel()) for member in self.members]

    def take(self, nested: Sequence[FullyShardedGroup]) -> None:
        """Order the collectives of ``nested`` groups, which belong to submodules, together with those of this group."""
        schedule = None
        for group in [*nested, self]:
            group.is_outermost = group is self
            if group.ranks == self.ranks:
                schedule = schedule or ShardedSchedule(self.platform, group.device, self.ranks)
                schedule.adopt(group)

    @property
    def reshards_after_forward(self) -> bool | None:
        """See ``FullyShardedOptions.reshard``."""
        return self.options.reshard

    @reshards_after_forward.setter
    def reshards_after_forward(self, reshard: bool | None) -> None:
        self.options = replace(self.options, reshard=reshard)

    def _step(self, kind: tuple[str, int, torch.dtype]) -> Step:
        operation, width, dtype = kind
        return Step(operation, self.name, width, dtype)

    # -- forward ---------------------------------------------------------------------------------------------------

    def _before_forward(self, _module: Any, args: Any, kwargs: Any) -> Any:
        if self.is_meta:
            self._materialize()
        self._follow_changes()
        self.schedule.enter_forward(self)
        self.gather()
        self._expose(whole=True)
        if torch.is_grad_enabled() and not self.in_backward:
            call = _Call()
            self.entered.append(call)
            for leaf in {id(leaf): leaf for leaf in _leaves((args, kwargs)) if _is_computed(leaf)}.values():
                call.inputs += 1
                leaf.register_hook(partial(self._after_input, call))
        dtype = self.options.param_dtype if self.options.cast_forward_inputs else None
        return None if dtype is None else tree_map(partial(_cast, dtype), (args, kwargs))

    def _follow_changes(self) -> None:
        """Apply freezing and unfreezing since the last forward, and refuse added or replaced parameters."""
        if self._structure is None:
            self._structure = _Structure(self.modules)
        if not self._structure.holds():
            msg = (
                f"fully_shard: a parameter or submodule of {self.kind} was added or removed after fully_shard, which "
                "does not shard it; change the module first"
            )
            raise PlanError(msg)
        trained_as_before = [member.check_unreplaced() for member in self.members]
        if all(trained_as_before) or self.entered or self.in_backward:
            return
        for member in self.members:
            member.follow_requires_grad()
        self._plan_gradients()
        self._prepare_rows()

    def unshard(self) -> None:
        """Gather all parameters, and set them in the modules, until :meth:`reshard` or the end of a forward."""
        if self.is_meta:
            self._materialize()
        self._follow_changes()
        self.schedule.enter_forward(self)
        try:
            self.gather()
        finally:
            self.schedule.leave_forward()
        self._expose(whole=True)
        for member in self.trained:
            set_unreduced(member.exposed, "fully_shard", _GATHERED, elsewhere=True)

    def reshard(self) -> None:
        """Free the gathered parameters, and set the shards in the modules."""
        if self.in_backward or self.entered:
            msg = f"reshard: forward or backward of module group {self.name} runs; call it before or after"
            raise PlanError(msg)
        self._expose(whole=False)
        self.free()

    def _after_forward(self, _module: Any, args: Any, output: Any) -> Any:
        del args
        if self.is_meta:
            return output  # the forward was refused
        if self.options.output_dtype is not None:
            output = tree_map(partial(_cast, self.options.output_dtype), output)
        if not self.in_backward:  # otherwise activations were recomputed
            self._expose(whole=False)
            leaves = [leaf for leaf in _leaves(output) if _is_computed(leaf)]
            if torch.is_grad_enabled() and self.entered:
                call = self.entered.pop()
                for leaf in leaves:
                    leaf.register_hook(partial(self._before_backward, call))
            reshard = self.options.reshard
            keeps = self.is_outermost if reshard is None else not reshard
            if not (keeps and leaves) and not self.entered:
                self.free()
        self.schedule.leave_forward()
        return output

    def as_forward(self, module: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a method of ``module`` as its forward runs: with gathered parameters."""
        changed = self._before_forward(module, args, kwargs)
        args, kwargs = (args, kwargs) if changed is None else changed
        try:
            output = method(*args, **kwargs)
        except BaseException:
            self._after_forward(module, args, None)
            raise
        return self._after_forward(module, args, output)

    def _expose(self, *, whole: bool) -> None:
        """Set the gathered parameters, or the shards, in the modules."""
        for member in self.members:
            member.expose(whole=whole)

    def _versions(self) -> list[tuple[int, int]]:
        return [(id(member.local), member.local._version) for member in self.members]

    def gather(self) -> None:
        """Gather all parameters in one collective, and begin to gather those of the next group."""
        versions = self._versions()
        is_current = versions == self.versions
        if (self.is_gathered and is_current) or not self.members:
            return
        begun = self.pending
        pending = begun if begun is not None and begun.versions == versions else self.start_gather()
        self.pending = None
        self.schedule.sequence.record(self._step(self.gather_step))
        if not pending.rows:
            self.schedule.sequence.complete(pending.number)
        self.schedule.prefetch()
        for member in self.members:
            member.fill(pending.rows, unchanged=is_current)
        self.versions, self.is_gathered = versions, True

    @torch.no_grad()
    def start_gather(self) -> _Gathering:
        """Begin to gather all parameters."""
        pending = _Gathering(self._versions())
        parts = []
        for member, padding in zip(self.members, self.paddings, strict=True):
            parts += [member.local.reshape(-1), padding] if padding.numel() else [member.local.reshape(-1)]
        row = torch.cat([*parts, self.tail]).to(self.gather_step[2])
        pending.number = self.schedule.run(self._step(self.gather_step), row, pending.arrive)
        self.pending = pending
        return pending

    def free(self) -> None:
        """Free the storage of the gathered parameters."""
        for member in self.members:
            member.free()
        self.is_gathered = False

    # -- backward --------------------------------------------------------------------------------------------------

    def _before_backward(self, call: _Call, gradient: torch.Tensor) -> torch.Tensor:
        if not self.in_backward:
            self.in_backward, self.is_reduced = True, False
            for member in self.trained:
                reason = f"a backward through module group {self.name} has not ended"
                set_unreduced(member.sharded, "fully_shard", reason, elsewhere=True)
            self.schedule.enter_backward(self)
            execution_engine.queue_callback(self._after_backward)
        call.remaining = call.inputs
        self.running.add(call)
        self.gather()
        self._expose(whole=True)  # backward may recompute parts of the module, without the module's own forward
        return gradient

    def _after_input(self, call: _Call, gradient: torch.Tensor) -> torch.Tensor:
        call.remaining -= 1
        if call in self.running and call.remaining == 0:
            self.running.discard(call)
            if not self.running:
                self._finish()
        return gradient

    def _after_backward(self) -> None:
        self._expose(whole=False)
        if not self.is_reduced or any(member.whole.grad is not None for member in self.trained):
            self._finish()
        self.announce_reduced()
        self.in_backward = False
        self.running.clear()
        self.entered.clear()
        self.schedule.leave_backward(self)

    def abandon_backward(self) -> None:
        """Drop a backward that has raised, with its gradients that are not reduced yet."""
        self.in_backward = False
        self._expose(whole=False)
        self.running.clear()
        self.entered.clear()
        for member in self.trained:
            member.whole.grad = None
            member.forget_reduced()
        self.free()

    def announce_reduced(self) -> None:
        """Allow optimizer steps, unless gradients were accumulated."""
        keeps_sums = len(self.options.replicas) > 1 and not self.reduces_over_replicas
        for member in self.trained:
            reason = ACCUMULATED if member.accumulated is not None else KEPT if keeps_sums else None
            set_unreduced(member.sharded, "fully_shard", reason, elsewhere=True)

    def _check_in_backward(self, whole: torch.Tensor) -> None:
        """Refuse a gradient that did not come through an output of the module: it would never be reduced."""
        if not self.in_backward:
            whole.grad = None
            msg = (
                f"fully_shard: backward through module group {self.name} began at a value that is not an output of its "
                "forward; return the value, in a dataclass or a structure that torch.utils._pytree knows"
            )
            raise PlanError(msg)

    def _finish(self) -> None:
        self._expose(whole=False)
        if not self.keeps_after_backward:
            self.free()
        if self.trained and self.reduces:
            self._reduce()
        elif self.trained:
            for member in self.trained:
                member.accumulate(self.reduce_step[2])
        self.is_reduced = True

    @torch.no_grad()
    def _reduce(self) -> None:
        """Begin to average the gradients over the ranks, in one collective.

        One element per parameter counts the ranks that have a gradient, so that a parameter that no rank used has none.
        """
        plan = self.gradient_plan
        _, width, dtype = self.reduce_step
        rows = torch.empty((plan.ranks, width), dtype=dtype, device=self.device)
        used = []
        for member, slot in zip(self.trained, plan.slots, strict=True):
            gradient = member.take_gradient()
            used.append(gradient is not None)
            columns = rows[:, slot.offset : slot.offset + slot.size]
            if gradient is None:
                columns.zero_()
                continue
            _scatter_into(columns, gradient, slot)
        rows[:, plan.row :] = torch.tensor([*map(float, used), *([0.0] * plan.ranks)], dtype=dtype)
        step = self._step(self.reduce_step)
        self.schedule.run(step, rows, partial(self._accumulate, used))
        self.schedule.sequence.record(step)

    @torch.no_grad()
    def _accumulate(self, used: Sequence[bool], own: torch.Tensor) -> None:
        """Add this rank's ``own`` reduced row to the gradients of the shards.

        Args:
            used: whether this rank has a gradient, by parameter; if ``own`` has no values, this stands for all ranks.
            own: the row.
        """
        plan, count = self.gradient_plan, len(self.trained)
        if len(self.options.replicas) > 1:
            own = own[: plan.row + count]
            if self._over_replicas is not None:
                own, self._over_replicas = own + self._over_replicas, None
            if not self.reduces_over_replicas:
                self._over_replicas = own
                return
            own = self.platform.all_reduce(own, self.options.replicas)
        counts = used if own.is_meta else own[plan.row : plan.row + count].tolist()
        own = (own[: plan.row] / (self.divide_factor or self.options.count)).to(self.members[0].local.dtype)
        for ranks_with_gradient, member, slot in zip(counts, self.trained, plan.slots, strict=True):
            if ranks_with_gradient:
                local = own[slot.offset : slot.offset + member.local.numel()]
                member.add_reduced(local.view(member.local.shape))

    @torch.no_grad()
    def call_hooks(self) -> None:
        """Call the hooks of parameters that got gradients in the backward that has just ended."""
        for member in self.trained:
            member.call_hooks()


class _Structure:
    """The numbers of parameters and submodules of a group's modules."""

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        children = [child for module in modules for child in module.modules()]
        self._homes = [getattr(child, name) for child in children for name in ("_parameters", "_modules")]
        self._count = sum(map(len, self._homes))

    def holds(self) -> bool:
        """Whether the numbers are unchanged."""
        return sum(map(len, self._homes)) == self._count


def _scatter_into(columns: torch.Tensor, gradient: torch.Tensor, slot: Slot) -> None:
    """Write the elements of a parameter to the ``columns`` (ranks, slot.size) of the rows, and zeros to the padding."""
    if columns.is_meta:
        return  # there are no values
    if slot.dim != 0:
        parts = gradient.split([slot.length(rank) for rank in range(slot.ranks)], slot.dim)
        for column, part, size in zip(columns.unbind(), parts, slot.sizes, strict=True):
            column[:size] = part.reshape(-1)
            column[size:] = 0
        return
    flat = gradient.reshape(-1)
    if flat.numel() == columns.numel():
        columns.copy_(flat.view(columns.shape))
        return
    full, rest = divmod(flat.numel(), slot.size)
    columns[:full] = flat[: full * slot.size].view(full, slot.size)
    columns[full:] = 0
    columns[full, :rest] = flat[full * slot.size :]
