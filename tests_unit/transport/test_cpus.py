"""Processes that keep to one CPU."""

import os
import sys

import pytest

from hyper_parallel.transport import cpus

pytestmark = pytest.mark.platforms("torch")


@pytest.fixture
def two(monkeypatch):
    """Numbers of two CPUs, and where this process is put instead of being put there."""
    put = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {7, 4}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, to: put.append(to), raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    return put


def test_seats_are_counted_around(two):
    """Every seat is one CPU of those that may be used, whichever those are."""
    for seat in range(3):
        cpus.stay_on(seat)
    assert two == [{4}, {7}, {4}]


def test_other_systems_bind_nothing(two, monkeypatch):
    """Where no process can be bound none is, and no number of CPUs is told."""
    monkeypatch.setattr(sys, "platform", "darwin")
    cpus.stay_on(0)
    assert (two, cpus.available()) == ([], [])
