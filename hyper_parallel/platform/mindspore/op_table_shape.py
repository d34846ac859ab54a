"""MindSpore's names: what rearranges, cuts, joins or stretches dims."""

from __future__ import annotations

__all__ = ["REORDERED", "SAME"]

SAME = """
Reshape view  View view  TransposeExtView transpose  TransposeExt transpose  TransposeView permute  TExt t
ExpandDims unsqueeze  ExpandDimsView unsqueeze  BroadcastTo expand  BroadcastToView expand
FlattenExt flatten  Tile tile  Repeat repeat  RepeatInterleaveInt repeat_interleave
Concat cat  StackExt stack  SplitTensor split  SplitTensorView split  SplitWithSize split  SplitWithSizeView split
Chunk chunk  ChunkView chunk  UnstackExt unbind  UnstackExtView unbind  NarrowView narrow  Narrow narrow
SelectExt select  SelectExtView select  ReverseV2 flip  Roll roll  TrilExt tril  Triu triu  Tril tril
"""
REORDERED = {
    "Diagonal": ("diagonal", "x, offset=0, dim1=0, dim2=1"),
    "DiagonalView": ("diagonal", "x, offset=0, dim1=0, dim2=1"),
}
