"""Context-parallel styles under the names that programs import. Each raises when an object of it is made."""

from __future__ import annotations

from hyper_parallel.compat.refusals import refused_class

_REASON = "styles of context parallelism are not supported; call hyper_parallel.context_parallel_attention"
_SPARSE = "context parallelism of sparse attention is not supported; set context_parallel to 1"

AsyncContextParallel = refused_class("AsyncContextParallel", _REASON)
ContextParallel = refused_class("ContextParallel", _REASON)
AsyncDSAIndexerContextParallel = refused_class("AsyncDSAIndexerContextParallel", _SPARSE)
AsyncDSAIndexerLossContextParallel = refused_class("AsyncDSAIndexerLossContextParallel", _SPARSE)
AsyncDSASparseAttentionContextParallel = refused_class("AsyncDSASparseAttentionContextParallel", _SPARSE)
DSAIndexerContextParallel = refused_class("DSAIndexerContextParallel", _SPARSE)
DSAIndexerLossContextParallel = refused_class("DSAIndexerLossContextParallel", _SPARSE)
DSASequenceReplicateCache = refused_class("DSASequenceReplicateCache", _SPARSE)
DSASparseAttentionContextParallel = refused_class("DSASparseAttentionContextParallel", _SPARSE)

__all__ = [
    "AsyncContextParallel",
    "AsyncDSAIndexerContextParallel",
    "AsyncDSAIndexerLossContextParallel",
    "AsyncDSASparseAttentionContextParallel",
    "ContextParallel",
    "DSAIndexerContextParallel",
    "DSAIndexerLossContextParallel",
    "DSASequenceReplicateCache",
    "DSASparseAttentionContextParallel",
]
