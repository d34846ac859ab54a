"""Verifies a parallel plan on one machine before it runs on accelerators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hyper_parallel._lazy import lazy_exports

# Imported eagerly, before the modules of the same names: the package's attribute is the function.
from hyper_parallel.verify.launch import launch
from hyper_parallel.verify.simulate import simulate

if TYPE_CHECKING:
    from hyper_parallel.core.shard.sample import (
        between,
        booleans,
        complex_,
        dtype,
        indices,
        integers,
        nonfinite,
        real,
        shuffled,
        size,
    )
    from hyper_parallel.verify.checker.function import check_function
    from hyper_parallel.verify.explain import explain_model
    from hyper_parallel.verify.frameworks.contract.record_log import record
    from hyper_parallel.verify.model.run import verify_model
    from hyper_parallel.verify.model_case import ModelCase, ParallelPlan
    from hyper_parallel.verify.ops.user_operators import operator_sample
    from hyper_parallel.verify.pages.report_pages import page_of
    from hyper_parallel.verify.program.run import verify_program
    from hyper_parallel.verify.recording.run import record_run

__all__ = [
    "ModelCase",
    "ParallelPlan",
    "between",
    "booleans",
    "check_function",
    "complex_",
    "dtype",
    "explain_model",
    "indices",
    "integers",
    "launch",
    "nonfinite",
    "operator_sample",
    "page_of",
    "real",
    "record",
    "record_run",
    "shuffled",
    "simulate",
    "size",
    "verify_model",
    "verify_program",
]

__getattr__, __dir__ = lazy_exports(
    globals(),
    {
        "hyper_parallel.core.shard.sample": (
            "between",
            "complex_",
            "dtype",
            "integers",
            "nonfinite",
            "real",
            "shuffled",
            "size",
            "booleans",
            "indices",
        ),
        "hyper_parallel.verify.model_case": ("ModelCase", "ParallelPlan"),
        "hyper_parallel.verify.checker.function": ("check_function",),
        "hyper_parallel.verify.explain": ("explain_model",),
        "hyper_parallel.verify.model.run": ("verify_model",),
        "hyper_parallel.verify.ops.user_operators": ("operator_sample",),
        "hyper_parallel.verify.pages.report_pages": ("page_of",),
        "hyper_parallel.verify.program.run": ("verify_program",),
        "hyper_parallel.verify.recording.run": ("record_run",),
        "hyper_parallel.verify.frameworks.contract.record_log": ("record",),
    },
)
