"""Linear algebra and distances: leading dims may be sharded, matrices must not be sharded."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.shard.labels import (
    Labels,
    broadcast_labels,
    labelled_rows,
    nonempty_rows,
    pattern,
    pattern_rule,
)
from hyper_parallel.core.shard.rule import (
    LocalCall,
    OpCall,
    Rule,
    Strategies,
    decomposition,
    register_rule,
    rule,
    whole,
)
from hyper_parallel.core.shard.rules.dims import normalize_dim
from hyper_parallel.core.shard.rules.reduce import reduced_dims, reduced_labels
from hyper_parallel.core.shard.sample import Sample, between, integers, real, sample, sample_call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hyper_parallel.core.dtensor.layout import Layout


def _min_side(sizes: Mapping[str, int]) -> int:
    return min(sizes["m"], sizes["n"])


# -- a fixed signature -------------------------------------------------------------------------------------------------


def _register_pattern(
    op: str, signature: str, text: str, *, each: str = "", **sizes: Callable[[dict[str, int]], int]
) -> None:
    """Declare an operator with the same labels in every call.

    Args:
        op: canonical name.
        signature: its parameters.
        text: its labels, as :func:`pattern_rule` reads them.
        each: the operand in which the operator is linear.
        sizes: sizes of labels that only outputs have.
    """
    register_rule(Rule(op, signature, pattern_rule(text, each=(each,) if each else (), full=True, **sizes)))


SAME = "x ...[n][n] -> ...[n][n]"
_register_pattern("cholesky", "x, upper=False", SAME)
_register_pattern("cholesky_ex", "x, upper=False, check_errors=False", f"{SAME}, ...")
_register_pattern("cholesky_inverse", "x, upper=False", SAME)
_register_pattern("cholesky_solve", "x, L, upper=False", "x ...[n][k], L ...[n][n] -> ...[n][k]", each="x")
_register_pattern("inv", "x", SAME)
_register_pattern("inv_ex", "x, *, check_errors=False", f"{SAME}, ...")
_register_pattern("matrix_exp", "x", SAME)
_register_pattern("matrix_power", "x, n", SAME)
_register_pattern(
    "pinv",
    "x, rcond=None, hermitian=False, *, atol=None, rtol=None",
    "x ...[m][n], rcond ..., atol ..., rtol ... -> ...[n][m]",
)
_register_pattern(
    "matrix_rank",
    "x, tol=None, hermitian=False, *, atol=None, rtol=None",
    "x ...[m][n], tol ..., atol ..., rtol ... -> ...",
)
_register_pattern("cond", "x, p=None", "x ...[m][n] -> ...")
_register_pattern("det", "x", "x ...[n][n] -> ...")
_register_pattern("logdet", "x", "x ...[n][n] -> ...")
_register_pattern("slogdet", "x", "x ...[n][n] -> ..., ...")
_register_pattern("det_parts", "x", "x ...[n][n] -> ..., ...[n][n], ...[n]")
_register_pattern("slogdet_parts", "x", "x ...[n][n] -> ..., ..., ...[n][n], ...[n]")
_register_pattern("eig", "x", "x ...[n][n] -> ...[n], ...[n][n]")
_register_pattern("eigvals", "x", "x ...[n][n] -> ...[n]")
_register_pattern("eigh", "x, UPLO='L'", "x ...[n][n] -> ...[n], ...[n][n]")
_register_pattern("eigvalsh", "x, UPLO='L'", "x ...[n][n] -> ...[n]")
_register_pattern("svdvals", "x, *, driver=None", "x ...[m][n] -> ...[k]", k=_min_side)
_register_pattern("lu_factor", "x, *, pivot=True", "x ...[m][n] -> ...[m][n], ...[k]", k=_min_side)
_register_pattern(
    "lu_factor_ex", "x, *, pivot=True, check_errors=False", "x ...[m][n] -> ...[m][n], ...[k], ...", k=_min_side
)
_register_pattern("ldl_factor", "x, *, hermitian=False", f"{SAME}, ...[n]")
_register_pattern("ldl_factor_ex", "x, *, hermitian=False, check_errors=False", f"{SAME}, ...[n], ...")
_register_pattern(
    "ldl_solve", "LD, pivots, y, *, hermitian=False", "LD ...[n][n], pivots ...[n], y ...[n][k] -> ...[n][k]", each="y"
)
_register_pattern("householder_product", "x, tau", "x ...[m][n], tau ...[j] -> ...[m][n]")
_register_pattern("geqrf", "x", "x ...[m][n] -> ...[m][n], ...[k]", k=_min_side)
_register_pattern("ormqr", "x, tau, y, left=True, transpose=False", "x ...[r][q], tau ...[j], y ...[m][n] -> ...[m][n]")
_register_pattern(
    "triangular_solve",
    "x, A, upper=True, transpose=False, unitriangular=False",
    "x ...[m][n], A ...[m][m] -> ...[m][n], ...[m][m]",
)
for _op, _signature in {
    "lstsq": "x, y, rcond=None, *, driver=None",
    "cov": "x, *, correction=1, fweights=None, aweights=None",
}.items():
    register_rule(Rule(_op, _signature, whole))


# -- results that depend on options ------------------------------------------------------------------------------------


@rule("svd", "x, full_matrices=True, *, driver=None")
def svd(call: OpCall) -> Strategies:
    """Singular value decomposition: U, S, Vh."""
    sides = "...[m][m], ...[k], ...[n][n]" if call["full_matrices"] else "...[m][k], ...[k], ...[k][n]"
    return pattern(call, f"x ...[m][n] -> {sides}", {"k": _min_side}, full=True)


@rule("svd_parts", "x, full_matrices=False, compute_uv=True, *, driver=None")
def svd_parts(call: OpCall) -> Strategies:
    """``svd``; bases that are not requested are empty."""
    if call["compute_uv"]:
        return svd(call)
    return pattern(call, "x ...[m][n] -> [none], ...[k], [none]", {"k": _min_side, "none": 0}, full=True)


@rule("svd_transposed", "x, some=True, compute_uv=True")
def svd_transposed(call: OpCall) -> Strategies:
    """``torch.svd``: the columns of V are the basis; bases that are not requested are square matrices of zeros."""
    reduced = call["some"] and call["compute_uv"]
    sides = "...[m][k], ...[k], ...[n][k]" if reduced else "...[m][m], ...[k], ...[n][n]"
    return pattern(call, f"x ...[m][n] -> {sides}", {"k": _min_side}, full=True)


@rule("eigh_parts", "x, UPLO='L', compute_v=True")
def eigh_parts(call: OpCall) -> Strategies:
    """``eigh``; eigenvectors that are not requested are empty."""
    vectors = "...[n][n]" if call["compute_v"] else "[none]"
    return pattern(call, f"x ...[n][n] -> ...[n], {vectors}", {"none": 0}, full=True)


QR = {
    "reduced": "...[m][k], ...[k][n]",
    "complete": "...[m][m], ...[m][n]",
    "r": "[none], ...[k][n]",
}


@rule("qr", "x, mode='reduced'")
def qr(call: OpCall) -> Strategies:
    """An orthonormal basis and an upper triangular matrix."""
    mode = {True: "reduced", False: "complete"}.get(call["mode"], call["mode"])
    if mode not in QR:
        msg = f"mode must be one of {', '.join(map(repr, QR))}, got {mode!r}"
        raise ValueError(msg)
    return pattern(call, f"x ...[m][n] -> {QR[mode]}", {"k": _min_side, "none": 0}, full=True)


@rule("lu", "x, *, pivot=True")
def lu(call: OpCall) -> Strategies:
    """A permutation, a lower and an upper triangular matrix."""
    first = "...[m][m]" if call["pivot"] else "[none]"
    return pattern(call, f"x ...[m][n] -> {first}, ...[m][k], ...[k][n]", {"k": _min_side, "none": 0}, full=True)


@rule("lu_unpack", "x, pivots, unpack_data=True, unpack_pivots=True")
def lu_unpack(call: OpCall) -> Strategies:
    """``lu`` from its compact form; results that are not requested are empty."""
    first = "...[m][m]" if call["unpack_pivots"] else "[none]"
    rest = "...[m][k], ...[k][n]" if call["unpack_data"] else "[none], [none]"
    return pattern(call, f"x ...[m][n], pivots ...[j] -> {first}, {rest}", {"k": _min_side, "none": 0}, full=True)


# -- equations ---------------------------------------------------------------------------------------------------------


_FACTORS = ("...[n][n]", "...[n]", "...")
"""Patterns of additional outputs of an equation, by how many fewer dims they have than the matrices."""


def _sides(call: OpCall, *lacking: int) -> Strategies:
    """Strategies of ``A x = y`` or ``x A = y``; the shapes decide whether ``y`` is one vector per matrix.

    Each number in ``lacking`` adds an output with that many fewer dims than the matrices. Its batch dims are those of
    the matrices, not broadcast to ``y``.
    """
    a, y, left = call["A"], call["y"], call["left"]
    vector = y.ndim == 1 or (left and y.ndim == a.ndim - 1 and y.shape == a.shape[:-1])
    side = "...[n]" if vector else "...[n][k]" if left else "...[k][n]"
    outputs = ", ".join([side, *(_FACTORS[dims] for dims in lacking)])
    strategies = pattern(call, f"A ...[n][n], y {side} -> {outputs}", each=() if lacking else ("y",), full=True)
    own = (strategies.outputs[0], *(a.shape[: a.ndim - dims] for dims in lacking))
    if own != strategies.outputs:
        return Strategies(strategies.rows[:1], own, many=True)
    if vector or y.ndim != a.ndim - 1:
        return strategies
    # With local shards, a matrix y could look like one vector per matrix.
    return Strategies(strategies.rows[:1], strategies.outputs, many=strategies.many)


@rule("solve", "A, y, *, left=True")
def solve(call: OpCall) -> Strategies:
    """``A x = y``: leading dims may be sharded; linear in ``y``, which may be Partial(sum)."""
    return _sides(call)


@rule("solve_ex", "A, y, *, left=True, check_errors=False")
def solve_ex(call: OpCall) -> Strategies:
    """``solve``, with an error number per matrix."""
    return _sides(call, 2)


@rule("solve_parts", "A, y, *, left=True, check_errors=False")
def solve_parts(call: OpCall) -> Strategies:
    """``solve``, with the factors of the matrices and their error numbers."""
    return _sides(call, 0, 1, 2)


@rule("solve_triangular", "A, y, *, upper, left=True, unitriangular=False")
def solve_triangular(call: OpCall) -> Strategies:
    """Right-hand sides are matrices; linear in them."""
    side = "...[n][k]" if call["left"] else "...[k][n]"
    return pattern(call, f"A ...[n][n], y {side} -> {side}", each=("y",), full=True)


@rule("lu_solve", "LU, pivots, y, *, left=True, adjoint=False")
def lu_solve(call: OpCall) -> Strategies:
    """Right-hand sides are matrices; linear in them."""
    side = "...[n][k]" if call["left"] else "...[k][n]"
    return pattern(call, f"LU ...[n][n], pivots ...[n], y {side} -> {side}", each=("y",), full=True)


@decomposition("lu_solve_first", "y, LU, pivots")
def lu_solve_first(ops: Any, y: Any, LU: Any, pivots: Any) -> Any:  # noqa: N803 - its name
    """``torch.lu_solve``: the right-hand side comes first."""
    return ops.lu_solve(LU, pivots, y)


# -- norms, products, powers -------------------------------------------------------------------------------------------


@rule("matrix_norm", "x, ord='fro', dim=(-2, -1), keepdim=False, *, dtype=None")
def matrix_norm(call: OpCall) -> Strategies:
    """The two dims of the matrices must not be sharded; the others may be sharded."""
    x = call["x"]
    dims = reduced_dims(call["dim"], x.ndim)
    names, out, shape = reduced_labels(x.shape, dims, keepdim=call["keepdim"])
    return Strategies(labelled_rows(Labels((names,), (out,), None)), (shape,))


@rule("cross", "x, y, dim=-1")
def cross(call: OpCall) -> Strategies:
    """``dim`` has size 3 and must not be sharded; the others broadcast and may be sharded. Linear in each operand."""
    x, y = call["x"], call["y"]
    inputs, out, shape = broadcast_labels([x.shape, y.shape])
    dim = normalize_dim(call["dim"], len(shape))
    if x.ndim != y.ndim or x.shape[dim] != y.shape[dim]:
        msg = f"x {list(x.shape)} and y {list(y.shape)} do not match along dim {dim}"
        raise ValueError(msg)
    labels = Labels(inputs, (out,), None, whole=frozenset({f"d{dim}"}), each=(0, 1))
    return Strategies(labelled_rows(labels), (shape,))


@decomposition("cross_default", "x, y, dim=None")
def cross_default(ops: Any, x: Any, y: Any, dim: int | None) -> Any:
    """``torch.cross``: without ``dim``, the first dim of global size 3."""
    if dim is None:
        left, right = (1,) * (y.ndim - x.ndim) + tuple(x.shape), (1,) * (x.ndim - y.ndim) + tuple(y.shape)
        threes = [dim_of_three for dim_of_three, pair in enumerate(zip(left, right, strict=True)) if pair == (3, 3)]
        if not threes:
            msg = f"cross: no dim of size 3 in {list(left)} and {list(right)}"
            raise ValueError(msg)
        dim = threes[0] - len(left)
    return ops.cross(x, y, dim)


@rule("vander", "x, N=None")
def vander(call: OpCall) -> Strategies:
    """All dims of ``x`` may be sharded; the new last dim (powers) is not."""
    x, count = call["x"], call["N"]
    if not x.ndim:
        msg = "x needs at least 1 dim"
        raise ValueError(msg)
    wanted = x.shape[-1] if count is None else count
    strategies = pattern(call, "x ...n -> ...n[powers]", {"powers": wanted}, full=True)  # a cumulative product
    return Strategies(strategies.rows, strategies.outputs, lambda *_: LocalCall({"N": wanted}))


@decomposition("linalg_norm", "x, ord=None, dim=None, keepdim=False, *, dtype=None")
def linalg_norm(ops: Any, x: Any, ord: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:  # noqa: A002 - its name
    """``torch.linalg.norm``: a vector norm or a matrix norm, depending on the number of dims."""
    ndim = len(tuple(x.shape))
    dims = None if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    if ord is not None and dims is None:
        dims = tuple(range(ndim))
    if ord is None or dims is None or len(dims) == 1:
        return ops.vector_norm(x, 2 if ord is None else ord, dims, keepdim, dtype=dtype)
    return ops.matrix_norm(x, ord, dims, keepdim, dtype=dtype)


MANY_POINTS = 25  # from here on PyTorch computes Euclidean distances by a matrix product


# -- distances ---------------------------------------------------------------------------------------------------------


def _cdist(call: OpCall) -> Strategies:
    """``…p[m], …r[m] -> …pr``; batch dims broadcast and may be sharded."""
    x, y = call["x"], call["y"]
    (left, right), batch, sizes = broadcast_labels([x.shape[:-2], y.shape[:-2]], "b")
    labels = Labels(((*left, "p", "m"), (*right, "r", "m")), ((*batch, "p", "r"),), None, frozenset({"m"}))
    strategies = Strategies(labelled_rows(labels), ((*sizes, x.shape[-2], y.shape[-2]),))
    return replace(strategies, localize=_cdist_mode)


def _cdist_mode(call: OpCall, targets: tuple[Layout, ...], outputs: tuple[Layout, ...]) -> LocalCall | None:
    """Choose the algorithm from the global sizes, as PyTorch does, so that every rank rounds as one device would."""
    del targets, outputs
    if call["compute_mode"] not in (None, "use_mm_for_euclid_dist_if_necessary"):
        return None
    many = max(call["x"].shape[-2], call["y"].shape[-2]) > MANY_POINTS
    return LocalCall({"compute_mode": f"{'' if many else 'donot_'}use_mm_for_euclid_dist"})


register_rule(Rule("cdist", "x, y, p=2.0, compute_mode='use_mm_for_euclid_dist_if_necessary'", _cdist))


@rule("pdist", "x, p=2.0")
def pdist(call: OpCall) -> Strategies:
    """``[n][m] -> [k]``: the distances of all pairs of rows; ``x`` must be replicated."""
    count = call["x"].shape[0]
    return Strategies(nonempty_rows(Labels(((None, None),), ((None,),))), ((count * (count - 1) // 2,),))


@decomposition("pairwise_distance", "x1, x2, p=2.0, eps=1e-06, keepdim=False")
def pairwise_distance(ops: Any, x1: Any, x2: Any, p: float, eps: float, keepdim: bool) -> Any:
    """The norm of ``x1 - x2 + eps`` along the last dim."""
    return ops.vector_norm(ops.add(ops.sub(x1, x2), eps), p, -1, keepdim)


# -- samples -----------------------------------------------------------------------------------------------------------

_ONE = between(0.5, 2.0, "a11")  # a positive definite matrix for all random values
_SQUARE, _OBLONG = real("ann"), real("amn")
sample("cholesky cholesky_ex cholesky_inverse logdet", _ONE)
sample("cholesky_ex", between(0.5, 2.0, "ab11"), upper=True)
sample("cholesky_solve", real("a1k"), _ONE)
sample("inv inv_ex det slogdet det_parts slogdet_parts matrix_exp cond eigvals", _SQUARE)
sample("inv det slogdet", real("ab22"))
sample("eig eigvals", real("ann").fixed)
sample("eigvalsh", _SQUARE)
sample("eigh eigh_parts", real("a33"))  # large matrices have nearly equal eigenvalues
sample("eigh_parts", real("ann").fixed, "U", compute_v=False)
sample("matrix_power", _SQUARE, 2)
sample("pinv cond svd svdvals svd_parts", _OBLONG)
sample_call("matrix_rank", Sample((real("amn").fixed,), constant=True))
sample("svd", real("amn").fixed, full_matrices=True)
sample("svd", _OBLONG, full_matrices=False)
sample("svd_parts", real("amn").fixed, compute_uv=False)
sample("svd_transposed", _OBLONG)
sample("svd_transposed", real("amn").fixed, compute_uv=False)
sample("qr", real("a53"))
sample("qr", real("a35").fixed, "complete")
sample("qr", real("a35").fixed, "r")
sample("lu lu_factor lu_factor_ex geqrf", real("amn").fixed)
sample("lu lu_factor lu_factor_ex", _SQUARE)
sample("ldl_factor ldl_factor_ex", real("ann").fixed)
sample("ldl_solve", _ONE.fixed, integers(1, 2, "a1"), real("a1k").fixed)
sample("lu_unpack", _SQUARE, integers(1, 2, "an"), unpack_pivots=False)
sample("householder_product", real("a53"), real("a3"))
sample("ormqr", real("a53").fixed, real("a3").fixed, real("a5k").fixed)
sample("triangular_solve", real("a2k"), between(1.0, 2.0, "a22"))
sample("solve solve_ex solve_parts", between(1.0, 2.0, "a11"), real("a1k"))
sample("solve solve_ex solve_parts", between(1.0, 2.0, "11"), real("a1k"))
sample("solve_ex solve_parts", between(1.0, 2.0, 3, 1, 2, 2), real(1, 2, 2, 2))
sample("solve", real("ann"), real("ank"))
sample("solve", real("ann"), real("akn"), left=False)
sample("solve", real(4, 2, 2), real(2, 2))
sample("solve", real("ann"), real("an"))
sample("solve_triangular", between(1.0, 2.0, "a22"), real("a2k"), upper=False)
sample("lu_solve", between(1.0, 2.0, "a11"), integers(1, 2, "a1"), real("a1k"))
sample("lu_solve_first", real("a1k"), between(1.0, 2.0, "a11"), integers(1, 2, "a1"))
sample("lstsq", real("a53").fixed, real("a5k").fixed)
sample("cov", real("vo"))
sample("cov", real("vo"), correction=0, aweights=between(0.5, 2.0, "o").fixed)
sample("matrix_norm", real("abc"), "fro", (0, 2))
sample("matrix_norm", real("amn"), "nuc", keepdim=True)
sample("linalg_norm", real("amn"))
sample("linalg_norm", real("mn"), 1)
sample("linalg_norm", real("amn"), "fro", (1, 2))
sample("linalg_norm", real("amn"), 3, -1)
sample("cross", real("ab3"), real("ab3"))
sample("cross", real("a3c"), real("13c"), 1)
sample("cross_default", real("a3"), real("a3"))
sample("vander", real("an"))
sample("vander", real("n"), 3)
sample("cdist", real("pm"), real("rm"))
sample("cdist", real("bpm"), real("1rm"), 1.0)
sample("pairwise_distance", real("ab"), real("ab"))
sample("pdist", real("ab"))
