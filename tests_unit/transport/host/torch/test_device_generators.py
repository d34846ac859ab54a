"""Each simulated rank has states of its own of the cards' generators."""

from types import SimpleNamespace

import pytest
import torch

from hyper_parallel.transport.host.torch.device_generators import restore_card_generators, save_card_generators
from hyper_parallel.transport.host.torch.ops import TorchOps
from hyper_parallel.verify import simulate

pytestmark = pytest.mark.platforms("torch")


USED = [True]
"""Whether the process has used a card."""


@pytest.fixture
def cards(monkeypatch):
    """Two generators that stand for those of two cards."""
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


def _draw(cards):
    return [torch.rand(5, generator=generator) for generator in cards]


def test_without_a_card_there_is_nothing_to_save(monkeypatch):
    """A process without cards has no states of cards, and putting none back changes nothing."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert save_card_generators() is None
    restore_card_generators(None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert save_card_generators() is None


def test_cards_that_nobody_used_are_left_alone(cards):
    """Reading a generator starts the driver, so states are neither read nor written before the first use of a card."""
    USED[0] = False
    before = [generator.get_state() for generator in cards]
    ops = TorchOps()
    state = ops.save_state()
    assert state[1] is None
    ops.restore_state(state)
    assert all(torch.equal(generator.get_state(), old) for generator, old in zip(cards, before, strict=True))


def test_a_rank_that_uses_the_cards_later_finds_its_own_seed(cards):
    """Where another rank used the cards first, a rank's own first use begins with the seed of its own CPU generator."""
    ops = TorchOps()
    USED[0] = False
    before = torch.default_generator.get_state()
    torch.default_generator.manual_seed(17)
    state = ops.save_state()
    USED[0] = True
    torch.default_generator.manual_seed(18)
    _draw(cards)
    ops.restore_state(state)
    assert all(map(torch.equal, _draw(cards), [torch.rand(5, generator=torch.Generator().manual_seed(17))] * 2))
    torch.default_generator.set_state(before)


def test_the_generators_of_all_cards_are_put_back(cards):
    """What a rank draws on any card after its state is put back is what it would have drawn."""
    ops = TorchOps()
    state = ops.save_state()
    first = _draw(cards)
    assert not torch.equal(_draw(cards)[1], first[1])
    ops.restore_state(state)
    assert all(map(torch.equal, _draw(cards), first))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_what_a_rank_draws_does_not_depend_on_other_ranks(cards, world_size):
    """Ranks that draw in turn draw what each would draw alone, and the caller's generators are as before."""
    import torch.distributed as dist

    def body(alone=None):
        rank = dist.get_rank() if alone is None else alone
        drawn = []
        for generator in cards:
            generator.manual_seed(100 + rank)
        for turn in range(3 + rank):
            drawn += _draw(cards)
            if alone is None and turn < 3:
                dist.barrier()
        return torch.stack(drawn)

    before = save_card_generators()
    got = simulate(body, world_size, "torch")
    assert all(map(torch.equal, save_card_generators(), before))
    assert all(torch.equal(got[rank], body(rank)) for rank in range(world_size))
