"""Allowed differences: what rounding does to each value, measured by perturbing the reference in the last place.

The reference runs again, in antithetic pairs: inputs and weights are moved by one unit in the last place, in random
directions and then in the opposite ones (:func:`perturb`). What that does to a value is its scale of rounding, with
everything on the way included: cancellation, division by small numbers, the optimizer. A correct parallel run computes
the same sums in another order, and may be off by :data:`MULTIPLE` of these scales.

**Derivation of the multiple.** Let ``x`` be the size of a sum's terms and ``u`` half a unit in the last place. Moving
each of ``n`` terms by ``2u x`` moves the sum by about ``2u x sqrt(n)``. Adding them one after the other in another
order rounds ``n`` partial sums of size up to ``x sqrt(n)``: about ``0.6 u x n / sqrt(2)`` (Higham, Accuracy and
Stability of Numerical Algorithms, section 4.2), which is ``sqrt(n) / 5`` scales. Kernels add in blocks, so that ``n``
is about a thousand at most: 7 scales, and five times that in the tail of millions of values. Terms of one sign add up
to ``n x``; that case is covered by the unit in the last place of the value itself, which counts as a scale. Measured
over 4000 random networks of up to four layers, with SGD and AdamW and in both precisions, no correct run was off by
more than half of what is allowed; ``tests_unit/verify/test_noise.py`` repeats some of them. In bfloat16 and float16,
sums are held in float32 and only results are rounded, so :data:`HALF_MULTIPLE` is enough.

**Few repeats.** Two pairs leave some elements unmoved by chance. The scale of an element is therefore at least the
median of its row, of its column and of its tensor, and the median relative scale times its own magnitude. Medians, as
AdamW makes single elements of a weight jump, which must not loosen the others.

**Half precision.** Movements of float32 weights and inputs are lost where they are rounded to bfloat16 or float16. Two
further pairs of repeats therefore move every half-precision output of a module, and its gradient, by one unit in the
last place, which is what another order of sums does to it; what follows is allowed :data:`ROUNDED_MULTIPLE` times.

**AdamW** divides by the gradient's own magnitude: where a gradient is only rounding noise, its sign decides about a
whole step. No multiple of a small movement shows that. Two further pairs of repeats therefore displace each gradient
by all that is allowed to it, with both signs, before the optimizer sees it (:func:`displace`): one in random
directions per element, one in the same direction everywhere, as the noise of neighbours may agree. What that does to
weights and everything after them is allowed :data:`DISPLACED_MULTIPLE` times, as the displacement has the multiple in
it already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = [
    "DISPLACED_MULTIPLE",
    "HALF_MULTIPLE",
    "MULTIPLE",
    "NOISE_SHARE",
    "ROUNDED_MULTIPLE",
    "allowed_difference",
    "displace",
    "movement",
    "multiple_of",
    "perturb",
    "seed_of",
    "unit",
]

MULTIPLE = 64.0
"""How many scales of rounding a correct run may be off."""

HALF_MULTIPLE = 16.0
"""The same for values of bfloat16 and float16, whose sums are held in float32."""

DISPLACED_MULTIPLE = 2.0
"""How often what displaced gradients do is allowed: once each for the reference and the parallel run."""

ROUNDED_MULTIPLE = 2.0
"""How often what moved half-precision outputs do is allowed.

The repeat moves all of them by a whole unit; a correct run rounds them by half of one, where its sums run in another
order. Four repeats show less than the largest of it. Measured on 36 random networks under autocast, no correct run was
off by more than 0.8 of what is allowed."""

NOISE_SHARE = 1e-3
"""Values that cancel exactly in the reference are measured against this fraction of the largest value of their kind."""

_HALF_BITS = {"bfloat16": 16, "float16": 13}
"""Trailing zero bits of bfloat16 and float16 numbers that are stored as float32."""

_LEAST_SPACING = {"bfloat16": 0.0, "float16": 2.0**-24}
"""Distance of the smallest numbers of a half-precision dtype, where float32 still has nearer ones."""


def perturb(array: Any, seed: int, sign: int, dtype: str = "") -> Any:
    """Return ``array`` moved by one unit in the last place, up or down at random.

    Args:
        array: NumPy array of any shape; values that are zero, not finite or not floating stay as they are.
        seed: of the directions; use another one for each array.
        sign: 1 or -1: the same directions, or the opposite ones.
        dtype: ``bfloat16`` or ``float16`` if a float32 array holds numbers of it; empty if that is to be seen from
            the numbers.

    Returns:
        a new array of the same shape and dtype. Numbers of bfloat16 and float16 in a float32 array stay such numbers.
    """
    if array.dtype.kind not in "fc" or not array.size:
        return array.copy()
    directions = _directions(array.shape, seed, sign)
    if array.dtype.kind == "c":
        real, imaginary = perturb(array.real.copy(), seed, sign), perturb(array.imag.copy(), seed + 1, sign)
        return (real + 1j * imaginary).astype(array.dtype)
    moved = (array + directions * _spacing(array, dtype)).astype(array.dtype)
    return np.where(np.isfinite(array) & (array != 0), moved, array)


def displace(array: Any, allowed: Any, seed: int | None, sign: int) -> Any:
    """Return ``array`` moved by exactly ``allowed``, up or down at random per element, or everywhere the same way.

    Args:
        array: gradient, of any shape.
        allowed: what may be added to each element: of the same shape, or a number.
        seed: of the directions; None moves every element up. With the same seed in each step an element moves the
            same way in all of them.
        sign: 1 or -1: the same directions, or the opposite ones.
    """
    if array.dtype.kind not in "fc" or not array.size:
        return array.copy()
    directions = float(sign) if seed is None else _directions(array.shape, seed, sign)
    moved = array + directions * np.where(np.isfinite(allowed), allowed, 0.0)
    return moved.astype(array.dtype)


def allowed_difference(
    reference: Any,
    repeats: Sequence[Any],
    displaced: Sequence[Any] = (),
    floor: float = 0.0,
    rounded: Sequence[Any] = (),
    dtype: str = "",
) -> Any:
    """Return how far a correct run may be from ``reference``, per element.

    Args:
        reference: the value in the reference, any shape and dtype.
        repeats: the same value in the repeats perturbed in the last place.
        displaced: the same value in the repeats whose gradients were displaced.
        floor: least magnitude whose unit in the last place counts as a scale: a fraction of the largest value of its
            kind, for values which cancel exactly in the reference.
        rounded: the same value in repeats whose half-precision outputs of modules were moved in the last place.
        dtype: as in :func:`perturb`.

    Returns:
        float64 array of the shape of ``reference``. Integers and booleans may not differ, except where a repeat
        does (infinity). Complex values have one bound for the modulus.

    Raises:
        ValueError: no repeats, or one of another shape.
    """
    reference = np.asarray(reference)
    if not repeats:
        raise ValueError("allowed differences are measured from repeats of the reference, but there are none")
    if reference.dtype.kind not in "fc":
        changed = np.zeros(reference.shape, dtype=bool)
        for repeat in (*repeats, *displaced, *rounded):
            changed |= np.asarray(_same_shape(repeat, reference)) != reference
        return np.where(changed, np.inf, 0.0)
    scale = movement(reference, repeats)
    least = unit(reference, dtype) * np.maximum(_magnitude(reference), floor)
    least = np.maximum(least, _LEAST_SPACING.get(dtype, 0.0))
    allowed = multiple_of(reference, dtype) * np.maximum(scale, least)
    if len(rounded):
        allowed = allowed + ROUNDED_MULTIPLE * movement(reference, rounded)
    if len(displaced):
        allowed = allowed + DISPLACED_MULTIPLE * movement(reference, displaced)
    return allowed


def movement(reference: Any, repeats: Sequence[Any]) -> Any:
    """Return the scale of each element: its largest movement in the repeats, and at least that of its neighbours.

    Args:
        reference: floating or complex array.
        repeats: arrays of the same shape.

    Returns:
        float64 array of the same shape; infinity where a repeat is not finite though the reference is.
    """
    moved = np.zeros(reference.shape, dtype=np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for repeat in repeats:
            distance = np.abs(_wide(_same_shape(repeat, reference)) - _wide(reference))
            moved = np.maximum(moved, np.where(np.isnan(distance), np.inf, distance))
    moved = np.where(np.isfinite(reference), moved, 0.0)
    return np.maximum(moved, _neighbours(moved, _magnitude(reference)))


def unit(array: Any, dtype: str = "") -> float:
    """Return the unit in the last place of 1 in the dtype that ``array`` was computed in.

    A single float64 number that fits in float32 is a loss or norm that was computed there and converted. ``dtype`` is
    that of :func:`perturb`.
    """
    eps = float(np.finfo(array.dtype).eps)
    if array.dtype == np.float64 and array.size == 1 and _is_single(float(array.reshape(()))):
        return float(np.finfo(np.float32).eps)
    return eps * float(2 ** _trailing_zero_bits(array, dtype))


def multiple_of(array: Any, dtype: str = "") -> float:
    """Return how many scales a correct run may be off in the dtype that ``array`` was computed in; see :func:`unit`."""
    half = array.dtype == np.float16 or _trailing_zero_bits(array, dtype)
    return HALF_MULTIPLE if half else MULTIPLE


def seed_of(seed: int, *names: object) -> int:
    """Return a seed for one array out of a run's seed and what identifies the array: equal in every process."""
    digest = hashlib.sha256(repr((seed, *names)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _neighbours(moved: Any, magnitude: Any) -> Any:
    """Return the least scale of each element: medians over its tensor, row, column and vicinity, and of its ratio."""
    active = (moved > 0) & np.isfinite(moved)
    if not active.any():
        return np.zeros_like(moved)
    least = np.full(moved.shape, float(np.median(moved[active])))
    if magnitude.size:
        visible = active & (magnitude > 0)
        if visible.any():
            ratio = float(np.median(moved[visible] / magnitude[visible]))
            least = np.maximum(least, min(ratio, 1.0) * magnitude)
    masked = np.where(active, moved, np.nan)
    if moved.ndim == 1:
        return np.maximum(least, _vicinity(masked))
    for dim in range(moved.ndim):
        others = tuple(other for other in range(moved.ndim) if other != dim)
        least = np.maximum(least, _median(masked, others))
    return least


def _vicinity(masked: Any, width: int = 7) -> Any:
    """Return the median over ``width`` neighbours in a vector: parts of fused biases differ in scale."""
    if masked.size < width:
        return np.zeros_like(masked)
    padded = np.pad(masked, width // 2, mode="reflect")
    return _median(np.lib.stride_tricks.sliding_window_view(padded, width), (1,)).reshape(-1)


def _median(masked: Any, dims: tuple[int, ...]) -> Any:
    """Return the median of the numbers along ``dims``, which are kept; 0 where there is none."""
    count = np.sum(~np.isnan(masked), axis=dims, keepdims=True)
    filled = np.where(count > 0, masked, 0.0)
    return np.nanmedian(filled, axis=dims, keepdims=True) if masked.size else filled


def _trailing_zero_bits(array: Any, dtype: str) -> int:
    """Return how many trailing bits are zero in every number of a float32 array: 16 of bfloat16, 13 of float16, or 0.

    Where the dtype is not told, up to seven numbers may have short binary fractions by chance (0.5, 1.0), and then
    count as float32.
    """
    if dtype in _HALF_BITS:
        return _HALF_BITS[dtype]
    if array.dtype != np.float32 or array.size < 8:
        return 0
    used = int(np.bitwise_or.reduce(np.ascontiguousarray(array).view(np.uint32), axis=None))
    if not used & ((1 << 19) - 1):
        return 0  # constants or small integers
    return next((bits for bits in _HALF_BITS.values() if not used & ((1 << bits) - 1)), 0)


def _is_single(number: float) -> bool:
    """Return whether a number fits in float32, and has more digits than a short fraction or a small integer."""
    used = int(np.float64(number).view(np.uint64)) & ((1 << 52) - 1)
    return not used & ((1 << 29) - 1) and bool(used & ((1 << 42) - 1))


def _spacing(array: Any, dtype: str) -> Any:
    """Return the distance to the next number of the dtype that ``array`` was computed in."""
    with np.errstate(invalid="ignore"):
        spacing = np.abs(np.spacing(array)) * array.dtype.type(2 ** _trailing_zero_bits(array, dtype))
    return np.maximum(spacing, array.dtype.type(_LEAST_SPACING.get(dtype, 0.0)))


def _directions(shape: tuple[int, ...], seed: int, sign: int) -> Any:
    return sign * np.random.default_rng(seed).choice(np.array([-1.0, 1.0]), size=shape)


def _magnitude(array: Any) -> Any:
    """Return finite magnitudes as float64; 0 for others."""
    wide = np.abs(_wide(array))
    return np.where(np.isfinite(wide), wide, 0.0)


def _wide(array: Any) -> Any:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _same_shape(repeat: Any, reference: Any) -> Any:
    repeat = np.asarray(repeat)
    if repeat.shape != reference.shape:
        raise ValueError(f"a repeat of the reference has shape {list(repeat.shape)}, not {list(reference.shape)}")
    return repeat
