"""Names that MindFormers 2.1.0 imports, by the path from which it does, and how it calls them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import subprocess
import sys
from collections import Counter
from enum import Enum
from pathlib import Path

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
NAMES_OF_EARLIER_PROGRAMS = {
    "": "MetaStepType ScheduleInterleaved1F1B destroy_process_group get_backend get_process_group_ranks "
    "init_parameters init_process_group parallelize_value_and_grad split_group",
    "core.checkpoint.layout": "combine_layout get_current_layout get_global_layout load_layout save_layout",
    "core.device_mesh": "DeviceMesh init_device_mesh",
    "core.layout": "Layout",
    "core.parameter_init": "init_parameters",
    "core.placement_types": "Partial Replicate Shard",
    "core.shard.api": "shard_module",
    "platform.torch.activation_checkpoint": "ActivationPolicy swap_wrapper",
    "platform.torch.fully_shard.utils": "CPUOffloadPolicy MixedPrecisionPolicy OffloadPolicy",
}
REFUSED_OF_EARLIER_PROGRAMS = {
    "": "HSDPCell hsdp hsdp_sync_stream",
    "core.checkpoint.loader": "load_checkpoint",
    "core.checkpoint.saver": "save_checkpoint",
    "core.fully_shard.api": "get_model_state_dict",
    "core.hsdp": "hsdp",
}
SCHEDULES = "Schedule1F1B ScheduleGPipe ScheduleInterleaved1F1B"  # imported by name, from core.pipeline_parallel
REFUSED = {
    "core.activation_checkpoint": "checkpoint_exclude_wrapper",
    **{path: names for path, names in NAMES_OF_MINDFORMERS.items() if "dsa" in path or path.startswith("custom_ops.")},
}


SENTENCES = {
    "custom_ops": "a kernel for Ascend devices, which this library does not have; configure the unfused implementation",
    "dsa": "context parallelism of sparse attention is not supported; set context_parallel to 1",
    "activation": "outputs inside a recomputed module cannot be kept; leave the exclusions of recomputation empty",
    "saver": "a file per rank, which the same mesh alone can load; call save of hyper_parallel.core.checkpoint",
    "loader": "a file per rank, which the same mesh alone can load; call load of hyper_parallel.core.checkpoint",
    "fully_shard": "call the one of torch.distributed.checkpoint.state_dict, which accepts modules of this library",
    "hsdp": "the sharded data parallelism of an earlier release; call fully_shard(module, mesh=mesh)",
}
"""What is said where a refused name is used, by a part of the path that it is imported from."""


def each(table):
    """Pairs of path and name."""
    return [(path, name) for path, names in table.items() for name in names.split()]


def imported(path, name):
    """What ``from hyper_parallel.<path> import <name>`` gives."""
    return getattr(importlib.import_module(f"hyper_parallel.{path}".rstrip(".")), name)


def test_the_list_has_all_names():
    """MindFormers 2.1.0 imports 54 names, counted once per path."""
    assert len(each(NAMES_OF_MINDFORMERS)) == 54


@pytest.mark.parametrize(
    "path, name",
    [*each(NAMES_OF_MINDFORMERS), *each(NAMES_OF_EARLIER_PROGRAMS), *each({"core.pipeline_parallel": SCHEDULES})],
)
def test_a_name_resolves(path, name):
    """Every name can be imported from the path that other programs name, in a process without a framework too."""
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


@pytest.mark.parametrize("path, name", [*each(REFUSED), *each(REFUSED_OF_EARLIER_PROGRAMS)])
def test_what_is_not_supported_refuses_by_name(path, name):
    """A name without an implementation can be subclassed, where it is a class, and raises its own name when used."""
    value = imported(path, name)
    if isinstance(value, type):
        assert not issubclass(value, Enum)
        value = type("Subclass", (value,), {})
    with pytest.raises(UnsupportedOnBackend) as refused:
        value(1, option=2)
    sentence = next((text for part, text in SENTENCES.items() if part in path), None)
    assert str(refused.value).startswith(f"{name}: ")
    assert sentence in (None, str(refused.value).removeprefix(f"{name}: "))


WHEEL = importlib.util.find_spec("mindformers")
needs_the_wheel = pytest.mark.skipif(WHEEL is None, reason="[no-tool] MindFormers is not installed: tox -e mindformers")


def modules_of_the_wheel():
    """The syntax trees of MindFormers' modules that import this library, and what each calls the names."""
    for file in sorted(Path(WHEEL.submodule_search_locations[0]).rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        if "hyper_parallel" not in source:
            continue
        tree = ast.parse(source)
        bound = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "hyper_parallel":
                path = node.module.partition(".")[2]
                bound.update({alias.asname or alias.name: (path, alias.name) for alias in node.names})
        yield tree, bound


def tables_of(tree):
    """Keys of the dictionaries that a module assigns to names, for calls with ``**name``."""
    return {
        target.id: {key.value for key in node.value.keys if key is not None}
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def calls_in(tree, bound):
    """Each call of a bound name, of a method of it, or of a class that hands its other arguments on to one.

    Yields the called object, its name, the number of arguments by position, and the names of the others.
    """
    heirs = {}  # classes of the module: the name that each is made of, and the arguments that it keeps
    for node in ast.walk(tree):
        bases = [base.id for base in getattr(node, "bases", ()) if isinstance(base, ast.Name) and base.id in bound]
        for member in node.body if bases else ():
            if isinstance(member, ast.FunctionDef) and member.name == "__init__" and member.args.kwarg:
                heirs[node.name] = (bases[0], {each.arg for each in member.args.kwonlyargs})
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        parts = ast.unparse(node.func).split(".")
        own, kept = heirs.get(parts[0], (parts[0], set()))
        if own not in bound or len(parts) > 2:
            continue
        path, name = bound[own]
        called = imported(path, name)
        keywords = [keyword.arg for keyword in node.keywords if keyword.arg and keyword.arg not in kept]
        for keyword in node.keywords:
            if keyword.arg is None:  # the keys of what `**name` hands on
                keywords += sorted(tables_of(tree)[ast.unparse(keyword.value)])
        assert not any(isinstance(argument, ast.Starred) for argument in node.args), ast.unparse(node)
        yield (getattr(called, parts[1]) if len(parts) == 2 else called), name, len(node.args), keywords


@needs_the_wheel
def test_the_list_is_what_the_wheel_imports():
    """The names of the list are those that the modules of MindFormers import, and no others."""
    found = {target for _, bound in modules_of_the_wheel() for target in bound.values()}
    assert found == set(each(NAMES_OF_MINDFORMERS))


@needs_the_wheel
def test_every_call_of_the_wheel_fits():
    """Every call by MindFormers of a name has arguments that the name takes here, by number and by keyword."""
    wrong, counts = [], Counter()
    for tree, bound in modules_of_the_wheel():
        for called, name, count, keywords in calls_in(tree, bound):
            counts[name] += 1
            try:
                inspect.signature(called).bind(*range(count), **dict.fromkeys(keywords))
            except TypeError as error:
                wrong.append(f"{name} with {count} arguments and {keywords}: {error}")
    assert wrong == []
    assert (counts["fully_shard"], counts["DTensor"], counts["PipelineStage"]) == (8, 9, 1)
    assert sum(counts.values()) == 148


@needs_the_wheel
def test_every_schedule_of_the_wheel_is_known():
    """Every schedule that MindFormers imports by its name is found, and takes stages and a number by position."""
    file = Path(WHEEL.submodule_search_locations[0]) / "pynative/distributed/pipeline_parallel.py"
    tables = [
        ast.literal_eval(node.value)
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_SCHEDULE_REGISTRY"
    ]
    assert sorted(name for _, name in tables[0].values()) == SCHEDULES.split()
    for path, name in tables[0].values():
        inspect.signature(getattr(importlib.import_module(path), name)).bind([], 4)
