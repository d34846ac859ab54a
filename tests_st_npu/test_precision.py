"""How exact operators on devices are, measured there: beside one device, and beside the host in float64.

One rank computes what the others are compared with, in another process: MindSpore has one device in each.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hyper_parallel.verify.frameworks import harness_of

MULTIPLE = 8
"""Ranks may be off by so many times what one device is off in the same dtype; sums of parts are rounded once more."""

_EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
_WITHOUT_KERNELS = {"mindspore": ("bfloat16",)}
"""Dtypes that a framework has on devices and not on CPU, where rehearsals compute."""


@pytest.fixture
def dtypes(platform_name, effort):
    """The dtypes that have operators here."""
    lacking = _WITHOUT_KERNELS.get(platform_name, ()) if effort == "rehearsal" else ()
    return [dtype for dtype in _EPSILON if dtype not in lacking]


def _torch_operators():
    """Operators of PyTorch whose sums depend on the placement, and those that are exact, by name."""
    import torch
    from torch.nn import functional

    rounding = {
        "matmul": lambda a, b: a @ b.transpose(0, 1),
        "softmax": lambda a, b: torch.softmax(a + b, 0),
        "layer_norm": lambda a, b: functional.layer_norm(a, a.shape[-1:]) + b,
        "mean": lambda a, b: (a * b).mean(0),
    }
    exact = {
        "add": lambda a, b: a + b,
        "multiply": lambda a, b: a * b,
        "relu": lambda a, b: torch.relu(a - b),
        "transpose": lambda a, b: torch.cat([a, b]).transpose(0, 1),
        "maximum": lambda a, b: torch.maximum(a, b).amax(0),
    }
    return {"rounding": rounding, "exact": exact}


def _mindspore_operators():
    """The same of MindSpore, whose layer norm has no float64 on CPU: it is written out."""
    from mindspore import mint
    from mindspore.mint.nn import functional

    def layer_norm(a, b):
        centred = a - mint.mean(a, -1, True)
        return centred * mint.rsqrt(mint.mean(centred * centred, -1, True) + 1e-5) + b

    rounding = {
        "matmul": lambda a, b: a @ mint.transpose(b, 0, 1),
        "softmax": lambda a, b: functional.softmax(a + b, 0),
        "layer_norm": layer_norm,
        "mean": lambda a, b: mint.mean(a * b, 0),
    }
    exact = {
        "add": lambda a, b: a + b,
        "multiply": lambda a, b: a * b,
        "relu": lambda a, b: functional.relu(a - b),
        "transpose": lambda a, b: mint.transpose(mint.cat([a, b]), 0, 1),
        "maximum": lambda a, b: mint.amax(mint.maximum(a, b), 0),
    }
    return {"rounding": rounding, "exact": exact}


def _torch_outcome(call, weighted, operands):
    """The output and both gradients of the weighted sum."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in operands]
    out = call(*leaves)
    weighted(out).backward()
    return [out, *(leaf.grad for leaf in leaves)]


def _mindspore_outcome(call, weighted, operands):
    """The same by MindSpore's transform."""
    import mindspore

    def loss(*operands):
        out = call(*operands)
        return weighted(out), out

    (_, out), gradients = mindspore.value_and_grad(loss, (0, 1), has_aux=True)(*operands)
    return [out, *gradients]


_OPERATORS = {"torch": _torch_operators, "mindspore": _mindspore_operators}
_OUTCOMES = {"torch": _torch_outcome, "mindspore": _mindspore_outcome}


def _measured(kind, dtypes, device, wide=""):
    """By dtype, operator and dim that is sharded, the outputs and gradients, each with its dtype, in float64.

    Args:
        kind: of the operators.
        dtypes: of the operands.
        device: that computes.
        wide: in which the operands are computed with after rounding to their dtype, if not in that.
    """
    from hyper_parallel import Shard, distribute_tensor, init_device_mesh
    from hyper_parallel.platform.select import current_platform
    from hyper_parallel.transport.base import active_transport

    platform, world = current_platform(), active_transport().world_size
    mesh, found = init_device_mesh(device, (world,)), {}
    calls, outcome = _OPERATORS[platform.platform_type]()[kind], _OUTCOMES[platform.platform_type]
    for dtype, (name, call) in product(dtypes, calls.items()):
        rng = np.random.default_rng(3)
        arrays = [rng.standard_normal((7, 11)) for _ in range(2)]
        rounded = [platform.tensor_type_cast(platform.from_numpy(array), dtype) for array in arrays]
        plain = [platform.to_device(platform.tensor_type_cast(each, wide or dtype), device) for each in rounded]
        for dim in (0, 1) if world > 1 else (None,):
            operands = plain if dim is None else [distribute_tensor(each, mesh, [Shard(dim)]) for each in plain]
            with harness_of(platform).on_device(device):
                found[dtype, name, dim] = [_host(each) for each in outcome(call, _weighted, operands)]
    return found


def _weighted(out):
    """A sum of the whole output in which every element has another weight."""
    from hyper_parallel.platform.select import current_platform

    platform, whole = current_platform(), _whole(out)
    weights = np.linspace(-1, 1, int(np.prod(whole.shape))).reshape(tuple(whole.shape))
    weights = platform.tensor_type_cast(platform.from_numpy(weights), whole.dtype)
    return (whole * platform.to_device(weights, platform.differing_device(whole, "cpu") or "cpu")).sum()


def _whole(value):
    """The whole of a DTensor."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def _host(value):
    """The dtype of a tensor, and its whole value."""
    from hyper_parallel.platform.contract.tensors import dtype_name
    from hyper_parallel.platform.select import current_platform

    platform = current_platform()
    array = platform.tensor_to_numpy(platform.detach(_whole(value)))
    return dtype_name(str(value.dtype)), array.astype("float64")


def test_errors_are_a_multiple_of_one_devices(on_ranks, suite_device, dtypes):
    """In float32, bfloat16 and float16, ranks are no further from the host's float64 than a multiple of one device."""
    (truths,) = on_ranks(_measured, 1, "rounding", dtypes, "cpu", "float64", device="cpu")
    (alone,) = on_ranks(_measured, 1, "rounding", dtypes, suite_device)
    for found in on_ranks(_measured, 3, "rounding", dtypes, suite_device):
        assert len(found) == 8 * len(dtypes)
        for (dtype, name, dim), values in found.items():
            truth, single = truths[dtype, name, None], alone[dtype, name, None]
            for (_, exact), (_, one), (computed, several) in zip(truth, single, values, strict=True):
                assert computed == dtype
                least = _EPSILON[dtype] / 2 * np.abs(exact).max()
                allowed = MULTIPLE * max(np.abs(one - exact).max(), least)
                error = np.abs(several - exact).max()
                assert error <= allowed, f"{name} in {dtype}, sharded in {dim}: {error} of {allowed}"


def test_exact_operators_are_equal_bit_for_bit(on_ranks, suite_device, dtypes):
    """What computes each element by itself gives the bits of one device, forward and backward, in each dtype."""
    (alone,) = on_ranks(_measured, 1, "exact", dtypes, suite_device)
    for found in on_ranks(_measured, 3, "exact", dtypes, suite_device):
        assert len(found) == 10 * len(dtypes)
        for (dtype, name, dim), values in found.items():
            for (one_dtype, one), (computed, several) in zip(alone[dtype, name, None], values, strict=True):
                assert computed == one_dtype == dtype
                assert np.array_equal(one, several), f"{name} in {dtype}, sharded in {dim}"


def _low_gradients(low, device):
    """Gradients in float32: of one rank those of each batch, computed in ``low``; of more, of the sharded model."""
    from hyper_parallel import init_device_mesh
    from hyper_parallel.core.data_parallel import MixedPrecisionPolicy, fully_shard
    from hyper_parallel.platform.select import current_platform
    from hyper_parallel.transport.base import active_transport

    platform, transport = current_platform(), active_transport()
    wide, sharded = "float32", transport.world_size > 1
    rng = np.random.default_rng(7)
    shapes = {"up.weight": (10, 7), "up.bias": (10,), "down.weight": (5, 10), "down.bias": (5,)}
    arrays = {path: rng.standard_normal(shape).astype(wide) for path, shape in shapes.items()}
    batches = rng.standard_normal((3, 4, 7)).astype(wide)
    with harness_of(platform).on_device(device):
        model = harness_of(platform).tutorial_model(7, 10, 5, wide if sharded else low)
        harness_of(platform).load_arrays(model, arrays)
        if sharded:
            policy = MixedPrecisionPolicy(platform.str_to_dtype(low), platform.str_to_dtype(wide))
            fully_shard(model, mesh=init_device_mesh(device, (transport.world_size,)), mp_policy=policy)
        found = []
        for batch in batches[transport.rank :][:1] if sharded else batches:
            x = platform.tensor_type_cast(platform.to_device(platform.from_numpy(batch), device), low)

            def loss(x=x):
                out = platform.tensor_type_cast(model(x), wide)
                return (out * out).mean()

            gradients = harness_of(platform).training_step(model, loss).gradients
            found.append({path: _host(gradient) for path, gradient in gradients.items()})
    return found


def test_low_precision_gradients_are_reduced_in_float32(on_ranks, suite_device, dtypes):
    """A model that computes in bfloat16 or float16 has the float32 average of the ranks' gradients in that dtype."""
    for low in dtypes[1:]:
        (alone,) = on_ranks(_low_gradients, 1, low, suite_device)
        for (found,) in on_ranks(_low_gradients, 3, low, suite_device):
            assert len(found) == 4
            for path, (dtype, value) in found.items():
                assert (dtype, alone[0][path][0]) == ("float32", low)
                average = sum(batch[path][1] for batch in alone) / 3
                largest = sum(np.abs(batch[path][1]) for batch in alone) / 3
                error = (np.abs(value - average) / largest).max()
                assert error <= 2 * _EPSILON["float32"], f"{path} in {low}: {error}"
