"""MindSpore's names: matrix products and layers."""

from __future__ import annotations

__all__ = ["SAME"]

SAME = """
Dense linear  MatMulExt matmul  BatchMatMulExt bmm  Mm mm  Mv mv  Dot dot  Outer outer  Addmm addmm  Baddbmm baddbmm
Addmv addmv  Addbmm addbmm  Ger outer  Vdot dot  GLU glu  PixelShuffle pixel_shuffle
PixelUnshuffle pixel_unshuffle  ChannelShuffle channel_shuffle  AdaptiveAvgPool2D adaptive_avg_pool2d
AdaptiveAvgPool2DExt adaptive_avg_pool2d  AdaptiveAvgPool3D adaptive_avg_pool3d
AdaptiveAvgPool3DExt adaptive_avg_pool3d  AdaptiveMaxPool2D adaptive_max_pool2d  GridSampler2D grid_sample
MatrixInverseExt inv  MatrixDeterminant det  Cholesky cholesky
FFT fft  IFFT ifft  HFFT hfft  IHFFT ihfft  RFFT rfft  IRFFT irfft  FFT2 fft2  IFFT2 ifft2  HFFT2 hfft2
IHFFT2 ihfft2  RFFT2 rfft2  IRFFT2 irfft2  FFTN fftn  IFFTN ifftn  HFFTN hfftn  IHFFTN ihfftn  RFFTN rfftn
IRFFTN irfftn
Im2ColExt im2col  Col2ImExt col2im
"""
