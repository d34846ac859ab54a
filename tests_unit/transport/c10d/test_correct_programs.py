"""A short form of ``correct_programs.py``: random programs that are correct."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.platforms("torch")


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_correct_programs_raise_no_alarm(load_file, size):
    """Collectives and messages of every kind, late ranks, waits in any order: no error, and every value is right."""
    programs = load_file(Path(__file__).with_name("correct_programs.py"))
    wrong, compared = programs.run(size, 67 * size, 67, 240.0)
    assert wrong == []
    assert compared > 50
