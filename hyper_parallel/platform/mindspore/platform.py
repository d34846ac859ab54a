"""MindSpore's platform: its facets, assembled."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from functools import cached_property
from io import StringIO
from typing import Any

# Without it every host read costs milliseconds on CPU, and an error surfaces in a later, unrelated statement.
os.environ.setdefault("MS_DEV_LAUNCH_BLOCKING", "1")

import mindspore
from mindspore import mint

from hyper_parallel._versions import Missing
from hyper_parallel.core.dtensor.moved_view import MovedView
from hyper_parallel.errors import MeshError, UnsupportedOnBackend, UnsupportedOperatorError
from hyper_parallel.platform.contract.differentiable import DifferentiableFacet
from hyper_parallel.platform.contract.groups import GroupsFacet
from hyper_parallel.platform.contract.launcher_env import unlaunched
from hyper_parallel.platform.contract.ledger import Gap
from hyper_parallel.platform.contract.platform import Platform
from hyper_parallel.platform.mindspore.memory import MindSporeMemory
from hyper_parallel.platform.mindspore.modules import MindSporeModules
from hyper_parallel.platform.mindspore.ops.empty_shards import kernel_on_elements
from hyper_parallel.platform.mindspore.ops.kernels import is_leaf, requires_grad
from hyper_parallel.platform.mindspore.persistence import MindSporePersistence
from hyper_parallel.platform.mindspore.runtime import MindSporeRuntime
from hyper_parallel.platform.mindspore.shared_storage import note_write, share_count
from hyper_parallel.platform.mindspore.tensors import MindSporeTensors
from hyper_parallel.platform.mindspore.versions import Function as _Function, MsDispatchMode, pynative_executor
from hyper_parallel.transport.base import Transport, active_transport_of
from hyper_parallel.transport.host.numpy_ops import NumpyOps
from hyper_parallel.transport.real.mindspore.transport import HcclTransport, NumpyBridge, connect, start_rehearsal
from hyper_parallel.transport.simulated.single_process import SingleTransport

__all__ = ["GAPS", "MindSporeDifferentiable", "MindSporeGroups", "MindSporePlatform", "build"]

GAPS = (
    Gap(
        "get_symmetric_memory_handler",
        "MindSpore has no symmetric memory",
        "use the collectives of the platform",
    ),
    *(
        [Gap("create_selective_checkpoint_contexts", MsDispatchMode.message, "checkpoint without a policy")]
        if isinstance(MsDispatchMode, Missing)
        else []
    ),
)


class MindSporeDifferentiable(DifferentiableFacet):
    """Collectives with gradients, on MindSpore."""

    def _awaited_on_use(self, output: Any, pending: Any) -> Any:
        """Wait and return ``output``: waiting orders streams on Ascend, and completes launched operations on CPU."""
        pending.wait()
        return output


class MindSporeGroups(GroupsFacet):
    """Worlds and groups of ``mindspore.mint.distributed``.

    On CPU, real processes communicate over PyTorch's gloo; this is called the rehearsal (of HCCL).
    """

    _rehearsal: Transport | None

    def _join(self, asked: dict[str, Any]) -> None:
        """Join over ``hccl`` with MindSpore, or over ``gloo`` with PyTorch; ``mccl`` is refused with the reason."""
        backend = asked["backend"]
        if backend != "gloo":
            options = {name: value for name, value in asked.items() if value is not None and name != "backend"}
            connect(backend, **options)
            return
        refused = [name for name in ("store", "pg_options", "device_id", "timeout") if asked[name] is not None]
        if refused:
            msg = f"init_process_group: the CPU rehearsal over gloo takes no {', '.join(refused)}; leave them out"
            raise UnsupportedOnBackend(msg)
        rank, size = _number(asked, "rank", "RANK"), _number(asked, "world_size", "WORLD_SIZE")
        self._rehearsal = start_rehearsal(rank, size, asked["init_method"] or "env://")

    def _barrier_tensor(self) -> Any:
        return mint.zeros((1,))


class MindSporePlatform(
    MindSporeTensors,
    MindSporeGroups,
    MindSporeModules,
    MindSporeDifferentiable,
    MindSporeRuntime,
    MindSporeMemory,
    MindSporePersistence,
    Platform,
):
    """MindSpore's implementation of the platform contract."""

    platform_type = "mindspore"
    gaps = GAPS
    Tensor = mindspore.Tensor
    Parameter = mindspore.Parameter
    Module = mindspore.nn.Cell
    Function = _Function
    # Measured on 2.10: x[1:3].copy_(y) changes neither x[1:3] nor x; x.reshape(shape)[index] = y does not change x.
    loses_writes_through_views = True
    empty_sums_are_uninitialized = True
    _writes = 0

    @cached_property
    def DTensorBase(self) -> Any:
        """MindSpore's DTensor class."""
        from hyper_parallel.platform.mindspore.dtensor import MindSporeDTensor

        return MindSporeDTensor

    def transport(self) -> Transport:
        """Return the transport of the simulated rank, else of the rehearsal, else of HCCL, else of one process."""
        active = active_transport_of("mindspore")
        if active is not None:
            return active
        if self._rehearsal is not None:
            return self._rehearsal
        return self._engine if mindspore.mint.distributed.is_initialized() else unlaunched(_ALONE)

    _rehearsal: Transport | None = None  # set by init_process_group on CPU

    def _leave(self, transport: Transport) -> None:
        transport.close()
        if transport is self._rehearsal:
            self._rehearsal = None
        self.__dict__.pop("_engine", None)

    @cached_property
    def _engine(self) -> Transport:
        return HcclTransport()

    @cached_property
    def wrap(self) -> Callable[[Any, Any], Any]:
        """The fast constructor of the DTensor class."""
        from hyper_parallel.platform.mindspore import dtensor

        return dtensor.wrap

    @cached_property
    def grad_enabled(self) -> Callable[[], bool]:
        """True inside a function that is being differentiated, except under ``no_grad``."""
        return pynative_executor.requires_grad

    needs_grad = staticmethod(requires_grad)  # True where the gradient engine has a node for the tensor

    def passes_gradient(self, plain: Any) -> bool:
        """True while a function is differentiated: inputs and parameters get their gradients through the graph.

        Under ``backward()``, which adds up the gradients of leaves, this is True only for results of operations.
        """
        if not self.grad_enabled() or not self.needs_grad(plain):
            return False
        from hyper_parallel.platform.mindspore.patches import differentiating

        return not is_leaf(plain) or differentiating()

    def is_parameter(self, tensor: Any) -> bool:
        """``Parameter``."""
        return isinstance(tensor, mindspore.Parameter)

    def accumulates_grad(self, local: Any) -> bool:
        """True while ``value_and_grad``, which returns deferred gradients, differentiates with respect to ``local``.

        False if ``local`` has hooks or is under ``replicate``: both need the complete gradient.
        """
        from hyper_parallel.platform.mindspore.autodiff import DIFFERENTIATED
        from hyper_parallel.platform.mindspore.gradients import AVERAGED

        return hasattr(local, DIFFERENTIATED) and not local.hooks() and not hasattr(local, AVERAGED)

    def version(self, local: Any) -> int:
        """Return the number of writes through any DTensor: MindSpore's counter misses some, and views share storage."""
        del local
        return self._writes

    def wrote(self, local: Any) -> None:
        """Count a write to ``local``."""
        self._writes += 1  # one rank is one process, and its operations run on one thread
        note_write(local)

    def follow_writes(self, view: Any, base: Any, *, is_copy: bool) -> None:
        """Invalidate ``view`` when ``base`` is written, by a write counter that aliases of the storage share."""
        if not (is_copy or isinstance(base, MovedView)):
            share_count(view._local, base._local)
            return
        from hyper_parallel.platform.mindspore.dtensor import invalidate_with

        invalidate_with(view, base)

    def may_cache_view(self, tensor: Any) -> bool:
        """True for results of operations only: inputs and parameters live on into the next differentiation."""
        return not is_leaf(tensor._local)

    def on_elements(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """The kernel without the wrapper of ``ops/empty_shards.py``."""
        return kernel_on_elements(func)

    def value_and_grad(self, fn: Callable[..., Any], *how: Any) -> Callable[..., tuple[Any, Any]]:
        """MindSpore's own ``value_and_grad``, whose gradients of DTensors are DTensors."""
        from hyper_parallel.platform.mindspore.autodiff import value_and_grad

        return value_and_grad(fn, *how)

    def operator_entry(self, op: Any) -> Any:
        """Return the dispatcher's entry of a MindSpore operator; ``op`` is its name, or an object with a name."""
        from hyper_parallel.platform.mindspore.intercept import interception

        name = op if isinstance(op, str) else getattr(op, "name", None) or getattr(op, "__name__", "")
        return getattr(interception().handlers.get(str(name)), "entry", None)

    def local_op(self, op: str) -> Callable[..., Any]:
        """Return the kernel."""
        from hyper_parallel.platform.mindspore.ops.registry import kernels

        if op not in kernels():
            msg = f"operator {op} is not implemented on MindSpore; compose it of others, or use PyTorch"
            raise UnsupportedOperatorError(msg)
        return kernels()[op]


_ALONE = NumpyBridge(SingleTransport(NumpyOps()))


def build() -> MindSporePlatform:
    """Return the platform, after completing the DTensor class with it."""
    from hyper_parallel.platform.mindspore.dtensor import install

    find_numpy(mindspore.Tensor(0.0))
    platform = MindSporePlatform()
    install(platform)
    return platform


def find_numpy(tensor: Any) -> None:
    """Make MindSpore search for NumPy's C interface now, with stderr discarded.

    MindSpore is compiled against NumPy 1. On NumPy 2 the first call that searches for the interface prints NumPy's
    advice and fails, whichever call that is; later calls work. The call below has a wrong argument, so it searches and
    then fails without computing anything.
    """
    with redirect_stderr(StringIO()), suppress(ImportError, SystemError, TypeError):
        tensor.reshape("")


def _number(asked: dict[str, Any], name: str, variable: str) -> int:
    value = asked[name] if asked[name] is not None else os.environ.get(variable)
    if value is None:
        msg = f"init_process_group: {name} is not given, and no launcher set {variable}; pass {name}="
        raise MeshError(msg)
    return int(value)
