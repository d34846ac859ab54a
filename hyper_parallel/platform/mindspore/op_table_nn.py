"""MindSpore's names: matrix products and layers."""

from __future__ import annotations

__all__ = ["SAME"]

SAME = """
Dense linear  MatMulExt matmul  BatchMatMulExt bmm  Mm mm  Mv mv  Dot dot  Outer outer  Addmm addmm  Baddbmm baddbmm
Addmv addmv  Addbmm addbmm  Ger outer  Vdot dot  GLU glu
"""
