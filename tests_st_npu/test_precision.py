"""How exact operators on cards are, measured there: beside one card, and beside the host in float64."""

from __future__ import annotations

import numpy as np
import pytest

pytestmark = [pytest.mark.platforms("torch"), pytest.mark.launch("processes"), pytest.mark.world_size(3)]

MULTIPLE = 8
"""Ranks may be off by so many times what one device is off in the same dtype; sums of parts are rounded once more."""


def _rounding():
    """Operators whose sums depend on the placement, by name."""
    import torch
    from torch.nn import functional

    return {
        "matmul": lambda a, b: a @ b.transpose(0, 1),
        "softmax": lambda a, b: torch.softmax(a + b, 0),
        "layer_norm": lambda a, b: functional.layer_norm(a, a.shape[-1:]) + b,
        "mean": lambda a, b: (a * b).mean(0),
    }


def _exact():
    """Operators that compute each element by itself, or move it, by name."""
    import torch

    return {
        "add": lambda a, b: a + b,
        "multiply": lambda a, b: a * b,
        "relu": lambda a, b: torch.relu(a - b),
        "transpose": lambda a, b: torch.cat([a, b]).transpose(0, 1),
        "maximum": lambda a, b: torch.maximum(a, b).amax(0),
    }


def _operands(dtype, device):
    """Two tensors on one device, from numbers that the dtype has."""
    import torch

    rng = np.random.default_rng(3)
    wide = [torch.from_numpy(rng.standard_normal((7, 11))).to(dtype) for _ in range(2)]
    return wide, [tensor.to(device) for tensor in wide]


def _outcomes(call, operands, mesh, placement):
    """What DTensors give, the output and both gradients, whole and on the host."""
    import torch

    from hyper_parallel import distribute_tensor

    spread = [distribute_tensor(tensor, mesh, [placement]).detach().requires_grad_() for tensor in operands]
    return _host(torch, call(*spread), spread)


def _alone(call, operands):
    """What plain tensors give, on the host."""
    import torch

    leaves = [tensor.detach().clone().requires_grad_() for tensor in operands]
    return _host(torch, call(*leaves), leaves)


def _host(torch, out, leaves):
    """Output and gradients for one random cotangent, as plain tensors on the host."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape)
    whole = out.full_tensor() if hasattr(out, "full_tensor") else out
    (whole * weights.to(whole.dtype).to(whole.device)).sum().backward()
    values = [out, *(leaf.grad for leaf in leaves)]
    return [(each.full_tensor() if hasattr(each, "full_tensor") else each).detach().cpu() for each in values]


def test_errors_are_a_multiple_of_one_devices(mesh, device):
    """In float32, bfloat16 and float16, ranks are no further from the host's float64 than a multiple of one device."""
    import torch

    from hyper_parallel import Shard

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        wide, operands = _operands(dtype, device)
        for name, call in _rounding().items():
            truth = _alone(call, [tensor.double() for tensor in wide])
            single = _alone(call, operands)
            for placement in (Shard(0), Shard(1)):
                ranks = _outcomes(call, operands, mesh, placement)
                for exact, one, several in zip(truth, single, ranks, strict=True):
                    assert several.dtype == dtype
                    least = torch.finfo(dtype).eps / 2 * float(exact.abs().max())
                    allowed = MULTIPLE * max(float((one.double() - exact).abs().max()), least)
                    error = float((several.double() - exact).abs().max())
                    assert error <= allowed, f"{name} in {dtype}, {placement}: {error} of {allowed}"


def test_exact_operators_are_equal_bit_for_bit(mesh, device):
    """What computes each element by itself gives the bits of one device, forward and backward, in each dtype."""
    import torch

    from hyper_parallel import Shard

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        _, operands = _operands(dtype, device)
        for name, call in _exact().items():
            single = _alone(call, operands)
            for placement in (Shard(0), Shard(1)):
                for one, several in zip(single, _outcomes(call, operands, mesh, placement), strict=True):
                    assert torch.equal(one, several), f"{name} in {dtype}, {placement}"
