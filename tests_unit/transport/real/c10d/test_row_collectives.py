"""What the engines of PyTorch reduce themselves."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.platforms("torch")


def test_an_engine_reduces_what_it_knows():
    """An accelerator's engine reduces the dtypes and reductions that it has; gloo's sums are added in rank order."""
    import torch

    from hyper_parallel.transport.real.c10d.row_collectives import is_native

    assert is_native("nccl", torch.float64, "sum")
    assert not is_native("hccl", torch.float64, "sum")
    assert not is_native("gloo", torch.float32, "sum")
    assert not is_native("nccl", torch.bool, "max")
    assert not is_native("nccl", torch.float32, "any")
    assert is_native("nccl", torch.float32, "avg")
    assert not is_native("nccl", torch.int32, "avg")


def test_deterministic_programs_add_in_rank_order():
    """While PyTorch's deterministic algorithms are on, only reductions whose order does not matter are the engine's."""
    import torch

    from hyper_parallel.transport.real.c10d.row_collectives import is_native

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(mode=True)
    try:
        assert [is_native("nccl", torch.float32, op) for op in ("sum", "avg", "prod", "max", "min")] == [
            False, False, False, True, True,
        ]  # fmt: skip
        assert is_native("nccl", torch.int32, "sum")
    finally:
        torch.use_deterministic_algorithms(mode=before)
