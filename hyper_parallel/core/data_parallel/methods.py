"""The methods that ``fully_shard`` adds to modules, with the names that they have in PyTorch."""

from __future__ import annotations

from functools import lru_cache, partial, update_wrapper
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.data_parallel.accumulation import set_requires_gradient_sync
from hyper_parallel.core.data_parallel.sharding import groups_of
from hyper_parallel.errors import ArgumentTypeError, PlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["FSDPModule", "UnshardHandle", "class_with", "register_fsdp_forward_method", "share_comm_ctx"]


class UnshardHandle:
    """Returned by ``unshard(async_op=True)``; the parameters are already gathered."""

    def wait(self) -> None:
        """Return at once, because the parameters are gathered already."""


class FSDPModule:
    """Base class of every PyTorch module that ``fully_shard`` was applied to."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an instance of the module's original class: calling ``type(module)`` gives an unsharded one."""
        kind: Any = cls.__mro__[2]
        made = kind.__new__(kind, *args, **kwargs)
        made.__init__(*args, **kwargs)
        return made

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this module's group, until ``reshard()`` or the end of a forward; all ranks call it.

        A gradient reaches the gathered parameters only through forward.
        """
        for group in groups_of(self)[0]:
            group.unshard()
        return UnshardHandle() if async_op else None

    def reshard(self) -> None:
        """Free the gathered parameters of this module's own group.

        Raises:
            PlanError: the forward or backward of the module is running.
        """
        for group in groups_of(self)[0]:
            group.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Reduce gradients in later passes, or accumulate them on each rank; see the function of this name."""
        set_requires_gradient_sync(self, requires_gradient_sync, recurse=recurse)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Reduce over the replicas in later passes, or keep the sums over the sharding axis until a pass does."""
        self._set("reduces_over_replicas", requires_all_reduce, recurse=recurse)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Has no effect: every backward waits for its reductions."""

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Free the gathered parameters after forward, or keep them until backward."""
        self._set("reshards_after_forward", reshard_after_forward, recurse=recurse)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Free the gathered parameters after backward, or keep them until the shards are written."""
        self._set("keeps_after_backward", not reshard_after_backward, recurse=recurse)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sums of this module's own gradients by ``factor`` instead of the number of ranks.

        Raises:
            PlanError: it is not positive, or parameters are DTensors on the data axes.
        """
        if not factor > 0:
            msg = f"set_gradient_divide_factor: {factor!r} must be positive"
            raise PlanError(msg)
        if any(group.options.on_data_axes for group in groups_of(self)[0]):
            msg = (
                "set_gradient_divide_factor: parameters are DTensors on the data axes, where gradients of sharded "
                "values are sums already; multiply the loss instead"
            )
            raise PlanError(msg)
        self._set("divide_factor", factor, recurse=False)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """:meth:`set_gradient_divide_factor` under its old name."""
        self.set_gradient_divide_factor(factor)

    def set_modules_to_forward_prefetch(self, modules: Sequence[Any]) -> None:
        """Only check that the modules are under ``fully_shard``: prefetches follow the order of the last forward."""
        _require_sharded("set_modules_to_forward_prefetch", modules)

    def set_modules_to_backward_prefetch(self, modules: Sequence[Any]) -> None:
        """Only check that the modules are under ``fully_shard``: prefetches follow the order of the last backward."""
        _require_sharded("set_modules_to_backward_prefetch", modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Has no effect: backward gathers whatever forward has freed."""

    def set_post_optim_event(self, event: Any) -> None:
        """Has no effect: gathers run after the optimizer, on its stream."""

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Has no effect: reductions are sums, which are divided afterwards."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Has no effect: PyTorch allocates all memory, for every transport."""

    def set_symm_mem_for_comm(self, *args: Any, **options: Any) -> None:
        """Has no effect, like :meth:`set_allocate_memory_from_process_group_for_comm`."""

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Has no effect: all collectives of a data axis use one group."""

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Only check the number: at most two collectives are in flight.

        Raises:
            PlanError: it is not a positive integer.
        """
        del recurse
        number: Any = max_input_buffers  # callers may not be type-checked
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            msg = f"set_reduce_scatter_max_input_buffers: {number!r} must be a positive integer"
            raise PlanError(msg)

    def reset_iter_state(self) -> None:
        """Has no effect: the state of a pass that raises is reset at once."""

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Accept only False: ranks may use different parameters, and a parameter that no rank uses has no gradient.

        Raises:
            PlanError: True is given, which asks for gradients of zeros for such parameters.
        """
        del recurse
        if reduce_scatter_unused_params:
            msg = (
                "set_reduce_scatter_unused_params: ranks may use different parameters without it, and a parameter that "
                "no rank uses has no gradient, as on one device; leave it out"
            )
            raise PlanError(msg)

    def set_all_reduce_hook(self, hook: Any, *args: Any, **options: Any) -> None:
        """Refused, like everything that replaces a collective."""
        del hook, args, options
        raise _refused("set_all_reduce_hook")

    def set_custom_all_gather(self, comm: Any) -> None:
        """Refused, like everything that replaces a collective."""
        del comm
        raise _refused("set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Refused, like everything that replaces a collective."""
        del comm
        raise _refused("set_custom_reduce_scatter")

    def _set(self, name: str, value: Any, *, recurse: bool) -> None:
        own, nested = groups_of(self)
        for group in [*own, *nested] if recurse else own:
            setattr(group, name, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return the state for copies and pickles; the class is created again from the module's own."""
        del protocol
        return _empty, (type(self).__mro__[2],), dict(vars(self))


def _refused(method: str) -> PlanError:
    return PlanError(
        f"{method}: collectives of fully_shard are not replaced, since all ranks agree on them beforehand; to change "
        "gradients, use hooks of the parameters, which get the reduced gradients"
    )


class _ForwardMethod:
    """A method that gathers parameters as forward does. It is copied and saved with its module."""

    def __init__(self, module: Any, method: Callable[..., Any]) -> None:
        self.module, self.method = module, method
        update_wrapper(self, method, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = self.method
        for group in groups_of(self.module)[0]:
            run = partial(group.as_forward, self.module, run)
        return run(*args, **kwargs)


def register_fsdp_forward_method(module: Any, method_name: str) -> None:
    """Let a method of a module under ``fully_shard`` gather parameters as its forward does, such as ``generate``.

    A module that ``fully_shard`` was not applied to is unchanged. If the method calls the module's own forward, the
    gathered parameters are freed at its end: read them before that call.

    Args:
        module: the module.
        method_name: name of the method.

    Raises:
        PlanError: (a ValueError) the module has no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        msg = f"register_fsdp_forward_method: {type(module).__name__} has no method {method_name!r}"
        raise PlanError(msg)
    if not isinstance(method, _ForwardMethod):
        setattr(module, method_name, _ForwardMethod(module, method))


def share_comm_ctx(modules: Sequence[Any]) -> None:
    """Only check that the modules are under ``fully_shard``: the order of their collectives is learned.

    Args:
        modules: the modules, such as stages of a pipeline.
    """
    _require_sharded("share_comm_ctx", modules)


def _require_sharded(caller: str, modules: Sequence[Any]) -> None:
    for module in modules:
        if not isinstance(module, FSDPModule):
            msg = f"{caller}: fully_shard was not applied to this {type(module).__name__}"
            raise ArgumentTypeError(msg)


@lru_cache(maxsize=1024)
def class_with(methods: type, kind: type) -> type:
    """Return a subclass of ``kind`` with the same name, in which the methods of ``methods`` come first."""
    if issubclass(kind, methods):
        return kind
    return type(kind.__name__, (methods, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _empty(kind: type) -> Any:
    """Return an instance of the class for modules of ``kind``, without attributes."""
    make: Any = kind.__new__
    return make(class_with(FSDPModule, kind))
