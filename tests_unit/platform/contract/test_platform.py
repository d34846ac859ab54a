"""Common mistakes of trainers in one table: the full message of each refusal, the same on both frameworks."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.simulate import simulate

MISMATCH, SPLITS = "CollectiveMismatchError", "differentiable_all_to_all_single"
INTO = "irecv: cannot receive into this tensor"
WAITED = "this handle was waited for before; wait once and keep the result"
WRONG = {
    "a group that is none": (
        "MeshError",
        (
            "'world' is not a group of this world, or was destroyed; known are the groups of ranks []; create_group "
            "builds one"
        ),
    ),
    "a group with ranks that are not there": (
        "MeshError",
        "group (0, 5) must name distinct ranks of the world of 2",
    ),
    "a group of others": (MISMATCH, "rank {me} calls a collective over ranks ({other},), of which it is not a member"),
    "a source outside the world": (
        MISMATCH,
        "broadcast from rank 2, which is not among ranks (0, 1); src is a global rank",
    ),
    "a source outside the group": (
        MISMATCH,
        "broadcast from rank {other}, which is not among ranks ({me},); src is a global rank",
    ),
    "a receiver outside the group": (
        MISMATCH,
        "isend: rank 7 must be another rank of the group [0, 1]; this is rank {me}",
    ),
    "a sender outside the group": (
        MISMATCH,
        "irecv: rank 7 must be another rank of the group [0, 1]; this is rank {me}",
    ),
    **{
        f"a tag that is {name}": (
            "ValueError",
            f"{member}: tag {name} must be an integer from 0 to 2147483647, the same on both sides",
        )
        for member, tags in (("isend", "-1 2147483648 1.5"), ("irecv", "'x' None True"))
        for name in tags.split()
    },
    "a message into an expanded tensor": (
        "ValueError",
        f"{INTO}: elements of [3, 2] overlap in memory (strides [0, 1]); receive into its contiguous()",
    ),
    "a peer outside the group": (MISMATCH, "p2p_exchange: rank 9 is not in the group of ranks [0, 1]"),
    "a position in the group of others": (
        "MeshError",
        "get_group_local_rank: rank {me} is not in the group of ranks [{other}]",
    ),
    "a position outside the group": (
        "MeshError",
        "get_global_rank: group_rank 2 is outside the group of ranks [0, 1]",
    ),
    "a dtype that is none": ("ValueError", "str_to_dtype: unknown dtype 'float33'; known: {dtypes}"),
    "a cast to no dtype": ("ValueError", "str_to_dtype: unknown dtype 'float33'; known: {dtypes}"),
    "unequal shapes": (
        MISMATCH,
        (
            "ranks 0 and 1 disagree about the shape of collective 2 of ranks (0, 1):\n"
            "  rank 0: all_reduce(f64[2], sum) at HERE (through THERE)\n"
            "  rank 1: all_reduce(f64[3], sum) at HERE (through THERE)"
        ),
    ),
    "splits that do not add up": ("ValueError", f"{SPLITS}: input_splits [1, 1] add up to 2, the input has 4 rows"),
    "splits below zero": (
        "ValueError",
        f"{SPLITS}: input_splits [5, -1] must be one row count per rank of the group [0, 1]",
    ),
    "too few splits": (
        "ValueError",
        f"{SPLITS}: output_splits [4] must be one row count per rank of the group [0, 1]",
    ),
    "splits that do not add up, launched": (
        "ValueError",
        f"{SPLITS}_async: input_splits [1, 1] add up to 2, the input has 4 rows",
    ),
    "a handle waited for twice": ("HandleError", f"all_reduce: {WAITED}"),
    "a barrier waited for twice": ("HandleError", f"barrier: {WAITED}"),
    "a forward pre-hook removed twice": (
        "HandleError",
        "this forward pre-hook of {linear} was already removed; remove it once",
    ),
    "a backward hook removed twice": (
        "HandleError",
        "this backward hook of {linear} was already removed; remove it once",
    ),
    "a backward pre-hook removed twice": (
        "HandleError",
        "this backward pre-hook of {linear} was already removed; remove it once",
    ),
    "a path in no folder": (
        "CheckpointWriteError",
        (
            "save_checkpoint: {path} cannot be written (Error while serializing: I/O error: No such file or directory "
            '(os error 2) at path "{folder}/.PART"); the previous file is unchanged'
        ),
    ),
}


def known_dtypes(platform_name):
    """The names of the framework's dtypes, from the framework itself where they differ by its version."""
    if platform_name == "torch":
        import torch

        return sorted(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
    floating = ["bfloat16", "complex128", "complex64", "float16", "float32", "float64"]
    return sorted([*floating, "bool", *(f"{kind}int{size}" for kind in ("", "u") for size in (8, 16, 32, 64))])


def mistakes(platform, folder):
    """Each mistake of the table as a call, on a rank of a world of two."""
    me, x = platform.get_rank(), platform.from_numpy(np.ones((4, 2)))
    reduced, together = platform.all_reduce(x, None, True)[1], platform.barrier(None, True)
    layer = harness_of(platform).linear_layer(2, 2, dtype=platform.str_to_dtype("float64"))
    hooks = [
        register(layer, lambda *_: None)
        for register in (
            platform.register_forward_pre_hook,
            platform.register_full_backward_hook,
            platform.register_full_backward_pre_hook,
        )
    ]
    for used in (reduced.wait, together.wait, *(hook.remove for hook in hooks)):
        used()
    exchange = platform.differentiable_all_to_all_single
    return {
        "a group that is none": lambda: platform.all_reduce(x, "world"),
        "a group with ranks that are not there": lambda: platform.all_reduce(x, (0, 5)),
        "a group of others": lambda: platform.all_reduce(x, (1 - me,)),
        "a source outside the world": lambda: platform.broadcast(x, 2),
        "a source outside the group": lambda: platform.broadcast(x, 1 - me, (me,)),
        "a receiver outside the group": lambda: platform.isend(x, 7),
        "a sender outside the group": lambda: platform.irecv(x, 7),
        **{
            f"a tag that is {tag!r}": functools.partial(member, x, 1 - me, tag=tag)
            for member, tags in ((platform.isend, (-1, 2**31, 1.5)), (platform.irecv, ("x", None, True)))
            for tag in tags
        },
        "a message into an expanded tensor": lambda: platform.irecv(x[0].expand((3, 2)), 1 - me),
        "a peer outside the group": lambda: platform.p2p_exchange(x, 9),
        "a position in the group of others": lambda: platform.get_group_local_rank((1 - me,)),
        "a position outside the group": lambda: platform.get_global_rank((0, 1), 2),
        "a dtype that is none": lambda: platform.str_to_dtype("float33"),
        "a cast to no dtype": lambda: platform.tensor_type_cast(x, "float33"),
        "unequal shapes": lambda: platform.all_reduce(platform.from_numpy(np.ones(2 + me))),
        "splits that do not add up": lambda: exchange(x, [1, 1], [2, 2]),
        "splits below zero": lambda: exchange(x, [5, -1], [2, 2]),
        "too few splits": lambda: exchange(x, [2, 2], [4]),
        "splits that do not add up, launched": lambda: platform.differentiable_all_to_all_single_async(
            x, [1, 1], [2, 2]
        ),
        "a handle waited for twice": reduced.wait,
        "a barrier waited for twice": together.wait,
        "a forward pre-hook removed twice": hooks[0].remove,
        "a backward hook removed twice": hooks[1].remove,
        "a backward pre-hook removed twice": hooks[2].remove,
        "a path in no folder": lambda: platform.save_checkpoint({"x": x}, folder / "x"),
    }


def raised(call):
    """Type and message of a call's error, without lines of code and names of unfinished files."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        words = re.sub(r" at \S+:\d+ \(through \S+:\d+\)", " at HERE (through THERE)", str(error))
        return type(error).__name__, re.sub(r"/\.tmp\w+", "/.PART", words)
    return "nothing", "was refused"


@pytest.fixture(scope="module")
def refusals_of(tmp_path_factory):
    """The errors of all mistakes on every rank, once per framework, and the missing folder."""
    folder, kept = tmp_path_factory.mktemp("refusals") / "nowhere", {}

    def run(platform_name):
        def rank():
            platform = platform_named(platform_name)
            refusals = {name: raised(call) for name, call in mistakes(platform, folder).items()}
            platform.barrier()
            return refusals

        if platform_name not in kept:
            kept[platform_name] = simulate(rank, 2, platform_name)
        return kept[platform_name], folder

    return run


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_refused_in_these_words(platform_name, refusals_of, mistake):
    """A mistake raises the same message with the fix on both ranks, and the next call works."""
    ranks, folder = refusals_of(platform_name)
    facts = {
        "dtypes": ", ".join(known_dtypes(platform_name)),
        "folder": folder,
        "linear": "Linear",
        "path": folder / "x",
    }
    kind, words = WRONG[mistake]
    for me, refusals in enumerate(ranks):
        assert refusals[mistake] == (kind, words.format(me=me, other=1 - me, **facts))
    assert list(ranks[0]) == list(WRONG)
    assert not folder.exists()


@pytest.mark.platforms("mindspore")
def test_a_framework_without_meshes_and_placements_of_its_own_converts_nothing():
    """MindSpore has no such values: anything comes back as it is, and transforms need no guard."""
    platform, value = platform_named("mindspore"), object()
    assert platform.own_mesh(value) is platform.own_placement(value) is value
    assert not platform.is_transformed(value)
