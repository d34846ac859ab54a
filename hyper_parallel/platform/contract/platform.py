"""The platform: one framework's facets in one object, plus the little that core needs to hold a DTensor."""

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
from hyper_parallel.platform.contract.training import TrainingFacet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    LedgerFacet,
    TrainingFacet,
    ModulesFacet,
    abc.ABC,
):
    """What core and trainers ask of a framework.

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
    def DTensorBase(self) -> Any:  # noqa: N802 - the contract fixes this name
        """The framework's DTensor class."""

    @abc.abstractmethod
    def transport(self) -> Transport:
        """Who carries the bytes here: the surrounding simulated rank, else the framework's own engine, else nobody."""

    @abc.abstractmethod
    def wrap(self, local: Any, layout: Any) -> Any:
        """A DTensor over ``local``, which stays on its autograd graph; shapes are trusted."""

    @abc.abstractmethod
    def grad_enabled(self) -> bool:
        """True when operations are being recorded for backward."""

    @abc.abstractmethod
    def needs_grad(self, local: Any) -> bool:
        """True when ``local`` (a plain tensor) may receive a gradient."""

    @abc.abstractmethod
    def passes_gradient(self, plain: Any) -> bool:
        """True when a new leaf with the values of ``plain`` would keep a gradient that now flows on to somewhere."""

    @abc.abstractmethod
    def is_parameter(self, tensor: Any) -> bool:
        """True for a DTensor that is the framework's ``Parameter``, and a leaf."""

    @abc.abstractmethod
    def accumulates_grad(self, local: Any) -> bool:
        """In backward: True when what the leaf ``local`` receives is added up, and nobody sees it on its way."""

    def accumulate_grad(self, local: Any, grad: Any) -> None:
        """Add to the gradient that the leaf ``local`` keeps, where the framework's leaves keep one."""

    @abc.abstractmethod
    def version(self, local: Any) -> int:
        """Counts writes into ``local`` where the framework does; a constant elsewhere."""

    loses_writes_through_views = False
    """True where values or gradients written through a view do not reach the tensor that it is a view of."""

    @abc.abstractmethod
    def may_keep_view(self, tensor: Any) -> bool:
        """False for a DTensor whose derived views must not outlive one differentiation."""

    def benchmark(self, repeats: int) -> tuple[int, Iterator[Any]]:
        """Host costs per operation beside PyTorch's DTensor: their number, and rows as they are measured.

        A row has ``name, plain, peer, ours, budget, ratio``.

        Raises:
            UnsupportedOnBackend: the framework has no distributed tensor of its own to compare with.
        """
        del repeats
        msg = f"benchmark: {self.platform_type} has no distributed tensor of its own to compare with; measure on torch"
        raise UnsupportedOnBackend(msg)

    @abc.abstractmethod
    def operator_entry(self, op: Any) -> Any:
        """The dispatcher's entry for an operator, given as the framework knows it or by name; None without one."""

    def follow(self, copy: Any, base: Any) -> None:
        """Refuse reads of ``copy``, a view of ``base`` that had to be a copy, once ``base`` is written; or nothing."""
        del copy, base

    def from_torch(self, tensor: Any) -> Any:
        """PyTorch's own DTensor as a DTensor of this library.

        Raises:
            UnsupportedOnBackend: the framework is another.
        """
        msg = f"from_torch: expected a torch.distributed.tensor.DTensor, got a {type(tensor).__name__}"
        raise UnsupportedOnBackend(msg)

    def value_and_grad(self, fn: Callable[..., Any], *how: Any) -> Callable[..., tuple[Any, Any]]:
        """The framework's function that differentiates functions, with gradients of DTensors as DTensors.

        Raises:
            UnsupportedOnBackend: the framework keeps gradients on tensors.
        """
        del fn, how
        msg = (
            f"value_and_grad: {self.platform_type} keeps gradients on tensors; "
            "call loss.backward() and read parameter.grad"
        )
        raise UnsupportedOnBackend(msg)

    @abc.abstractmethod
    def local_op(self, op: str) -> Callable[..., Any]:
        """The framework's implementation of canonical operator ``op`` on plain tensors, with canonical parameters."""

    def writing_op(self, op: str) -> Callable[..., Any]:
        """The same where its first argument is written and returned: what in-place calls run on locals."""
        return self.local_op(op)
