"""Calls dropout functions, records their masks, and can replace the masks by those of the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["drop"]


def drop(
    plain: Callable[..., Any],
    record: Callable[[Any], Any | None],
    values: Any,
    p: float,
    *,
    inplace: bool,
    redraw: bool,
    replays: bool,
) -> Any:
    """Call a dropout function, record its mask, and return its output.

    Even if the mask is replaced, the function is called, so that the generator advances as it does without recording.
    If the input has zeros, the output does not show the mask there; the mask is then drawn again with the same random
    numbers.

    Args:
        plain: ``torch.nn.functional.dropout`` or one of its forms for channels.
        record: called with an array that is zero where elements are dropped; returns the mask to use instead, or None.
        values: the input.
        p: probability with which an element is dropped.
        inplace: whether the input is overwritten.
        redraw: whether random numbers come from the CPU's generator, whose state can be restored for a second draw.
        replays: whether ``record`` may return a mask.
    """
    if type(values) is not torch.Tensor or values.device.type != "cpu" or p >= 1:
        output = plain(values, p, True, inplace)
        record(output)
        return output
    before = torch.get_rng_state() if redraw and bool((values.detach() == 0).any()) else None
    output = plain(values.detach(), p, True, False) if replays else plain(values, p, True, inplace)
    drawn = output if before is None else _drawn_again(plain, output, p, before)
    mask = record(drawn)
    if not replays:
        return output
    kept = drawn != 0 if mask is None else torch.from_numpy(mask)
    noise = kept.to(values.dtype).div_(1 - p)
    return values.mul_(noise) if inplace else values * noise


def _drawn_again(plain: Callable[..., Any], output: Any, p: float, before: Any) -> Any:
    """Apply the dropout to ones with the same random numbers, and restore the generator's state.

    Returns:
        the result; ``output`` if the two masks differ.
    """
    after = torch.get_rng_state()
    try:
        torch.set_rng_state(before)
        ones = plain(torch.ones_like(output.detach()), p, True, False)
        return ones if torch.equal(torch.get_rng_state(), after) else output
    finally:
        torch.set_rng_state(after)
