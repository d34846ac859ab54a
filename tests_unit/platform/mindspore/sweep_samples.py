"""Sample calls of MindSpore's public functions and methods, by name; sizes are odd and unequal.

``names: arguments | other arguments`` applies to ``mint``, ``mint.nn.functional``, ``mint.linalg``, ``mint.special``,
``ops`` and, with the first argument in front, to ``Tensor``, wherever the name exists. A name with its home in front
(``ops.roll``, ``Tensor.max``) replaces the general line there.
"""

from __future__ import annotations

import numpy as np

__all__ = ["EXPRESSIONS", "GENERIC", "NOT_SWEPT", "OPERANDS", "TABLE"]

RNG = np.random.default_rng(5)
F32 = np.float32


def _real(*shape):
    return RNG.standard_normal(shape).astype(F32)


def _within(low, high, *shape):
    return RNG.uniform(low, high, shape).astype(F32)


def _whole(high, *shape, kind=np.int64):
    return RNG.integers(0, high, shape).astype(kind)


def _truth(*shape):
    return RNG.integers(0, 2, shape).astype(bool)


def _definite(*batch, size=3):
    root = RNG.standard_normal((*batch, size, size))
    return (root @ np.swapaxes(root, -1, -2) + 2 * np.eye(size)).astype(F32)


# Tensors by the names that expressions use; an expression's operands are the names that occur in it.
OPERANDS = {
    "x": _real(5, 3),
    "y": _real(5, 3),
    "z": _real(5, 3),
    "p": _within(0.3, 2.0, 5, 3),
    "q": _within(0.3, 2.0, 5, 3),
    "u": _within(-0.9, 0.9, 5, 3),
    "w": _within(0.1, 0.9, 5, 3),
    "g": _within(1.1, 3.0, 5, 3),
    "v": _real(4, 2, 3),
    "a": _real(3, 4),
    "b": _real(4, 3),
    "r": _real(3),
    "r2": _real(3),
    "s": _real(5),
    "s2": _real(5),
    "f": _real(4),
    "o": np.array(0.7, F32),
    "d": _real(2, 5, 3),
    "e": _real(2, 3, 4),
    "k": _real(2, 5, 4),
    "k2": _real(2, 5, 3),
    "m": _real(5, 4),
    "sq": _real(5, 5),
    "spd": _definite(),
    "spds": _definite(2),
    "low": np.tril(_definite()),
    "n": _whole(9, 5, 3),
    "n2": _whole(9, 5, 3) + 1,
    "small": _whole(4, 5, 3),
    "ni": _whole(9, 5, 3, kind=np.int32),
    "line": _whole(9, 7),
    "t": _truth(5, 3),
    "t2": _truth(5, 3),
    "rows": _whole(5, 4, 3),
    "perm": np.stack([RNG.permutation(5)[:4] for _ in range(3)], 1).astype(np.int64),
    "src": _real(4, 3),
    "ids": np.array([3, 0, 4], np.int64),
    "ids32": np.array([2, 0, 1], np.int32),
    "ids2": _whole(5, 4, 2),
    "pairs": np.array([[0, 1], [4, 2], [2, 2]], np.int64),
    "pairs32": np.array([[0, 1], [4, 2], [2, 2]], np.int32),
    "labels": np.array([0, 2, 1, 2, 0], np.int64),
    "labels32": np.array([0, 2, 1, 2, 0], np.int32),
    "signs": np.where(RNG.random((5, 3)) < 0.5, -1, 1).astype(F32),
    "sign5": np.array([1, -1, -1, 1, 1], np.int32),
    "i1": _real(2, 4, 9),
    "i2": _real(2, 4, 6, 5),
    "i3": _real(2, 2, 4, 5, 4),
    "c1": _real(6, 4, 3),
    "c2": _real(6, 4, 3, 2),
    "c3": _real(4, 2, 2, 3, 2),
    "ct": _real(4, 6, 3, 2),
    "bias6": _real(6),
    "ch": _real(4),
    "chp": _within(0.3, 2.0, 4),
    "ch2": _real(4),
    "z1": (_real(5, 3) + 1j * _real(5, 3)).astype(np.complex64),
    "wide": _real(5, 6),
    "even": _real(4, 6),
    "hq": _real(2, 4, 5, 8),
    "hk": _real(2, 4, 5, 8),
    "hv": _real(2, 4, 5, 8),
    "sorted_": np.sort(_real(5, 3), -1),
    "edges": np.array([-1.0, 0.0, 0.5, 1.0], F32),
    "grid": _within(-0.9, 0.9, 2, 3, 4, 2),
    "seg": np.array([0, 2, 1, 0, 2], np.int64),
    "seg32": np.array([0, 2, 1, 0, 2], np.int32),
    "h": _real(5, 3).astype(np.float16),
    "x64": RNG.standard_normal((5, 3)),
}

TABLE = """
abs absolute neg negative exp exp2 expm1 square sin cos tan sinh cosh tanh asinh arcsinh atan arctan erf erfc sigmoid: x
sign sgn ceil floor trunc round frac sinc isnan isfinite isinf isneginf isposinf nan_to_num signbit angle positive: x
relu relu6 silu gelu hardswish hardsigmoid mish softplus logsigmoid elu celu selu hardtanh leaky_relu softshrink: x
hardshrink softsign tanhshrink fast_gelu soft_shrink deg2rad rad2deg isreal conj i0 is_complex: x
clone contiguous copy detach flatten ravel t ndimension dim numel nelement stop_gradient: x
is_floating_point is_tensor is_signed is_contiguous long int float double half bool byte short bfloat16 T: x
size shape rank dyn_shape tolist asnumpy numpy: x
rsqrt sqrt log log1p log2 log10 reciprocal lgamma digamma: p
asin arcsin acos arccos atanh arctanh erfinv: u
acosh arccosh: g
logit: w
bessel_i0 bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1: x
bessel_k0 bessel_k0e bessel_k1 bessel_k1e bessel_y0 bessel_y1: p
logical_not: t
bitwise_not invert: n | t
threshold: x, 0.1, 20.0
gelu: x | x, approximate="tanh"
glu: wide, -1 | even, 0
swiglu: wide, -1
prelu: x, r | d, s | i2, ch
population_count: ni
polygamma: three, p
mvlgamma: g, 2
add sub subtract mul multiply maximum minimum fmax fmin hypot copysign logaddexp logaddexp2 atan2 arctan2: x, p | x, r
eq equal ne not_equal lt less le less_equal gt greater ge greater_equal isclose nextafter heaviside approximate_equal: x, y
ops.equal: x, y
allclose: x, y
is_nonzero: o
Tensor.item: o
div divide true_divide floor_divide floor_div fmod remainder floor_mod truncate_div truncate_mod xdivy: x, p
float_power float_power_ext: p64, 2.5 | p64, x64
pow: p, q | p, 2.5 | x, 2
xlogy: p, q | p, r
add sub: x, y | x, 2.5
mint.add mint.sub: x, y, alpha=3 | x, 2
Tensor.add Tensor.sub: x, y | x, 2
rsub: x, y
div: x, p | x, 2.0 | x, p, rounding_mode="floor" | x, p, rounding_mode="trunc"
gcd lcm: n2, n
bitwise_and bitwise_or bitwise_xor: n, n2 | t, t2 | n, 3
bitwise_left_shift bitwise_right_shift: n, small
logical_and logical_or logical_xor: t, t2
ldexp: x, small
lerp: x, y, 0.3 | x, y, w
addcmul: x, y, p, value=2.0
addcdiv: x, y, p, value=2.0
ops.addcmul ops.addcdiv: x, y, p, o
where: t, x, y
Tensor.where: t, x, y
ops.select: t, x, y
clamp clip clip_by_value: x, -0.5, 0.5
mint.clamp: x, -0.5, 0.5 | x, min=0.0 | x, y, p
clamp: x, -0.5, 0.5 | x, y, p
masked_fill: x, t, 2.0 | x, t, o
masked_select: x, t
masked_scatter: x, t, y
igamma igammac: p, q
zeta: g, q
cast: x, mindspore.float16 | n, mindspore.float32
astype type to: x, mindspore.float16
type_as: x, h
full_like fills: x, 3.0
lcm: n2, n
polar: p, x
imag: z1
mint.real Tensor.real ops.real: z1
conj: z1
view_as_real: z1
sum mean prod nansum amax amin max min std var any all median norm argmax argmin count_nonzero: x
mint.max mint.min: x | x, 1 | x, y
Tensor.max Tensor.min: x | x, 1 | x, axis=0
ops.max ops.min: x | x, 1 | x, 0, True
sum: x | x, 0 | v, (0, 2), True
mean: x | x, 0 | v, (0, 2), True
ops.sum ops.mean: x | x, 0 | v, (0, 2), True
prod: x | x, 0 | x, 1, True
nansum: x | x, 0
amax amin: x | x, 0 | v, (0, 2), True
std var: x | x, 0 | x, 1
mint.std mint.var: x | x, 0 | x, 1, correction=0
var_mean std_mean: x, 0
ops.var_mean ops.std_mean: x, 0
any all: t | t, 1
argmax argmin: x | x, 1
argmax_with_value argmin_with_value: x, 1
median: x | x, 1
mint.median: x | x, 1
norm: x | x, 2, 0
mint.norm: x | x, dim=0
matrix_norm: x | d
vector_norm: x | x, 2, 0
count_nonzero: x | n, 0
logsumexp: x, 0
cumsum cumprod logcumsumexp: x, 0 | x, 1
ops.cumprod: x, 1
cummax cummin: x, 0 | x, 1
aminmax: x | x, axis=0
ptp: x
nanmean nanmedian: x | x, 0
quantile nanquantile: x64, 0.3 | x64, 0.3, 1
bincount: line | labels, s
histc: x, 4, -2.0, 2.0
reduce_sum reduce_mean reduce_max reduce_min: x, 0
trapz: x
cov: x
dist: x, y
renorm: x, 2, 0, 1.0
diff: x | x, 1, 0
l1_loss mse_loss soft_margin_loss: x, y
softmax log_softmax softmin: x, -1 | x, 0
matmul: x, a | d, e | d, a | x, r
mm: x, a
mv: x, r
dot vdot: r, r2
Tensor.dot: x, a
ops.dot: x, a
inner: x, y
ops.vecdot: x, y
outer ger: s, r
bmm: d, e
ops.batch_dot: d, e, (2, 1)
tensor_dot: x, a, ((1,), (0,))
kron: x, a
einsum: "ij,jk->ik", x, a
addmm: m, x, a, beta=2, alpha=3
addmv: s, x, r
addr: x, s, r
addbmm: m, d, e
baddbmm: k, d, e
linear dense: x, b | x, b, f | d, b, f
chain_matmul: x, a
triangular_solve: src, spd
cdist: d, k2
pdist: x
cross: x, y, 1
mint.linalg.inv: spd | spds
inverse inv matrix_exp pinv: spd | spds
Tensor.inv: p
ops.inv: p
cholesky det logdet slogdet matrix_determinant log_matrix_determinant: spd | spds
cholesky_inverse: low
matrix_power: spd, 3
cholesky_solve: spd, low
matrix_solve: spd, spd
lu_solve: src, spd, ids
qr svd eigvals geqrf: sq
eig: sq
lstsq: sq, m
trace: sq
orgqr: x, r
cosine_similarity: x, y, 1
reshape view: v, (2, 2, 6) | v, (8, 3) | v, (-1,)
Tensor.reshape Tensor.view: v, 2, 2, 6 | v, (8, 3)
reshape_as view_as: v, d4
permute: v, (2, 0, 1)
Tensor.permute: v, 2, 0, 1 | v, (2, 0, 1)
transpose: v, 0, 2
Tensor.transpose: v, 0, 2 | v, 2, 0, 1
ops.transpose: v, (2, 0, 1)
swapaxes swapdims: v, 0, 2
moveaxis movedim: v, 0, 2
adjoint: v
flatten: v | v, 1
mint.flatten: v | v, 1
ops.flatten: v | v, start_dim=1
unsqueeze expand_dims: v, 1
squeeze: one | one, 1
mint.squeeze: one, 1
broadcast_to: r, (5, 3)
expand: r, (5, 3)
Tensor.expand: r, 5, 3
expand_as: r, x
tile: x, (2, 1) | x, (2, 3)
Tensor.repeat: x, 2, 3
repeat_interleave: x, 2, 1
ops.repeat_elements: x, 2, 1
cat concat: [x, y], 0 | [x, y], 1
ops.cat ops.concat: [x, y], 0 | (x, y), 1
stack: [x, y], 1
ops.stack mint.stack: [x, y], 0 | [x, y], 1
hstack vstack dstack column_stack row_stack: [x, y]
block_diag: x, a
split: v, 2, 0
mint.split: v, 2, 0 | v, [1, 3], 0
Tensor.split: v, 2, 0 | v, [1, 3], 0
chunk: v, 2, 0 | x, 2, 1
unbind unstack: v, 1
tensor_split: x, 2 | x, (1, 3)
hsplit vsplit: v, 2
dsplit: even3, 2
narrow: v, 0, 1, 2
Tensor.select mint.select: v, 1, 1
slice: x, (1, 0), (3, 2)
strided_slice: x, (0, 0), (5, 3), (2, 1)
flip: v, (0,) | v, (0, 2)
reverse: v, (0,)
fliplr flipud: x
roll: x, 1, 0
ops.roll: x, (1,), (0,)
rot90: x, 1, (0, 1)
tril triu: x | x, 1
diag: x | r
diagflat: r
diag_embed: x
diagonal: v, 0, 0, 2
Tensor.diagonal: v, 1, 0, 2
diagonal_scatter: sq, s
select_scatter: x, r, 0, 2
slice_scatter: x, row3, 0, 1, 4
meshgrid: s, r
ops.meshgrid mint.meshgrid: s, r, indexing="ij"
atleast_1d atleast_2d atleast_3d: r
cartesian_prod: s, r
combinations: r, 2
pad: x, (1, 2)
ops.pad mint.nn.functional.pad: x, (1, 2) | x, [1, 0, 0, 2], value=1.5
unfold: v, 0, 2, 1
mint.nn.functional.unfold ops.unfold: i2, (2, 2)
vander: r
pixel_shuffle: i2, 2
pixel_unshuffle: i4, 2
channel_shuffle: i2, 2
reverse_sequence: x, labels, 1
sum_to_size: x, (1, 3)
matrix_diag: x
matrix_diag_part: sq
matrix_band_part: x, 1, 1
matrix_set_diag: sq, s
take: x, ids
gather: x, 0, rows
ops.gather: x, ids, 0 | x, ids2, 0 | x, ids32, 1
Tensor.gather: x, ids, 0
gather_elements gather_d: x, 0, rows
gather_nd: x, pairs
index_select: x, 0, ids
ops.index_select: x, 0, ids
index_add: x, 0, ids, row3
ops.index_add: x, ids32, row3, 0
index_fill: x, 0, ids32, 2.0
mint.index_add Tensor.index_add: x, 0, ids, row3
scatter: x, 0, perm, src
scatter_add: x, 0, rows, src
tensor_scatter_elements: x, perm, src, 0 | x, rows, src, 0, "add"
tensor_scatter_add tensor_scatter_sub tensor_scatter_mul tensor_scatter_div tensor_scatter_max tensor_scatter_min: x, pairs, r
scatter_add scatter_sub scatter_mul scatter_div scatter_max scatter_min: x, pairs, r
mint.scatter_add ops.scatter_add: x, 0, rows, src
tensor_scatter_update: x, pairs, r
scatter_nd: pairs, r, (5, 3)
choose: labels, [s, s2, s]
index_put: x, (ids,), r
nonzero argwhere: x
searchsorted: sorted_, x
bucketize: x, [-1.0, 0.0, 1.0]
unique unique_consecutive: line
isin: line, ids
one_hot: labels, 4
ops.one_hot: labels, 4
embedding: ids2, x
topk top_k: x, 2
sort: x, 0 | x, 1
mint.sort: x, dim=0 | x, dim=1, descending=True
argsort: x, 1
msort: x
kthvalue: x, 2, 1
intopk: x, labels32, 2
sequence_mask: labels
unsorted_segment_sum unsorted_segment_max unsorted_segment_min unsorted_segment_prod: x, seg32, 3
cross_entropy: x, labels32 | x, labels32, label_smoothing=0.1
mint.nn.functional.cross_entropy: x, labels
nll_loss: x, labels32
mint.nn.functional.nll_loss: x, labels
binary_cross_entropy: w, w2
binary_cross_entropy_with_logits: x, w
kl_div: x, w
smooth_l1_loss huber_loss: x, y
hinge_embedding_loss: x, signs
margin_ranking_loss: x, y, signs
cosine_embedding_loss: x, y, sign5
triplet_margin_loss: x, y, z
multi_margin_loss: x, labels
multilabel_margin_loss: x, n_ml
multilabel_soft_margin_loss: x, w
gaussian_nll_loss: x, y, p
ctc_loss: c_t
layer_norm: x, (3,), r, r2
ops.layer_norm: x, (3,), r, r2
rms_norm: x, r
group_norm: i2, 2, ch, ch2
batch_norm: i2, ch, chp, ch2, chp2, training=False
ops.batch_norm: i2, ch, chp, ch2, chp2
mint.nn.functional.batch_norm: i2, ch, chp, ch2, chp2
normalize: x
lrn: i2
dropout: = _drawn(@x@)
dropout1d: = _drawn(@d@)
dropout2d: = _drawn(@i2@)
dropout3d: = _drawn(@i3@)
rrelu gumbel_softmax: = _drawn(@x@)
bernoulli_ exponential_ normal_ random_ uniform_: = _drawn(@x@)
conv1d: i1, c1, bias6
conv2d: i2, c2, bias6
conv3d: i3, c3
conv_transpose2d: i2, ct
avg_pool1d: i1, 3
avg_pool2d: i2, 2
avg_pool3d: i3, 2
max_pool2d: i2, 2
max_pool3d: i3, 2
adaptive_avg_pool1d adaptive_max_pool1d: i1, 3
adaptive_avg_pool2d adaptive_max_pool2d: i2, (3, 2)
adaptive_avg_pool3d adaptive_max_pool3d: i3, (2, 2, 2)
lp_pool1d: i1, 2.0, 3
lp_pool2d: i2, 2.0, 2
interpolate upsample: i2, (9, 7)
grid_sample: i2, grid
affine_grid: theta, (2, 3, 4, 5)
fold col2im: unfolded, (6, 5), (2, 2)
flash_attention_score: hq, hk, hv, 4, input_layout="BNSD", scalar_value=0.35
fft ifft hfft: x
ihfft rfft irfft: x
fft2 ifft2 rfft2 irfft2 fftn ifftn rfftn irfftn hfft2 hfftn ihfft2 ihfftn: x
fftshift ifftshift: x, (0, 1)
assign assign_add assign_sub: = _written(x, lambda c: @c, y@)
bias_add: x, r
tensor_add tensor_sub tensor_mul tensor_div tensor_floordiv tensor_mod tensor_pow: p, q
tensor_exp tensor_expm1: x
tensor_lt tensor_le tensor_gt tensor_ge: x, y
square_sum_all squared_difference: x, y
clip_by_norm: x, 1.0
tensor_muls: x, 3.0
add_rms_norm: x, y, r
add_layer_norm: x, y, r, r2
elu_ relu_ hardtanh_ sigmoid_: x
npu_gelu: x
addr_: x, s, r
clip_by_global_norm: [x, y], 1.0
addn accumulate_n: [x, y, z]
lcm: n, n2
hypot: p, q
narrow: x, 0, 1, 3
zeros_like ones_like: = x + @x@
empty_like: = _drawn(@x@)
new_zeros new_ones: = r2 + @x, (4, 3)@
new_empty: = _drawn(@x, (4, 2)@)
new_full: x, (4, 2), 2.0
bernoulli: = _drawn(@w@)
rand_like randn_like: = _drawn(@x@)
randint_like: = _drawn(@n, 0, 5@)
mint.randint_like: = _drawn(@x, 0, 5@)
random_categorical: x, 3
multinomial: w, 2
set_data: x, y
expand_dims: x, 0
nan_to_num: x
resize: x, 5, 3
inplace_add inplace_sub inplace_update: x, row3, (0, 2, 4)
swiglu: wide
rotary_position_embedding: hq, cos4, sin4
"""

OPERANDS |= {
    "p64": RNG.uniform(0.3, 2.0, (5, 3)),
    "three": np.array(3, np.int32),
    "one": _real(5, 1, 3),
    "d4": _real(2, 2, 6),
    "even3": _real(2, 3, 4),
    "row3": _real(3, 3),
    "i4": _real(2, 3, 4, 6),
    "w2": _within(0.1, 0.9, 5, 3),
    "chp2": _within(0.3, 2.0, 4),
    "theta": _real(2, 2, 3),
    "unfolded": _real(2, 12, 20),
    "n_ml": np.array([[0, 2, -1], [1, -1, 0], [2, 1, 0], [0, -1, -1], [1, 2, -1]], np.int64),
    "cos4": _real(1, 1, 5, 8),
    "sin4": _real(1, 1, 5, 8),
}

# In-place methods: name -> arguments after self. The result and the tensor afterwards must both be what a copy gives.
IN_PLACE = """
add_ sub_ mul_ div_: y | 2.0
floor_divide_ remainder_: p | 2.0
exp_ log_ tanh_ sigmoid_ floor_ sign_ erfinv_ zero_:
clamp_: -0.5, 0.5
fill_: 2.5
fill_diagonal_: 1.5
masked_fill_: t, 2.0
masked_scatter_: t, y
scatter_: 0, perm, src
scatter_add_: 0, rows, src
index_add_: 0, ids, row3
index_copy_: 0, ids, row3
index_fill_: 0, ids, 1.5
index_put_: (ids,), r
put_: ids, r
copy_: y
addmm_: m3, a3
__iadd__ __isub__ __imul__ __itruediv__: y | 2.0
__ifloordiv__ __imod__: p
"""

OPERANDS |= {"m3": _real(5, 4), "a3": _real(4, 3)}

# Python's own spellings, one expression each.
EXPRESSIONS = """
-x | +x | abs(x) | ~t | x + y | x + 2.5 | 2.5 + x | x - y | 2.5 - x | x - 2.5 | x * y | 2 * x | x * 2 | x / p | x / 2.0
2.0 / p | x // p | x // 2.0 | 7.0 // p | x % p | x % 2.0 | 7.0 % p | p ** q | x ** 2 | 2.0 ** x | x @ a | x == y
x != y | x < y | x <= y | x > y | x >= y | x > 0 | 0.5 < x | t & t2 | t|t2 | t ^ t2 | n & 3 | x[0] | x[1:3] | v[:, 1:]
x[..., None] | x[None] | x[::2] | x[-1] | v[1, :, 2] | x[ids] | v[:, :, [0, 2]] | v[1:3, [1, 0]] | x[t] | x[ids, 1] | x[ids, [0, 1, 2]]
list(x) | x.T | v.mT | x.ndim | x.shape | x.size | len(x) | x.dtype | x.itemsize | x.nbytes | bool((x > 5).any()) | float(o) | o.item()
x.abs().sum() | round(x) | x.sum().item() | int(o) | [*x] | x in [x] | x.strides | x.is_complex() | x.H | hash(x) == hash(x)
mint.add(x, other=y) | mint.mul(x, other=r) | mint.sum(x, dim=0) | x.sum(axis=0, keepdims=True) | x.mean(axis=1) | x.prod(0)
x.max(axis=0, keepdims=True) | x.argmax(axis=1) | x.var(axis=0, ddof=1) | x.std(0) | x.std(dim=0) | x.std(axis=0, ddof=1) | x.std(dim=0, correction=1) | x.var(dim=0) | x.var(0) | x.argmin(dim=0) | x.argmax(dim=0) | x.count_nonzero(dim=0) | x.max(dim=0) | x.any() | mint.cat((x, y), dim=1)
mint.sum(x, dtype=mindspore.float64) | x.cumsum(axis=0) | n + 1 | n / 2 | n * 2.5 | n + x | t * x | h + x | t + 1 | n // 2 | x64 * 2
ops.ReduceSum()(x) | ops.Concat(1)((x, y)) | ops.Stack(0)([x, y]) | ops.Pack(1)([x, y]) | ops.Softmax()(x) | ops.Transpose()(v, (2, 0, 1))
ops.Reshape()(v, (8, 3)) | ops.Shape()(x) | ops.ExpandDims()(x, 0) | ops.Squeeze(1)(one) | ops.Cast()(x, mindspore.float16)
ops.GatherD()(x, 0, rows) | ops.ArgMaxWithValue(1)(x) | ops.TopK()(x, 2) | ops.OneHot()(labels, 4, Tensor(1.0, mindspore.float32), Tensor(0.0, mindspore.float32))
ops.Tile()(x, (2, 1)) | ops.MatMul()(x, a) | ops.BatchMatMul()(d, e) | ops.BiasAdd()(x, r) | ops.ReLU()(x) | ops.L2Normalize()(x) | ops.L2Loss()(x)
ops.SquaredDifference()(x, y) | ops.AddN()([x, y]) | ops.Sort(0)(x) | ops.Slice()(x, (1, 0), (3, 2)) | ops.StridedSlice()(x, (0, 0), (5, 3), (2, 1))
ops.SoftmaxCrossEntropyWithLogits()(x, w) | ops.SigmoidCrossEntropyWithLogits()(x, w) | ops.SparseSoftmaxCrossEntropyWithLogits()(x, labels32)
ops.PReLU()(x, r) | ops.Elu()(x) | ops.CumSum()(x, 0) | ops.ReverseV2([0])(x) | ops.Select()(t, x, y) | ops.Identity()(x) | ops.Rint()(x) | ops.DivNoNan()(x, p)
ops.MulNoNan()(x, p) | ops.Xdivy()(x, p) | ops.InplaceUpdateV2()(x, (0,), r1) | ops.Meshgrid(indexing="ij")((s, r)) | ops.Unstack(1)(v) | ops.ReduceStd()(x)
"""
OPERANDS |= {"r1": _real(1, 3)}

# Tried in turn for a name that the table does not know: the first that works as it is becomes the sample.
GENERIC = [
    "x",
    "p",
    "u",
    "x, y",
    "x, p",
    "x, 0",
    "x, 1, 0",
    "n",
    "t",
    "spd",
    "v",
    "[x, y]",
    "x, 2",
    "n, n2",
    "i2",
    "x, (0,)",
]

# Not operators on tensors of one mesh, and why.
NOT_SWEPT = {
    "sparse tensors, which have no DTensor": "coo_* csr_* row_tensor_* coo2csr csr2coo dense_to_sparse_* make_coo* "
    "make_csr* make_row* make_sparse* to_coo to_csr coalesce",
    "communication between processes": "all_gather* all_reduce all_to_all* barrier batch_isend* broadcast_object* broadcast "
    "destroy_process* gather_into* gather_object get_backend get_global_rank get_group_rank get_process* get_rank "
    "get_world_size init_process* irecv isend is_available is_initialized new_group recv* reduce_scatter* "
    "scatter_object* scatter_tensor send send_object* set_comm_ops* matmul_reduce_scatter reduce distribute reshard",
    "differentiation and control flow": "cond custom_info* derivative geswitch get_grad grad jacfwd jacrev jet jvp linearize vjp vmap "
    "value_and_grad switch switch_layer merge partial depend recompute_block stop_gradient_ J kernel ms_kernel ms_hasnext ms_next "
    "constexpr hyper_add get_vm_impl_fn op_info_register prim_arg_register prim_attr_register mixed_precision_cast",
    "Python values inside graph mode": "bool_and bool_eq bool_not bool_or dict_* env_* environ_* in_dict not_in_dict is_ is_not isconstant "
    "list_* scalar_* tuple_* string_* make_dict make_list make_range make_slice make_tuple array_reduce array_to_scalar "
    "augassign_* embed typeof hastype iter_converter zip_operation shape_mul reduced_shape ref_to_embed tail SliceGetItem "
    "_add_attr _ms_pyfunc _ones_like_for_grad add_flags broadcast_gradient_args floordiv floormod identity is_dynamic* is_sequence* "
    "is_tensor_bool_cond deepcopy print_ tensordump move_to make_map_parameter range arange tensor_slice getitem_index_info "
    "setitem_index_info",
    "makers without an operand": "arange bartlett_window blackman_window hamming_window hann_window kaiser_window empty eye ctc_greedy_decoder choice_with_mask "
    "full linspace logspace ones zeros rand randn randint randperm normal uniform standard_normal standard_laplace laplace "
    "gamma poisson random_gamma random_poisson tril_indices triu_indices fftfreq rfftfreq log_uniform_candidate_sampler "
    "uniform_candidate_sampler eps tensor_range multinomial_with_replacement fill",
    "memory and host": "data_ptr data_sync delete_ flush_from_cache hooks init_data is_init is_pinned is_shared pin_memory offload "
    "offload_file_path register_hook remove_hook requires_grad_ set_cast_dtype set_const_arg set_device_address set_dtype "
    "set_init_flag set_param_info storage storage_offset untyped_storage wait_pipeline value from_numpy convert_bytes_to_tensor "
    "assign_value_cpp to_ stride get_bytes from_dlpack to_dlpack itemset set_ cauchy log_normal fill is_complex itemset",
}
