"""PyTorch's names of linear algebra."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, linalg

from hyper_parallel.platform.torch.op_line import Line, both
from hyper_parallel.platform.torch.op_table_pointwise import by_name

__all__ = ["FUNCTIONS", "LOCAL", "OVERLOADS"]

aten = torch.ops.aten

FACTORS = [
    Line("cholesky", (torch.cholesky, Tensor.cholesky)),
    Line("cholesky", (linalg.cholesky,), "x, *, upper=False"),
    Line("cholesky_ex", (linalg.cholesky_ex,), "x, *, upper=False, check_errors=False"),
    both("cholesky_inverse"),
    Line("qr", (linalg.qr,), "x, mode='reduced'"),
    Line("qr", (torch.qr, Tensor.qr), "x, mode=True"),
    both("geqrf"),
    Line("householder_product", (linalg.householder_product, torch.orgqr, Tensor.orgqr)),
    both("ormqr", signature="x, tau, y, left=True, transpose=False"),
    Line("svd", (linalg.svd,)),
    both("svd_transposed", "svd"),
    Line("svdvals", (linalg.svdvals,)),
    Line("eig", (linalg.eig,)),
    Line("eigvals", (linalg.eigvals,)),
    Line("eigh", (linalg.eigh,)),
    Line("eigvalsh", (linalg.eigvalsh,)),
    Line("lu", (linalg.lu,)),
    Line("lu_factor", (linalg.lu_factor,)),
    Line("lu_factor_ex", (linalg.lu_factor_ex,)),
    Line("lu_unpack", (torch.lu_unpack,)),
    Line("ldl_factor", (linalg.ldl_factor,)),
    Line("ldl_factor_ex", (linalg.ldl_factor_ex,)),
]

SOLVERS = [
    Line("solve", (linalg.solve,)),
    Line("solve_ex", (linalg.solve_ex,)),
    Line("solve_triangular", (linalg.solve_triangular,)),
    both("triangular_solve", signature="x, A, upper=True, transpose=False, unitriangular=False"),
    both("cholesky_solve"),
    Line("lu_solve", (linalg.lu_solve,)),
    Line("lu_solve_first", (torch.lu_solve, Tensor.lu_solve)),
    Line("ldl_solve", (linalg.ldl_solve,)),
    Line("lstsq", (linalg.lstsq,)),
    Line("inv", (linalg.inv, torch.inverse, Tensor.inverse)),
    Line("inv_ex", (linalg.inv_ex,)),
    Line("pinv", (linalg.pinv,)),
    both("pinv", "pinverse", signature="x, rcond=1e-15"),
]

NUMBERS = [
    Line("det", (linalg.det, torch.det, Tensor.det)),
    both("logdet"),
    Line("slogdet", (linalg.slogdet, torch.slogdet, Tensor.slogdet)),
    Line("matrix_rank", (linalg.matrix_rank,)),
    Line("cond", (linalg.cond,)),
    Line("matrix_norm", (linalg.matrix_norm,)),
    Line("linalg_norm", (linalg.norm,)),
    both("cov"),
]

PRODUCTS = [
    Line("matrix_power", (linalg.matrix_power, torch.matrix_power, Tensor.matrix_power)),
    Line("matrix_exp", (linalg.matrix_exp, torch.matrix_exp, Tensor.matrix_exp)),
    Line("cross", (linalg.cross,), "x, y, *, dim=-1"),
    both("cross_default", "cross"),
    Line("vander", (linalg.vander,), "x, *, N=None"),
]

FUNCTIONS = [*FACTORS, *SOLVERS, *NUMBERS, *PRODUCTS]

OVERLOADS = [
    Line("cholesky_ex", (aten.linalg_cholesky_ex.default,)),
    Line("inv_ex", (aten.linalg_inv_ex.default,)),
    Line("det_parts", (aten._linalg_det.default,)),  # noqa: SLF001 - an operator's name, as below
    Line("slogdet_parts", (aten._linalg_slogdet.default,)),  # noqa: SLF001
    Line("svd_parts", (aten._linalg_svd.default,)),  # noqa: SLF001
    Line("eigh_parts", (aten._linalg_eigh.default,)),  # noqa: SLF001
    Line("eig", (aten.linalg_eig.default,)),
    Line("qr", (aten.linalg_qr.default,)),
    Line("lu", (aten.linalg_lu.default,)),
    Line("lu_factor_ex", (aten.linalg_lu_factor_ex.default,)),
    Line("lu_unpack", (aten.lu_unpack.default,)),
    Line("lu_solve", (aten.linalg_lu_solve.default,)),
    Line("solve_parts", (aten._linalg_solve_ex.default,)),  # noqa: SLF001
    Line("solve_triangular", (aten.linalg_solve_triangular.default,)),
    Line("pinv", (aten.linalg_pinv.atol_rtol_tensor,), "x, *, atol=None, rtol=None, hermitian=False"),
    Line("matrix_exp", (aten.linalg_matrix_exp.default,)),
    Line("cross", (aten.linalg_cross.default,), "x, y, *, dim=-1"),
]


LOCAL: dict[str, Callable[..., Any]] = {
    **by_name([*FUNCTIONS, *OVERLOADS]),
    "pinv": lambda x, rcond=None, hermitian=False, atol=None, rtol=None: linalg.pinv(
        x, atol=atol, rtol=rcond if rtol is None else rtol, hermitian=hermitian
    ),
    "matrix_rank": lambda x, tol=None, hermitian=False, atol=None, rtol=None: linalg.matrix_rank(
        x, atol=tol if atol is None else atol, rtol=rtol, hermitian=hermitian
    ),
    "cross": lambda x, y, dim=-1: linalg.cross(x, y, dim=dim),
    "lu_solve": lambda LU, pivots, y, left=True, adjoint=False: linalg.lu_solve(  # noqa: N803 - PyTorch's name
        LU, pivots.int(), y, left=left, adjoint=adjoint
    ),
    "ldl_solve": lambda LD, pivots, y, hermitian=False: linalg.ldl_solve(  # noqa: N803 - PyTorch's name
        LD, pivots.int(), y, hermitian=hermitian
    ),
    "vander": lambda x, N: linalg.vander(x, N=N),  # noqa: N803 - PyTorch's name
    "matrix_norm": lambda x, ord="fro", dim=(-2, -1), keepdim=False, dtype=None: linalg.matrix_norm(  # noqa: A006
        x, ord, dim, keepdim, dtype=dtype
    ),
}
