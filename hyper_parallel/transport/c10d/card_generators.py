"""Saves and restores the generators of the cards, which simulated ranks that compute on one card share.

All ranks of a simulation are threads of one process, and PyTorch keeps one generator for each card in a process. Each
rank has states of its own: they are saved when it hands over and put back when it goes on. Operators enqueue with the
state that the generator has when they are called, so nothing waits for a card.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["CardGenerators", "restore_card_generators", "save_card_generators"]

CardGenerators = list[torch.Tensor]


def save_card_generators() -> CardGenerators:
    """The states of the generators of all cards that PyTorch sees, in the order of the cards; none without a card.

    Raises:
        RuntimeError: PyTorch sees cards and cannot use them; the driver's own error.
    """
    module = _device_module()
    return [] if module is None else module.get_rng_state_all()


def restore_card_generators(states: CardGenerators) -> None:
    """Put back what :func:`save_card_generators` returned."""
    module = _device_module()
    if module is not None:
        module.set_rng_state_all(states)


def _device_module() -> Any:
    """``torch.cuda``, ``torch.npu`` or the like; None where there is no card."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    return None if accelerator is None else torch.get_device_module(accelerator.type)
