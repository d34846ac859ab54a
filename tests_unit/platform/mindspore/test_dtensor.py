"""The DTensor class of MindSpore: storage, parameters, writes, and conversions to Python and NumPy."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    input_reshard,
    parallelize_module,
)
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.errors import (
    ArgumentTypeError,
    HyperParallelError,
    MeshError,
    UnsupportedOnBackend,
    UnsupportedOperatorError,
)
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.checker.function import all_placements, check_function
from hyper_parallel.verify.checker.shards import local_shard
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

RNG = np.random.default_rng(5)
A = RNG.standard_normal((5, 3)).astype(np.float32)
FACTORS = [RNG.standard_normal(shape).astype(np.float32) for shape in ((7, 5), (7,), (3, 7), (3,), (4, 5))]
PLACES = (Shard(0), Shard(0), Shard(1), Replicate())


def _mesh(shape=None):
    shape = shape or (platform_named("mindspore").get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=[f"m{axis}" for axis in range(len(shape))])


def _placed(array, places, mesh=None):
    platform = platform_named("mindspore")
    layout = Layout.place(mesh or _mesh(), places if isinstance(places, tuple) else (places,), array.shape)
    return platform.wrap(platform.from_numpy(local_shard(array, layout, 11)), layout)


# -- optimizers --------------------------------------------------------------------------------------------------------


def _optimizer(name, parameters):
    from mindspore import nn
    from mindspore.experimental import optim

    return {
        "SGD": lambda: nn.SGD(parameters, learning_rate=0.01, momentum=0.9),
        "Adam": lambda: nn.Adam(parameters, learning_rate=0.1),
        "Momentum": lambda: nn.Momentum(parameters, 0.01, 0.9),
        "experimental.AdamW": lambda: optim.AdamW(parameters, lr=0.1),
        "experimental.SGD": lambda: optim.SGD(parameters, lr=0.01),
    }[name]()


def _trained(name, distributed):
    from mindspore import Parameter, Tensor, mint, value_and_grad
    from mindspore.mint.nn import functional as F

    arrays = zip(FACTORS, PLACES, strict=False)
    parameters = [
        Parameter(_placed(array, place) if distributed else Tensor(array), name=f"p{index}")
        for index, (array, place) in enumerate(arrays)
    ]
    x = _placed(FACTORS[4], Replicate()) if distributed else Tensor(FACTORS[4])

    def loss(x):
        y = F.linear(mint.tanh(F.linear(x, parameters[0], parameters[1])), parameters[2], parameters[3])
        return (y * y).mean()

    optimizer = _optimizer(name, parameters)
    step = value_and_grad(loss, None, parameters)
    for _ in range(3):
        optimizer(step(x)[1])
    if not distributed:
        return [tensor.asnumpy() for tensor in parameters], True
    shared = all((Tensor.asnumpy(tensor) == tensor.to_local().asnumpy()).all() for tensor in parameters)
    return [tensor.full_tensor().asnumpy() for tensor in parameters], shared


def _compared(name):
    plain, _ = _trained(name, distributed=False)
    results, shared = _trained(name, distributed=True)
    return plain, results, shared


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["SGD", "Adam", "Momentum", "experimental.AdamW", "experimental.SGD"])
@pytest.mark.untraced
def test_optimizer_steps_as_on_plain_parameters(name, world):
    """Three steps on a column- and a row-parallel layer move DTensor parameters as plain ones, without any factor."""
    for plain, results, shared in simulate(_compared, world, platform="mindspore", args=(name,)):
        assert shared
        for ours, theirs, start in zip(results, plain, FACTORS, strict=False):
            np.testing.assert_allclose(ours, theirs, rtol=2**-20, atol=2**-20)
            assert np.abs(theirs - start).max() > 1e-4


# -- storage -----------------------------------------------------------------------------------------------------------


def _writes():
    from mindspore import Parameter, Tensor

    p = Parameter(_placed(A, Shard(0)), name="p")
    seen = {}

    def record(what, expected):
        seen[what] = (
            p.full_tensor().asnumpy(),
            Tensor.asnumpy(p).tolist() == p.to_local().asnumpy().tolist(),
            expected,
        )

    p.set_data(_placed(2 * A, Replicate()))
    record("set_data", 2 * A)
    p.assign_value(_placed(3 * A, Shard(1)))
    record("assign_value", 3 * A)
    p.copy_(_placed(4 * A, Shard(0)))
    record("copy_", 4 * A)
    p.add_(_placed(A, Shard(0)))
    record("add_", 5 * A)
    p.mul_(2.0)
    record("mul_", 10 * A)
    p[:, 1:] = 0.0
    record("setitem", np.concatenate([10 * A[:, :1], 0 * A[:, 1:]], 1))
    p.fill_(2.0)
    record("fill_", 0 * A + 2)
    p.zero_()
    record("zero_", 0 * A)
    return seen


@pytest.mark.parametrize("world", [2, 3])
def test_every_write_reaches_parameter_and_local_tensor(world):
    """A parameter and its local tensor share storage through every kind of write, in-place arithmetic included."""
    for seen in simulate(_writes, world, platform="mindspore"):
        for what, (results, shared, expected) in seen.items():
            np.testing.assert_array_equal(results, expected, err_msg=what)
            assert shared, what


def _pickled(x):
    return pickle.loads(pickle.dumps(x))  # noqa: S301 - bytes made here


def _copies():
    from mindspore import Parameter

    p = Parameter(_placed(A, Shard(0)), name="p", requires_grad=False)
    deep, zeros, pickled = copy.deepcopy(p), p.clone(init="zeros"), _pickled(_placed(A, Shard(1)))
    deep.set_data(_placed(7 * A, Shard(0)))
    return (
        [isinstance(tensor, Parameter) for tensor in (deep, zeros, p.clone(), copy.copy(p))],
        (deep.name, deep.requires_grad, deep.placements),
        p.full_tensor().asnumpy(),
        zeros.full_tensor().asnumpy(),
        (pickled.placements, pickled.full_tensor().asnumpy()),
        (p.shape, p.size, p.ndim, p.numel(), len(p), p.nbytes, p.stride()),
    )


def test_copies_are_parameters_with_storage_of_their_own():
    """Copies of a parameter stay parameters with its layout, and writing to them leaves the original alone."""
    for parameters, facts, original, zeros, pickled, sizes in simulate(_copies, 2, platform="mindspore"):
        assert all(parameters)
        assert facts == ("p", False, (Shard(0),))
        np.testing.assert_array_equal(original, A)
        np.testing.assert_array_equal(zeros, 0 * A)
        assert pickled[0] == (Shard(1),)
        np.testing.assert_array_equal(pickled[1], A)
        assert sizes == ((5, 3), 15, 2, 15, 5, 60, (3, 1))


# -- host --------------------------------------------------------------------------------------------------------------


def _on_host():
    platform, mesh = platform_named("mindspore"), _mesh()
    part = np.asarray(3.5 if mesh.rank == 0 else 0.0, np.float32)
    scalar = platform.wrap(platform.from_numpy(part), Layout.place(mesh, (Partial(),), ()))
    x = _placed(A, Shard(0))
    arrays = (x.asnumpy(), x.numpy(), np.asarray(x), np.array(x, np.float64))
    with pytest.raises(ValueError, match="read-only"):
        arrays[0][0, 0] = 1
    numbers = (scalar.item(), float(scalar), int(scalar), bool(scalar), f"{scalar:.1f}", scalar.asnumpy().tolist())
    return numbers, x.tolist(), arrays, repr(x)


@pytest.mark.parametrize("world", [2, 3])
def test_numbers_and_arrays_are_global(world):
    """Conversions to Python reduce and gather; an array cannot be written to, since it shares no storage."""
    for numbers, values, arrays, text in simulate(_on_host, world, platform="mindspore"):
        assert numbers == (3.5, 3.5, 3, True, "3.5", 3.5)
        assert values == A.tolist()
        for array in arrays:
            np.testing.assert_array_equal(array, A)
        assert text.startswith("DTensor(f32[5@m0, 3] on DeviceMesh(")


def test_numbers_of_bfloat16_need_no_bfloat16_of_numpy():
    """MindSpore hands no bfloat16 to NumPy 2, where ``item()`` crashes the process: numbers go through float32."""
    from mindspore import Tensor, bfloat16

    def refuse_bfloat16(method):
        def call(self, *args):
            assert self.dtype != bfloat16
            return method(self, *args)

        return call

    def numbers():
        x = _placed(np.arange(15, dtype=np.float32).reshape(5, 3), Replicate()).astype(bfloat16)
        first = x[1][1]
        with pytest.MonkeyPatch.context() as patch:
            for name in ("item", "asnumpy"):
                patch.setattr(Tensor, name, refuse_bfloat16(getattr(Tensor, name)))
            return (first.item(), float(first), int(first), bool(first), x.item(4)), x.tolist()

    ((found, values),) = simulate(numbers, 1, platform="mindspore")
    assert found == (4.0, 4.0, 4, True, 4.0)
    assert values == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11], [12, 13, 14]]


# -- redistribution ----------------------------------------------------------------------------------------------------


def _moves(shape):
    """Every source to every target: values, and the gradient of the source under a random cotangent."""
    platform, mesh, wrong = platform_named("mindspore"), _mesh(shape), []
    from hyper_parallel.core.dtensor.transition import dual

    seed = np.random.default_rng(2).standard_normal(A.shape).astype(np.float32)
    places, count = all_placements(2, len(shape)), 0
    for number, source in enumerate(places):
        start = Layout.place(mesh, source, A.shape)
        for target in places:
            goal, count = Layout.place(mesh, target, A.shape), count + 1
            local = platform.from_numpy(local_shard(A, start, number))
            kept = []

            def move(shard, start=start, goal=goal, kept=kept):
                kept[:] = [platform.wrap(shard, start).redistribute_to(goal)]
                return [kept[0].to_local()]

            shard = seed[tuple(slice(*box) for box in dual(goal).local_box())]
            _, (grad,) = harness_of(platform).vjp(move, [local], [platform.from_numpy(shard)], [True])
            whole = kept[0].full_tensor().asnumpy()
            true = seed[tuple(slice(*box) for box in dual(start).local_box())]
            bound = 2**-20 * (1 + np.abs(A).max()) if start.partials else 0  # what is not added is only moved
            if not np.allclose(whole, A, rtol=0, atol=bound) or not np.array_equal(grad.asnumpy(), true):
                wrong.append((source, target))
    return count, wrong


@pytest.mark.parametrize("shape, moves", [((3,), 16), ((2, 2), 256)])
@pytest.mark.untraced
def test_redistribution_forward_and_backward(shape, moves):
    """Any placement is redistributed to any other; the gradient has the source's dual layout and no factor."""
    world = int(np.prod(shape))
    for count, wrong in simulate(_moves, world, platform="mindspore", args=(shape,)):
        assert count == moves
        assert wrong == []


# -- interception ------------------------------------------------------------------------------------------------------


def _unknown():
    from mindspore import mint

    with pytest.raises(UnsupportedOperatorError) as caught:
        mint.linalg.qr(_placed(RNG.standard_normal((3, 3)).astype(np.float32), Shard(0)))
    return str(caught.value)


def test_an_operator_without_rule_says_what_to_do():
    """An operator without a rule is refused by name, with the layouts and the fixes."""
    assert simulate(_unknown, 2, platform="mindspore")[0] == (
        "operator LinalgQr has no sharding rule (layouts: f32[3@m0, 3]); "
        "add one with hyper_parallel.DistributedOp, or run it replicated: "
        "hyper_parallel.ReplicatedOp('LinalgQr')"
    )


def _mixed():
    from mindspore import Parameter, Tensor, mint

    x, plain = _placed(A, Shard(0)), Tensor(A)
    calls = {
        "plain + x": lambda: plain + x,
        "plain.add(x)": lambda: plain.add(x),
        "mint.add(plain, other=x)": lambda: mint.add(plain, other=x),
        "parameter * x": lambda: Parameter(plain, name="p") * x,
    }
    results = {}
    for name, call in calls.items():
        with pytest.raises(HyperParallelError) as caught:
            call()
        results[name] = type(caught.value).__name__
    parameter = Parameter(Tensor(A), name="q")
    return results, (parameter + plain).asnumpy()


def test_a_plain_tensor_first_arrives_too():
    """A plain tensor or Parameter may stand first or by keyword: it is dispatched and refused, never run locally."""
    for results, plain in simulate(_mixed, 2, platform="mindspore"):
        assert set(results.values()) == {"MixedTensorError"}
        np.testing.assert_array_equal(plain, 2 * A)


# -- bypasses ----------------------------------------------------------------------------------------------------------


def _through(name):
    from mindspore import ops

    calls = {
        "stack": lambda x: ops.stack([x, x], 1),
        "Stack": lambda x: ops.Stack(0)((x, x)),
        "addn": lambda x: ops.addn([x, x, x]),
        "full_like": lambda x: ops.full_like(x, 2.0) + x,
        "zeros_like": lambda x: ops.zeros_like(x) + x,
        "new_zeros": lambda x: x.new_zeros((5, 3)) + x,
        "index": lambda x: x[1],
        "slice": lambda x: x[1:4, 1:],
        "newaxis": lambda x: x[..., None],
        "list": lambda x: x[[0, 2, 4]],
        "iter": list,
        "unpack": lambda x: ops.stack([*x], 0),
    }
    return calls[name]


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "name",
    [
        "stack",
        "Stack",
        "addn",
        "full_like",
        "zeros_like",
        "new_zeros",
        "index",
        "slice",
        "newaxis",
        "list",
        "iter",
        "unpack",
    ],
)
@pytest.mark.untraced
def test_every_call_is_intercepted(name, mesh):
    """Calls that MindSpore would run on the local tensor are dispatched, and right forward and backward."""

    def run(x):
        return _through(name)(x)

    report = check_function(run, [A], mesh, platform="mindspore", limit=12)
    assert report.ok, report.wrong[:3]
    assert not report.rejected, report.rejected[:3]


def _refusals():
    import mindspore

    x = _placed(A, Shard(0))
    messages = []
    for call in (lambda: mindspore.Tensor(x), lambda: mindspore.tensor(x), x.get_bytes, lambda: x.set_(x)):
        with pytest.raises(UnsupportedOperatorError) as caught:
            call()
        messages.append(str(caught.value))
    return messages, type(x.data).__name__


def test_conversions_to_plain_tensors_are_refused():
    """Tensor(x) and storage methods, which would take local values silently, are refused with the fix."""
    messages, data = simulate(_refusals, 2, platform="mindspore")[0]
    assert messages[0] == "Tensor(x) of a DTensor: call x.full_tensor(), or x.to_local() for this rank's shard"
    assert re.search(r"to_local\(\)", messages[2])
    assert data == "MindSporeDTensor"


# -- protocol ----------------------------------------------------------------------------------------------------------


def _protocol():
    from mindspore import Parameter, Tensor

    x, scalar = _placed(A, Shard(0)), _placed(np.asarray(3.5, np.float32), Replicate())
    two = _placed(np.asarray(2, np.int64), Replicate())
    refused = []
    for call in (lambda: len(scalar), lambda: [*scalar], lambda: x.set_data(Tensor(np.ones(2, np.float32)))):
        with pytest.raises((TypeError, HyperParallelError)) as caught:
            call()
        refused.append(str(caught.value))
    same = type(x)(x)
    same.data = x * 2
    facts = (x.dim(), [10, 20, 30][two], A[1, 1] in same, A[1, 1] * 2 in same, scalar in x, x.move_to("cpu") is x)
    weight = Parameter(_placed(A, Shard(0)), name="w")
    zeros = weight.clone("zeros")
    kept = (weight.local_param_info is None, copy.copy(weight).name, zeros.full_tensor().asnumpy().any())
    written = weight.assign_value(3.0).full_tensor().asnumpy()
    return refused, facts, kept, x.copy().full_tensor().asnumpy() / 2, (written == 3).all()


def test_a_dtensor_answers_as_a_tensor_does():
    """Length, membership, indices and copies are global; a write reaches every tensor of the same storage."""
    what = "pass a DTensor, or this rank's shard"
    for rank, (refused, facts, kept, copied, written) in enumerate(simulate(_protocol, 2, platform="mindspore")):
        assert refused == [
            "len() of a 0-d tensor",
            "iteration over a 0-d tensor",
            f"set_data: this rank holds [{3 - rank}, 3] of f32[5@m0, 3], the data has [2]; {what}",
        ]
        assert facts == (2, 30, False, True, False, True)
        assert kept == (False, "w", False)
        assert (copied == A).all()
        assert written


def test_a_parameter_of_a_parameter_is_refused():
    """Parameter(parameter), which would copy local values only, is refused with the way to copy."""

    def rank():
        from mindspore import Parameter

        weight = Parameter(_placed(A, Shard(0)), name="w")
        with pytest.raises(UnsupportedOperatorError) as caught:
            Parameter(weight)
        return str(caught.value)

    messages = "Parameter(p) of a DTensor parameter: call p.clone() for a new parameter with its own values"
    assert simulate(rank, 2, "mindspore") == [messages, messages]


def test_lists_are_no_operands():
    """A list as operand is refused, since it would be added to every rank's shard."""

    def rank():
        dtensor = _placed(np.arange(6, dtype=np.float32), Shard(0))
        messages = []
        for row in ([1.0, 2.0], (1.0, 2.0)):
            with pytest.raises(TypeError) as caught:
                dtensor + row
            messages.append(str(caught.value))
        return messages

    assert simulate(rank, 3, "mindspore")[0] == [
        f"unsupported operand type(s) for +: 'MindSporeDTensor' and '{kind}'" for kind in ("list", "tuple")
    ]


def _filled():
    from mindspore import Parameter
    from mindspore.common.initializer import Constant, Normal

    weight = Parameter(_placed(A[:2], Shard(0)), name="w")
    values = {str(init): weight.clone(init).full_tensor().asnumpy() for init in ("zeros", "ones", 2, 2.5, Constant(3))}
    weight.set_data(4.0)
    values["set_data"] = weight.full_tensor().asnumpy()
    refusals = []
    for init in ("normal", Normal(0.1)):
        with pytest.raises(UnsupportedOperatorError) as caught:
            weight.clone(init)
        refusals.append(str(caught.value).replace(repr(init), "INIT"))
    return list(values.values()), refusals


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_parameter_is_filled_alike_on_all_ranks(world):
    """A clone or a write of a constant works on ranks with an empty shard too; random numbers would differ by rank."""
    refusal = (
        "Parameter.clone(INIT) of a DTensor: every rank would draw numbers of its own; use "
        "hyper_parallel.distribute_tensor(initializer(...), mesh, placements) as the new value"
    )
    for values, refusals in simulate(_filled, world, platform="mindspore"):
        for array, value in zip(values, (0, 1, 2, 2.5, 3, 4), strict=True):
            np.testing.assert_array_equal(array, np.full_like(A[:2], value))
        assert refusals == [refusal] * 2


# -- methods that do not ask MindSpore ---------------------------------------------------------------------------------

METHOD_CALLS = {"reshape": (1, 15), "view": (15,), "unsqueeze": (0,), "transpose": (0, 1)}  # the others take nothing


def test_light_methods_are_those_that_mindspore_calls(monkeypatch):
    """A method repeats calls of the operator that MindSpore itself calls for it, with the arguments as written."""
    from hyper_parallel.platform.mindspore import dtensor, intercept

    x, called = _placed(np.abs(A), Replicate()), []
    asked = dtensor.MindSporeDTensor.__fallback__
    monkeypatch.setattr(
        dtensor.MindSporeDTensor,
        "__fallback__",
        lambda self, func, args, kwargs=None: called.append((func.name, *args[1:])) or asked(self, func, args, kwargs),
    )
    for entry in {handler.entry for handler in map(intercept.interception().handlers.get, dtensor.METHODS.values())}:
        entry.cache.clear()
    for name, operator in dtensor.METHODS.items():
        args = METHOD_CALLS.get(name, ())
        first, second, third = (getattr(x, name)(*args) for _ in range(3))
        assert called == [(operator, *args)], name
        wanted = getattr(platform_named("mindspore").from_numpy(np.abs(A)), name)(*args).asnumpy()
        for result in (first, second, third):
            np.testing.assert_array_equal(result.asnumpy(), wanted)
        called.clear()


def test_light_methods_by_keyword_and_in_a_block():
    """Calls by keyword are MindSpore's to read; inside of a block that skips dispatch the local tensor is meant."""
    from hyper_parallel.core.dtensor.skip_dispatch import SkipDTensorDispatch
    from hyper_parallel.platform.mindspore.dtensor import MindSporeDTensor

    x = _placed(A, Replicate())
    for _ in range(2):
        assert x.transpose(dim0=0, dim1=1).shape == (3, 5)
        assert isinstance(x.exp(), MindSporeDTensor)
        with SkipDTensorDispatch():
            assert not isinstance(x.exp(), MindSporeDTensor)


# -- functions that do not ask MindSpore -------------------------------------------------------------------------------


def _functions():
    from mindspore import mint, ops
    from mindspore.mint.nn import functional as F

    norm = ops.LayerNorm(1, 1, 1e-3)
    return {
        "a function": mint.exp,
        "one with numbers": lambda x: mint.sum(x, 1),
        "a view": lambda x: mint.reshape(x, (3, 5)),
        "one of a list": lambda x: mint.cat([x, x], 1),
        "several results": lambda x: mint.chunk(x, 3, 1)[1],
        "a decomposition": lambda x: F.softmax(x, -1),
        "a legacy primitive": lambda x: norm(x, x[0], x[1])[0],
    }


def test_functions_are_served_without_a_search(monkeypatch):
    """A registered function or primitive of a DTensor never makes MindSpore look for its handler, seen or not."""
    from hyper_parallel.platform.mindspore import dtensor

    plain, asked = platform_named("mindspore").from_numpy(A), []
    x = _placed(A, Replicate())
    monkeypatch.setattr(dtensor.MindSporeDTensor, "__fallback__", lambda _, func, *__: asked.append(func.name))
    for name, function in _functions().items():
        for _ in range(3):
            result = function(x)
            assert isinstance(result, dtensor.MindSporeDTensor), name
            np.testing.assert_allclose(result.asnumpy(), function(plain).asnumpy(), rtol=1e-6, atol=1e-6, err_msg=name)
    assert asked == []


def test_functions_in_a_block():
    """Inside of a block that skips dispatch functions compute on local tensors, except those that it names."""
    from mindspore import mint

    from hyper_parallel.core.dtensor.skip_dispatch import SkipDTensorDispatch
    from hyper_parallel.platform.mindspore.dtensor import MindSporeDTensor

    x = _placed(A, Replicate())
    for _ in range(2):
        for name, function in _functions().items():
            assert isinstance(function(x), MindSporeDTensor), name
            with SkipDTensorDispatch():
                assert not isinstance(function(x), MindSporeDTensor), name
        with SkipDTensorDispatch(no_skip=["Exp"]):
            assert isinstance(mint.exp(x), MindSporeDTensor)
            assert not isinstance(mint.tanh(x), MindSporeDTensor)


def test_an_input_of_a_differentiated_function_is_refused():
    """On MindSpore distribute_tensor refuses a tensor that the surrounding differentiation tracks."""

    def rank():
        import mindspore

        mesh = init_device_mesh("cpu", (2,))
        w = mindspore.Tensor(np.ones((4, 6), np.float32))

        def loss(w):
            return (
                DTensor.from_local(w * 2, mesh, [Replicate()]) * distribute_tensor(constant, mesh, [Shard(0)])
            ).sum()

        constant = mindspore.Tensor(np.full((4, 6), 3, np.float32))
        for cut in (lambda w: w, lambda w: w * 2):
            with pytest.raises(ArgumentTypeError, match="would be a leaf"):
                mindspore.grad(lambda w, cut=cut: distribute_tensor(cut(w), mesh, [Shard(0)]).sum().full_tensor())(w)
        return float(mindspore.grad(lambda w: loss(w).full_tensor())(w).asnumpy().min())

    assert simulate(rank, 2, "mindspore") == [6.0, 6.0]


def outside_of_mindspore():
    """The error of a rank outside of a mesh."""
    import mindspore

    mesh = init_device_mesh("cpu", (2,), rank_list=[0, 1])
    if mesh.get_coordinate() is not None:
        return None
    with pytest.raises(MeshError) as caught:
        distribute_tensor(mindspore.Tensor([1.0, 2.0]), mesh, [Shard(0)])
    return str(caught.value)


def test_mindspore_has_no_tensors_outside_of_the_mesh():
    """MindSpore cannot tell the dtypes of results without computing them: a rank outside gets an error at once."""
    outside = (
        "rank 2 is not in DeviceMesh(cpu, 2, ranks=[0, 1]): it holds no shard of tensors on that mesh and takes no "
        "part in its collectives; leave it out with 'if mesh.get_coordinate() is not None:'"
    )
    assert simulate(outside_of_mindspore, 3, "mindspore") == [None, None, outside]


def test_saved_inputs_are_not_sharded():
    """input_reshard refuses cells."""

    def rank():
        import mindspore

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        layer = parallelize_module(mindspore.nn.Dense(4, 6), mesh, ColwiseParallel())
        with pytest.raises(UnsupportedOnBackend) as caught:
            input_reshard(layer, mesh, 1)
        return str(caught.value)

    message = "input_reshard: not supported on MindSpore; recompute the module, or offload its saved tensors"
    assert simulate(rank, 2, "mindspore") == [message] * 2
