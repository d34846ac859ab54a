"""The interface of a platform: all facets, and what core needs for DTensors."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.contract.collectives import CollectivesFacet
from hyper_parallel.platform.contract.differentiable import DifferentiableFacet
from hyper_parallel.platform.contract.groups import GroupsFacet
from hyper_parallel.platform.contract.identity import IdentityFacet
from hyper_parallel.platform.contract.ledger import LedgerFacet
from hyper_parallel.platform.contract.memory import MemoryFacet
from hyper_parallel.platform.contract.modules import ModulesFacet
from hyper_parallel.platform.contract.persistence import PersistenceFacet
from hyper_parallel.platform.contract.pipeline import PipelineFacet
from hyper_parallel.platform.contract.runtime import RuntimeFacet
from hyper_parallel.platform.contract.tensors import TensorsFacet

if TYPE_CHECKING:
    from collections.abc import Callable

    from hyper_parallel.transport.base import Transport

__all__ = ["Platform"]


class Platform(
    GroupsFacet,
    DifferentiableFacet,
    CollectivesFacet,
    RuntimeFacet,
    MemoryFacet,
    PersistenceFacet,
    PipelineFacet,
    IdentityFacet,
    TensorsFacet,
    ModulesFacet,
    LedgerFacet,
    abc.ABC,
):
    """The interface to a framework that core and trainers use.

    Attributes:
        platform_type: ``torch`` or ``mindspore``.
        Tensor: the framework's tensor type.
        Parameter: its trainable tensor type.
        Module: its module type.
        Function: its custom autograd function; subclasses have static ``forward(ctx, *args)`` and
            ``backward(ctx, *grads)``, ``apply`` takes positional tensors and values.
        DTensorBase: the framework's DTensor class.
        dispatcher: the dispatcher of calls on DTensors, set once when the platform is built.
    """

    platform_type: str
    Tensor: Any
    Parameter: Any
    Module: Any
    Function: Any
    dispatcher: Any

    @property
    @abc.abstractmethod
    def DTensorBase(self) -> Any:
        """The framework's DTensor class."""

    @abc.abstractmethod
    def transport(self) -> Transport:
        """Return the transport: of the simulated rank, else of the framework's engine, else of one process."""

    @abc.abstractmethod
    def wrap(self, local: Any, layout: Any) -> Any:
        """Return a DTensor over ``local``, which stays on its autograd graph; shapes are not checked."""

    @abc.abstractmethod
    def grad_enabled(self) -> bool:
        """Return True if operations are recorded for backward."""

    @abc.abstractmethod
    def needs_grad(self, local: Any) -> bool:
        """Return True if ``local``, a plain tensor, may receive a gradient."""

    @abc.abstractmethod
    def passes_gradient(self, plain: Any) -> bool:
        """Return True if ``plain`` is the result of a recorded operation (not a leaf)."""

    @abc.abstractmethod
    def is_parameter(self, tensor: Any) -> bool:
        """Return True for a DTensor that is the framework's ``Parameter`` and a leaf."""

    @abc.abstractmethod
    def accumulates_grad(self, local: Any) -> bool:
        """Return True, in backward, if gradients of the leaf ``local`` are only accumulated, without hooks."""

    def accumulate_grad(self, local: Any, grad: Any) -> None:
        """Add ``grad`` to the gradient of the leaf ``local``, if the framework keeps gradients on leaves."""

    @abc.abstractmethod
    def version(self, local: Any) -> int:
        """Return the number of writes to ``local`` if the framework counts them, else a constant."""

    empty_sums_are_uninitialized = False
    """True if a sum over no elements, and so the gradient of a tensor broadcast to no rows, is uninitialised memory."""
    computes_on_meta = False
    """True if operators run on tensors without storage, which yields the dtypes and shapes of their results."""
    loses_writes_through_views = False
    """True if values or gradients written through a view do not reach its base tensor."""

    def replaying_views(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, which makes or writes views, such that its graph is the same for empty tensors."""
        return call

    def on_elements(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that ``func`` calls if none of its operands is empty."""
        return func

    @abc.abstractmethod
    def may_cache_view(self, tensor: Any) -> bool:
        """Return False for a DTensor whose varying views must not outlive one differentiation."""

    @abc.abstractmethod
    def operator_entry(self, op: Any) -> Any:
        """Return the dispatcher's entry of an operator (the framework's callable, or its name), or None."""

    def follow_writes(self, view: Any, base: Any, *, is_copy: bool) -> None:
        """Make reads of ``view`` an error once ``base`` is written, if ``view`` is a copy or a view of a copy.

        Args:
            view: the result of an operator whose results are views.
            base: the operand of that operator.
            is_copy: whether ``base`` had to be redistributed.
        """
        del view, base, is_copy

    def is_transformed(self, tensor: Any) -> bool:
        """Return whether a plain tensor is wrapped by a function transform (``torch.func``)."""
        del tensor
        return False

    def from_torch(self, tensor: Any) -> Any:
        """Return PyTorch's own DTensor as a DTensor of this library.

        Raises:
            UnsupportedOnBackend: the framework is not PyTorch.
        """
        msg = f"from_torch: expected a torch.distributed.tensor.DTensor, got a {type(tensor).__name__}"
        raise UnsupportedOnBackend(msg)

    def own_mesh(self, mesh: Any) -> Any:
        """Convert a mesh of the framework to a DeviceMesh of this library; return other values unchanged."""
        return mesh

    def own_placement(self, placement: Any) -> Any:
        """Convert a placement of the framework to one of this library; return other values unchanged.

        Raises:
            UnsupportedOperatorError: only the framework has such a placement.
        """
        return placement

    def value_and_grad(self, fn: Callable[..., Any], *options: Any) -> Callable[..., tuple[Any, Any]]:
        """Return the framework's ``value_and_grad`` of ``fn``, with gradients of DTensors as DTensors.

        Raises:
            UnsupportedOnBackend: the framework keeps gradients on tensors.
        """
        del fn, options
        msg = (
            f"value_and_grad: {self.platform_type} keeps gradients on tensors; "
            "call loss.backward() and read parameter.grad"
        )
        raise UnsupportedOnBackend(msg)

    @abc.abstractmethod
    def local_op(self, op: str) -> Callable[..., Any]:
        """Return the framework's implementation of the canonical operator ``op`` on plain tensors."""
