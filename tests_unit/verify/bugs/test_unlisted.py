"""The harness on broken programs that are not in the corpus: its checks are about classes of errors."""

import functools
import importlib.util
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from hyper_parallel.verify.program.run import verify_program

pytestmark = [pytest.mark.platforms("torch"), pytest.mark.untraced]


def load():
    """The table of programs."""
    for file in ("unlisted", "reported"):
        name = f"hyper_parallel_{file}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{file}.py"))
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
    return sys.modules["hyper_parallel_unlisted"].PROGRAMS


NAMES = (
    "accumulation_divided_twice", "batch_norm_of_a_part", "batches_shuffled_per_rank", "bias_summed_over_model_ranks",
    "broadcast_from_another_owner", "convolution_without_the_neighbour", "decay_by_dims_of_flat_shards",
    "fused_projection_cut_across", "gathered_along_another_dim", "gathered_before_the_update", "initialized_per_rank",
    "key_head_by_remainder", "last_micro_batch_without_sync", "mean_losses_summed", "micro_batches_of_each_rank",
    "norm_over_a_shard", "rate_scaled_by_world", "reduced_by_hook_and_by_hand", "rows_of_other_ranks_not_masked",
    "scheduler_per_micro_batch", "sharded_gradients_not_averaged", "tail_of_a_flat_buffer", "tied_weight_of_stages",
    "trust_ratio_of_rows", "untied_by_sharding", "variance_by_the_own_count",
)  # fmt: skip
OTHER_CAUSE = {"fused_projection_cut_across"}  # each of its parts is right, and which belong together is not recorded


@functools.cache
def report_of(name, bug):
    """What `verify program` says of a program; the reference is the fixed form."""
    program = load()[name]
    return verify_program(
        lambda: program.train(bug), single=lambda: program.train(False), mesh=program.mesh, platform="torch"
    )


def test_every_program_is_tested():
    """No program of the file is left out."""
    assert set(NAMES) == set(load())


@pytest.mark.parametrize("name", NAMES)
def test_the_fixed_form_passes(name):
    """The fixed form trains like one device, and values were compared."""
    verdict = report_of(name, False).verdict
    assert verdict.equal, verdict.text()
    assert verdict.checked > 100


@pytest.mark.parametrize("name", NAMES)
def test_the_broken_form_is_caught_with_its_tensor_and_cause(name):
    """The first difference is the value that the bug touches first, and its cause is of the bug's class."""
    program, verdict = load()[name], report_of(name, True).verdict
    assert not verdict.equal
    kind, pattern = program.differs
    assert verdict.first.kind == kind, verdict.text()
    assert fnmatchcase(verdict.first.name, pattern), verdict.text()
    assert (verdict.first.cause.kind == program.cause) != (name in OTHER_CAUSE), verdict.text()
