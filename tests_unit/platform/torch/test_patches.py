"""Patches of PyTorch: each is installed and needed; recomputation and masked functions have plain values."""

from __future__ import annotations

import ast
import importlib
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed._composable import checkpoint as composable
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
from torch.utils import checkpoint as ways

from hyper_parallel._versions import Missing
from hyper_parallel.core.dtensor import random
from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.errors import UnsupportedOperatorError
from hyper_parallel.platform.select import platform_named
from hyper_parallel.platform.tested import TESTED
from hyper_parallel.platform.torch.patches import LATE_PATCHES, PATCHES, Patch, _keeping_dtensors, install
from hyper_parallel.verify.simulate import simulate

pytestmark = pytest.mark.platforms("torch")


# -- the list ----------------------------------------------------------------------------------------------------------


def late_patches():
    """Return the patches of modules that PyTorch imports later."""
    return [patch for name, late in LATE_PATCHES.items() for patch in late(importlib.import_module(name))]


def test_every_patch_names_its_reason_and_the_installed_version():
    """A version is tested only once the reason of each patch has been checked for it; on others, reasons are there."""
    platform_named("torch")
    installed = ".".join(torch.__version__.split(".")[:2])
    for patch in [*PATCHES, *late_patches()]:
        assert installed in patch.versions or installed not in TESTED["torch"], patch.reason
        assert patch.reason
        assert patch.places, patch.reason


def test_every_patch_is_installed_once():
    """Each place of each patch has the replacement, which is not replaced again."""
    platform_named("torch")
    before = [getattr(owner, name) for patch in PATCHES for owner, name in patch.places]
    install()
    assert [getattr(owner, name) for patch in PATCHES for owner, name in patch.places] == before
    assert all(hasattr(function, "_hyper_parallel_original") for function in before)
    patched = {f"{owner.__name__}.{name}" for patch in PATCHES for owner, name in patch.places}
    assert {"Function.apply", "CheckpointFunction.forward", "_CheckpointFrame.__init__", "torch.masked.sum"} < patched


def test_a_version_without_the_attribute_gets_no_patch():
    """What a newer PyTorch has dropped is not replaced, and a warning names it and what is lost; the library works."""
    needed = "pruning of DTensors needs torch.nn._Pruning, which PyTorch 9.9 does not have"
    plain = Patch(((torch.nn.utils, "no_such_function"),), lambda call: call, "it prunes shards")
    for patch, text in (
        (plain, f"PyTorch {torch.__version__} has no torch.nn.utils.no_such_function; it would be replaced, because"),
        (
            Patch(((Missing(needed), "prune"),), lambda call: call, "it prunes shards"),
            f"{needed}; it would be replaced",
        ),
    ):
        with pytest.warns(UserWarning, match=re.escape(text)):
            patch.install()
    assert not hasattr(torch.nn.utils, "no_such_function")


class Saved(torch.autograd.Function):
    """Saves a recomputed forward's inputs, as PyTorch 2.11 and older do: backward gets them back by ``get_args``."""

    @staticmethod
    def forward(ctx, dummy, kwargs, *args):
        """Return a new tensor, whose node gives the arguments back as tensors of the graph."""
        ctx.get_args = lambda _saved: [kwargs, *(arg.detach() for arg in args)]
        return dummy.clone()

    @staticmethod
    def backward(ctx, grad):
        """Pass the gradient on."""
        return grad, *[None] * (len(ctx.needs_input_grad) - 1)


@pytest.mark.parametrize("grad", [True, False])
def test_older_versions_keep_the_dtensors_of_a_recomputed_forward(grad):
    """Its inputs come back as themselves if a DTensor is among them, and as PyTorch saves them otherwise."""
    save = _keeping_dtensors(lambda _cls, *args: Saved.apply(*args))

    def rank():
        dummy = torch.empty((0,), requires_grad=grad)
        plain = torch.ones(3)
        x = distribute_tensor(torch.arange(5.0), init_device_mesh("cpu", (2,)), [Shard(0)])
        for given, kept in (([x, plain], True), ([plain], False)):
            saver = save(Saved, dummy, {"y": 1}, *given)
            assert (saver.grad_fn is None) != grad
            if grad:
                kwargs, *args = saver.grad_fn.get_args(())
                assert kwargs == {"y": 1}
                assert [arg is value for arg, value in zip(args, given, strict=True)] == [kept] * len(given)

    simulate(rank, 2, "torch")


def test_modules_that_are_imported_later_are_patched():
    """What PyTorch imports only with its ``fully_shard`` or its compiler has its replacements once it is there."""
    platform_named("torch")
    for patch in late_patches():
        for owner, attribute in patch.places:
            assert hasattr(getattr(owner, attribute), "_hyper_parallel_original"), attribute


def test_pytorch_is_patched_in_one_file_only():
    """No other file of the room sets attributes of PyTorch's classes and modules, but the recorder's while it runs.

    Switches that PyTorch documents as attributes are no patches.
    """
    switches = {"torch.backends.cudnn.benchmark", "torch.backends.cudnn.deterministic"}
    room = Path(find_spec("hyper_parallel.platform.torch").origin).parent
    for path in sorted(set(room.rglob("*.py")) - {room / "patches.py", room / "recording.py"}):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        foreign = {
            (alias.asname or alias.name).partition(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, (ast.Import, ast.ImportFrom))
            and (getattr(node, "module", None) or node.names[0].name).partition(".")[0] == "torch"
            for alias in node.names
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node) not in switches
            ):
                root = node.value
                while isinstance(root, ast.Attribute):
                    root = root.value
                assert not (isinstance(root, ast.Name) and root.id in foreign), (path.name, node.lineno)


# -- gradients ---------------------------------------------------------------------------------------------------------


def takes_a_dict():
    """Whether torch.autograd.grad takes inputs by name, as later versions do."""
    x = torch.ones(1, requires_grad=True)
    try:
        torch.autograd.grad(x * 2, {"x": x})
    except (RuntimeError, TypeError):
        return False
    return True


def test_gradients_of_every_form_of_inputs():
    """torch.autograd.grad of DTensors by one input, several, a dict and positions, and under a function mode."""

    class Watching(torch.overrides.TorchFunctionMode):
        """Notes the functions that are called."""

        def __torch_function__(self, func, types, args=(), kwargs=None):
            """Note it and call it."""
            seen.append(func)
            return func(*args, **(kwargs or {}))

    draw = torch.Generator().manual_seed(3)
    a, b, seed = (torch.randn(4, 3, generator=draw) for _ in range(3))
    seen, by_name = [], takes_a_dict()

    def run():
        mesh = init_device_mesh("cpu", (2,))
        x, y = (distribute_tensor(value, mesh, [Shard(0)]).requires_grad_() for value in (a, b))
        cotangent = distribute_tensor(seed, mesh, [Shard(0)])
        (one,) = torch.autograd.grad(x * y, x, cotangent)
        both = torch.autograd.grad(x * y, [x, y], cotangent, retain_graph=True)
        (by_position,) = torch.autograd.grad(x * y, (x,), cotangent, True)
        named = torch.autograd.grad(x * y, {"y": y} if by_name else y, cotangent)
        with Watching():
            (watched,) = torch.autograd.grad(x * y, x, cotangent)
        grads = [one, *both, by_position, named["y"] if by_name else named[0], watched]
        return [grad.full_tensor() for grad in grads]

    for grads in simulate(run, 2, "torch"):
        for value, expected in zip(grads, [seed * b, seed * b, seed * a, seed * b, seed * a, seed * b], strict=True):
            torch.testing.assert_close(value, expected)
    assert torch.autograd.grad in seen


# -- recomputation -----------------------------------------------------------------------------------------------------


class Dropping(torch.nn.Module):
    """A module with two dropouts, so that a mask sampled out of order shows."""

    def forward(self, x):
        """Apply dropout twice and multiply by the sine."""
        return F.dropout(F.dropout(x, 0.3) * x.sin(), 0.4)


def selected():
    """A policy that keeps products and recomputes the rest."""
    return ways.create_selective_checkpoint_contexts([torch.ops.aten.mul.Tensor])


def composed(fn, x):
    """A module under PyTorch's composable checkpoint."""
    return composable(fn)(x)


WAYS = {
    "not reentrant": lambda fn, x: ways.checkpoint(fn, x, use_reentrant=False),
    "reentrant": lambda fn, x: ways.checkpoint(fn, x, use_reentrant=True),
    "without PyTorch's generators": lambda fn, x: ways.checkpoint(fn, x, use_reentrant=False, preserve_rng_state=False),
    "reentrant without PyTorch's generators": lambda fn, x: ways.checkpoint(
        fn, x, use_reentrant=True, preserve_rng_state=False
    ),
    "to the end": lambda fn, x: ways.checkpoint(fn, x, use_reentrant=False, early_stop=False),
    "selective": lambda fn, x: ways.checkpoint(fn, x, use_reentrant=False, context_fn=selected),
    "function": lambda fn, x: ways.CheckpointFunction.apply(fn, True, x),
    "sequential": lambda fn, x: ways.checkpoint_sequential([fn, torch.sin, fn], 2, x, use_reentrant=False),
    "sequential, reentrant": lambda fn, x: ways.checkpoint_sequential([fn, torch.sin, fn], 2, x, use_reentrant=True),
    "wrapper": lambda fn, x: wrappers.checkpoint_wrapper(fn)(x),
    "wrapper, reentrant": lambda fn, x: wrappers.checkpoint_wrapper(fn, wrappers.CheckpointImpl.REENTRANT)(x),
    "composable": composed,
    "nested": lambda fn, x: ways.checkpoint(
        lambda y: ways.checkpoint(fn, fn(y), use_reentrant=False), x, use_reentrant=True
    ),
    "nested, reentrant": lambda fn, x: ways.checkpoint(
        lambda y: ways.checkpoint(fn, fn(y), use_reentrant=True), x, use_reentrant=True
    ),
    "platform": lambda fn, x: platform_named("torch").checkpoint(fn, x),
    "platform, reentrant": lambda fn, x: platform_named("torch").checkpoint(fn, x, use_reentrant=True),
}
PLAIN = {
    "sequential": lambda fn, x: fn(torch.sin(fn(x))),
    "sequential, reentrant": lambda fn, x: fn(torch.sin(fn(x))),
    "nested": lambda fn, x: fn(fn(x)),
    "nested, reentrant": lambda fn, x: fn(fn(x)),
}


def gradients(way, place, mesh_shape):
    """Value, gradient, and the state of the stream after forward and after backward of two applications."""
    mesh = init_device_mesh("cpu", mesh_shape)
    draw = torch.Generator().manual_seed(1)
    whole, seed = (torch.randn(7, 5, generator=draw, dtype=torch.float64) for _ in range(2))
    places = [place] * len(mesh_shape)
    x = distribute_tensor(whole, mesh, places).requires_grad_()
    random.manual_seed(11)
    y = way(Dropping(), x) + way(Dropping(), x * 2)
    after = random.get_rng_state()
    y.backward(distribute_tensor(seed, mesh, places))
    assert random.get_rng_state() == after
    return [y.full_tensor().detach().tolist(), x.grad.full_tensor().tolist(), after]


@pytest.mark.parametrize(
    "world, mesh_shape, place", [(2, (2,), Shard(0)), (3, (3,), Replicate()), (4, (2, 2), Shard(1))]
)
@pytest.mark.parametrize("name", WAYS)
def test_gradients_are_those_without_recomputation(name, world, mesh_shape, place):
    """Under every kind of PyTorch's checkpoint dropout has its plain values, and gradients up to rounding."""
    plain = PLAIN.get(name, lambda fn, x: fn(x))
    expected = simulate(gradients, world, "torch", (plain, place, mesh_shape))
    results = simulate(gradients, world, "torch", (WAYS[name], place, mesh_shape))
    for mine, other in zip(results, expected, strict=True):
        assert (mine[0], mine[2]) == (other[0], other[2])
        np.testing.assert_allclose(mine[1], other[1], rtol=1e-13, atol=1e-14)  # summed in another order
    assert any(0.0 in row for row in expected[0][0])


def test_backward_twice_samples_the_same_twice():
    """A retained graph that is differentiated again is recomputed with the random numbers of its forward."""

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        local = torch.linspace(1, 2, 32, requires_grad=True)
        x = DTensor.from_local(local, mesh, [Shard(0)])
        y = ways.checkpoint(Dropping(), x, use_reentrant=False)
        F.dropout(x)  # the stream goes on
        results = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0].to_local() for _ in range(2)]
        return torch.equal(*results)

    assert simulate(rank, 2, "torch") == [True, True]


class Foreign(torch.autograd.Function):
    """A recomputation as third parties implement it."""

    @staticmethod
    def forward(ctx, fn, x, state):
        """Run the function without a graph."""
        ctx.fn, ctx.state = fn, state
        ctx.save_for_backward(x)
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx, grad):
        """Run the function again with a graph."""
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), random.preserve_state() if ctx.state is None else random.replay(ctx.state):
            y = ctx.fn(x)
        y.backward(grad)
        return None, x.grad, None


def test_recomputation_by_others_is_refused_unless_it_replays():
    """A third-party recomputation raises if it would sample anew, and is right if it replays the stream."""

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        local = torch.linspace(1, 2, 32, requires_grad=True)
        x = DTensor.from_local(local, mesh, [Shard(0)])
        with pytest.raises(UnsupportedOperatorError) as raised:
            Foreign.apply(lambda t: F.dropout(t, 0.5), x, None).sum().backward()
        y = Foreign.apply(lambda t: F.dropout(t, 0.5), x, random.get_rng_state())
        y.sum().backward()
        return str(raised.value), torch.equal(local.grad * local.detach(), y.to_local())

    for message, right in simulate(rank, 2, "torch"):
        assert right
        assert message == (
            "backward recomputes a forward that samples random numbers of DTensors, without restoring their stream; "
            "the numbers would differ from those of the forward, and the gradients would be wrong; recompute by "
            "torch.utils.checkpoint.checkpoint, or take state = hyper_parallel.core.dtensor.random.get_rng_state() "
            "before the first run and run again `with hyper_parallel.core.dtensor.random.replay(state):`"
        )
