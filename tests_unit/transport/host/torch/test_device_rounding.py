"""TF32 and HF32: off while a card is verified, each rank's own, and put back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.platforms("torch")

MATMUL = ("none", "tf32")


@pytest.fixture(autouse=True)
def kept():
    """Put back the switches of this process."""
    from hyper_parallel.transport.host.torch.device_rounding import put_rounding, rounding

    state = rounding()
    yield
    put_rounding(state)


def allow_tf32_in_cudnn():
    """Switch it on, also where an import of PyTorch's own tests has frozen the flags of this process."""
    import torch

    torch._C._set_cudnn_allow_tf32(True)


def older():
    """Switch on what the older interface has."""
    import torch

    torch.set_float32_matmul_precision("high")
    allow_tf32_in_cudnn()


def newer():
    """Switch on what the newer interface has, of which the older one cannot say the state."""
    import torch

    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    torch.backends.cudnn.rnn.fp32_precision = "ieee"


@pytest.mark.parametrize("switch_on", [older, newer, lambda: None], ids=["older", "newer", "defaults"])
def test_nothing_rounds_inside_and_all_is_as_before_afterwards(switch_on):
    """However TF32 was switched on, no place has it inside; afterwards each has what it had, also after an error."""
    import torch

    from hyper_parallel.transport.host.torch.device_rounding import exact_products, rounding

    switch_on()
    before, backends = rounding(), torch.backends

    def fail():
        with exact_products():
            places = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn)
            assert "tf32" not in {place.fp32_precision for place in places}
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert rounding() == before


def test_frozen_flags_do_not_stop_it(monkeypatch):
    """A program that has called ``torch.backends.disable_global_flags()`` is verified without rounding, too."""
    import torch

    from hyper_parallel.transport.host.torch.device_rounding import exact_products

    allow_tf32_in_cudnn()
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", False)
    with exact_products():
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32


def test_hf32_is_switched_off_where_torch_npu_has_it(monkeypatch):
    """Both switches of torch_npu are off inside and as before afterwards."""
    import torch

    from hyper_parallel.transport.host.torch.device_rounding import exact_products

    npu = SimpleNamespace(matmul=SimpleNamespace(allow_hf32=False), conv=SimpleNamespace(allow_hf32=True))
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    with exact_products():
        assert (npu.matmul.allow_hf32, npu.conv.allow_hf32) == (False, False)
    assert (npu.matmul.allow_hf32, npu.conv.allow_hf32) == (False, True)


def test_each_simulated_rank_has_its_own_switches():
    """A rank that leaves the block switches nothing on for a rank that is still in it, nor for the caller."""
    import torch
    import torch.distributed as dist

    from hyper_parallel.transport.host.torch.device_rounding import exact_products, rounding
    from hyper_parallel.verify import simulate

    def rank():
        seen = []
        with exact_products():
            dist.barrier()
            seen.append(torch.backends.cudnn.allow_tf32)
            if dist.get_rank():
                dist.barrier()
                seen.append(torch.backends.cudnn.allow_tf32)
                dist.barrier()
        if not dist.get_rank():
            seen.append(torch.backends.cudnn.allow_tf32)
            dist.barrier()
            dist.barrier()
        return seen

    allow_tf32_in_cudnn()
    before = rounding()
    assert simulate(rank, 3, "torch") == [[False, True], [False, False], [False, False]]
    assert rounding() == before


def test_a_simulated_program_may_use_the_newer_switches():
    """A rank that sets the newer switches, of which the older cannot say the state, meets the others as usual."""
    import torch
    import torch.distributed as dist

    from hyper_parallel.verify import simulate

    def rank():
        torch.backends.cuda.matmul.fp32_precision = MATMUL[dist.get_rank()]
        dist.barrier()
        dist.barrier()
        return torch.backends.cuda.matmul.fp32_precision

    assert simulate(rank, 2, "torch") == list(MATMUL)
