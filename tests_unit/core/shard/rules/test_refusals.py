"""Calls that do not fit, on PyTorch: every rank refuses them with the operator, its operands and the reason."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import linalg

from hyper_parallel.core.dtensor.events import record_events
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard

pytestmark = pytest.mark.platforms("torch")

aten = torch.ops.aten


def write(x, value):
    """Write a row."""
    x[0] = value


# name: (function, an operand per shape, whole numbers as (high, shape), and the message)
DIMS = {
    "no such dim": (
        lambda x: x.transpose(0, 2), (4, 3),
        "transpose(x=f64[4@tp, 3]): dim 2 does not exist in a tensor of 2 dims",
    ),
    "a dim twice": (lambda x: x.sum((0, -2)), (4, 3), "sum(x=f64[4@tp, 3]): dim (0, -2) names a dim twice"),
    "permute": (
        lambda x: x.permute(0, 0), (4, 3),
        "permute(x=f64[4@tp, 3]): dims [0, 0] do not name each of 2 dims once",
    ),
    "movedim to fewer": (
        lambda x: x.movedim((0, 1), (1,)), (4, 3),
        "movedim(x=f64[4@tp, 3]): source (0, 1) and destination (1,) must name as many dims, each once",
    ),
    "movedim twice": (
        lambda x: x.movedim((0, 0), (1, 0)), (4, 3),
        "movedim(x=f64[4@tp, 3]): source (0, 0) and destination (1, 0) must name as many dims, each once",
    ),
    "t": (lambda x: x.t(), (4, 3, 2), "t(x=f64[4@tp, 3, 2]): t() takes at most 2 dims, x has 3"),
    "mT": (lambda x: x.mT, (4,), "matrix_transpose(x=f64[4@tp]): mT takes at least 2 dims, x has 1"),
    "expand": (lambda x: x.expand(4, 5), (4, 3), "expand(x=f64[4@tp, 3]): sizes [4, 5] do not stretch [4, 3]"),
    "expand a new dim": (
        lambda x: x.expand(-1, 4, 3), (4, 3),
        "expand(x=f64[4@tp, 3]): sizes [-1, 4, 3]: -1 cannot stand for a new dim",
    ),
    "narrow": (
        lambda x: x.narrow(1, 2, 2), (4, 3),
        "narrow(x=f64[4@tp, 3]): start 2 and length 2 leave dim 1 of size 3",
    ),
    "narrow from a fraction": (
        lambda x: x.narrow(1, 1.0, 1), (4, 3),
        "narrow(x=f64[4@tp, 3]): start is 1.0; it must be an integer",
    ),
    "select": (lambda x: x.select(1, 3), (4, 3), "select(x=f64[4@tp, 3]): index 3 does not exist in dim 1 of [4, 3]"),
    "diagonal": (lambda x: x.diagonal(0, 1, -1), (4, 3), "diagonal(x=f64[4@tp, 3]): dim1 and dim2 are both 1"),
    "unfold": (
        lambda x: x.unfold(1, 4, 1), (4, 3),
        "unfold(x=f64[4@tp, 3]): windows of 4 every 1 do not fit dim 1 of [4, 3]",
    ),
    "split": (lambda x: x.split(-1, 1), (4, 3), "split(x=f64[4@tp, 3]): split size -1 is not positive"),
    "split by sizes": (
        lambda x: x.split((1, 1), 1), (4, 3),
        "split(x=f64[4@tp, 3]): sections [1, 1] do not add up to dim 1 of size 3",
    ),
    "chunk": (lambda x: x.chunk(0, 1), (4, 3), "chunk: chunks must be positive, got 0"),
    "tensor_split": (
        lambda x: x.tensor_split("12", 1), (4, 3),
        "tensor_split: indices must be a list of numbers, or a tensor of them",
    ),
    "repeat": (lambda x: x.repeat(2), (4, 3), "repeat(x=f64[4@tp, 3]): repeats [2] name fewer dims than x has (2)"),
    "repeat_interleave": (
        lambda x, times: x.repeat_interleave(times, 1), (4, 3), (2, (2,)),
        "repeat_interleave: [2] repeats for dim 1 of [4, 3]",
    ),
    "repeat_interleave by a list": (
        lambda x: x.repeat_interleave([1, 2, 3], 1), (4, 3),
        "repeat_interleave(x=f64[4@tp, 3]): repeats is [1, 2, 3]; it must be an integer, or a tensor of them",
    ),
    "view by two unknowns": (lambda x: x.view(-1, -1), (4, 3), "view(x=f64[4@tp, 3]): invalid shape [-1, -1]"),
    "view of a remainder": (
        lambda x: x.view(5, -1), (4, 3),
        "view(x=f64[4@tp, 3]): shape [5, -1] is invalid for [4, 3]",
    ),
    "view of others": (lambda x: x.view(5, 2), (4, 3), "view(x=f64[4@tp, 3]): shape [5, 2] is invalid for [4, 3]"),
    "flatten": (lambda x: x.flatten(1, 0), (4, 3), "flatten: start_dim 1 comes after end_dim 0"),
    "cat": (
        lambda x, y: torch.cat([x, y]), (4, 3), (4, 2),
        "cat(tensors[0]=f64[4@tp, 3], tensors[1]=f64[4@tp, 2]): shapes [4, 3], [4, 2] differ outside dim 0",
    ),
    "stack": (
        lambda x, y: torch.stack([x, y]), (4, 3), (4, 2),
        "stack(tensors[0]=f64[4@tp, 3], tensors[1]=f64[4@tp, 2]): shapes [4, 3], [4, 2] differ",
    ),
    "tril": (lambda x: x.tril(), (4,), "tril(x=f64[4@tp]): x needs at least 2 dims, it has 1"),
    "glu": (F.glu, (4, 3), "glu: dim -1 of size 3 has no halves"),
    "diag_embed": (torch.diag_embed, (), "diag_embed(x=f64[]): x needs at least 1 dim"),
    "diag_embed in one dim": (
        lambda x: torch.diag_embed(x, 0, 1, -2), (4, 3),
        "diag_embed(x=f64[4@tp, 3]): dim1 and dim2 are both 1",
    ),
    "diag": (torch.diag, (4, 3, 2), "diag: x needs 1 or 2 dims, it has 3"),
    "trace": (torch.trace, (4,), "trace: expected a matrix, x has 1 dims"),
}  # fmt: skip

PLACES = {
    "too many indices": (
        lambda x: x[0, 0, 0], (4, 3),
        "getitem(x=f64[4@tp, 3]): 3 indices for a tensor of 2 dims",
    ),
    "no such index": (
        lambda x: x[:, 3], (4, 3),
        "getitem(x=f64[4@tp, 3]): index 3 does not exist in dim 1 of [4, 3]",
    ),
    "no index": (
        lambda x: x[:, 1.0], (4, 3),
        ("getitem(x=f64[4@tp, 3]): index 1.0: only numbers, slices, None, Ellipsis and integer or boolean tensors are "
        "supported"),
    ),
    "what is written": (
        write, (4, 3), (9, (2,)),
        "setitem(x=f64[4@tp, 3], value=i64[2@tp]): value [2] does not broadcast to [3]",
    ),
    "gather": (
        lambda x, i: x.gather(0, i), (4, 3), (3, (4,)),
        "gather(x=f64[4@tp, 3], index=i64[4@tp]): x has 2 dims, index has 1",
    ),
    "index_select": (
        lambda x, i: x.index_select(0, i), (4, 3), (3, (4, 1)),
        "index_select(x=f64[4@tp, 3], index=i64[4@tp, 1]): index has 2 dims, it needs at most 1",
    ),
    "take_along_dim": (
        lambda x, i: x.take_along_dim(i, 0), (4, 3), (3, (4,)),
        "take_along_dim: x has 2 dims, indices have 1",
    ),
    "scatter": (
        lambda x, i, s: x.scatter(0, i, s), (4, 3), (4, (4,)), (4, 3),
        ("scatter(x=f64[4@tp, 3], index=i64[4@tp], src=f64[4@tp, 3]): x has 2 dims, index has 1 dims, src has 2 dims; "
        "they must have as many"),
    ),
    "index_add": (
        lambda x, i, s: x.index_add(0, i, s), (4, 3), (4, (2,)), (3, 3),
        ("index_add(x=f64[4@tp, 3], index=i64[2@tp], source=f64[3@tp, 3]): x [4, 3], index [2] and source [3, 3] do "
        "not fit along dim 0"),
    ),
    "index_copy": (
        lambda x, i, s: x.index_copy(0, i, s), (4, 3), (4, (1,)), (2, 3),
        ("index_copy(x=f64[4@tp, 3], index=i64[1@tp], source=f64[2@tp, 3]): x [4, 3], index [1] and source [2, 3] do "
        "not fit along dim 0"),
    ),
    "select_scatter": (
        lambda x, s: x.select_scatter(s, 1, 3), (4, 3), (4,),
        "select_scatter(x=f64[4@tp, 3], src=f64[4@tp]): index 3 does not exist in dim 1 of [4, 3]",
    ),
    "slice_scatter": (
        lambda x, s: x.slice_scatter(s, 1, 0, 3, 2), (4, 3), (4, 3),
        "slice_scatter(x=f64[4@tp, 3], src=f64[4@tp, 3]): src is [4, 3], the part that it replaces is [4, 2]",
    ),
    "one_hot": (
        lambda x: F.one_hot(x, -5), (4, (4, 3)),
        ("one_hot(x=i64[4@tp, 3]): num_classes is -5; give a positive number: the size of the result must not depend "
        "on values"),
    ),
    "embedding": (
        F.embedding, (3, (4, 3)), (4,),
        "embedding(x=i64[4@tp, 3], weight=f64[4@tp]): weight has 1 dims, it must have 2",
    ),
    "padding_idx": (
        lambda i, w: F.embedding(i, w, padding_idx=7), (3, (4, 3)), (4, 2),
        "embedding(x=i64[4@tp, 3], weight=f64[4@tp, 2]): padding_idx 7 does not exist in a table of 4 rows",
    ),
    "searchsorted": (
        torch.searchsorted, (4, 3), (3, 2),
        ("searchsorted(table=f64[4@tp, 3], x=f64[3@tp, 2]): table [4, 3] and x [3, 2] must agree in all dims but the "
        "last"),
    ),
}  # fmt: skip

SDPA = F.scaled_dot_product_attention
PRODUCTS = {
    "linear": (
        F.linear, (4, 3), (4, 2),
        "linear(x=f64[4@tp, 3], weight=f64[4@tp, 2]): x has 3 features, weight takes 2",
    ),
    "matmul of a number": (
        torch.matmul, (4, 3), (),
        "matmul(x=f64[4@tp, 3], y=f64[]): both operands need at least one dim",
    ),
    "addmm of a vector": (
        lambda bias, x: torch.addmm(bias, x, bias), (4,), (4, 3),
        "addmm(bias=f64[4@tp], x=f64[4@tp, 3], y=f64[4@tp]): y has 1 dims, it must have 2",
    ),
    "addmm": (
        torch.addmm, (4,), (4, 3), (4, 4),
        "addmm(bias=f64[4@tp], x=f64[4@tp, 3], y=f64[4@tp, 4]): y has 4 where 3 is needed",
    ),
    "bilinear": (
        F.bilinear, (4, 3), (4, 2), (5, 3, 3),
        ("bilinear(x=f64[4@tp, 3], y=f64[4@tp, 2], weight=f64[5@tp, 3, 3]): x [4, 3], y [4, 2] and weight [5, 3, 3] do "
        "not fit as …i, …j, nij"),
    ),
    "block_diag": (
        torch.block_diag, (4, 3, 2),
        "block_diag(tensors[0]=f64[4@tp, 3, 2]): blocks are matrices, got [[4, 3, 2]]",
    ),
    "cross": (
        linalg.cross, (4, 3), (3,),
        "cross(x=f64[4@tp, 3], y=f64[3@tp]): x [4, 3] and y [3] do not fit along dim 1",
    ),
    "cross without a dim of 3": (torch.cross, (4, 2), (4, 2), "cross: no dim of size 3 in [4, 2] and [4, 2]"),
    "vander": (linalg.vander, (), "vander(x=f64[]): x needs at least 1 dim"),
    "qr": (
        lambda x: linalg.qr(x, "full"), (4, 3),
        "qr(x=f64[4@tp, 3]): mode 'full' is none of 'reduced', 'complete', 'r'",
    ),
    "einsum of two sizes": (
        lambda x, y: torch.einsum("ij,jk->ik", x, y), (4, 3), (4, 3),
        "einsum(operands[0]=f64[4@tp, 3], operands[1]=f64[4@tp, 3]): einsum: 'j' is 3 in one operand and 4 in another",
    ),
    "einsum of two ellipses": (
        lambda x, y: torch.einsum("...i,...i->...", x, y), (4, 3), (3, 3),
        ("einsum(operands[0]=f64[4@tp, 3], operands[1]=f64[3@tp, 3]): einsum: dim 0 of the ellipsis is 4 in one "
        "operand and 3 in another"),
    ),
    "einsum of fewer operands": (
        lambda x: torch.einsum("ij,jk->ik", x), (4, 3),
        "einsum(operands[0]=f64[4@tp, 3]): einsum: equation 'ij,jk->ik' names 2 operands, 1 are given",
    ),
    "einsum to nowhere": (
        lambda x: torch.einsum("ij->ik", x), (4, 3),
        (
            "einsum(operands[0]=f64[4@tp, 3]): einsum: the output of 'ij->ik' names a dim twice, or one that no "
            "operand has"
        ),
    ),
    "einsum of other dims": (
        lambda x: torch.einsum("ijk->ik", x), (4, 3),
        "einsum(operands[0]=f64[4@tp, 3]): einsum: 'ijk' in 'ijk->ik' does not fit an operand of 2 dims",
    ),
    "attention of other features": (
        SDPA, (4, 3), (4, 2), (4, 2),
        ("scaled_dot_product_attention(q=f64[4@tp, 3], k=f64[4@tp, 2], v=f64[4@tp, 2]): q, k and v must be …le, …se "
        "and …sf"),
    ),
    "attention under two masks": (
        lambda x, mask: SDPA(x, x, x, mask, is_causal=True), (4, 3), (4, 4),
        ("scaled_dot_product_attention(q=f64[4@tp, 3], k=f64[4@tp, 3], v=f64[4@tp, 3], attn_mask=f64[4@tp, 4]): "
        "attn_mask and is_causal exclude each other"),
    ),
    "attention under another mask": (
        lambda x, mask: SDPA(x, x, x, mask), (4, 3), (5, 4),
        ("scaled_dot_product_attention(q=f64[4@tp, 3], k=f64[4@tp, 3], v=f64[4@tp, 3], attn_mask=f64[5@tp, 4]): "
        "attn_mask [5, 4] does not broadcast to [4, 4]"),
    ),
    "attention of odd groups": (
        lambda q, x: SDPA(q, x, x, enable_gqa=True), (2, 3, 4, 3), (2, 2, 4, 3),
        ("scaled_dot_product_attention(q=f64[2@tp, 3, 4, 3], k=f64[2@tp, 2, 4, 3], v=f64[2@tp, 2, 4, 3]): enable_gqa: "
        "the heads of q must be a multiple of those of k and v"),
    ),
}  # fmt: skip

LAYERS = {
    "convolution of images": (
        F.conv2d, (4, 3, 5, 5), (2, 3, 3),
        ("convolution(x=f64[4@tp, 3, 5, 5], weight=f64[2@tp, 3, 3]): x has 4 dims and weight 3; both need samples or "
        "outputs, channels, and the same more"),
    ),
    "convolution of channels": (
        F.conv2d, (4, 3, 5, 5), (2, 2, 3, 3),
        ("convolution(x=f64[4@tp, 3, 5, 5], weight=f64[2@tp, 2, 3, 3]): x has 3 channels, weight [2, 2, 3, 3] in 1 "
        "group(s) takes 2"),
    ),
    "pooling": (
        lambda x: F.max_pool2d(x, 2), (4,),
        "max_pool2d(x=f64[4@tp]): x has 1 dims, at least 2 are needed",
    ),
    "adaptive pooling": (
        lambda x: F.adaptive_avg_pool3d(x, 2), (4, 3),
        "adaptive_avg_pool3d(x=f64[4@tp, 3]): x has 2 dims, at least 3 are needed",
    ),
    "padding": (
        lambda x: aten.constant_pad_nd(x, [1]), (4, 3),
        "pad(x=f64[4@tp, 3]): pad [1] needs two numbers per dim, from the last of 2 dims on",
    ),
    "channel_shuffle": (
        lambda x: F.channel_shuffle(x, 2), (4, 3, 2, 2),
        "channel_shuffle: 3 channels do not make 2 groups",
    ),
    "recurrence": (
        lambda x, h, w, v: torch.rnn_tanh(x, h, [w, v], False, 1, 0.0, True, False, False),
        (2, 4, 3), (1, 3, 2), (2, 3), (2, 2),
        ("rnn_tanh(x=f64[2@tp, 4, 3], hx=f64[1@tp, 3, 2], params[0]=f64[2@tp, 3], params[1]=f64[2@tp, 2]): x [2, 4, 3] "
        "and hx [[1, 3, 2]] need the same samples"),
    ),
    "layer_norm": (
        lambda x: F.layer_norm(x, (4,)), (4, 3),
        "layer_norm(x=f64[4@tp, 3]): normalized_shape [4] does not end x's shape [4, 3]",
    ),
    "layer_norm's weight": (
        lambda x, w: F.layer_norm(x, (3,), w), (4, 3), (4,),
        "layer_norm(x=f64[4@tp, 3], weight=f64[4@tp]): weight has shape [4], normalized_shape is [3]",
    ),
    "dropout": (
        lambda x: F.dropout(x, 1.5), (4, 3),
        "dropout(x=f64[4@tp, 3]): p is 1.5; a probability lies between 0 and 1",
    ),
    "label_smoothing": (
        lambda x, t: F.cross_entropy(x, t, label_smoothing=1.5), (4, 3), (3, (4,)),
        "cross_entropy: label_smoothing must lie between 0 and 1, got 1.5",
    ),
    "reduction": (
        lambda x, t: F.cross_entropy(x, t, reduction="avg"), (4, 3), (3, (4,)),
        "cross_entropy: reduction must be 'none', 'mean' or 'sum', got 'avg'",
    ),
    "transform of nothing": (
        lambda x: torch.fft.fft(x, 0), (4, 3),
        "fft(x=f64[4@tp, 3]): a transform over dims [1] of [4, 3] has no elements",
    ),
    "transform of a number": (torch.fft.fft, (), "fft(x=f64[]): x needs at least 1 dim"),
    "transform of other dims": (
        lambda x: torch.fft.fftn(x, s=(2, 3), dim=(0,)), (4, 3),
        "fftn(x=f64[4@tp, 3]): s [2, 3] and dims [0] must be as many",
    ),
    "pairs": (
        torch.view_as_complex, (4, 3),
        "view_as_complex(x=f64[4@tp, 3]): the last dim holds real and imaginary part, x is [4, 3]",
    ),
}  # fmt: skip

EVERY = {**DIMS, **PLACES, **PRODUCTS, **LAYERS}


def plain(spec, number):
    """Numbers of a shape, or whole numbers below `high` for `(high, shape)`."""
    rng = np.random.default_rng([number, 7])
    if len(spec) == 2 and isinstance(spec[1], tuple):
        return torch.from_numpy(np.asarray(rng.integers(0, *spec[:1], spec[1])))
    return torch.from_numpy(np.asarray(rng.standard_normal(spec)))


@pytest.mark.parametrize("name", EVERY)
def test_what_pytorch_refuses_is_refused_before_anything_moves(ranks, name):
    """A call that fails on one device fails on every rank, with its reason, and no rank is left waiting."""
    fn, *specs, words = EVERY[name]
    tensors = [plain(spec, number) for number, spec in enumerate(specs)]
    with pytest.raises((RuntimeError, IndexError, TypeError, ValueError, AssertionError)):
        fn(*(one.clone() for one in tensors))

    def run(mesh):
        given = [distribute_tensor(one, mesh, [Shard(0) if one.ndim else Replicate()]) for one in tensors]
        with record_events() as events, pytest.raises((ValueError, TypeError, NotImplementedError)) as caught:
            fn(*given)
        return events.collectives(), str(caught.value)

    assert ranks(2, run) == [([], words)] * 2


BEYOND = {
    "reinterpreted bits": (
        lambda x: x.view(torch.int64), (4, 3),
        ("view(x=f64[4@tp, 3]): view as [torch.int64]: only sizes are supported; reinterpret the bits of to_local() "
        "instead"),
    ),
    "nothing to unbind": (
        lambda x: x.unbind(1), (4, 0),
        "unbind(x=f64[4@tp, 0]): dim 1 of [4, 0] has nothing to unbind",
    ),
    "storage written by address": (
        lambda x, s: torch.as_strided_scatter(x, s, (2, 2), (1, 2)), (6,), (2, 2),
        ("as_strided_scatter(x=f64[6@tp], src=f64[2@tp, 2]): strides address storage, of which ranks hold different "
        "pieces; x = x.redistribute().contiguous() first"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BEYOND)
def test_what_only_one_device_can_do_is_refused(ranks, name):
    """What has no meaning for pieces is an error with its reason, and not a guess."""
    fn, *specs, words = BEYOND[name]

    def run(mesh):
        given = [distribute_tensor(plain(spec, number), mesh, [Shard(0)]) for number, spec in enumerate(specs)]
        with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole message is compared
            fn(*given)
        return str(caught.value)

    assert ranks(2, run) == [words] * 2
