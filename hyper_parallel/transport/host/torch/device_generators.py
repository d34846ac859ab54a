"""Saves and restores the generators of the cards, which simulated ranks that compute on one card share.

All ranks of a simulation are threads of one process, and PyTorch keeps one generator for each card in a process. Each
rank has states of its own: they are saved when it hands over and put back when it goes on. Operators enqueue with the
state that the generator has when they are called, so nothing waits for a card.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["CardGenerators", "restore_card_generators", "save_card_generators"]

CardGenerators = list[torch.Tensor] | None


def save_card_generators() -> CardGenerators:
    """The states of the generators of all cards that PyTorch sees, in the order of the cards.

    None while no card is in use, so that a simulation of CPU tensors does not start the driver.
    """
    module = _module_in_use()
    return None if module is None else module.get_rng_state_all()


def restore_card_generators(states: CardGenerators) -> None:
    """Put back what :func:`save_card_generators` returned.

    If another rank has begun to use the cards since, they get the state that this rank would have found at its own
    first use: PyTorch seeds them then with the seed of the CPU's generator, which is put back before.
    """
    module = _module_in_use()
    if module is None:
        return
    if states is None:
        module.manual_seed_all(torch.initial_seed())
    else:
        module.set_rng_state_all(states)


def _module_in_use() -> Any:
    """``torch.cuda``, ``torch.npu`` or the like; None where there is no card, or the process has not used one."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    module = None if accelerator is None else torch.get_device_module(accelerator.type)
    return module if module is not None and module.is_initialized() else None
