"""Operators that only Ascend devices have, under the names that programs import. Each raises when it is called."""

from __future__ import annotations

from hyper_parallel.compat.refusals import refused_function

_NAMES = (
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
_REASON = "a kernel for Ascend devices, which this library does not have; configure the unfused implementation"

__all__ = list(_NAMES)
globals().update({name: refused_function(name, _REASON) for name in _NAMES})
