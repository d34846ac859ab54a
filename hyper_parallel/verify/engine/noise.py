"""Tolerances: the effect of rounding on each value, measured by perturbing the reference by one ULP.

The reference runs again, in antithetic pairs: inputs and weights are moved by one unit in the last place, in random
directions and then in the opposite directions (:func:`perturb`). The resulting movement of a value is its scale of
rounding. It includes everything that is computed before the value: cancellation, division by small numbers, the
optimizer. A correct parallel run computes the same sums in a different order, and may be off by :data:`MULTIPLE` of
these scales.

**Derivation of the multiple.** Let ``x`` be the size of a sum's terms and ``u`` half a unit in the last place. Moving
each of ``n`` terms by ``2u x`` moves the sum by about ``2u x sqrt(n)``. Adding them one after the other in a different
order rounds ``n`` partial sums of size up to ``x sqrt(n)``: about ``0.6 u x n / sqrt(2)`` (Higham, Accuracy and
Stability of Numerical Algorithms, section 4.2), which is ``sqrt(n) / 5`` scales. Kernels add in blocks, so ``n`` is at
most about a thousand: 7 scales, and five times that in the tail of millions of values. Terms of one sign add up to ``n
x``; that case is covered by the unit in the last place of the value itself, which counts as a scale. Measured over 4000
random networks of up to four layers, with SGD and AdamW and in both precisions, no correct run was off by more than
half of its tolerance; ``tests_unit/verify/engine/test_noise.py`` repeats some. In bfloat16 and float16, sums are
computed in float32 and only results are rounded, so :data:`HALF_MULTIPLE` is enough.

**Few repeats.** Two pairs leave some elements unmoved by chance. The scale of an element is therefore at least the
median of its row, of its column and of its tensor, and the median relative scale times its own magnitude. Medians are
used because AdamW makes single elements of a weight jump, which must not loosen the tolerances of the other elements.

**Half precision.** Movements of float32 weights and inputs are lost where they are rounded to bfloat16 or float16. Two
further pairs of repeats therefore move every half-precision output of a module, and its gradient, by one unit in the
last place, as sums in a different order do. The tolerance is :data:`ROUNDED_MULTIPLE` times the resulting movement.

**AdamW** divides by the gradient's own magnitude: if a gradient is only rounding noise, its sign decides the direction
of a complete step. No multiple of a small movement covers that. Two further pairs of repeats therefore displace each
gradient by its tolerance, with both signs, before the optimizer sees it (:func:`displace`): one in random directions
per element, one in the same direction everywhere, because the noise of neighbours may agree. The tolerance of weights
and all later values is :data:`DISPLACED_MULTIPLE` times their movement, because the displacement already includes the
multiple.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.verify.frameworks.contract.records import HALF_BITS, used_bits

__all__ = [
    "DISPLACED_MULTIPLE",
    "HALF_MULTIPLE",
    "MULTIPLE",
    "NOISE_SHARE",
    "ROUNDED_MULTIPLE",
    "allowed_movement",
    "as_wide",
    "displace",
    "movement",
    "multiple_of",
    "perturb",
    "seed_of",
    "unit",
]

MULTIPLE = 64.0
"""Number of scales of rounding by which a correct run may be off."""

HALF_MULTIPLE = 16.0
"""The same for values of bfloat16 and float16, whose sums are computed in float32."""

DISPLACED_MULTIPLE = 2.0
"""Factor of the movements in repeats with displaced gradients: 1 for the reference plus 1 for the parallel run."""

ROUNDED_MULTIPLE = 2.0
"""Factor of the movements in repeats with moved half-precision outputs.

The repeat moves all outputs by one ULP. A correct run with sums in a different order rounds them by half an ULP. Four
repeats underestimate the largest effect. Measured on 36 random networks under autocast, no correct run was off by more
than 0.8 of its tolerance.
"""

NOISE_SHARE = 1e-3
"""Values that cancel exactly in the reference are measured relative to this fraction of the largest value of their
kind.
"""

_CANCELLED = 64.0
"""Factor of :data:`NOISE_SHARE` for fewer than :data:`_FEW` numbers that are exactly zero in the reference and all
repeats.

Terms that cancel leave multiples of their own ULP, and zero is the most likely multiple. Five runs in the same order
may all give zero where a different order gives one ULP. A larger number of values stays zero only if nothing is added
there.
"""

_FEW = 8

_SAMPLED = 4096
"""Largest number of elements in a median over a tensor; for a row, a 64th of it if there are many rows."""

_LEAST_SPACING = {"bfloat16": 0.0, "float16": 2.0**-24}
"""Spacing of the smallest numbers of a half-precision dtype, where float32 still has finer spacing."""


def perturb(array: Any, seed: int, sign: int, dtype: str = "") -> Any:
    """Return ``array`` moved by one unit in the last place, up or down at random.

    Args:
        array: NumPy array of any shape; values that are zero, not finite or not floating stay as they are.
        seed: seed of the directions; use a different one for each array.
        sign: 1 for the directions of the seed, -1 for the opposite directions.
        dtype: ``bfloat16`` or ``float16`` if a float32 array contains numbers of that dtype; if empty, this is inferred
            from the numbers.

    Returns:
        A new array of the same shape and dtype. Numbers of bfloat16 and float16 in a float32 array stay numbers of that
        dtype.
    """
    if array.dtype.kind not in "fc" or not array.size:
        return array.copy()
    if array.dtype.kind == "c":
        real, imaginary = perturb(array.real.copy(), seed, sign), perturb(array.imag.copy(), seed + 1, sign)
        return (real + 1j * imaginary).astype(array.dtype)
    moved = (array + _directions(array, seed, sign) * _spacing(array, dtype)).astype(array.dtype)
    return np.asarray(np.where(np.isfinite(array) & (array != 0), moved, array))


def displace(array: Any, allowed: Any, seed: int | None, sign: int) -> Any:
    """Return ``array`` moved by exactly ``allowed``, up or down at random per element, or everywhere the same way.

    Args:
        array: gradient, of any shape.
        allowed: movement of each element: an array of the same shape, or a number.
        seed: seed of the directions; None moves every element up. With the same seed in each step, an element moves in
            the same direction in all steps.
        sign: 1 for the directions of the seed, -1 for the opposite directions.
    """
    if array.dtype.kind not in "fc" or not array.size:
        return array.copy()
    directions = float(sign) if seed is None else _directions(array, seed, sign)
    moved = array + directions * np.where(np.isfinite(allowed), allowed, 0.0)
    return np.asarray(moved, dtype=array.dtype)


def allowed_movement(
    reference: Any,
    moved: Any,
    rounded: Any | None,
    displaced: Any | None,
    *,
    floor: float = 0.0,
    dtype: str = "",
    least_unit: float = 0.0,
) -> Any:
    """Return the tolerance of ``reference`` per element, from its largest movements.

    Args:
        reference: floating or complex array.
        moved: largest movement of each element in repeats perturbed by one ULP, of the same shape.
        rounded: the same in repeats whose half-precision outputs were moved; None if there were no such repeats.
        displaced: the same in repeats whose gradients were displaced; None if there were no such repeats.
        floor: smallest magnitude whose unit in the last place counts as a scale: a fraction of the largest value of its
            kind, for values that cancel exactly in the reference.
        dtype: as in :func:`perturb`.
        least_unit: unit in the last place of 1 in the dtype from which the value was computed, if that is coarser.

    Returns:
        array of the dtype of ``moved``. Complex values have one bound for the modulus.
    """
    if not reference.ndim:
        one = [None if moves is None else np.reshape(moves, 1) for moves in (moved, rounded, displaced)]
        options: dict[str, Any] = {"floor": floor, "dtype": dtype, "least_unit": least_unit}
        return allowed_movement(reference.reshape(1), *one, **options).reshape(())
    magnitude = _magnitude(reference, moved.dtype)
    if reference.size < _FEW and not moved.any() and not magnitude.any():
        floor *= _CANCELLED
    allowed = np.maximum(magnitude, moved.dtype.type(floor))
    allowed *= moved.dtype.type(max(unit(reference, dtype), least_unit))
    least_spacing = _LEAST_SPACING.get(dtype, 0.0)
    if least_spacing:
        np.maximum(allowed, moved.dtype.type(least_spacing), out=allowed)
    np.maximum(allowed, _with_neighbours(moved, magnitude), out=allowed)
    allowed *= moved.dtype.type(multiple_of(reference, dtype))
    for moves, multiple in ((rounded, ROUNDED_MULTIPLE), (displaced, DISPLACED_MULTIPLE)):
        if moves is not None:
            allowed += moved.dtype.type(multiple) * _with_neighbours(moves, magnitude)
    return allowed


def movement(reference: Any, repeats: Sequence[Any]) -> Any:
    """Return the scale of each element: its largest movement in the repeats, or that of its neighbours if larger.

    Args:
        reference: floating or complex array.
        repeats: arrays of the same shape.

    Returns:
        float64 array of the same shape; infinity where a repeat is not finite though the reference is.
    """
    moved, magnitude = _largest_moves(reference, repeats), _magnitude(reference, np.dtype(np.float64))
    return _with_neighbours(np.atleast_1d(moved), np.atleast_1d(magnitude)).reshape(reference.shape)


def _largest_moves(reference: Any, repeats: Sequence[Any]) -> Any:
    """Return the largest movement of each element in float64; 0 where the reference is not finite."""
    moved = np.zeros(reference.shape, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for repeat in repeats:
            distance = np.abs(as_wide(_same_shape(repeat, reference)) - as_wide(reference))
            moved = np.maximum(moved, np.where(np.isnan(distance), np.inf, distance))
    return np.where(np.isfinite(reference), moved, 0.0)


def unit(array: Any, dtype: str = "") -> float:
    """Return the unit in the last place of 1 in the dtype that ``array`` was computed in.

    A single float64 number that float32 represents exactly is a loss or norm that was computed in float32 and
    converted. ``dtype`` is that of :func:`perturb`.
    """
    eps = float(np.finfo(array.dtype).eps)
    if array.dtype == np.float64 and array.size == 1 and _is_single(float(array.reshape(()))):
        return float(np.finfo(np.float32).eps)
    return eps * float(2 ** _trailing_zero_bits(array, dtype))


def multiple_of(array: Any, dtype: str = "") -> float:
    """Return how many scales of rounding a correct run may be off, in the dtype that ``array`` was computed in."""
    half = array.dtype == np.float16 or _trailing_zero_bits(array, dtype)
    return HALF_MULTIPLE if half else MULTIPLE


def seed_of(seed: int, *names: object) -> int:
    """Return a seed for one array from a run's seed and the identity of the array; it is equal in every process."""
    digest = hashlib.sha256(repr((seed, *names)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _with_neighbours(moved: Any, magnitude: Any) -> Any:
    """Return the scale of each element: its movement, or that of its neighbours if larger.

    The neighbours enter by medians over the element's tensor, row, column and vicinity, and by the median ratio of
    movement to magnitude. Each median is taken over those that moved among at most :data:`_SAMPLED` elements, whose
    choice depends only on the shape.
    """
    if not moved.size:
        return moved
    flat, sizes = moved.reshape(-1), magnitude.reshape(-1)
    if moved.size > _SAMPLED:
        chosen = np.random.default_rng(moved.size).integers(0, moved.size, _SAMPLED)
        flat, sizes = flat[chosen], sizes[chosen]
    active = (flat > 0) & np.isfinite(flat)
    if not active.any():
        if moved.size <= _SAMPLED or not np.any(moved):
            return moved
        active = (moved.reshape(-1) > 0) & np.isfinite(moved.reshape(-1))
        flat, sizes = moved.reshape(-1), magnitude.reshape(-1)
        if not active.any():
            return moved
    least = np.maximum(moved, np.median(flat[active]))
    visible = active & (sizes > 0)
    if visible.any():
        ratio = np.median(flat[visible] / sizes[visible])
        np.maximum(least, np.minimum(ratio, 1.0).astype(moved.dtype) * magnitude, out=least)
    if moved.ndim == 1:
        return np.maximum(least, _vicinity(moved), out=least)
    for dim in range(moved.ndim):
        rows = np.moveaxis(moved, dim, 0).reshape(moved.shape[dim], -1)
        most = max(_SAMPLED // 64, _SAMPLED // len(rows))
        if rows.shape[1] > most:
            rows = rows[:, np.linspace(0, rows.shape[1] - 1, most).astype(np.int64)]
        shape = [1] * moved.ndim
        shape[dim] = moved.shape[dim]
        np.maximum(least, _medians(rows).reshape(shape), out=least)
    return least


def _vicinity(moved: Any, width: int = 7) -> Any:
    """Return the median over ``width`` neighbours in a vector, because sections of fused biases differ in scale."""
    if moved.size < width:
        return np.zeros_like(moved)
    padded = np.pad(moved, width // 2, mode="reflect")
    return _medians(np.lib.stride_tricks.sliding_window_view(padded, width))


def _medians(rows: Any) -> Any:
    """Return the median of the finite movements of each row; 0 for a row without movements."""
    ordered = np.sort(np.where((rows > 0) & np.isfinite(rows), rows, np.inf), axis=1)
    count = np.isfinite(ordered).sum(axis=1)
    middle = np.clip(np.stack([(count - 1) // 2, count // 2]), 0, rows.shape[1] - 1)
    pairs = np.take_along_axis(ordered, middle.T, axis=1)
    with np.errstate(invalid="ignore"):
        return np.where(count > 0, pairs.mean(axis=1), 0).astype(rows.dtype)


def _trailing_zero_bits(array: Any, dtype: str) -> int:
    """Return how many trailing bits of all numbers of a float32 array are zero: 16 for bfloat16, 13 for float16, or 0.

    If the dtype is unknown, up to seven numbers may have short binary fractions by chance (0.5, 1.0). They then count
    as float32.
    """
    if dtype in HALF_BITS:
        return HALF_BITS[dtype]
    if array.dtype != np.float32 or array.size < 8:
        return 0
    if used_bits(array.reshape(-1)[:_SAMPLED]) & 1:
        return 0
    used = used_bits(array)
    if not used & ((1 << 19) - 1):
        return 0  # constants or small integers
    return next((bits for bits in HALF_BITS.values() if not used & ((1 << bits) - 1)), 0)


def _is_single(number: float) -> bool:
    """Return whether float32 represents a number exactly that is not a short fraction or a small integer."""
    used = int(np.float64(number).view(np.uint64)) & ((1 << 52) - 1)
    return not used & ((1 << 29) - 1) and bool(used & ((1 << 42) - 1))


def _spacing(array: Any, dtype: str) -> Any:
    """Return the distance to the next number of the dtype that ``array`` was computed in."""
    with np.errstate(invalid="ignore"):
        spacing = np.abs(np.spacing(array)) * array.dtype.type(2 ** _trailing_zero_bits(array, dtype))
    return np.maximum(spacing, array.dtype.type(_LEAST_SPACING.get(dtype, 0.0)))


def _directions(array: Any, seed: int, sign: int) -> Any:
    """Return 1 or -1 for each element, of the dtype of its magnitudes."""
    drawn = np.frombuffer(np.random.default_rng(seed).bytes(-(-array.size // 8)), np.uint8)
    ups = np.unpackbits(drawn, count=array.size).astype(array.real.dtype)
    ups *= 2 * sign
    ups -= sign
    return ups.reshape(array.shape)


def _magnitude(array: Any, dtype: np.dtype[Any]) -> Any:
    """Return finite magnitudes in ``dtype``; 0 for other numbers."""
    magnitude = np.abs(array).astype(dtype, copy=False)
    return np.where(np.isfinite(magnitude), magnitude, dtype.type(0))


def as_wide(array: Any) -> Any:
    """Return an array in float64, or complex128."""
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _same_shape(repeat: Any, reference: Any) -> Any:
    repeat = np.asarray(repeat)
    if repeat.shape != reference.shape:
        raise ValueError(f"a repeat of the reference has shape {list(repeat.shape)}, not {list(reference.shape)}")
    return repeat
