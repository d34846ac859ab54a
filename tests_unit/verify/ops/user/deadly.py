"""Operators that kill or outlive their process, and one that is well."""

import ctypes
import time

from hyper_parallel.verify import operator_sample, real


def segfault(x):
    """Reads where nothing is."""
    ctypes.string_at(0)
    return x


def endless(x):
    """Never returns."""
    time.sleep(3600)
    return x


def doubled(x):
    """Well behaved."""
    return x * 2


operator_sample(segfault, real("ab"))
operator_sample(endless, real("ab"))
operator_sample(doubled, real("ab"))
