"""Names that programs of an earlier release import: functions on gradients and parameters, and unsupported names.

That release had its own sharded data parallelism, ``hsdp``, and checkpoints per rank. Both are gone: the names can be
imported, but calls raise an error with the replacement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.compat.refusals import refused_class, refused_function
from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.select import platform_of_argument, value_and_grad

__all__ = [
    "HSDPCell",
    "hsdp",
    "hsdp_sync_stream",
    "init_parameters",
    "load_checkpoint",
    "parallelize_value_and_grad",
    "save_checkpoint",
]


def parallelize_value_and_grad(fn: Callable[..., Any], weights: Any, sens: Any = None) -> Callable[..., Any]:
    """Return a function that computes ``fn`` and its gradients with respect to ``weights``, equal to one device's.

    Args:
        fn: a function or cell with one result.
        weights: the parameters.
        sens: must be None; the cotangent of the result is one.

    Raises:
        UnsupportedOnBackend: (a NotImplementedError) ``sens`` is given, or the framework is PyTorch.
        TypeError: ``fn`` has several results; raised when the function runs.
    """
    if sens is not None:
        msg = f"parallelize_value_and_grad: sens={sens!r} is not supported; multiply the result of fn by it"
        raise UnsupportedOnBackend(msg)

    def one_result(*args: Any, **kwargs: Any) -> Any:
        result = fn(*args, **kwargs)
        if isinstance(result, (list, tuple)):
            msg = f"parallelize_value_and_grad: fn returned {len(result)} results and must return one; "
            raise TypeError(msg + "call hyper_parallel.value_and_grad(fn, None, weights, has_aux=True)")
        return result

    return value_and_grad(one_result, None, weights)


def init_parameters(module: Any, stage_index: int = 0) -> Any:
    """Run the initializer of every parameter of ``module`` that has no values yet, and return the module.

    Args:
        module: the module, after its parameters were sharded.
        stage_index: index of the module's stage in a pipeline.
    """
    platform_of_argument(module, "init_parameters: module", module=True).init_parameters(module, stage_index)
    return module


_SHARDED = "the sharded data parallelism of an earlier release; call fully_shard(module, mesh=mesh)"
_CHECKPOINT = "a file per rank, which the same mesh alone can load; call {} of hyper_parallel.core.checkpoint"

hsdp = refused_function("hsdp", _SHARDED)
hsdp_sync_stream = refused_function("hsdp_sync_stream", "of hsdp; fully_shard, which takes its place, waits by itself")
HSDPCell = refused_class("HSDPCell", _SHARDED)
save_checkpoint = refused_function("save_checkpoint", _CHECKPOINT.format("save"))
load_checkpoint = refused_function("load_checkpoint", _CHECKPOINT.format("load"))
