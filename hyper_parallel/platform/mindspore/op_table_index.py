"""MindSpore's names: gathering and scattering."""

from __future__ import annotations

__all__ = ["IN_PLACE", "REORDERED", "SAME"]

SAME = """
GatherD gather  IndexSelect index_select  ScatterAddExt scatter_add  IndexAddExt index_add
"""
REORDERED = {
    "Scatter": ("scatter", "x, dim, index, src, reduction=0"),
    "Embedding": ("embedding", "x, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False"),
}
IN_PLACE = """
InplaceScatterAdd scatter_add  InplaceIndexAddExt index_add
"""
