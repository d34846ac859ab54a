"""Fingerprints: the same numbers on host and device, and tolerances that follow from those of the elements."""

import numpy as np
import pytest

from hyper_parallel.verify.frameworks.contract.fingerprint import (
    NUMBERS,
    PROJECTIONS,
    TIMES,
    fingerprint_of,
    grid,
    places,
    signs,
    tolerance,
)

FIRST_ROWS = [1, -1, -1, 1, 1, 1, -1, 1]
FIRST_COLUMNS = [[-1, 1, 1, -1], [1, 1, 1, -1]]
SIZES = [1, 2, 31, 33, 1000, 1025, 5003, 262_147, 600_011]


@pytest.fixture
def random():
    """Numbers drawn from one seed."""
    return np.random.default_rng(7)


def vectors(size):
    """The projection vectors of a size, one by one."""
    rows, columns = grid(size)
    row, column = signs("rows", rows + 1), signs("columns", columns)
    place = np.arange(size)
    return row[place // columns] * column[:, place % columns]


@pytest.mark.parametrize("size", SIZES)
def test_the_numbers_are_what_they_are_called(random, size):
    """Norm, sum, extremes, projections on vectors of signs, and elements at fixed places, for every size of a grid."""
    values = random.standard_normal(size)
    numbers = fingerprint_of(values).numbers
    assert len(numbers) == len(NUMBERS)
    expected = [np.linalg.norm(values), values.sum(), values.min(), values.max(), 0.0]
    assert np.allclose(numbers[:5], expected, rtol=1e-11, atol=1e-9)
    assert np.allclose(numbers[5 : 5 + PROJECTIONS], vectors(size) @ values, rtol=1e-10, atol=1e-8)
    assert numbers[5 + PROJECTIONS :].tolist() == values[list(places(size))].tolist()
    assert all(0 <= place < size for place in places(size))


def test_signs_are_the_same_everywhere():
    """Signs come from a hash that no version changes, are balanced, and a longer vector begins with the shorter one."""
    assert signs("rows", 8).tolist() == FIRST_ROWS
    assert signs("columns", 4)[:2].tolist() == FIRST_COLUMNS
    long = signs("columns", 8192)
    assert np.array_equal(long[:, :100], signs("columns", 100))
    assert np.abs(long.mean(1)).max() < 0.05
    assert np.abs(long @ long.T / 8192 - np.eye(PROJECTIONS)).max() < 0.05


@pytest.mark.parametrize("size", [65, 3001, 300_007])
def test_projections_measure_a_distance(random, size):
    """Eight projections of a difference have its norm as their root mean square, within what eight can show."""
    values, moved = random.standard_normal(size), 1e-3 * random.standard_normal(size)
    distance = fingerprint_of(values + moved).distance(fingerprint_of(values))
    assert 0.4 < distance / np.linalg.norm(moved) < 2.0


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("size", [3, 900, 5003, 300_007])
def test_what_elements_may_be_off_by_bounds_the_numbers(random, size, dtype):
    """No change of elements within their own bounds takes a number out of its own: random ones, and all one way."""
    values = random.standard_normal(size).astype(dtype)
    allowed = (1e-4 * random.random(size)).astype(dtype)
    one = fingerprint_of(values)
    bounds = tolerance(allowed, one)
    for signed in (random.choice([-1.0, 1.0], size), np.ones(size), -np.ones(size), np.sign(values)):
        other = fingerprint_of((values + 0.999 * signed * allowed).astype(dtype))
        assert (np.abs(other.numbers - one.numbers) <= bounds).all()
    assert bounds[5] <= TIMES * np.linalg.norm(allowed.astype(np.float64)) * 1.1 + 1e-3 * one.norm


def test_a_scale_is_seen_by_the_norm(random):
    """An element's bound of one part in a million shows a scale of one in a hundred thousand, whatever the size."""
    values = random.standard_normal(200_001)
    one, other = fingerprint_of(values), fingerprint_of(values * (1 + 1e-5))
    bounds = tolerance(1e-6 * np.abs(values), one)
    assert abs(one.numbers[0] - other.numbers[0]) > bounds[0]


@pytest.mark.parametrize(
    "values, dtype",
    [
        (np.arange(12).reshape(3, 4), "int64"),
        (np.array([True, False, True]), "bool"),
        (np.array([1 + 2j, 3 - 1j], np.complex64), "complex64"),
        (np.zeros((0, 3), np.float32), "float32"),
        (np.float64(2.5), "float64"),
    ],
)
def test_other_dtypes_and_empty_tensors(values, dtype):
    """Integers and booleans are exact, complex numbers are pairs, a tensor without elements has zeros."""
    one = fingerprint_of(values)
    assert (one.dtype, one.shape) == (dtype, np.shape(values))
    assert one.is_exact == (dtype in ("int64", "bool"))
    assert one.norm == pytest.approx(np.linalg.norm(np.ravel(values)))
    assert one.size == np.size(values)
    assert tolerance(np.zeros(np.shape(values)), one)[1] <= 1e-3


def test_half_precision_goes_by_its_own_name():
    """A float32 array that stands for bfloat16 says so."""
    assert fingerprint_of(np.ones(3, np.float32), "bfloat16").dtype == "bfloat16"


def test_numbers_that_are_not_finite_are_counted():
    """NaN and infinity are counted; a norm that overflows float32 is computed again in float64."""
    for size in (5, 3000):
        values = np.ones(size, np.float32)
        values[[1, 3]] = np.nan, np.inf
        assert fingerprint_of(values).numbers[4] == 2
        large = fingerprint_of(np.full(size, 1e30, np.float32))
        assert large.numbers[4] == 0
        assert large.norm == pytest.approx(1e30 * np.sqrt(size))
    same = fingerprint_of(np.array([np.nan, 1.0]))
    assert same.same(fingerprint_of(np.array([np.nan, 1.0])))
    assert fingerprint_of(np.array([np.nan, 1.0])).distance(fingerprint_of(np.array([2.0, 1.0]))) == np.inf


@pytest.mark.platforms("torch")
@pytest.mark.parametrize("size", SIZES)
def test_a_device_computes_what_the_host_does(random, size):
    """The few calls that a device gets return the host's numbers, but for rounding in the tensor's dtype."""
    import torch

    from hyper_parallel.verify.frameworks.torch.fingerprints import TorchFingerprints

    fingerprints = TorchFingerprints()
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        tensor = torch.from_numpy(random.standard_normal(size)).to(dtype)
        host = fingerprint_of(tensor.numpy())
        (numbers,) = fingerprints.numbers([fingerprints.on_device(tensor, torch.float64)])
        assert np.abs(np.array(numbers) - host.numbers).max() <= bound * max(host.norm, 1.0) * 10
        assert fingerprints.numbers([fingerprints.of(tensor)]) == [host.numbers.tolist()]
    assert fingerprints.on_device(torch.zeros(0), torch.float64).tolist() == [0.0] * len(NUMBERS)
    half = torch.from_numpy(random.standard_normal(size)).to(torch.bfloat16)
    assert fingerprints.numbers([fingerprints.of(half)]) == [fingerprint_of(half.float().numpy()).numbers.tolist()]
    assert fingerprints.dtype(half) == "bfloat16"
    assert fingerprints.array(half).dtype == np.float32
    assert fingerprints.array(torch.arange(3)).tolist() == [0, 1, 2]
    pair = torch.tensor([1 + 2j])
    assert fingerprints.numbers([fingerprints.of(pair)]) == [fingerprint_of(pair.numpy()).numbers.tolist()]
