"""MindSpore's names: reductions, running sums and softmaxes."""

from __future__ import annotations

__all__ = ["REORDERED", "SAME"]

SAME = """
SumExt sum  MeanExt mean  ProdExt prod  Nansum nansum  CountNonZero count_nonzero  Any any  AnyExt any  ReduceAny any
All all  ReduceAll all  ReduceMax amax  ReduceMin amin  AMax amax  AMin amin  ArgMaxExt argmax  ArgMinExt argmin
Max max  Min min  MaxDim max_along  MinDim min_along  LogSumExp logsumexp  LogSumExpExt logsumexp  CumsumExt cumsum
LogCumsumExp logcumsumexp  LinalgVectorNorm vector_norm  MedianDim median_along
Cummax cummax  CumminExt cummin  MedianExt median_all
SortExt sort  ArgSort argsort  TopkExt topk  Kthvalue kthvalue
"""
REORDERED = {
    "HistcExt": ("histc", "x, bins=100, min=0, max=0"),
    "BincountExt": ("bincount", "x, weights=None, minlength=0"),
    "Cdist": ("cdist", "x, y, p=2.0"),
    "DeprecatedSum": ("sum", "x, dim=None, dtype=None, keepdim=False"),
    "DeprecatedMean": ("mean", "x, dim=None, keepdim=False"),
    "DeprecatedProd": ("prod", "x, dim=None, keepdim=False, dtype=None"),
    "DeprecatedVar": ("var", "x, dim=None, correction=0, keepdim=False"),
    "DeprecatedArgmax": ("argmax", "x, dim=None, keepdim=False"),
    "DeprecatedMax": ("amax", "x, dim=None, keepdim=False, initial=None, where=True, return_indices=False"),
    "DeprecatedMin": ("amin", "x, dim=None, keepdim=False, initial=None, where=True, return_indices=False"),
    "DeprecatedAny": ("any", "x, dim=None, keepdim=False"),
    "DeprecatedAll": ("all", "x, dim=None, keepdim=False"),
    "CumProd": ("cumprod", "x, dim, exclusive=False, reverse=False"),
    "CumSum": ("cumsum", "x, dim, exclusive=False, reverse=False"),
    "LogSoftmaxExt": ("log_softmax", "x, dim=-1, dtype=None"),
    "Var": ("var", "x, dim=None, correction=1, keepdim=False"),
    "Std": ("std", "x, dim=None, correction=1, keepdim=False"),
    "VarMean": ("var_mean", "x, dim=None, correction=1, keepdim=False"),
    "StdMean": ("std_mean", "x, dim=None, correction=1, keepdim=False"),
}
