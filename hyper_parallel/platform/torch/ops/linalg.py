"""PyTorch's spellings of linear algebra and of distances."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, linalg

from hyper_parallel.platform.torch.ops.index import gathered
from hyper_parallel.platform.torch.ops.registry import aten, decomposition, kernel, spelling

# -- factors -----------------------------------------------------------------------------------------------------------

spelling("cholesky", torch.cholesky, Tensor.cholesky)  # from 2.14 on they only raise
spelling("cholesky", linalg.cholesky, signature="x, *, upper=False")
kernel("cholesky")(lambda x, upper=False: linalg.cholesky(x, upper=upper))
spelling("cholesky_ex", linalg.cholesky_ex, signature="x, *, upper=False, check_errors=False")
spelling("cholesky_ex", aten.linalg_cholesky_ex.default)
spelling("cholesky_inverse")
spelling("qr", linalg.qr, signature="x, mode='reduced'")
spelling("qr", aten.linalg_qr.default)
spelling("qr", torch.qr, Tensor.qr, signature="x, mode=True")
spelling("geqrf")
spelling("householder_product", linalg.householder_product, torch.orgqr, Tensor.orgqr)
spelling("ormqr", signature="x, tau, y, left=True, transpose=False")
spelling("svd", linalg.svd)
spelling("svd_parts", aten._linalg_svd.default)
spelling("svd_transposed", "svd")
spelling("svdvals", linalg.svdvals)
spelling("eig", linalg.eig, aten.linalg_eig.default)
spelling("eigvals", linalg.eigvals)
spelling("eigh", linalg.eigh)
spelling("eigh_parts", aten._linalg_eigh.default)
spelling("eigvalsh", linalg.eigvalsh)
spelling("lu", linalg.lu, aten.linalg_lu.default)
spelling("lu_factor", linalg.lu_factor)
spelling("lu_factor_ex", linalg.lu_factor_ex, aten.linalg_lu_factor_ex.default)
spelling("lu_unpack", torch.lu_unpack, aten.lu_unpack.default)
spelling("ldl_factor", linalg.ldl_factor)
spelling("ldl_factor_ex", linalg.ldl_factor_ex)

# -- solvers and inverses ----------------------------------------------------------------------------------------------

spelling("solve", linalg.solve)
spelling("solve_ex", linalg.solve_ex)
spelling("solve_parts", aten._linalg_solve_ex.default)
spelling("solve_triangular", linalg.solve_triangular, aten.linalg_solve_triangular.default)
spelling("triangular_solve", signature="x, A, upper=True, transpose=False, unitriangular=False")
spelling("cholesky_solve")
spelling("lu_solve", linalg.lu_solve, aten.linalg_lu_solve.default)
spelling("lu_solve_first", torch.lu_solve, Tensor.lu_solve)
spelling("ldl_solve", linalg.ldl_solve)
spelling("lstsq", linalg.lstsq)
spelling("inv", linalg.inv, torch.inverse, Tensor.inverse)
spelling("inv_ex", linalg.inv_ex, aten.linalg_inv_ex.default)
spelling("pinv", linalg.pinv)
spelling("pinv", "pinverse", signature="x, rcond=1e-15")
spelling("pinv", aten.linalg_pinv.atol_rtol_tensor, signature="x, *, atol=None, rtol=None, hermitian=False")


@kernel("lu_solve")
def _lu_solve(LU: Tensor, pivots: Tensor, y: Tensor, left: bool = True, adjoint: bool = False) -> Tensor:
    return linalg.lu_solve(LU, pivots.int(), y, left=left, adjoint=adjoint)


@kernel("ldl_solve")
def _ldl_solve(LD: Tensor, pivots: Tensor, y: Tensor, hermitian: bool = False) -> Tensor:
    return linalg.ldl_solve(LD, pivots.int(), y, hermitian=hermitian)


@kernel("pinv")
def _pinv(x: Tensor, rcond: Any = None, hermitian: bool = False, atol: Any = None, rtol: Any = None) -> Tensor:
    return linalg.pinv(x, atol=atol, rtol=rcond if rtol is None else rtol, hermitian=hermitian)


@decomposition(aten._linalg_check_errors.default, signature="x, api_name, *, is_matrix", op="check_errors")
def _check_errors(_ops: Any, x: Any, api_name: str, is_matrix: bool) -> None:
    """Raise the errors of every matrix on every rank."""
    aten._linalg_check_errors(gathered(x, api_name), api_name, is_matrix=is_matrix)


# -- numbers of matrices -----------------------------------------------------------------------------------------------

spelling("det", linalg.det, torch.det, Tensor.det)
spelling("det_parts", aten._linalg_det.default)
spelling("logdet")
spelling("slogdet", linalg.slogdet, torch.slogdet, Tensor.slogdet)
spelling("slogdet_parts", aten._linalg_slogdet.default)
spelling("matrix_rank", linalg.matrix_rank)
spelling("cond", linalg.cond)
spelling("matrix_norm", linalg.matrix_norm)
spelling("linalg_norm", linalg.norm)
spelling("cov")


@kernel("matrix_rank")
def _matrix_rank(x: Tensor, tol: Any = None, hermitian: bool = False, atol: Any = None, rtol: Any = None) -> Tensor:
    return linalg.matrix_rank(x, atol=tol if atol is None else atol, rtol=rtol, hermitian=hermitian)


@kernel("matrix_norm")
def _matrix_norm(
    x: Tensor,
    ord: Any = "fro",
    dim: Any = (-2, -1),
    keepdim: bool = False,
    dtype: Any = None,
) -> Tensor:
    return linalg.matrix_norm(x, ord, dim, keepdim, dtype=dtype)


# -- products of matrices and vectors ----------------------------------------------------------------------------------

spelling("matrix_power", linalg.matrix_power, torch.matrix_power, Tensor.matrix_power)
spelling("matrix_exp", linalg.matrix_exp, torch.matrix_exp, Tensor.matrix_exp, aten.linalg_matrix_exp.default)
spelling("cross", linalg.cross, aten.linalg_cross.default, signature="x, y, *, dim=-1")
spelling("cross_default", "cross")
spelling("vander", linalg.vander, signature="x, *, N=None")


@kernel("cross")
def _cross(x: Tensor, y: Tensor, dim: int = -1) -> Tensor:
    return linalg.cross(x, y, dim=dim)


# -- distances ---------------------------------------------------------------------------------------------------------

spelling("cdist", torch.cdist, signature="x, y, p=2.0, compute_mode='use_mm_for_euclid_dist_if_necessary'")
spelling("pairwise_distance", F.pairwise_distance, torch.pairwise_distance)
spelling("pdist", aten._pdist_forward.default, canonical=True)


@kernel("cdist")
def _cdist(x: Tensor, y: Tensor, p: float, compute_mode: str | None) -> Tensor:
    return torch.cdist(x, y, p, compute_mode or "use_mm_for_euclid_dist_if_necessary")


@kernel("pdist")
def _pdist(x: Tensor, p: float = 2.0) -> Tensor:
    return F.pdist(x.contiguous(), p)
