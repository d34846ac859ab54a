"""Operators that a user lets run whole on every rank, because they have no rule."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from hyper_parallel._tree import leaves, tree_map
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.events import Cause
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.custom.distributed_op import UserOp, mutates, writes
from hyper_parallel.errors import MeshMismatchError, MixedTensorError, UnsupportedOperatorError

if TYPE_CHECKING:
    from hyper_parallel.core.shard.dispatch import Dispatcher
    from hyper_parallel.core.shard.rule import OpCall
    from hyper_parallel.platform.contract.platform import Platform

__all__ = ["ReplicatedOp"]


class ReplicatedOp(UserOp):
    """Opt one operator into replication: instantiate once to register.

    Every rank gathers the operands, computes everything and holds the whole result. The gathering is recorded as
    implicit, so ``strict()`` forbids it and the event log shows what it costs. The operator must give the same result
    on every rank: random ones do not.

    Args:
        op_name: name of the function (``func.__name__``), operator overload or MindSpore primitive.

    Raises:
        ValueError: an operator of this name has a rule already.
    """

    _kind = "ReplicatedOp"

    def answer(self, func: Callable[..., Any], call: OpCall) -> NoReturn:
        """Nothing can be said without the call itself: the operands become whole, and so is whatever comes out."""
        del func, call
        msg = f"{self.op_name}: it runs whole on every rank (ReplicatedOp), so only a call tells what its outputs are"
        raise UnsupportedOperatorError(msg)

    def run(
        self, dispatcher: Dispatcher, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Gather, call ``func`` and wrap what comes out."""
        platform = dispatcher.platform
        operands = _tensors_in(platform, args, kwargs)
        meshes = list(dict.fromkeys(one.device_mesh for one in operands if isinstance(one, DTensor)))
        if len(meshes) > 1:
            msg = f"{self.op_name}: operands live on different meshes, {meshes[0]!r} and {meshes[1]!r}"
            raise MeshMismatchError(msg)
        plain = next((one for one in operands if not isinstance(one, DTensor)), None)
        if plain is not None:
            msg = f"{self.op_name}: a plain tensor {list(plain.shape)} meets DTensors on {meshes[0]!r}"
            raise MixedTensorError(msg)
        written = operands if mutates(func, self.op_name) else []
        self._require_writable(written)
        whole, named = self._whole(args), {name: self._whole(value) for name, value in kwargs.items()}
        gathered = [
            (one, local)
            for one, local in zip(operands, _tensors_in(platform, whole, named), strict=True)
            if local is not one._local
        ]
        before = [platform.version(local) for _, local in gathered]
        found = func(*whole, **named)
        for (one, local), version in zip(gathered, before, strict=True):
            if platform.version(local) != version:
                msg = (
                    f"{self.op_name}: it writes into {one.layout.notation(one.dtype)}, which was gathered first, so "
                    "the write is lost; use x = x.redistribute() first"
                )
                raise UnsupportedOperatorError(msg)
        for one in written:
            one.drop_views()
        if writes(func, self.op_name):
            return operands[0]

        def wrap(leaf: Any) -> Any:
            return platform.wrap(leaf, _whole_layout(meshes[0], leaf)) if platform.is_tensor(leaf) else leaf

        return tree_map(wrap, found)

    def _require_writable(self, operands: Iterable[Any]) -> None:
        for one in operands:
            if not one.layout.is_replicated:
                msg = f"{self.op_name}: what is written in place must be whole; use x = x.redistribute() first"
                raise UnsupportedOperatorError(msg)
            if one._readonly is not None:
                msg = f"{self.op_name}: an operand cannot be written to: {one._readonly}"
                raise UnsupportedOperatorError(msg)

    def _whole(self, value: Any) -> Any:
        """``value`` with the gathered local tensor in place of each DTensor."""
        return tree_map(lambda leaf: self._gathered(leaf) if isinstance(leaf, DTensor) else leaf, value)

    def _gathered(self, tensor: Any) -> Any:
        return tensor.local_for(
            _whole_layout(tensor.device_mesh, tensor), (), Cause(self.op_name, "operand", implicit=True)
        )


def _tensors_in(platform: Platform, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [leaf for leaf in leaves((args, tuple(kwargs.values()))) if platform.is_tensor(leaf)]


def _whole_layout(mesh: Any, tensor: Any) -> Layout:
    shape = tuple(tensor.shape)
    return Layout.of(mesh, ((),) * len(shape), (), shape)
