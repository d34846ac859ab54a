"""Operators and in-place writes where some rank's shard is empty."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import platform_named, use_platform
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(7)
F32 = np.float32


def real(*shape):
    """Random numbers of both signs."""
    return RNG.standard_normal(shape).astype(F32)


def whole(high, *shape):
    """Integers below ``high``."""
    return RNG.integers(0, high, shape).astype(np.int64)


def test_indices_of_empty_shards_have_no_gradient():
    """Backward runs the same collectives on every rank, also after casts of indices and on empty shards."""
    from hyper_parallel.core.dtensor.placements import Shard
    from hyper_parallel.verify.checker.function import check_function

    def placed(x):
        return x.argmax(0).float() * x.sum(0) + x.argsort(0).float() * x + (x > 0).float() * x

    on_both = [[(Shard(0), Shard(0)), (Shard(1), Shard(1))]]
    report = check_function(placed, [real(5, 3)], (2, 2), platform="mindspore", placements=on_both)
    assert report.all_held, (report.wrong, report.rejected)


def test_collectives_behind_a_cast_of_booleans_run_backward_on_every_rank():
    """A comparison has a gradient of zeros, which a redistribution after the cast moves, on empty shards as well."""
    import mindspore

    def rank():
        mesh = init_device_mesh("cpu", (3,))
        x = distribute_tensor(mindspore.Tensor(real(1, 4)), mesh, [Shard(1)])  # rank 2 has no column
        y = distribute_tensor(mindspore.Tensor(real(1, 2)), mesh, [Replicate()])
        functions = [lambda x: x >= 0, lambda x: x != 2, mindspore.ops.isfinite]
        grad = mindspore.ops.GradOperation(get_all=True, sens_param=True)
        return [
            float(grad(lambda x, f=f: f(x).to(mindspore.float32).split(2, -1)[1])(x, y)[0].full_tensor().abs().sum())
            for f in functions
        ]

    assert simulate(rank, 3, "mindspore") == [[0.0] * 3] * 3


def test_steps_of_empty_shards_have_no_gradient():
    """Step functions have zero gradient, and a rank with an empty shard does not hang in backward."""
    from hyper_parallel.core.dtensor.placements import Replicate, Shard
    from hyper_parallel.verify.checker.function import check_function

    def stepped(x):
        ops, rows = platform_named("mindspore").dispatcher.ops, x
        if hasattr(x, "redistribute"):
            rows = x.redistribute(placements=[Shard(0)])  # two rows on three ranks
        return sum(getattr(ops, op)(rows) for op in ("sign", "sgn", "ceil", "round")) + x

    placements = [[(Partial("sum"),), (Replicate(),), (Shard(1),)]]
    report = check_function(stepped, [3 * real(2, 3)], (3,), platform="mindspore", placements=placements)
    assert report.all_held, (report.wrong, report.rejected)


STEPS = {
    **{op: (lambda ops, x, op=op: getattr(ops, op)(x)) for op in ("sign", "sgn", "ceil", "round")},
    "heaviside": lambda ops, x: ops.heaviside(x, 0.5),
    "copysign": lambda ops, x: ops.copysign(ops.detach(x) + 1, x),
}


@pytest.mark.parametrize("name", STEPS)
def test_what_follows_a_step_function_has_a_backward_on_every_rank(name):
    """A step function passes no gradient on; what is computed of it has a backward, on empty shards as on others."""

    def followed(x):
        stepped = STEPS[name](platform_named("mindspore").dispatcher.ops, x)
        if hasattr(stepped, "redistribute"):
            stepped = stepped.redistribute(placements=[Shard(1)])  # two rows on three ranks; back in backward
        return stepped * stepped

    report = check_function(followed, [3 * real(2, 3)], (3,), platform="mindspore", placements=[[(Shard(0),)]])
    assert report.all_held, (report.wrong, report.rejected)


def test_what_is_added_to_an_empty_product_has_no_gradient():
    """A bias added to an empty product gets a zero gradient."""
    import mindspore

    platform = platform_named("mindspore")
    for name, shapes in (("linear", [(0, 5), (3, 5), (1,)]), ("addmm", [(3,), (0, 5), (5, 3)])):
        run = platform.local_op(name)
        operands = [mindspore.Tensor(real(*shape)) for shape in shapes]
        for _ in range(5):
            junk = [
                real(*shape) + 1 for shape in shapes for _ in range(20)
            ]  # left in memory for kernels that do not write
            del junk
            grads = mindspore.grad(lambda *args, run=run: run(*args).sum(), (0, 1, 2))(*operands)
            assert [tensor.shape for tensor in grads] == shapes
            assert not any(tensor.asnumpy().any() for tensor in grads)


def test_counts_of_no_element_are_zero(canonical):
    """Counts of an empty shard are zero, and its rank takes part in the sum over all ranks."""
    assert canonical("bincount_to", whole(5, 0), None, 7).tolist() == [0] * 7
    assert canonical("histc", real(0), 4, -1, 1).tolist() == [0.0] * 4
    assert canonical("dot", real(0), real(0)).tolist() == 0.0


def test_mvlgamma_of_no_element_is_empty(canonical):
    """Mvlgamma of an empty shard is empty."""
    assert canonical("mvlgamma", real(0, 5), 2).shape == (0, 5)


def test_results_of_empty_shards(refusal):
    """Several results, slices, operands that are not written, and reductions that have no value over no element."""
    import mindspore

    from hyper_parallel.platform.mindspore.ops.registry import write_back

    run = platform_named("mindspore").local_op
    empty, whole_ = mindspore.Tensor(real(0, 4)), mindspore.Tensor(real(3, 4))
    values, placements = run("topk")(empty, 2, -1)
    assert (values.shape, placements.shape, str(placements.dtype)) == ((0, 2), (0, 2), "Int64")
    assert [tensor.shape for tensor in run("unbind")(empty, 1)] == [(0,)] * 4
    assert run("slice")(empty, 1, 1, 4, 2).shape == (0, 2)
    rows, nowhere = mindspore.Tensor(real(0, 4)), mindspore.Tensor(whole(3, 0))
    same, grads = mindspore.value_and_grad(lambda x, rows: run("index_add")(x, 0, nowhere, rows), (0, 1))(whole_, rows)
    assert (same.asnumpy() == whole_.asnumpy()).all()
    assert [tensor.asnumpy().tolist() for tensor in grads] == [np.ones((3, 4)).tolist(), []]
    assert refusal(UnsupportedOperatorError, "amax", real(0, 4), (0,)) == (
        "amax: this rank's shard is empty and the result over no element is not defined; redistribute it first"
    )
    into = mindspore.Tensor(real(3))
    with pytest.raises(UnsupportedOperatorError) as caught:
        write_back(mindspore.mint.add)(into, mindspore.Tensor(real(3).astype(np.complex64)))
    assert str(caught.value) == (
        "a result of Complex64 cannot be written into a tensor of Float32; use the out-of-place form"
    )


# -- writing in place --------------------------------------------------------------------------------------------------


WRITTEN = np.random.default_rng(0)
X, Y, ROW = WRITTEN.standard_normal((2, 3)), WRITTEN.standard_normal((2, 3)) + 3, WRITTEN.standard_normal(3) + 3


SQUARE, FIRST = WRITTEN.standard_normal((3, 3)), np.zeros(1, np.int64)


def _written(z, write, plain):
    """``z`` written in place; on plain tensors, whose CPU kernels do not write, the same out of place."""
    if not isinstance(z, DTensor):
        return plain(z)
    write(z)
    return z


def _product(x, y):
    from mindspore import mint

    return mint.matmul(x, y)


def _over(row, z):
    """``row`` in place of the first of ``z``."""
    from mindspore import mint

    return mint.cat([row, z[1:]], 0)


def _iadd(x, y):
    z = x * 2
    z += y
    return z


def _isub(x, y):
    z = x * 2
    z -= y
    return z


def _imul(x, y):
    z = x * 2
    z *= y
    return z


def _idiv(x, y):
    z = x * 2
    z /= y
    return z


def _set(x, y):
    z = x * 2
    z[:, 1:] = y if len(y.shape) == 1 else y[:, 1:]
    return z * 3


def _set_number(x, y):
    z = x * 2
    z[:, 1:] = 4.0
    return z * y


WRITERS = {
    "+=": (_iadd, ROW),
    "+= of the same shape": (_iadd, Y),
    "-=": (_isub, ROW),
    "*=": (_imul, ROW),
    "/=": (_idiv, ROW),
    "setitem": (_set, Y),
    "setitem of a number": (_set_number, ROW),
    "add_": (lambda x, y: _written(x * 2, lambda z: z.add_(y, alpha=2), lambda z: z + 2 * y), ROW),
    "sub_": (lambda x, y: _written(x * 2, lambda z: z.sub_(y), lambda z: z - y), ROW),
    "mul_": (lambda x, y: _written(x * 2, lambda z: z.mul_(y), lambda z: z * y), ROW),
    "div_": (lambda x, y: _written(x * 2, lambda z: z.div_(y), lambda z: z / y), ROW),
    "copy_": (lambda x, y: _written(x * 2, lambda z: z.copy_(y), lambda z: z * 0 + y) * 3, ROW),
    "copy_ of the same shape": (lambda x, y: _written(x * 2, lambda z: z.copy_(y), lambda z: z * 0 + y) * 3, Y),
    "exp_": (lambda x, y: _written(x * 2, lambda z: z.exp_(), lambda z: z.exp()) * y, ROW),
    "clamp_": (lambda x, y: _written(x * 2, lambda z: z.clamp_(-1.0, 1.0), lambda z: z.clamp(-1.0, 1.0)) * y, ROW),
    "masked_fill_": (
        lambda x, y: _written(x * 2, lambda z: z.masked_fill_(z > 1, 3.0), lambda z: z.masked_fill(z > 1, 3.0)) * y,
        ROW,
    ),
    "fill_": (lambda x, y: (_written(x * 2, lambda z: z.fill_(2.0), lambda z: z * 0 + 2) + x) * y, ROW),
    "zero_": (lambda x, y: (_written(x * 2, lambda z: z.zero_(), lambda z: z * 0) + x) * y, ROW),
    "addmm_": (lambda x, y: _written(x * 2, lambda z: z.addmm_(x, y), lambda z: z + _product(x, y)), SQUARE),
    "index_copy_": (
        lambda x, at: _written(x * 2, lambda z: z.index_copy_(0, at, x[:1]), lambda z: _over(x[:1], z)),
        FIRST,
    ),
    "index_fill_": (
        lambda x, at: _written(x * 2, lambda z: z.index_fill_(0, at, 1.5), lambda z: _over(z[:1] * 0 + 1.5, z)),
        FIRST,
    ),
    "scatter_": (
        lambda x, at: _written(x * 2, lambda z: z.scatter_(0, at, x[:1]), lambda z: _over(x[:1], z)),
        np.zeros((1, 3), np.int64),
    ),
}


@pytest.mark.parametrize("name", sorted(WRITERS))
def test_writes_of_one_rank_are_plain_ones(name):
    """On a world of one rank a write gives the plain values."""
    fn, y = WRITERS[name]
    platform = platform_named("mindspore")
    with use_platform("mindspore"):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("m",))
        tensors = [platform.from_numpy(np.asarray(tensor)) for tensor in (X, y)]
        result = fn(*(DTensor.from_local(tensor, mesh, [Shard(0)]) for tensor in tensors))
        np.testing.assert_allclose(result.full_tensor().asnumpy(), fn(*tensors).asnumpy(), rtol=1e-6)


@pytest.mark.parametrize("mesh", [(3,), pytest.param((4,), marks=pytest.mark.sweep), (2, 2)], ids=str)
@pytest.mark.parametrize("name", sorted(WRITERS))
def test_writes_into_empty_shards_keep_every_rank_together(name, mesh):
    """Writes into a tensor that is empty on some rank have the plain values and gradients on every rank."""
    fn, y = WRITERS[name]
    report = check_function(fn, [X, y], mesh, platform="mindspore", limit=12)
    assert report.ok, report.wrong[:3]
    assert all("writing in place would have to change the layout of x" in tensor for tensor in report.rejected)


# -- shards that are not empty -----------------------------------------------------------------------------------------

ON_ELEMENTS = {
    "linear": ("linear", [(5, 3), (4, 3)], ()),
    "linear with a bias": ("linear", [(5, 3), (4, 3), (4,)], ()),
    "linear with a bias of one element": ("linear", [(5, 3), (4, 3), (1,)], ()),
    "matmul": ("matmul", [(5, 3), (3, 4)], ()),
    "matmul of batches": ("matmul", [(2, 5, 3), (2, 3, 4)], ()),
    "matmul of a vector": ("matmul", [(3,), (3, 4)], ()),
    "chunk": ("chunk", [(5, 7)], (3, 1)),
    "chunk of more parts than rows": ("chunk", [(5, 3)], (9, 0)),
    "sum": ("sum", [(5, 3)], (-1, True)),
}


@pytest.mark.parametrize("name", ON_ELEMENTS)
def test_what_runs_without_empty_shards_computes_the_same(name):
    """The function that stands for a kernel where no shard is empty has its values, shapes and gradients."""
    import mindspore
    from mindspore import Tensor

    op, shapes, rest = ON_ELEMENTS[name]
    random = np.random.default_rng(2)
    operands = [Tensor(random.standard_normal(shape).astype(np.float32)) for shape in shapes]
    platform = platform_named("mindspore")
    kernel = platform.local_op(op)
    computed = platform.on_elements(kernel)
    assert computed is not kernel
    results = []
    for compute in (computed, kernel):

        def outputs(*tensors, compute=compute):
            out = compute(*tensors, *rest)
            return out if isinstance(out, tuple) else (out,)

        def total(*tensors, of=outputs):
            return sum((out**3 * (index + 1)).sum() for index, out in enumerate(of(*tensors)))

        gradients = mindspore.grad(total, tuple(range(len(operands))))(*operands)
        results.append([*outputs(*operands), *(gradients if isinstance(gradients, tuple) else (gradients,))])
    assert [tensor.shape for tensor in results[0]] == [tensor.shape for tensor in results[1]]
    for own, expected in zip(*results, strict=True):
        np.testing.assert_allclose(own.asnumpy(), expected.asnumpy(), rtol=1e-5, atol=1e-5)
