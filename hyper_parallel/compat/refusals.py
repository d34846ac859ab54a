"""Names that other programs import but that raise an error when used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from hyper_parallel.errors import UnsupportedOnBackend


def refused_class(name: str, reason: str) -> type[Any]:
    """Return a class that can be named and subclassed but raises an error when instantiated.

    Args:
        name: name of the class.
        reason: reason why it does not exist, and the alternative.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        del self, args, kwargs
        raise UnsupportedOnBackend(f"{name}: {reason}")

    return type(name, (), {"__doc__": f"Refused: {reason}.", "__init__": init, "__module__": __name__})


def refused_function(name: str, reason: str) -> Callable[..., NoReturn]:
    """Return a function that raises an error when called. Arguments as for :func:`refused_class`."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        del args, kwargs
        raise UnsupportedOnBackend(f"{name}: {reason}")

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Refused: {reason}."
    return call


_KERNELS = (
    "npu_dense_lightning_indexer_grad_kl_loss",
    "npu_dense_lightning_indexer_softmax_lse",
    "npu_lightning_indexer",
    "npu_mhc_post",
    "npu_mhc_pre_sinkhorn",
    "npu_sparse_flash_mla",
    "npu_sparse_flash_mla_grad",
    "npu_sparse_lightning_indexer_grad_kl_loss",
    "npu_sparse_lightning_indexer_kl_loss_grad",
)
_KERNEL = "a kernel for Ascend devices, which this library does not have; configure the unfused implementation"

_STYLES = (
    "AsyncDSAIndexerContextParallel",
    "AsyncDSAIndexerLossContextParallel",
    "AsyncDSASparseAttentionContextParallel",
    "DSAIndexerContextParallel",
    "DSAIndexerLossContextParallel",
    "DSASequenceReplicateCache",
    "DSASparseAttentionContextParallel",
)
_SPARSE = "context parallelism of sparse attention is not supported; set context_parallel to 1"

__all__ = [  # noqa: F822 - made below
    "AsyncDSAIndexerContextParallel",
    "AsyncDSAIndexerLossContextParallel",
    "AsyncDSASparseAttentionContextParallel",
    "DSAIndexerContextParallel",
    "DSAIndexerLossContextParallel",
    "DSASequenceReplicateCache",
    "DSASparseAttentionContextParallel",
    "npu_dense_lightning_indexer_grad_kl_loss",
    "npu_dense_lightning_indexer_softmax_lse",
    "npu_lightning_indexer",
    "npu_mhc_post",
    "npu_mhc_pre_sinkhorn",
    "npu_sparse_flash_mla",
    "npu_sparse_flash_mla_grad",
    "npu_sparse_lightning_indexer_grad_kl_loss",
    "npu_sparse_lightning_indexer_kl_loss_grad",
    "refused_class",
    "refused_function",
]
globals().update({name: refused_function(name, _KERNEL) for name in _KERNELS})
globals().update({name: refused_class(name, _SPARSE) for name in _STYLES})
