"""Patches of MindSpore: each is installed and needed, and recomputation samples again what forward sampled."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from hyper_parallel._versions import Missing
from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.platform.tested import TESTED, newer_than_tested
from hyper_parallel.verify.checker.shards import local_shard
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("mindspore")

A, C = (np.random.default_rng(seed).uniform(0.5, 2.0, (9, 7)).astype(np.float32) for seed in (5, 6))
WAYS = [
    "recompute, reentrant",
    "recompute",
    "recompute to the end",
    "cell, reentrant",
    "cell",
    "platform, reentrant",
    "platform",
]


def _cell():
    from mindspore import nn
    from mindspore.mint.nn import functional as F

    class Dropping(nn.Cell):
        """A module with two dropouts, so that a mask sampled out of order shows."""

        def construct(self, x):
            """Apply dropout twice and multiply by the sine."""
            return F.dropout(F.dropout(x, 0.3, True) * x.sin(), 0.4, True)

    return Dropping()


def _way(name, cell):
    import mindspore

    platform = platform_named("mindspore")
    reentrant = "reentrant" in name
    if name == "plain":
        return cell
    if name.startswith("recompute"):
        stops = not reentrant and "early_stop" in inspect.signature(mindspore.recompute).parameters
        options = {"early_stop": "end" not in name} if stops else {}
        return lambda x: mindspore.recompute(cell, x, use_reentrant=reentrant, **options)
    if name.startswith("cell"):
        cell.recompute(use_reentrant=reentrant)
        return cell
    return lambda x: platform.checkpoint(cell, x, use_reentrant=reentrant)


def _gradients(placement):
    """Loss, gradient, and the state of the stream before backward: plain, then by every kind of recomputation."""
    platform = platform_named("mindspore")
    mesh = init_device_mesh("cpu", (platform.get_world_size(),), mesh_dim_names=["tp"])
    layout = Layout.place(mesh, (placement,), A.shape)
    x, seed = (platform.wrap(platform.from_numpy(local_shard(array, layout, 0)), layout) for array in (A, C))
    results = {}
    for name in ("plain", *WAYS):
        random.manual_seed(3)
        apply, calls = _way(name, _cell()), []

        def loss(x, apply=apply, calls=calls):
            y = apply(x) + apply(x * 2)
            calls.append(random.get_rng_state())
            return (y * seed).sum()

        value, grad = platform.value_and_grad(loss)(x)
        assert calls == [random.get_rng_state()]
        results[name] = float(value.full_tensor().asnumpy()), grad.full_tensor().asnumpy().tolist(), calls
    return results


def test_a_version_without_the_attribute_gets_no_patch():
    """What another MindSpore does not have is not replaced, and a warning names it and what is lost."""
    import mindspore

    from hyper_parallel.platform.mindspore.patches import Patch

    needed = "gradients of recorders need mindspore.recorder, which MindSpore 9.9 does not have"
    plain = Patch(((mindspore.mint, "no_such_function"),), lambda call: call, "it takes DTensors")
    place = (
        f"MindSpore {mindspore.__version__} has no mindspore.mint.no_such_function; it would be replaced, because it"
    )
    gone = Patch(((Missing(needed), "record"),), lambda call: call, "it takes DTensors")
    for patch, text in ((plain, place), (gone, f"{needed}; it would be replaced, because it takes DTensors")):
        with pytest.warns(UserWarning, match=re.escape(text)):
            patch.install()
    assert not hasattr(mindspore.mint, "no_such_function")


@pytest.mark.parametrize("world, place", [(2, Shard(0)), (3, Replicate())])
def test_gradients_are_those_without_recomputation(world, place):
    """Under every kind of MindSpore's recomputation dropout has its plain loss and gradient, up to rounding."""
    for results in simulate(_gradients, world, "mindspore", (place,)):
        plain = results.pop("plain")
        assert (np.array(plain[1]) == 0).any()
        for name, (loss, grad, calls) in results.items():
            assert (name, loss, calls) == (name, plain[0], plain[2])
            np.testing.assert_array_equal(np.array(grad) == 0, np.array(plain[1]) == 0)
            np.testing.assert_allclose(grad, plain[1], rtol=1e-5, err_msg=name)  # float32, summed in another order


def test_what_cannot_be_run_again_is_refused_reentrantly_too():
    """Recomputing nn.Dropout of a plain tensor is an error in either mode, never a wrong gradient."""

    def rank():
        import mindspore
        from mindspore import Tensor, nn

        platform = platform_named("mindspore")
        drop = nn.Dropout(p=0.5)
        drop.set_train()
        messages = []
        for reentrant in (False, True):
            with pytest.raises(UnsupportedOperatorError) as raised:
                mindspore.grad(lambda x: platform.checkpoint(drop, x, use_reentrant=reentrant).sum())(  # noqa: B023
                    Tensor(np.ones((8, 9), np.float32))
                )
            messages.append(str(raised.value))
        return messages

    ((first, second),) = simulate(rank, 1, "mindspore")
    assert first == second
    assert first.startswith("checkpoint: running again gave a different result, so its gradients would be wrong")


def test_mindspore_itself_has_no_symmetric_memory():
    """MindSpore has no symmetric memory, as the gap ledger states."""
    import mindspore

    homes = [mindspore, mindspore.communication, mindspore.mint.distributed, mindspore.hal, mindspore.runtime]
    assert [name for home in homes for name in dir(home) if "symm" in name.lower()] == []


def test_every_patch_is_for_the_installed_version():
    """An upgrade of MindSpore fails here until the reason of each patch has been checked and its version renewed."""
    import mindspore

    from hyper_parallel.platform.mindspore.patches import PATCHES

    platform_named("mindspore")
    installed = ".".join(mindspore.__version__.split(".")[:2])
    is_older = installed not in TESTED["mindspore"] and not newer_than_tested("mindspore", installed)
    for patch in PATCHES:
        assert is_older or installed in patch.versions, patch.reason
        assert patch.reason
        assert patch.places, patch.reason


def test_every_patch_is_installed():
    """Each place of each patch holds the replacement, which keeps the original."""
    from hyper_parallel.platform.mindspore import intercept
    from hyper_parallel.platform.mindspore.patches import PATCHES

    platform_named("mindspore")
    for patch in PATCHES:
        for owner, name in patch.places:
            current = getattr(owner, name)
            assert current is intercept.fallback or hasattr(current, "__wrapped__"), (owner, name)


def test_mindspore_is_patched_in_one_file_only():
    """No other file of the room sets attributes of MindSpore's classes and modules."""
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    room = Path(find_spec("hyper_parallel.platform.mindspore").origin).parent
    for path in sorted(set(room.rglob("*.py")) - {room / "patches.py"}):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        foreign = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            and (getattr(node, "module", None) or node.names[0].name).startswith("mindspore")
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                root = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                assert not (isinstance(root, ast.Name) and root.id in foreign), (path.name, node.lineno)
