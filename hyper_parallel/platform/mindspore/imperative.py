"""``loss.backward()`` and ``tensor.grad``, which are public in MindSpore 2.11 and private in 2.10."""

from __future__ import annotations

from typing import Any

from mindspore import Parameter, Tensor

from hyper_parallel._versions import Missing
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.errors import LayoutError, PlanError
from hyper_parallel.platform.mindspore.versions import (
    NAMES,
    TENSOR_GRADIENTS,
    no_grad,
    pynative_executor,
    run_backward,
)
from hyper_parallel.platform.mindspore.versions.older import identity
from hyper_parallel.transport.base import active_transport_of

__all__ = ["enable"]


def enable() -> None:
    """Record operations for backward from now on, and give tensors the attributes below that they lack.

    On simulated ranks, this is undone when their run ends.

    Raises:
        UnsupportedOnBackend: (a NotImplementedError) MindSpore has no ``backward``, and lacks the functions that
            the ``backward`` here needs.
    """
    added = {name: value for name, value in _ATTRIBUTES.items() if not hasattr(Tensor, name)}
    for needed in (run_backward, *map(NAMES.find, TENSOR_GRADIENTS)) if added else ():
        if isinstance(needed, Missing):
            needed.refuse()
    recorded = pynative_executor.grad_flag()
    pynative_executor.set_grad_flag(True)
    for name, value in added.items():
        setattr(Tensor, name, value)

    def undo() -> None:
        pynative_executor.set_grad_flag(recorded)
        for name in added:
            delattr(Tensor, name)

    transport = active_transport_of("mindspore")
    if transport is not None:
        transport.at_end(undo)


def _backward(
    self: Any, gradient: Any = None, retain_graph: bool = False, create_graph: bool = False, inputs: Any = None
) -> None:
    """Add the gradients with respect to the leaves to their ``grad``.

    Args:
        self: the tensor to differentiate.
        gradient: the gradient with respect to ``self``; 1 by default, if ``self`` has one element.
        retain_graph: keep the graph for another backward.
        create_graph: record the backward for differentiation.
        inputs: the leaves that get a gradient; all by default.

    Raises:
        LayoutError: (a ValueError) ``self`` is a DTensor of partial values.
    """
    if isinstance(self, DTensor) and self.layout.partials:
        msg = f"backward: {self.layout.notation(self.dtype)} has partial values; reduce them first: reduce_partial()"
        raise LayoutError(msg)
    gradients = None if gradient is None else (_local(gradient),)
    leaves = None if inputs is None else tuple(_local(each) for each in inputs)
    handles = [leaf.register_prehook(_dense) for leaf in _leaves(_local(self)._grad_node)]
    try:
        run_backward((_local(self),), gradients, retain_graph or create_graph, create_graph, leaves)
    finally:
        for handle in handles:
            handle.remove()


def _leaves(root: Any) -> list[Any]:
    """Return the nodes of the graph at which gradients are added up."""
    leaves, seen, waiting = [], set(), [root]
    while waiting:
        node = waiting.pop()
        if node is None or identity(node) in seen:
            continue
        seen.add(identity(node))
        is_leaf = node.is_leaf
        if is_leaf() if callable(is_leaf) else is_leaf:
            leaves.append(node)
        waiting.extend(after for after, _ in node.next_functions)
    return leaves


def _dense(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return gradients in dense storage.

    On CPU MindSpore adds to a gradient that is a transposed view as if its elements were in row-major order.
    """
    with no_grad():
        return tuple(gradient if gradient is None else gradient.contiguous() for gradient in gradients)


def _local(tensor: Any) -> Any:
    return tensor._local if isinstance(tensor, DTensor) else tensor


def _grad(self: Any) -> Any:
    """The gradient that backward has added up, or None; that of a DTensor is a DTensor in the same layout."""
    gradient = _local(self)._grad
    if gradient is None or not isinstance(self, DTensor):
        return gradient
    return self._platform.wrap(gradient, self.layout)


def _set_grad(self: Any, gradient: Any) -> None:
    layout = self.layout if isinstance(self, DTensor) else None
    if isinstance(gradient, DTensor) and gradient.layout is not layout:
        own = f"a {type(self).__name__}" if layout is None else layout.notation(self.dtype)
        msg = f"grad: {gradient.layout.notation(gradient.dtype)} does not have the layout of its tensor, {own}"
        raise PlanError(msg)
    _local(self)._grad = None if gradient is None else _dense((_local(gradient),))[0]


def _requires_grad(self: Any) -> bool:
    """Whether backward adds a gradient to this tensor, or passes one on."""
    if isinstance(self, Parameter):  # for DTensor parameters, which inherit from Tensor first
        return bool(self.param_info.requires_grad)
    return bool(_local(self)._requires_grad)


def _set_requires_grad(self: Any, value: bool) -> None:
    if isinstance(self, Parameter):
        Parameter.requires_grad.fset(self, value)
    _local(self).requires_grad_(value)


def _grad_fn(self: Any) -> Any:
    """The operation that has computed this tensor; None for leaves."""
    local = _local(self)
    return None if local._is_leaf else local._grad_node


_ATTRIBUTES = {
    "backward": _backward,
    "grad": property(_grad, _set_grad),
    "requires_grad": property(_requires_grad, _set_requires_grad),
    "grad_fn": property(_grad_fn),
}
