"""``ReplicatedOp``: run an operator without a rule on replicated operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from hyper_parallel._tree import tree_map
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import Cause
from hyper_parallel.core.shard.custom.distributed_op import UserOp, mutates, writes
from hyper_parallel.core.shard.op_plan import replicated_layout
from hyper_parallel.core.shard.refusals import common_mesh, lost_write_error, plain_tensor_error, read_only_error
from hyper_parallel.errors import UnsupportedOperatorError

if TYPE_CHECKING:
    from hyper_parallel.core.shard.dispatch import Dispatcher
    from hyper_parallel.core.shard.rule import OpCall

__all__ = ["ReplicatedOp"]


class ReplicatedOp(UserOp):
    """Run one operator replicated; instantiate once to register it.

    Every rank gathers the operands and computes the whole result. The gathering is recorded as implicit, so
    ``strict()`` forbids it and the event log shows its cost. The operator must give the same result on every rank:
    random ones do not.

    Args:
        op_name: name of the function (``func.__name__``), operator overload or MindSpore primitive.

    Raises:
        ValueError: an operator of this name has a rule already.
    """

    _registrar = "ReplicatedOp"

    def strategies(self, func: Callable[..., Any], call: OpCall) -> NoReturn:
        """Refuse to plan: only the call itself tells what its outputs are."""
        del func, call
        msg = f"{self.op_name}: it is a ReplicatedOp, so its outputs are known only after the call"
        raise UnsupportedOperatorError(msg)

    def run(
        self, dispatcher: Dispatcher, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Gather the operands, call ``func`` and wrap its outputs as replicated."""
        platform = dispatcher.platform
        operands = dispatcher.tensors((*args, *kwargs.values()))
        mesh: Any = common_mesh(
            self.op_name, (operand.device_mesh for operand in operands if isinstance(operand, DTensor))
        )
        plain = next((operand for operand in operands if not isinstance(operand, DTensor)), None)
        if plain is not None:
            raise plain_tensor_error(f"{self.op_name}: an operand", "operand", plain.shape, mesh)
        written = operands if mutates(func, self.op_name) else []
        self._require_writable(written)
        whole, named = tree_map(self._gathered, args), {name: tree_map(self._gathered, kwargs[name]) for name in kwargs}
        gathered = [
            (operand, local)
            for operand, local in zip(operands, dispatcher.tensors((*whole, *named.values())), strict=True)
            if local is not operand._local
        ]
        before = [platform.version(local) for _, local in gathered]
        result = func(*whole, **named)
        for (operand, local), version in zip(gathered, before, strict=True):
            if platform.version(local) != version:
                layout = operand.layout.notation(operand.dtype)
                raise lost_write_error(
                    self.op_name, f"an operand {layout}", "gathered", "use x = x.redistribute() first"
                )
        for operand in written:
            operand.drop_views()
        if writes(func, self.op_name):
            return operands[0]

        def wrap(leaf: Any) -> Any:
            return platform.wrap(leaf, replicated_layout(mesh, leaf.shape)) if platform.is_tensor(leaf) else leaf

        return tree_map(wrap, result)

    def _require_writable(self, operands: Iterable[Any]) -> None:
        for operand in operands:
            if not operand.layout.is_replicated:
                msg = f"{self.op_name}: operands written in place must be replicated; use x = x.redistribute() first"
                raise UnsupportedOperatorError(msg)
            if operand._readonly is not None:
                raise read_only_error(self.op_name, "an operand", operand._readonly)

    def _gathered(self, value: Any) -> Any:
        """The whole local tensor of a DTensor; any other value as it is."""
        if not isinstance(value, DTensor):
            return value
        target = replicated_layout(value.device_mesh, value.shape)
        return value.local_for(target, (), Cause(self.op_name, "operand", implicit=True))
