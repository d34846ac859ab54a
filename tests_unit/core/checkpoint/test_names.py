"""Names in the folder: renamed tensors, and fused ones, whose blocks keep their places whatever the shards."""

from __future__ import annotations

import json

import numpy as np
import pytest

from hyper_parallel import Replicate, Shard, distribute_tensor, init_device_mesh
from hyper_parallel.core.checkpoint import Block, Blocks, load, save
from hyper_parallel.core.checkpoint.folder import INDEX, Entry
from hyper_parallel.core.checkpoint.names import FolderNames
from hyper_parallel.errors import CheckpointError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.verify import simulate

RNG = np.random.default_rng(3)
FUSED = RNG.standard_normal((11, 3)).astype(np.float32)
PARTS = {"q": FUSED[:5], "k": FUSED[5:8], "v": FUSED[8:]}
SIZES = (5, 3, 3)


def distributed(platform, array, placement):
    """A DTensor over all ranks."""
    mesh = init_device_mesh("cpu", (platform.get_world_size(),), mesh_dim_names=("tp",))
    return distribute_tensor(platform.from_numpy(array.copy()), mesh, [placement])


def whole(platform, value):
    """The global tensor as an array."""
    return platform.tensor_to_numpy(value.full_tensor())


def entry(*shape):
    """A float32 tensor."""
    return Entry("F32", shape)


def read(folder):
    """The tensors as safetensors' own reader sees them."""
    from safetensors.numpy import load_file

    (file,) = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    return load_file(folder / file)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_fused_tensor_is_saved_and_loaded_by_blocks(platform_name, tmp_path, ranks, dim):
    """The folder has the blocks under their names, however shards cut them, and a fused tensor loads from them."""
    names = {"layers.*.qkv": Blocks(("m.*.q", "m.*.k", "m.*.v"), SIZES)}

    def rank():
        platform = platform_named(platform_name)
        weight, bias = distributed(platform, FUSED, Shard(dim)), distributed(platform, FUSED[:, 0], Shard(0))
        save({"layers": [{"qkv": {"weight": weight, "bias": bias}}], "n": 2}, tmp_path, names=names)
        weight, bias = (
            distributed(platform, FUSED * 0, Shard(1 - dim)),
            distributed(platform, FUSED[:, 0] * 0, Shard(0)),
        )
        state = load({"layers": [{"qkv": {"weight": weight, "bias": bias}}], "n": 0}, tmp_path, names=names)
        assert state["n"] == 2
        np.testing.assert_array_equal(whole(platform, state["layers"][0]["qkv"]["weight"]), FUSED)
        np.testing.assert_array_equal(whole(platform, bias), FUSED[:, 0])

    simulate(rank, ranks, platform=platform_name)
    stored = read(tmp_path)
    assert sorted(stored) == sorted(f"m.0.{part}.{kind}" for part in PARTS for kind in ("weight", "bias"))
    for part, values in PARTS.items():
        np.testing.assert_array_equal(stored[f"m.0.{part}.weight"], values)
        np.testing.assert_array_equal(stored[f"m.0.{part}.bias"], values[:, 0])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_blocks_become_one_tensor_in_the_folder(platform_name, tmp_path, ranks):
    """Apart in the state, fused in the folder, and back."""
    names = {f"{part}.*": Block("qkv.*", index, SIZES) for index, part in enumerate(PARTS)}

    def rank():
        platform = platform_named(platform_name)
        parts = {part: {"weight": distributed(platform, values, Shard(0))} for part, values in PARTS.items()}
        save(parts, tmp_path, names=names)
        parts = {part: {"weight": distributed(platform, values * 0, Shard(1))} for part, values in PARTS.items()}
        load(parts, tmp_path, names=names)
        for part, values in PARTS.items():
            np.testing.assert_array_equal(whole(platform, parts[part]["weight"]), values)
        fused = distributed(platform, FUSED * 0, Replicate())
        load({"qkv.weight": fused}, tmp_path)
        np.testing.assert_array_equal(whole(platform, fused), FUSED)

    simulate(rank, ranks, platform=platform_name)
    np.testing.assert_array_equal(read(tmp_path)["qkv.weight"], FUSED)


@pytest.mark.parametrize("ranks", [2, 3])
def test_blocks_may_alternate(platform_name, tmp_path, ranks):
    """With groups, the fused tensor holds the blocks of one group of heads after those of another."""
    gate, up = RNG.standard_normal((2, 4, 6)).astype(np.float32)
    fused = np.stack([gate, up], axis=2).reshape(4, 12)

    def rank():
        platform = platform_named(platform_name)
        value = distributed(platform, fused, Shard(1))
        save({"w": value}, tmp_path, names={"w": Blocks(("gate", "up"), (1, 1), dim=1, groups=6)})
        apart = {"g": distributed(platform, gate * 0, Shard(1)), "u": distributed(platform, up * 0, Shard(0))}
        load(apart, tmp_path, names={"g": "gate", "u": "up"})
        np.testing.assert_array_equal(whole(platform, apart["g"]), gate)
        np.testing.assert_array_equal(whole(platform, apart["u"]), up)
        blocks = {name: Block("w", index, (1, 1), 1, 6) for index, name in enumerate("gu")}
        save(apart, tmp_path, names=blocks)

    simulate(rank, ranks, platform=platform_name)
    np.testing.assert_array_equal(read(tmp_path)["w"], fused)


def test_the_first_key_that_matches_applies():
    """Keys are names or leading parts, a ``*`` is one segment or a part of one; "" is before every name."""
    entries = {name: entry(1) for name in ("model.layers.10.w", "model.w", "model", "other.w")}
    names = FolderNames({"model.layers.*": "h.*", "model": "", "": "x"}, {**entries, "model": entry(1)}, {})
    folder = {name: links[0].name for name, links in names.links.items()}
    assert folder == {"model.layers.10.w": "h.10.w", "model.w": "w", "model": "", "other.w": "x.other.w"}
    assert not names.problems


def test_what_does_not_fit_is_named():
    """All problems of the map are listed, and none is guessed away."""
    entries = {"a": entry(5, 2), "b": entry(5, 2), "c": entry(4), "d": entry(3), "e": entry(2, 3), "f": entry(5)}
    names = {
        "a": "x",
        "b": "x",
        "c": Blocks(("p", "q"), (2, 1)),
        "d": Block("r", 0, (2, 1)),
        "e": Block("s", 1, (1, 2), dim=2, groups=3),
        "f": Block("t", 1, (4, 5)),
        "nothing.*": "y",
        "g*": "z",
    }
    assert FolderNames(names, {**entries, "gg": entry(1)}, {"b2": "b"}).problems == [
        "dim 0 of c, of shape [4], is not blocks of (2, 1)",
        "dim 0 of d, of shape [3], is not block 0",
        "dim 2 of e, of shape [2, 3], is not block 1 in 3 groups",
        "names: 'g*' and 'z' do not have the same number of *",
        "a, b do not cover each element of x in the folder exactly once",
        "f do not cover each element of t in the folder exactly once",
        "the key 'nothing.*' of names matches no tensor of the state",
    ]
    different = FolderNames({"a": "x", "c": "x"}, {"a": entry(5, 2), "c": entry(4)}, {})
    assert different.problems[0] == "a and c give x different shapes or dtypes"
    tied = FolderNames({"n": "m"}, {"a": entry(1), "m": entry(1)}, {"n": "a"})
    assert tied.problems == ["n is tied to a, but names maps m to another tensor"]


def test_blocks_are_checked():
    """Sizes are positive and one per name, and a block has an index."""
    for sizes, groups in (((), 1), ((0, 1), 1), ((1, 1), 0)):
        with pytest.raises(CheckpointError, match=r"^sizes of blocks and groups must be positive, got sizes"):
            Blocks(("a", "b"), sizes, groups=groups)
    with pytest.raises(CheckpointError, match=r"^Blocks: 2 names need 2 sizes, got \(1,\)$"):
        Blocks(("a", "b"), (1,))
    with pytest.raises(CheckpointError, match=r"^Block: index 2 is not one of the 2 blocks of w$"):
        Block("w", 2, (1, 1))


@pytest.mark.platforms("torch")
def test_a_map_that_does_not_fit_changes_nothing(tmp_path):
    """``save`` and ``load`` refuse it, the latter together with all other differences."""
    import torch

    def rank():
        save({"a": torch.ones(3)}, tmp_path)
        with pytest.raises(CheckpointError, match=r"^save: the key 'b' of names matches no tensor of the state$"):
            save({"a": torch.zeros(3)}, tmp_path, names={"b": "c"})
        with pytest.raises(
            CheckpointError, match="state: the key 'b' of names matches no tensor of the state; d is not"
        ):
            load({"d": torch.zeros(3)}, tmp_path, names={"b": "c"})
        assert load({"a": torch.zeros(3)}, tmp_path)["a"].sum() == 3

    simulate(rank, 2, platform="torch")
