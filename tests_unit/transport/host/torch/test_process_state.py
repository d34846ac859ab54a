"""Each simulated rank has states of its own of the devices' generators."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from hyper_parallel.transport.host.torch.ops import TorchOps
from hyper_parallel.transport.host.torch.process_state import restore_device_generators, save_device_generators
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


USED = [True]
"""Whether the process has used a device."""


@pytest.fixture
def devices(monkeypatch):
    """Two generators that stand for those of two devices."""
    generators = [torch.Generator(), torch.Generator()]

    def set_all(states):
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)

    def seed_all(seed):
        for generator in generators:
            generator.manual_seed(seed)

    module = SimpleNamespace(
        is_initialized=lambda: USED[0],
        get_rng_state_all=lambda: [generator.get_state() for generator in generators],
        set_rng_state_all=set_all,
        manual_seed_all=seed_all,
    )
    USED[0] = True
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: {"cuda": module}[device])
    return generators


def _draw(devices):
    return [torch.rand(5, generator=generator) for generator in devices]


def test_without_a_device_there_is_nothing_to_save(monkeypatch):
    """A process without devices has no states of devices, and putting none back changes nothing."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert save_device_generators() is None
    restore_device_generators(None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert save_device_generators() is None


def test_devices_that_nobody_used_are_left_alone(devices):
    """Reading a generator starts the driver, so states are not touched before the first use of a device."""
    USED[0] = False
    before = [generator.get_state() for generator in devices]
    ops = TorchOps()
    state = ops.save_state()
    assert state[1] is None
    ops.restore_state(state)
    assert all(torch.equal(generator.get_state(), old) for generator, old in zip(devices, before, strict=True))


def test_a_rank_that_uses_the_devices_later_finds_its_own_seed(devices):
    """Where another rank used the devices first, a rank's first use begins with the seed of its own CPU generator."""
    ops = TorchOps()
    USED[0] = False
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(17)
    state = ops.save_state()
    USED[0] = True
    torch.default_generator.manual_seed(18)
    _draw(devices)
    ops.restore_state(state)
    assert all(map(torch.equal, _draw(devices), [torch.rand(5, generator=torch.Generator().manual_seed(17))] * 2))
    torch.default_generator.set_state(before)


def test_the_generators_of_all_devices_are_put_back(devices):
    """What a rank draws on any device after its state is put back is what it would have drawn."""
    ops = TorchOps()
    state = ops.save_state()
    first = _draw(devices)
    assert not torch.equal(_draw(devices)[1], first[1])
    ops.restore_state(state)
    assert all(map(torch.equal, _draw(devices), first))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_a_rank_draws_does_not_depend_on_other_ranks(devices, world_size):
    """Ranks that draw in turn draw what each would draw alone, and the caller's generators are as before."""
    import torch.distributed as dist

    def body(alone=None):
        rank = dist.get_rank() if alone is None else alone
        drawn = []
        for generator in devices:
            generator.manual_seed(100 + rank)
        for turn in range(3 + rank):
            drawn += _draw(devices)
            if alone is None and turn < 3:
                dist.barrier()
        return torch.stack(drawn)

    before = save_device_generators()
    got = simulate(body, world_size, "torch")
    assert all(map(torch.equal, save_device_generators(), before))
    assert all(torch.equal(got[rank], body(rank)) for rank in range(world_size))


MATMUL = ("none", "tf32")


@pytest.fixture(autouse=True)
def kept():
    """Put back the switches of this process."""
    from hyper_parallel.transport.host.torch.process_state import put_rounding, rounding

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

    from hyper_parallel.transport.host.torch.process_state import exact_products, rounding

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

    from hyper_parallel.transport.host.torch.process_state import exact_products

    allow_tf32_in_cudnn()
    monkeypatch.setattr(torch.backends, "__allow_nonbracketed_mutation_flag", False)
    with exact_products():
        assert not torch.backends.cudnn.allow_tf32
    assert torch.backends.cudnn.allow_tf32


def test_hf32_is_switched_off_where_torch_npu_has_it(monkeypatch):
    """Both switches of torch_npu are off inside and as before afterwards."""
    import torch

    from hyper_parallel.transport.host.torch.process_state import exact_products

    npu = SimpleNamespace(matmul=SimpleNamespace(allow_hf32=False), conv=SimpleNamespace(allow_hf32=True))
    monkeypatch.setattr(torch, "npu", npu, raising=False)
    with exact_products():
        assert (npu.matmul.allow_hf32, npu.conv.allow_hf32) == (False, False)
    assert (npu.matmul.allow_hf32, npu.conv.allow_hf32) == (False, True)


def test_each_simulated_rank_has_its_own_switches():
    """A rank that leaves the block switches nothing on for a rank that is still in it, nor for the caller."""
    import torch
    import torch.distributed as dist

    from hyper_parallel.transport.host.torch.process_state import exact_products, rounding
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
