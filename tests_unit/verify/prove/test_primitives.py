"""The table of functions: what it says of one is what the function does to small tensors."""

import logging
import threading

import numpy as np
import pytest

from hyper_parallel.verify.frameworks.contract.primitives import Constant, Graph, Opaque, Primitive, Reshape

pytestmark = pytest.mark.platforms("torch")

# The name in ATen, the call on operands, and their shapes; an index operand is given by its number of values.
CASES = [
    ("add", lambda x, y: x + y, [(3, 4), (4,)]),
    ("mul", lambda x, y: x * y, [(3, 4), (3, 1)]),
    ("div", lambda x, y: x / y, [(3, 4), (3, 4)]),
    ("relu", lambda x: x.relu(), [(3, 4)]),
    ("_to_copy", lambda x: x.float(), [(3, 4)]),
    ("_to_copy", lambda x: x.clamp(max=0).bool(), [(3, 4)]),
    ("_to_copy", lambda x: x.to(_torch().uint8), [(3, 4)]),
    ("where", lambda x, y: _torch().where(x > 0, y, 0), [(3, 4), (3, 4)]),
    ("where", lambda c, x, y: _torch().where(c > 0, x, y), [(3, 4), (3, 4), (4,)]),
    ("exp", lambda x: x.exp(), [(3, 4)]),
    ("maximum", lambda x, y: x.maximum(y), [(3, 4), (4,)]),
    ("sum", lambda x: x.sum(1), [(3, 4, 2)]),
    ("sum", lambda x: x.sum((0, 2), True), [(3, 4, 2)]),
    ("sum", lambda x: x.sum(1, dtype=_torch().float32).double(), [(3, 4)]),
    ("amax", lambda x: x.amax(1), [(3, 4)]),
    ("amin", lambda x: x.amin(0), [(3, 4)]),
    ("prod", lambda x: x.prod(1), [(3, 4)]),
    ("any", lambda x: (x > 0).any(1), [(3, 4)]),
    ("argmax", lambda x: x.argmax(1), [(3, 4)]),
    ("kthvalue", lambda x: x.kthvalue(1, 0)[0], [(3, 4)]),
    ("kthvalue", lambda x: x.kthvalue(2)[0], [(3, 4)]),
    ("mode", lambda x: x.mode()[0], [(3, 4)]),
    ("cumsum", lambda x: x.cumsum(1), [(3, 4)]),
    ("sort", lambda x: x.sort(1)[0], [(3, 4)]),
    ("topk", lambda x: x.topk(2, 0)[0], [(3, 4)]),
    ("flip", lambda x: x.flip(1), [(3, 4)]),
    ("roll", lambda x: x.roll(1, 1), [(3, 4)]),
    ("slice", lambda x: x[:, 1:3], [(3, 4)]),
    ("cat", lambda x, y: _torch().cat([x, y], 1), [(3, 4), (3, 2)]),
    ("unfold", lambda x: x.unfold(0, 2, 1), [(3, 4)]),
    ("constant_pad_nd", lambda x: _torch().nn.functional.pad(x, (1, 2)), [(3, 4)]),
    ("expand", lambda x: x.expand(5, *x.shape), [(3, 4)]),
    ("permute", lambda x: x.permute(2, 0, 1), [(3, 4, 2)]),
    ("transpose", lambda x: x.transpose(0, 2), [(3, 4, 2)]),
    ("t", lambda x: x.t(), [(3, 4)]),
    ("unsqueeze", lambda x: x.unsqueeze(1), [(3, 4)]),
    ("squeeze", lambda x: x.squeeze(1), [(3, 1, 4)]),
    ("select", lambda x: x.select(1, 2), [(3, 4, 2)]),
    ("diagonal", lambda x: x.diagonal(0, 0, 1), [(3, 3, 4)]),
    ("diagonal", lambda x: x.diagonal(0, 2), [(4, 3, 3)]),
    ("unbind", lambda x: x.unbind(1)[0], [(3, 4)]),
    ("split", lambda x: x.split(2, 1)[0], [(3, 4)]),
    ("stack", lambda x, y: _torch().stack([x, y], 1), [(3, 4), (3, 4)]),
    ("mm", lambda x, y: x @ y, [(3, 4), (4, 2)]),
    ("bmm", lambda x, y: x.bmm(y), [(2, 3, 4), (2, 4, 5)]),
    ("embedding", lambda w, i: _torch().nn.functional.embedding(i, w), [(5, 4), (3, "5")]),
    ("index_select", lambda x, i: x.index_select(1, i), [(3, 5), ("5",)]),
    ("gather", lambda x, i: x.gather(1, i), [(3, 5), (3, "5")]),
    ("scatter_add", lambda x, i, y: x.scatter_add(1, i, y), [(3, 5), (3, "5"), (3, 5)]),
    ("scatter", lambda x, i, y: x.scatter(1, i, y), [(3, 5), (3, "5"), (3, 5)]),
    ("tril", lambda x: x.tril(), [(3, 4, 4)]),
    ("linalg_inv_ex", lambda x: _torch().linalg.inv_ex(x)[0], [(3, 4, 4)]),
    ("avg_pool2d", lambda x: _torch().nn.functional.avg_pool2d(x, 2), [(2, 3, 4, 4)]),
    ("triu", lambda x: x.triu(), [(3, 4, 4)]),
    ("complex", lambda x, y: _torch().complex(x, y), [(3, 4), (4,)]),
    ("polar", lambda x, y: _torch().polar(x, y), [(3, 4), (4,)]),
    ("_conj_physical", lambda x: _torch().complex(x, x).conj_physical(), [(3, 4)]),
    ("_to_copy", lambda x: x.to(_torch().complex64), [(3, 4)]),
    ("copy", lambda x: _aten().copy(x.new_zeros(3, len(x)), x), [(4,)]),
    ("copy", lambda x: _aten().copy(_torch().zeros(x.shape, dtype=_torch().int64), x), [(3, 4)]),
    ("_fft_r2c", lambda x: _torch().fft.rfft(x, dim=0), [(3, 4)]),
    ("_fft_c2c", lambda x: _torch().fft.fft2(_torch().complex(x, -x), dim=(0, 2)), [(3, 4, 2)]),
    ("_fft_c2r", lambda x: _torch().fft.irfft(_torch().complex(x, -x), dim=0), [(3, 4)]),
    ("index", lambda x, i: x[i], [(5, 4), (2, "5")]),
    ("index", lambda x, i: x[:, i], [(3, 5, 4), (2, "5")]),
    ("index", lambda x, i, j: x[i, :, j], [(5, 3, 5), (3, "5"), ("5",)]),
    ("index", lambda x, i, j: x[i, j], [(5, 5, 3), (3, "5"), (3, "1")]),
    ("index_put", lambda x, i, y: x.index_put((i,), y), [(5, 4), ("5",), (5, 4)]),
    ("index_put", lambda x, i, y: x.index_put((i,), y, True), [(5, 4), (3, "5"), (3, 5, 4)]),
    ("index_put", lambda x, i, y: _aten().index_put(x, [None, i], y, True), [(4, 5), (3, "5"), (4, 3, 5)]),
    ("put", lambda x, i, y: x.put(i, y), [(5,), ("5",), (5,)]),
    ("put", lambda x, i, y: x.put(i, y, True), [(5,), (3, "5"), (3, 5)]),
    ("take", lambda x, i: x.take(i), [(2, 3), (3, "5")]),
    ("index_add", lambda x, i, y: x.index_add(1, i, y, alpha=2), [(3, 5), ("5",), (3, 5)]),
    ("index_copy", lambda x, i, y: x.index_copy(1, i, y), [(3, 5), ("5",), (3, 5)]),
    ("index_fill", lambda x, i: x.index_fill(1, i, 0), [(3, 5), ("5",)]),
    ("index_fill", lambda x, i: x.index_fill(1, i, 0.5), [(3, 5), ("5",)]),
    ("index_fill", lambda x, i, y: x.index_fill(1, i, y), [(3, 5), ("5",), ()]),
    ("index_reduce", lambda x, i, y: x.index_reduce(1, i, y, "amax"), [(3, 5), ("5",), (3, 5)]),
    ("scatter_reduce", lambda x, i, y: x.scatter_reduce(1, i, y, "sum"), [(3, 5), (3, "5"), (3, 5)]),
    ("scatter", lambda x, i, y: x.scatter(1, i, y, reduce="multiply"), [(3, 5), (3, "5"), (3, 5)]),
    ("scatter", lambda x, i: x.scatter(1, i, 0), [(3, 5), (3, "5")]),
    ("scatter", lambda x, i: x.scatter(1, i, 1.5), [(3, 5), (3, "5")]),
    ("slice_scatter", lambda x, y: x.slice_scatter(y, 1, 1, 3), [(3, 5), (3, 2)]),
    ("select_scatter", lambda x, y: x.select_scatter(y, 1, 2), [(3, 5), (3,)]),
    ("diagonal_scatter", lambda x, y: x.diagonal_scatter(y, 0, 1, 2), [(3, 4, 4), (3, 4)]),
    ("bucketize", lambda x, y: _torch().bucketize(x, y.sort()[0]), [(3, 4), (5,)]),
    ("searchsorted", lambda x, y: _torch().searchsorted(x.sort(-1)[0], y), [(3, 5), (3, 2)]),
    ("searchsorted", lambda x, y: _torch().searchsorted(x.sort(-1)[0], y), [(5,), (3, 2)]),
    ("histc", lambda x: x.histc(3, -4, 4), [(3, 4)]),
    ("histc", lambda x: x.histc(3), [(3, 4)]),
    ("linalg_solve_triangular", lambda x, y: _torch().linalg.solve_triangular(x, y, upper=True),
     [(3, 2, 2), (3, 2, 4)]),
    ("_linalg_solve_ex", lambda x, y: _torch().linalg.solve(x, y, left=True), [(3, 2, 2), (3, 2, 4)]),
    ("_linalg_solve_ex", lambda x: _aten()._linalg_solve_ex(x, x.new_ones(len(x), 2, 4))[1], [(3, 2, 2)]),
    ("cholesky_solve", lambda x, y: x.cholesky_solve(y.abs()), [(3, 2, 4), (3, 2, 2)]),
    ("linalg_lu_solve", lambda x, i, y: _torch().linalg.lu_solve(x, _pivots(i), y),
     [(3, 2, 2), (3, "2"), (3, 2, 4)]),
    ("linalg_ldl_solve", lambda x, i, y: _torch().linalg.ldl_solve(x, _pivots(i), y),
     [(3, 2, 2), (3, "2"), (3, 2, 4)]),
    ("_cdist_forward", lambda x, y: _torch().cdist(x, y), [(2, 3, 4), (2, 5, 4)]),
    ("_cdist_backward", lambda g, x, y, d: _aten()._cdist_backward(g, x, y, 2.0, d),
     [(2, 3, 5), (2, 3, 4), (2, 5, 4), (2, 3, 5)]),
    ("convolution", lambda x, w: _functions().conv2d(x, w, stride=2, padding=1), [(2, 3, 5, 5), (4, 3, 2, 2)]),
    ("convolution", lambda x, w: _functions().conv2d(x, w, groups=2), [(2, 4, 5, 5), (6, 2, 2, 2)]),
    ("convolution", lambda x, w: _functions().conv_transpose1d(x, w, stride=2), [(2, 3, 5), (3, 4, 2)]),
    ("convolution_backward", lambda g, w: _gradient_of_conv(g, w.new_ones(g.shape[0], w.shape[1], 5), w, 0),
     [(2, 4, 4), (4, 3, 2)]),
    ("convolution_backward", lambda g, x: _gradient_of_conv(g, x, x.new_ones(g.shape[1], x.shape[1], 2), 1),
     [(2, 4, 4), (2, 3, 5)]),
    ("convolution_backward", lambda g: _gradient_of_conv(g, g.new_ones(len(g), 3, 5), g.new_ones(g.shape[1], 3, 2), 2),
     [(2, 4, 4)]),
    ("grid_sampler_2d", lambda x, y: _functions().grid_sample(x, y / 5, align_corners=False),
     [(2, 3, 4, 5), (2, 3, 6, 2)]),
    ("grid_sampler_2d_backward", lambda g, y: _gradient_of_samples(g, g.new_ones(*g.shape[:2], 4, 5), y, 0),
     [(2, 3, 3, 6), (2, 3, 6, 2)]),
    ("grid_sampler_2d_backward", lambda g, x, y: _gradient_of_samples(g, x, y, 1),
     [(2, 3, 3, 6), (2, 3, 4, 5), (2, 3, 6, 2)]),
    ("im2col", lambda x: _functions().unfold(x, 2), [(2, 3, 4, 5)]),
    ("col2im", lambda x: _functions().fold(x, (4, 3), 2), [(2, 8, 6)]),
    ("affine_grid_generator", lambda x: _functions().affine_grid(x, (len(x), 1, 3, 4), align_corners=False),
     [(3, 2, 3)]),
    ("max_unpool2d", lambda x, i: _torch()._C._nn.max_unpool2d(x, i, (6, 1)), [(2, 3, 1, 5), (2, 3, 1, "5")]),
    ("fractional_max_pool2d",
     lambda x, y: _torch()._C._nn.fractional_max_pool2d(x, (2, 2), (3, 3), y.sigmoid())[0],
     [(2, 3, 6, 7), (2, 3, 2)]),
    ("avg_pool2d_backward", lambda g: _aten().avg_pool2d_backward(
        g, g.new_ones(*g.shape[:2], 4, 4), (2, 2), (2, 2), (0, 0), False, True, None), [(2, 3, 2, 2)]),
]  # fmt: skip


def _aten():
    return _torch().ops.aten


def _functions():
    return _torch().nn.functional


def _pivots(indices):
    """Return row numbers, from 1 on, that no factorization exchanges."""
    return (indices.sort(-1)[0] + 1).int()


def _gradient_of_conv(grad, x, weight, index):
    mask = [at == index for at in range(3)]
    return _aten().convolution_backward(grad, x, weight, [4], [1], [0], [1], False, [0], 1, mask)[index]


def _gradient_of_samples(grad, x, grid, index):
    return _aten().grid_sampler_2d_backward(grad, x, grid / 5, 0, 0, False, [index == 0, index == 1])[index]


def _torch():
    import torch

    return torch


def described(call, tensors):
    """Return the steps of a call, traced with numbers."""
    from hyper_parallel.verify.frameworks.torch.primitives import traced

    return traced(lambda leaves, _: call(*leaves), [(tuple(x.shape), x.dtype) for x in tensors], [False] * len(tensors))


def operand(shape, rng):
    """Return an operand: numbers, or distinct indices where a size is text."""
    sizes = [int(size) for size in shape]
    if any(isinstance(size, str) for size in shape):
        return _torch().as_tensor(np.argsort(rng.random(sizes), -1))
    return _torch().as_tensor(rng.integers(-4, 5, sizes).astype(float) + 0.5)


def restricted(tensor, labels, label, kept):
    """Return a tensor with some of its elements along a label."""
    return tensor.index_select(labels.index(label), kept) if label in labels else tensor


@pytest.mark.parametrize("name, call, shapes", CASES, ids=[case[0] for case in CASES])
def test_the_table(name, call, shapes):
    """Free labels commute with choices of elements, reductions with splits; it is linear and increasing as said."""
    rng, torch = np.random.default_rng(1), _torch()
    tensors = [operand(shape, rng) for shape in shapes]
    graph = described(call, tensors)
    last = graph.steps[graph.outputs[0]]
    does = last.does if last.name == name else next(step.does for step in graph.steps if step.name == name)
    assert isinstance(does, Primitive), does
    labels = does.inputs
    out = call(*tensors)
    if len(labels) != len(tensors):
        assert name == "where"  # with a number as operand
        return
    for label in {each for each in does.output if each is not None} - does.whole - does.copies:
        for kept in ([0], [1, 0], [2, 1, 2]):
            index = torch.as_tensor([each % out.shape[does.output.index(label)] for each in kept])
            some = [restricted(x, own, label, index) for x, own in zip(tensors, labels, strict=True)]
            assert torch.allclose(call(*some), restricted(out, does.output, label, index)), label
    _check_classes(does, call, tensors, out, rng)


def _check_classes(does, call, tensors, out, rng):
    torch = _torch()
    floats = [index for index, x in enumerate(tensors) if x.is_floating_point()]
    more = {index: torch.as_tensor(rng.standard_normal(tensors[index].shape)) for index in floats}
    for indices in (*((index,) for index in does.each), does.joint):
        if not indices or not set(indices) <= set(floats):
            continue
        other = [more[index] if index in indices else x for index, x in enumerate(tensors)]
        both = [x + y if index in indices else x for index, (x, y) in enumerate(zip(tensors, other, strict=True))]
        assert torch.allclose(call(*both), out + call(*other))
    if (does.increasing or does.moves) and not does.reduce:
        moved = does.each or floats
        other = [more[index] if index in moved else x for index, x in enumerate(tensors)]
        largest = [x.maximum(y) for x, y in zip(tensors, other, strict=True)]
        assert torch.equal(call(*largest), out.maximum(call(*other)))
    if does.reduce in {"sum", "max", "min", "prod"}:
        combine = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum, "prod": torch.mul}[does.reduce]
        gone = {each for own in does.inputs for each in own if each is not None} - set(does.output)
        for label in gone - does.whole:
            size = next(x.shape[own.index(label)] for x, own in zip(tensors, does.inputs, strict=True) if label in own)
            parts = []
            for half in (torch.arange(1), torch.arange(1, size)):
                own = [restricted(x, own, label, half) for x, own in zip(tensors, does.inputs, strict=True)]
                for index in does.joint:  # a term that all parts are added to
                    if label not in does.inputs[index] and parts:
                        own[index] = torch.zeros_like(own[index])
                parts.append(call(*own))
            assert torch.allclose(combine(*parts), out)


def test_what_has_no_labels():
    """Copies and views keep row-major order, factories make constants, and what is unknown is opaque."""
    x = _torch().ones(3, 4)
    steps = {}
    for call in (lambda x: x.reshape(4, 3), lambda x: x.new_zeros(2), lambda x: _torch().full_like(x, 2.0)):
        steps |= {step.name: step.does for step in described(call, [x]).steps}
    assert isinstance(steps["view"], Reshape)
    assert [each.zero for each in steps.values() if isinstance(each, Constant)] in ([True, False], [False, True])
    graph = described(lambda x: x.nonzero_static(size=2), [x])
    assert isinstance(graph, Graph)
    assert [step.does for step in graph.steps if isinstance(step.does, Opaque)] == [
        Opaque("nonzero_static: it has no description")
    ]
    empty = described(lambda x: _torch().linalg.qr(x, "r")[0], [x])
    assert empty.steps[empty.outputs[0]].does == Constant(zero=True)


def test_every_description_is_tried():
    """Each function of the table that has labels of its own is among the cases, or is described with one that is."""
    from hyper_parallel.verify.frameworks.torch import primitive_table as primitives

    tried = {primitives._DESCRIBED[name] for name, *_ in CASES if name in primitives._DESCRIBED}
    left = {run.__name__ for run in primitives._DESCRIBED.values()} - {run.__name__ for run in tried}
    assert left == {"_pairs", "_put_back", "_summed_rows"}, sorted(left)


def of(graph, name):
    """Return what the functions called ``name`` do, in order."""
    return [step.does for step in graph.steps if step.name == name]


def with_backward(call, *tensors):
    """Return the steps of a call and its backward, traced with numbers."""
    from hyper_parallel.verify.frameworks.torch.primitives import traced

    wanted = [x.is_floating_point() or x.is_complex() for x in tensors]
    return traced(lambda leaves, _: call(*leaves), [(tuple(x.shape), x.dtype) for x in tensors], wanted)


def with_symbols(call):
    """Return the steps of a call on a matrix of symbolic sizes."""
    from hyper_parallel.verify.frameworks.torch.primitives import traced

    return traced(lambda leaves, _: call(*leaves), [_torch().ones(3, 5)], [False])


@pytest.mark.parametrize(
    "name, call, shapes, inputs, output, whole, reduce",
    [
        ("select_backward", lambda x: x.select(1, 2), [(3, 5)], ((0,),), (0, 1), {1}, ""),
        ("slice_backward", lambda x: x[:, 1:3], [(3, 5)], ((0, 1),), (0, 1), {1}, ""),
        ("unfold_backward", lambda x: x.unfold(1, 2, 1), [(3, 5)], ((0, 1, 101),), (0, 100), {1, 100, 101}, ""),
        ("embedding_dense_backward", lambda w, i: _torch().nn.functional.embedding(i, w), [(7, 4), (3, "5")],
         ((100, 101, 1), (100, 101)), (0, 1), {0}, "sum"),
        ("view_as_complex", lambda x: _torch().view_as_complex(x), [(3, 2)], ((0, 1),), (0,), {1}, ""),
        ("view_as_real", lambda x: _torch().view_as_complex(x), [(3, 2)], ((0,),), (0, 1), {1}, ""),
        ("_to_copy", lambda x: x.float(), [(3, 2)], ((0, 1),), (0, 1), set(), ""),
    ],
)  # fmt: skip
def test_labels_of_backwards(name, call, shapes, inputs, output, whole, reduce):
    """A gradient is put back where its operand was: the dim that was chosen from is whole, all others are free."""
    rng = np.random.default_rng(2)
    does = of(with_backward(call, *(operand(shape, rng) for shape in shapes)), name)[0]
    assert (does.inputs, does.output, does.whole, does.reduce) == (inputs, output, frozenset(whole), reduce)


@pytest.mark.parametrize(
    "shape, inputs, output, copies",
    [((3, 5), ((0, 1),), (2, 0, 1), {2}), ((3, 1), ((0, None),), (2, 0, 4), {2, 4})],
)
def test_labels_of_a_broadcast_into_dims(shape, inputs, output, copies):
    """New dims and stretched ones are copies; all others keep their labels."""
    graph = described(lambda x: _torch().ops.prims.broadcast_in_dim(x, [2, 3, 5], [1, 2]), [_torch().ones(shape)])
    does = of(graph, "broadcast_in_dim")[0]
    assert (does.inputs, does.output, does.copies) == (inputs, output, frozenset(copies))


def test_numbers_of_positions_are_whole():
    """Every element of ``arange`` depends on where it stands, so no part of it is an ``arange``."""
    does = of(described(lambda x: x + _torch().arange(5), [_torch().ones(3, 5)]), "arange")[0]
    assert (does.inputs, does.output, does.whole) == ((), (0,), frozenset({0}))


def _reads_values():
    """Whether bucketize of a number needs its table's values to know its result's shape: tables without are refused."""
    try:
        _aten().bucketize(2.0, _torch().ones(5, device="meta"))
    except RuntimeError as error:
        return str(error) == "Tensor.item() cannot be called on meta tensors"
    return False


@pytest.mark.parametrize(
    "name, call, shapes, reason",
    [
        ("index_add", lambda x, i, y: x.index_add(1, i[0], y), [(3, 5), ("5",), (3, 1)],
         "dims that were not understood"),
        ("index_put", lambda x, i, y: x.index_put((i > 0,), y), [(5, 3), ("5",), ()], "a mask as index"),
        ("bucketize", lambda x: _aten().bucketize(2.0, x), [(5,)], "no table, or one that is not sorted"),
        ("searchsorted", lambda x, i, y: _torch().searchsorted(x, y, sorter=i), [(5,), ("5",), (3,)],
         "no table, or one that is not sorted"),
        ("_cdist_forward", lambda x, y: _torch().cdist(x, y), [(2, 3, 4), (5, 4)], "operands of other dims"),
        ("scatter", lambda x, i, y: x.scatter(1, i, y), [(3, 5), (2, "5"), (2, 5)], "an index of fewer rows"),
        ("scatter", lambda x, i, y: x.scatter(1, i, y), [(3, 5), (2, "5"), (3, 5)], "an index of fewer rows"),
        ("scatter_add", lambda x, i, y: x.scatter_add(1, i, y), [(3, 5), (2, "5"), (3, 5)], "an index of fewer rows"),
        ("gather", lambda x, i: x.gather(1, i), [(3, 5), (2, "5")], "an index of fewer rows"),
        ("index_select", lambda x, i: x.index_select(0, i.argmax()), [(3, 5), ("5",)],
         "dims that were not understood"),
        ("cat", lambda x, y: _aten().cat([x, y]), [(3, 5), (0,)], "operands of other dims"),
        ("view", lambda x: x.view(_torch().int64), [(3, 5)], "the bytes of numbers as numbers of another dtype"),
        ("linalg_solve_triangular", lambda x, y: _torch().linalg.solve_triangular(x, y, upper=True),
         [(3, 4, 4), (4, 4)], "operands of other dims"),
    ],
)  # fmt: skip
def test_what_is_not_described(name, call, shapes, reason):
    """A function whose dims do not follow its description is opaque: its labels would be wrong."""
    rng = np.random.default_rng(3)
    if name == "bucketize" and _reads_values():
        pytest.skip("[no-tool] bucketize of a number reads its table in PyTorch 2.10, so it cannot be traced")
    assert of(described(call, [operand(shape, rng) for shape in shapes]), name) == [Opaque(f"{name}: {reason}")]


def test_gradients_divided_by_counts_are_opaque():
    """The counts of an embedding's indices are of all indices, so the gradient is not a sum over parts of them."""
    rng, name = np.random.default_rng(4), "embedding_dense_backward"
    call = lambda w, i: _torch().nn.functional.embedding(i, w, scale_grad_by_freq=True)  # noqa: E731 - one call
    graph = with_backward(call, operand((7, 4), rng), operand((3, "5"), rng))
    assert of(graph, name) == [Opaque(f"{name}: gradients divided by counts")]


def test_sums_of_integers():
    """A sum is linear in numbers, and in integers of 64 bits, which wrap; not in what it converts to integers."""
    torch, (x, y) = _torch(), np.random.default_rng(5).standard_normal((2, 3, 4)) * 3
    for dtype, to, linear in (
        ("int64", None, True), ("int32", None, False), ("bool", None, False), ("float64", None, True),
        ("float64", "int64", False), ("float32", "float64", True), ("int64", "float64", False),
    ):  # fmt: skip
        for name in ("sum", "cumsum"):
            call = lambda x, to=to, name=name: getattr(x, name)(1, dtype=to and getattr(torch, to))  # noqa: E731
            first, second = (torch.as_tensor(each).to(getattr(torch, dtype)) for each in (x, y))
            (does,) = of(described(call, [first]), name)
            assert does.joint == ((0,) if linear else ()), (dtype, to)
            if linear:
                assert torch.allclose(call(first + second), call(first) + call(second))
    large = torch.full((1, 4), 2**62)
    assert torch.equal((large + large).sum(1), large.sum(1) + large.sum(1))


def test_what_is_unread():
    """The factors of matrices do not depend on what is solved for."""
    torch = _torch()
    x = torch.as_tensor(np.random.default_rng(7).standard_normal((3, 2, 2)))
    _, *first = _aten()._linalg_solve_ex(x, torch.ones(3, 2, 4).double())
    _, *second = _aten()._linalg_solve_ex(x, torch.zeros(3, 2, 4).double())
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    steps = described(torch.linalg.solve, [x, x]).steps
    assert [step.operands for step in steps if step.name == "_linalg_solve_ex"] == [(2, 3), (2,), (2,), (2,)]


@pytest.mark.parametrize(
    "error, words",
    [
        (ValueError(), "ValueError"),
        (ValueError("no\nmore"), "no"),
        (NotImplementedError("aten.geqrf.default"), "PyTorch has no shapes of aten.geqrf.default"),
        (RuntimeError("x.cpp:49: SymIntArrayRef expected to contain only concrete integers"),
         "PyTorch computes its shapes only from numbers"),
        (RuntimeError("Could not guard on data-dependent expression Eq(u0, 1)"),
         "what it does depends on values, such as indices that it checks"),
        (TypeError("argument 'diagonal' must be int, not _Unknown"),
         "it depends on the rank, such as on where its part starts"),
    ],
)  # fmt: skip
def test_reasons_in_words(error, words):
    """A trace that fails names what a reader can understand, in one line, without files of PyTorch."""
    from hyper_parallel.verify.frameworks.torch.primitive_labels import in_words

    assert in_words(error) == words


def test_the_last_row_without_gradient_depends_on_the_number_of_rows():
    """A padding index that counts from the end is a size, which decides the gradient's values."""
    from hyper_parallel.verify.frameworks.torch.primitives import traced

    def call(leaves, _):
        return _torch().nn.functional.embedding(leaves[1], leaves[0], padding_idx=-1)

    table, ids = _torch().ones(7, 4), _torch().zeros(3, dtype=_torch().int64)
    graph = traced(call, [table, ids], [True, False])
    (does,) = of(graph, "embedding_dense_backward")
    assert [each.symbols for each in does.values] == [graph.steps[graph.inputs[0]].shape[0].symbols]


def test_refusals_of_the_table():
    """The larger of two tensors is not a reduction, and sizes that differ do not broadcast."""
    from hyper_parallel.verify.frameworks.contract.sizes import Size
    from hyper_parallel.verify.frameworks.torch.primitive_labels import broadcast
    from hyper_parallel.verify.frameworks.torch.primitive_table import describe

    x = _torch().ones(3, 5)
    with pytest.raises(LookupError, match=r"^not a reduction$"):
        describe(_torch().ops.aten.max.other, (x, x), {}, [x, x], x)
    with pytest.raises(LookupError, match=r"^size 2 where 3 is$"):
        broadcast([Size(2)], [Size(5), Size(3)])


def test_a_size_that_a_call_fixes_is_no_graph():
    """A call that asks for one size holds for it alone, and is not proven for others."""
    with pytest.raises(ValueError, match=r"^it asks for sizes that are numbers: 5$"):
        with_symbols(lambda x: x + _torch().ones(5))


def test_failed_shapes_are_reasons_and_not_logged():
    """A trace that fails logs no traceback of PyTorch's, which the reason of the row replaces; other threads log."""
    from hyper_parallel.verify.frameworks.torch.primitives import traced

    torch, logged = _torch(), []
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())

    def failing(leaves, _):
        thread = threading.Thread(target=logger.error, args=["of another thread"])
        thread.start()
        thread.join()
        return torch.mm(leaves[0], leaves[1])

    logger.addHandler(handler)
    try:
        with pytest.raises(ValueError, match="must have same reduction dim"):
            traced(failing, [torch.ones(3, 4), torch.ones(3, 4)], [False, False])
        logger.error("after")
    finally:
        logger.removeHandler(handler)
    assert set(logged) == {"of another thread", "after"}


def test_a_number_that_the_operator_asks_for_stays_one():
    """A size of 1 that broadcasts is not a symbol if the caller gave it as a number; other sizes stay symbols."""
    from hyper_parallel.verify.frameworks.torch.primitives import traced

    torch = _torch()
    x, row = torch.ones(3, 5), torch.ones(1, 5)
    graph = traced(lambda leaves, _: leaves[0] + leaves[1], [x, row], [True, True], numbers={1})
    shapes = [[(size.number, len(size.symbols)) for size in graph.steps[at].shape] for at in graph.inputs]
    assert shapes == [[(1, 1), (1, 1)], [(1, 0), (1, 1)]]
    (does,) = of(graph, "add")
    assert does.inputs == ((0, 1), (None, 1))
    (summed,) = of(graph, "sum")
    assert (summed.output, summed.reduce) == ((None, 1), "sum")
    graph = traced(lambda leaves, _: leaves[0].exp(), [x], [False], numbers={3, 5})
    assert [len(size.symbols) for size in graph.steps[0].shape] == [1, 1]
    for numbers in ((), {5}):
        with pytest.raises(ValueError, match=r"^it asks for sizes that are numbers: 1$"):
            traced(lambda leaves, _: leaves[0] + leaves[1], [x, torch.ones(1, 3)[:, :1]], [False] * 2, numbers=numbers)


def test_a_chosen_row_gives_its_gradient_a_place_along_one_dim():
    """The sizes of the gradient of ``select`` are those of its operand; only the index is a place."""
    from hyper_parallel.verify.frameworks.torch.primitives import traced

    graph = traced(lambda leaves, _: leaves[0].select(1, 2), [_torch().ones(3, 5)], [True])
    (does,) = (step.does for step in graph.steps if step.name == "select_backward")
    assert (does.values, does.whole) == ((), {1})
    graph = traced(lambda leaves, _: leaves[0].select(1, leaves[0].shape[1] - 1), [_torch().ones(3, 5)], [True])
    (does,) = (step.does for step in graph.steps if step.name == "select_backward")
    assert len(does.values) == 1


def test_sizes_as_numbers():
    """A size is a factor, a divisor, or text where it is neither; a constant made of one, and a place, depend on it."""
    product = of(with_symbols(lambda x: x * x.shape[0]), "mul")[0]
    quotient = of(with_symbols(lambda x: x / x.shape[0]), "div")[0]
    real = of(with_symbols(lambda x: x * _torch().sym_float(x.shape[0])), "mul")[0]
    assert product.times == quotient.per == real.times
    assert (product.times[0].number, len(product.times[0].symbols), product.times[0].formula) == (1, 1, "")
    (more,) = of(with_symbols(lambda x: x * (x.shape[0] + 1)), "mul")[0].times
    assert (more.number, more.formula) == (0, f"{more.symbols[0]} + 1")
    graph = with_symbols(lambda x: _torch().full((2,), x.shape[0]))
    (size,) = product.times
    assert [does.values for does in of(graph, "full")] == [(size,)]
    for call in (
        lambda x: x.roll(x.shape[0], 1),
        lambda x: x.select(1, x.shape[0] - 1),
        lambda x: x.narrow(1, 0, x.shape[0]),
        lambda x: _torch().ops.aten.constant_pad_nd(x, [0, 1], x.shape[0]),
        lambda x: _torch().ops.aten.histc(x, 4, 0, x.shape[0]),
        lambda x: x.index_fill(1, _torch().zeros(2, dtype=_torch().int64), x.shape[0]),
        lambda x: _torch().arange(x.shape[0], x.shape[0] + 4),
        lambda x: _torch().ops.prims.iota(
            4, start=x.shape[0], step=1, dtype=_torch().int64, device="cpu", requires_grad=False
        ),
    ):
        names = {"roll", "select", "slice", "constant_pad_nd", "histc", "index_fill", "arange", "iota"}
        (does,) = (step.does for step in with_symbols(call).steps if step.name in names)
        assert {symbol for each in does.values for symbol in each.symbols} == set(size.symbols)
    (does,) = of(with_symbols(lambda x: x.narrow(1, 0, x.shape[1])), "slice")
    assert (does.values, does.whole) == ((), frozenset())


def test_a_write_is_the_new_value():
    """What is copied into a tensor is its value from then on; dims that the source lacks are copies."""
    graph = described(lambda x, y: x.clone().copy_(y), [_torch().ones(3, 5), _torch().ones(5)])
    does = of(graph, "copy")[0]
    assert (does.inputs, does.output, does.copies) == (((1,),), (0, 1), frozenset({0}))
    assert graph.steps[graph.outputs[0]].does == does


def _row_copied(x, y):
    z = x.clone()
    z[1].copy_(y)
    return z


def _row_added_to(x, y):
    z = x.clone()
    z[1].add_(y)
    return z


def _row_kept(x, y):
    z = x.clone()
    row = z[1][1:]
    z.copy_(y)
    return row


def _part_kept(x, y):
    z = x.clone()
    part = z.split(2)[1]
    z.add_(y)
    return part


@pytest.mark.parametrize(
    "call, steps",
    [
        (_row_copied, ["select_scatter"]),
        (_row_added_to, ["add", "select_scatter"]),
        (_row_kept, ["copy", "select", "slice"]),
        (_part_kept, ["add"]),
    ],
)
def test_a_write_changes_what_shares_the_memory(call, steps):
    """A write through a view changes the tensor and a write to the tensor its views: the graph has the new values."""
    graph = described(call, [_torch().ones(3, 5), _torch().ones(5)])
    made, waiting = [], [graph.outputs[0]]
    while waiting:
        step = graph.steps[waiting.pop()]
        made.append(step.name)
        assert not isinstance(step.does, Opaque), step
        waiting.extend(step.operands)
    assert set(steps) <= set(made)
    assert not any(step.name.endswith("_") for step in graph.steps)


def test_what_a_write_returns_is_described():
    """A tensor that is written in place is the result of the write, also where views of it were used before."""
    x, y = _torch().ones(3, 5), _torch().ones(5)
    for call in (lambda x, y: x.clone().add_(y), lambda x, y: (z := x.clone(), z + z[1], z.add_(y))[2]):
        graph = described(call, [x, y])
        does = graph.steps[graph.outputs[0]].does
        assert (does.inputs, does.output) == (((0, 1), (1,)), (0, 1))


def test_a_backward_that_fails_leaves_the_forward():
    """The graph says in one line why there is no backward, and has the forward's steps."""

    class OneWay(_torch().autograd.Function):
        @staticmethod
        def forward(_ctx, x):
            return x.exp()

        @staticmethod
        def backward(_ctx, _grad):
            msg = "no way back\nhere"
            raise RuntimeError(msg)

    graph = with_backward(OneWay.apply, _torch().ones(3, 5))
    assert (graph.no_backward, graph.gradients) == ("no way back", ())
    assert len(of(graph, "exp")) == 1


def test_tensors_of_the_program():
    """A tensor that is not an operand is opaque, except a number, which is a constant of no known value."""
    numbers = described(lambda x: x + _torch().tensor([1.0, 2.0, 3.0, 4.0, 5.0]), [_torch().ones(3, 5)])
    assert of(numbers, "_tensor_constant0") == [Opaque("a tensor of the program")]
    one = described(lambda x: x + _torch().tensor(2.0), [_torch().ones(3, 5)])
    assert of(one, "_tensor_constant0") == [Constant()]


@pytest.mark.parametrize(
    "call, shapes",
    [
        (lambda x, w, b: _functions().conv2d(x, w, b, padding=1), [(2, 3, 4, 5), (4, 3, 2, 2), (4,)]),
        (lambda x, w, b: _torch().conv_tbc(x, w, b, 1), [(5, 2, 3), (2, 3, 4), (4,)]),
        (lambda x, y, z: x.addbmm(y, z, beta=2, alpha=3), [(3, 5), (2, 3, 4), (2, 4, 5)]),
        (lambda x, y, w, b: _functions().bilinear(x, y, w, b), [(2, 3), (2, 4), (5, 3, 4), (5,)]),
        (lambda x, y: _aten()._trilinear(x, y, y, [1], [0], [0], [], 0), [(3, 4), (5, 4)]),
    ],
)  # fmt: skip
def test_functions_in_terms_of_others(call, shapes):
    """A function that is written in terms of others has the same values."""
    from torch.fx.experimental.proxy_tensor import make_fx

    from hyper_parallel.verify.frameworks.torch.primitive_table import REWRITTEN

    rng = np.random.default_rng(6)
    tensors = [_torch().as_tensor(rng.standard_normal(shape)) for shape in shapes]
    module = make_fx(call, decomposition_table=REWRITTEN)(*tensors)
    names = {str(node.target).split(".")[1] for node in module.graph.nodes if node.op == "call_function"}
    assert not names & {"conv_tbc", "addbmm", "_trilinear"}
    assert _torch().allclose(module(*tensors), call(*tensors))


_CELL = [(5, 4), (5, 3), (3, 4), (3, 3), (3,), (3,)]
_GATES = [(5, 4), (5, 3), (9, 4), (9, 3), (9,), (9,)]
_STATES = [(5, 4), (5, 3), (5, 3), (12, 4), (12, 3), (12,), (12,)]


@pytest.mark.parametrize(
    "call, shapes",
    [
        (lambda *xs: _torch().rnn_tanh_cell(*xs), _CELL),
        (lambda *xs: _torch().rnn_relu_cell(*xs[:4]), _CELL),
        (lambda *xs: _torch().gru_cell(*xs), _GATES),
        (lambda x, h, c, *xs: _torch().cat(_torch().lstm_cell(x, (h, c), *xs)), _STATES),
        (lambda x: _functions().one_hot((x > 0).to(_torch().int64), 3) * x.sum(), [(5, 4)]),
        (lambda *xs: _torch().block_diag(*xs), [(2, 3), (4,), (3, 1), ()]),
        (lambda x, w, b: _torch().conv_tbc(x, w, b, 1), [(5, 2, 3), (2, 3, 4), (4,)]),
        (lambda x: _torch().sgn(x) * x, [(5, 4)]),
        (lambda x: _torch().sgn(_torch().complex(x, x + 1)).imag, [(5, 4)]),
        (lambda x, y, z: _torch().cat([x, y, z]), [(2, 3), (0,), (4, 3)]),
        (lambda x: _torch().cat([x, x]), [(0,)]),
    ],
)
def test_functions_that_keep_sizes_symbolic(call, shapes):
    """A function in whose place another one is traced has its values and gradients."""
    from hyper_parallel.verify.frameworks.torch.primitive_rewriting import SymbolicCalls

    rng = np.random.default_rng(7)
    tensors = [_torch().as_tensor(rng.standard_normal(shape)).requires_grad_() for shape in shapes]
    right = call(*tensors)
    with SymbolicCalls():
        found = call(*tensors)
    assert (found.shape, found.dtype) == (right.shape, right.dtype)
    assert _torch().allclose(found, right)
    cotangent = _torch().as_tensor(rng.standard_normal(right.shape))
    grads = [_torch().autograd.grad(out, tensors, cotangent, materialize_grads=True) for out in (found, right)]
    assert all(_torch().allclose(*pair) for pair in zip(*grads, strict=True))


def test_draws_are_constants():
    """A random number depends on its global index alone: what a rank draws is split as a constant of its size is."""
    from hyper_parallel.core.dtensor import random
    from hyper_parallel.platform.select import current_platform, use_platform

    layout = type(
        "Layout", (), {"shape": (3, 5), "local_shape": (3, 5), "mesh": type("Mesh", (), {"coordinate": None})}
    )

    def noisy(x):
        return x * current_platform().from_numpy(random.uniform(layout, 24), device=x.device)

    with use_platform("torch"):
        graph = described(noisy, [_torch().ones(3, 5)])
    assert [type(step.does) for step in graph.steps if step.name in {"empty", "mul"}] == [Constant, Primitive]
