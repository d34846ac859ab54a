"""Operators that kill their process or never end, and one that works."""

import ctypes
import time

from hyper_parallel.verify import operator_sample, real


def segfault(x):
    """Read from an invalid address."""
    ctypes.string_at(0)
    return x


def endless(x):
    """Never return."""
    time.sleep(3600)
    return x


def doubled(x):
    """Return twice the input."""
    return x * 2


operator_sample(segfault, real("ab"))
operator_sample(endless, real("ab"))
operator_sample(doubled, real("ab"))
