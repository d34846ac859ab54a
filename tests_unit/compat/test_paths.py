"""Names that MindFormers 2.1.0 imports, by the path from which it does."""

from __future__ import annotations

import importlib
import subprocess
import sys
from enum import Enum

import pytest

from hyper_parallel.compat.paths import MODULES, NAMES
from hyper_parallel.errors import UnsupportedOnBackend

NAMES_OF_MINDFORMERS = {
    "": "DTensor DeviceMesh PipelineStage SkipDTensorDispatch init_device_mesh shard_module",
    "core.activation_checkpoint": "CheckpointPolicy SwapManager checkpoint_exclude_wrapper checkpoint_wrapper "
    "swap_wrapper",
    "core.context_parallel.async_context_parallel": "AsyncContextParallel",
    "core.context_parallel.async_dsa_context_parallel": "AsyncDSAIndexerContextParallel "
    "AsyncDSAIndexerLossContextParallel AsyncDSASparseAttentionContextParallel",
    "core.context_parallel.context_parallel": "ContextParallel",
    "core.context_parallel.dsa_context_parallel": "DSAIndexerContextParallel DSAIndexerLossContextParallel "
    "DSASequenceReplicateCache DSASparseAttentionContextParallel",
    "core.distributed_checkpoint": "get_current_layout get_global_layout",
    "core.dtensor": "DTensor",
    "core.dtensor.dtensor": "DTensor distribute_tensor",
    "core.dtensor.layout": "_infer_slice_area_by_rank",
    "core.dtensor.placement_types": "Partial Placement Replicate Shard",
    "core.dtensor.redistribute_infer": "DevMat RedistributionOperatorInfer",
    "core.fully_shard.api": "HSDPModule MixedPrecisionPolicy fully_shard",
    "core.fully_shard.utils": "CPUOffloadPolicy OffloadPolicy",
    "core.pipeline_parallel.comm_compute_overlap": "CommComputeOverlap",
    "core.pipeline_parallel.hook_coordinator": "HookCoordinator HookRole",
    "core.pipeline_parallel.scheduler": "MetaStepType",
    "core.shard.sharding_plan": "ShardingPlan",
    "custom_ops.experimental": "npu_dense_lightning_indexer_grad_kl_loss npu_dense_lightning_indexer_softmax_lse "
    "npu_lightning_indexer npu_mhc_post npu_mhc_pre_sinkhorn npu_sparse_flash_mla npu_sparse_flash_mla_grad "
    "npu_sparse_lightning_indexer_grad_kl_loss npu_sparse_lightning_indexer_kl_loss_grad",
    "platform": "get_platform",
    "platform.mindspore.autograd_compat": "enable_mindspore_backward_compat",
    "platform.mindspore.pipeline_parallel._utils": "_MicroBatch",
}
SCHEDULES = "Schedule1F1B ScheduleGPipe ScheduleInterleaved1F1B"  # imported by name, from core.pipeline_parallel
REFUSED = {
    "core.activation_checkpoint": "checkpoint_exclude_wrapper",
    **{
        path: names
        for path, names in NAMES_OF_MINDFORMERS.items()
        if "dsa" in path or path.startswith(("custom_ops.", "core.pipeline_parallel.comm"))
    },
}


def each(table):
    """Pairs of path and name."""
    return [(path, name) for path, names in table.items() for name in names.split()]


def imported(path, name):
    """What ``from hyper_parallel.<path> import <name>`` gives."""
    return getattr(importlib.import_module(f"hyper_parallel.{path}".rstrip(".")), name)


def test_the_list_has_all_names():
    """MindFormers 2.1.0 imports 54 names, counted once per path."""
    assert len(each(NAMES_OF_MINDFORMERS)) == 54


@pytest.mark.parametrize("path, name", [*each(NAMES_OF_MINDFORMERS), *each({"core.pipeline_parallel": SCHEDULES})])
def test_a_name_resolves(path, name):
    """Every name can be imported from the path that MindFormers names, in a process without a framework too."""
    assert imported(path, name) is imported(path, name)


def test_no_framework_is_imported():
    """All the names can be imported without a framework."""
    code = "import sys; sys.modules['torch'] = sys.modules['mindspore'] = None\n"
    code += "\n".join(
        f"from hyper_parallel{'.' if path else ''}{path} import {name}" for path, name in each(NAMES_OF_MINDFORMERS)
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("path", [path for path in MODULES if MODULES[path]])
def test_a_path_has_the_names_of_its_home(path):
    """A module of the table lists and has what its home has; other names raise AttributeError."""
    module, home = importlib.import_module(f"hyper_parallel.{path}"), f"hyper_parallel.{MODULES[path]}"
    assert set(importlib.import_module(home).__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


def test_names_of_existing_modules_do_not_hide_theirs():
    """A module that lacks a name still raises AttributeError in its own name."""
    for path in NAMES:
        module = importlib.import_module(f"hyper_parallel.{path}".rstrip("."))
        with pytest.raises(AttributeError, match=f"^module '{module.__name__}' has no attribute 'nothing'$"):
            _ = module.nothing


def test_a_path_outside_of_the_table_does_not_exist():
    """A module that neither a file nor the table has raises the usual error."""
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'hyper_parallel\.core\.pipeline'"):
        importlib.import_module("hyper_parallel.core.pipeline")


@pytest.mark.parametrize("path, name", each(REFUSED))
def test_what_is_not_supported_refuses_by_name(path, name):
    """A name without an implementation can be subclassed, where it is a class, and raises its own name when used."""
    value = imported(path, name)
    if isinstance(value, type):
        assert not issubclass(value, Enum)
        value = type("Subclass", (value,), {})
    with pytest.raises(UnsupportedOnBackend, match=f"^{name}: "):
        value(1, option=2)
