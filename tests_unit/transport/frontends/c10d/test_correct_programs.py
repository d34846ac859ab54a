"""A short form of ``correct_programs.py``: random programs that are correct."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = [pytest.mark.platforms("torch"), pytest.mark.fault]


@pytest.mark.parametrize(
    "size", [pytest.param(2, marks=pytest.mark.sweep), 3, pytest.param(4, marks=pytest.mark.sweep)]
)
def test_random_correct_programs_raise_no_alarm(load_file, size):
    """Collectives and messages of every kind, late ranks, waits in any order: no error, and every value is right."""
    programs = load_file(Path(__file__).with_name("correct_programs.py"))
    wrong, compared = programs.run(size, 67 * size, 67, 240.0)
    assert wrong == []
    assert compared > 50


@pytest.mark.sweep
@pytest.mark.parametrize("size, steps", [(2, 3334), (3, 3333), (4, 3333)])
def test_ten_thousand_correct_steps_raise_no_alarm(load_file, size, steps):
    """In 10,000 steps of the same kinds, other ones than the everyday check takes, nobody is told of anything."""
    programs = load_file(Path(__file__).with_name("correct_programs.py"))
    compared = 0
    for first in range(0, steps, 100):
        wrong, tensors = programs.run(size, 10_000 * size + first, min(100, steps - first), 240.0)
        assert wrong == []
        compared += tensors
    assert compared > 2 * steps
