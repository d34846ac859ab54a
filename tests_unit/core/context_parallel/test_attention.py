"""Attention over a sharded sequence is that of one device, in all forms: result and every gradient."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import hyper_parallel as hp
from hyper_parallel import Partial, Replicate, Shard
from hyper_parallel.core.context_parallel import attention
from hyper_parallel.errors import LayoutError, PlanError, UnsupportedOnBackend
from hyper_parallel.verify import launch, simulate

pytestmark = pytest.mark.platforms("torch")

FORMS = ("ring", "gather", "all_to_all")
HEADS = [(4, 4), (4, 2), (6, 2), (3, 1)]
LENGTHS = [7, 8, 2]
MASKS = ["none", "causal", "boolean", "no key", "added", "row"]


def drawn(heads, key_heads, length, dtype=torch.float64):
    """Return query, key, value and the gradient of the result, with values narrower than keys."""
    generator = torch.Generator().manual_seed(length)
    sizes = ((heads, 4), (key_heads, 4), (key_heads, 3), (heads, 3))
    shapes = [(2, count, length, width) for count, width in sizes]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def mask_of(kind, heads, length):
    """Return the mask of a kind: by batch, with a query that sees no key, by head, or one row or column for all."""
    generator = torch.Generator().manual_seed(1)
    if kind == "boolean":
        return torch.rand(2, 1, length, length, generator=generator) > 0.4
    if kind == "no key":
        return (torch.rand(length, length, generator=generator) > 0.4) & (torch.arange(length) != 1).unsqueeze(-1)
    if kind == "added":
        return torch.randn(heads, length, length, generator=generator, dtype=torch.float64)
    shape = {"row": (1, length), "column": (length, 1)}.get(kind)
    return shape and torch.randn(shape, generator=generator, dtype=torch.float64)


def reference(tensors, mask, causal, scale=None):
    """Return the result and the gradients of one device."""
    *inputs, grad = tensors
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    grouped = inputs[0].shape[1] != inputs[1].shape[1]
    result = F.scaled_dot_product_attention(*leaves, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped)
    result.backward(grad)
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def parallel(mesh, placements, tensors, **options):
    """Return the result and the gradients on ranks, whole."""
    *inputs, grad = (hp.distribute_tensor(tensor, mesh, placements) for tensor in tensors)
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    result = hp.context_parallel_attention(*leaves, axis="cp", **options)
    assert result.placements == tuple(placements)
    result.backward(grad)
    return [tensor.full_tensor().detach() for tensor in (result, *(leaf.grad for leaf in leaves))]


def largest_difference(actual, expected):
    """Return the largest difference of all tensors; shapes and dtypes are equal."""
    for one, other in zip(actual, expected, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    return max((one.double() - other.double()).abs().max().item() for one, other in zip(actual, expected, strict=True))


@pytest.mark.parametrize("world", [1, 2, 3, pytest.param(4, marks=pytest.mark.sweep)])
def test_every_form_is_attention(world):
    """Odd lengths, empty shards, grouped heads, fewer heads than ranks, each mask: one device's values to rounding."""

    def on_rank():
        mesh = hp.init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
        errors = {}
        for (heads, key_heads), length, kind, form in itertools.product(HEADS, LENGTHS, MASKS, FORMS):
            tensors, mask = drawn(heads, key_heads, length), mask_of(kind, heads, length)
            expected = reference(tensors, mask, kind == "causal")
            options = {"form": form, "attn_mask": mask, "is_causal": kind == "causal"}
            actual = parallel(mesh, [Shard(2)], tensors, **options)
            errors[heads, key_heads, length, kind, form] = largest_difference(actual, expected)
        return errors

    for errors in simulate(on_rank, world, platform="torch"):
        assert len(errors) == 216
        assert {case: error for case, error in errors.items() if not error < 2e-14} == {}


@pytest.mark.parametrize(
    "shape, names, placements",
    [
        ((2, 2), ("dp", "cp"), [Shard(0), Shard(2)]),
        ((2, 2), ("cp", "tp"), [Shard(2), Shard(1)]),
        ((2, 3), ("tp", "cp"), [Shard(1), Shard(2)]),
        ((3, 2), ("cp", "dp"), [Shard(2), Replicate()]),
    ],
)
def test_other_axes_shard_batch_or_heads(shape, names, placements):
    """Beside data and tensor parallelism the values are one device's, with masks that have these dims or not."""

    def on_rank():
        mesh = hp.init_device_mesh("cpu", shape, mesh_dim_names=names)
        errors = {}
        for heads, kind, form in itertools.product([(4, 4), (4, 2)], MASKS, FORMS):
            tensors, mask = drawn(*heads, 7), mask_of(kind, heads[0], 7)
            options = {"form": form, "attn_mask": mask, "is_causal": kind == "causal", "scale": 0.5}
            expected = reference(tensors, mask, kind == "causal", scale=0.5)
            actual = parallel(mesh, placements, tensors, **options)
            errors[heads, kind, form] = largest_difference(actual, expected)
        return errors

    for errors in simulate(on_rank, shape[0] * shape[1], platform="torch"):
        assert len(errors) == 36
        assert {case: error for case, error in errors.items() if not error < 2e-14} == {}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_balanced_order_is_the_same_attention(world):
    """With positions from ``balanced_order`` the causal result is that of the sequence in order, reordered."""
    length = 6 * world

    def on_rank():
        mesh = hp.init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
        order = hp.balanced_order(length, world)
        tensors = drawn(4, 2, length)
        shuffled = [tensor[:, :, order] for tensor in tensors]
        actual = parallel(mesh, [Shard(2)], shuffled, form="ring", is_causal=True, positions=order)
        expected = [tensor[:, :, order] for tensor in reference(tensors, None, causal=True)]
        return largest_difference(actual, expected)

    assert max(simulate(on_rank, world, platform="torch")) < 2e-14


@pytest.mark.parametrize("tile", [1, 2, 3])
def test_tiles_give_the_same_attention(tile, monkeypatch):
    """Scores are computed tile by tile, with every mask: the values are one device's."""
    monkeypatch.setattr(attention, "TILE", tile)

    def on_rank():
        mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        errors = {}
        for kind in (*MASKS, "column"):
            tensors, mask = drawn(4, 2, 7), mask_of(kind, 4, 7)
            actual = parallel(mesh, [Shard(2)], tensors, form="ring", attn_mask=mask, is_causal=kind == "causal")
            errors[kind] = largest_difference(actual, reference(tensors, mask, kind == "causal"))
        return errors

    for errors in simulate(on_rank, 2, platform="torch"):
        assert {case: error for case, error in errors.items() if not error < 2e-14} == {}
        assert len(errors) == len(MASKS) + 1


def test_half_precision_is_computed_in_single():
    """bfloat16 in a ring is as near to the exact result as one device's; the result and gradients are bfloat16."""
    tensors = drawn(4, 4, 9, torch.bfloat16)
    exact = reference([tensor.double() for tensor in tensors], None, causal=True)
    plain = reference(tensors, None, causal=True)

    def on_rank():
        mesh = hp.init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
        return parallel(mesh, [Shard(2)], tensors, form="ring", is_causal=True)

    for actual in simulate(on_rank, 3, platform="torch"):
        for one, near, right in zip(actual, plain, exact, strict=True):
            assert one.dtype == torch.bfloat16
            unit = 2**-8 * right.abs().max()
            assert (one - right).abs().max() <= (near - right).abs().max() + unit


@pytest.mark.parametrize("world", [2, 3])
def test_real_ranks_pass_keys_around(world):
    """Over gloo a ring of processes gives one device's values, an uneven sequence included."""
    tensors = drawn(4, 2, 7)
    expected = reference(tensors, None, causal=True)

    def on_rank():
        mesh = hp.init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
        return parallel(mesh, [Shard(2)], tensors, form="ring", is_causal=True)

    for actual in launch(on_rank, world, platform="torch"):
        assert largest_difference(actual, expected) < 2e-14


def test_plain_tensors_are_those_of_one_device():
    """Without a DTensor the same call is attention on one device, in any order of positions."""
    for heads, kind in itertools.product(HEADS, MASKS):
        tensors, mask = drawn(*heads, 7), mask_of(kind, heads[0], 7)
        *inputs, grad = tensors
        order = torch.randperm(7, generator=torch.Generator().manual_seed(2)).tolist()
        options = {"attn_mask": mask, "is_causal": kind == "causal"}
        for chosen in (None, order) if kind == "causal" else (None,):
            taken = list(range(7)) if chosen is None else chosen
            leaves = [tensor[:, :, taken].requires_grad_() for tensor in inputs]
            result = hp.context_parallel_attention(*leaves, axis="cp", form="ring", positions=chosen, **options)
            result.backward(grad[:, :, taken])
            expected = [tensor[:, :, taken] for tensor in reference(tensors, mask, kind == "causal")]
            assert largest_difference([result.detach(), *(leaf.grad for leaf in leaves)], expected) < 2e-14
    with pytest.raises(PlanError, match=r"query has shape \[7, 4\]; it must be \[batch, heads, sequence, width\]"):
        hp.context_parallel_attention(*[torch.ones(7, 4)] * 3, axis="cp")


def test_second_gradients():
    """The forms that move placements have second gradients; the ring refuses them on every rank."""

    def on_rank():
        mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        seconds = {}
        for form in FORMS:
            *inputs, grad = (hp.distribute_tensor(tensor, mesh, [Shard(2)]) for tensor in drawn(2, 2, 5))
            leaves = [tensor.requires_grad_() for tensor in inputs]
            result = hp.context_parallel_attention(*leaves, axis="cp", form=form)
            try:
                (first,) = torch.autograd.grad(result, leaves[0], grad, create_graph=True)
            except UnsupportedOnBackend as error:
                seconds[form] = str(error)
            else:
                (second,) = torch.autograd.grad(first.square().sum(), leaves[1])
                seconds[form] = second.full_tensor()
        return seconds

    query, key, value, grad = drawn(2, 2, 5)
    query, key = query.requires_grad_(), key.requires_grad_()
    scores = (query @ key.transpose(-2, -1) * 0.5).softmax(-1)
    (first,) = torch.autograd.grad(scores @ value, query, grad, create_graph=True)
    (expected,) = torch.autograd.grad(first.square().sum(), key)
    for seconds in simulate(on_rank, 2, platform="torch"):
        assert seconds["ring"] == (
            "context_parallel_attention: form='ring' has no second gradient (create_graph=True); use form='gather' or "
            "form='all_to_all'"
        )
        for form in ("gather", "all_to_all"):
            torch.testing.assert_close(seconds[form], expected)


NAME = "context_parallel_attention: "
PLACED = (
    "query, key and value must be sharded by dim 2 over axis 'cp', and have the same placements over every other "
    "axis (sharded by batch or heads, or replicated); call "
)


@pytest.mark.parametrize(
    "change, error, text",
    [
        ({"axis": "sp"}, PlanError, "axis 'sp' is not in the mesh; its axes are 'dp', 'cp'"),
        ({"form": "flash"}, PlanError, "form is 'flash'; it must be 'gather', 'all_to_all' or 'ring'"),
        ({"positions": [0] * 7}, PlanError,
            "positions has 7 numbers; it must be a permutation of range(7), such as balanced_order gives"),
        ({"positions": range(7), "form": "gather"}, PlanError,
            "positions are for form='ring'; form='gather' takes the sequence in order"),
        ({"attn_mask": torch.ones(7, 7), "is_causal": True}, PlanError, "attn_mask and is_causal exclude each other"),
        ({"attn_mask": torch.ones(3, 7)}, PlanError, "attn_mask is [3, 7]; it must broadcast to [2, 4, 7, 7]"),
        ({"attn_mask": torch.ones(7, 7, requires_grad=True)}, PlanError,
            "attn_mask has no gradient in form='ring'; use form='gather', or detach it"),
        ({"query": torch.ones(2, 4, 7, 4)}, LayoutError,
            ("query is a plain tensor; give a DTensor that is sharded by its sequence, such as "
             "distribute_tensor(query, mesh, [Shard(2)])")),
        ({"key": (torch.ones(2, 4, 7), [Replicate(), Shard(2)])}, PlanError,
            "key has shape [2, 4, 7]; it must be [batch, heads, sequence, width]"),
        ({"key": (torch.ones(2, 3, 7, 4), [Shard(0), Shard(2)])}, PlanError,
            ("query is [2, 4, 7, 4], key [2, 3, 7, 4], value [2, 4, 7, 3]; they must be [B, H, S, E], [B, Hk, S, E] "
             "and [B, Hk, S, F], where Hk divides H")),
        ({"key": (torch.ones(2, 4, 7, 4, dtype=torch.float64), [Shard(0), Shard(2)])}, PlanError,
            "query, key and value have dtypes torch.float32, torch.float64; they must have the same dtype"),
        ({"value": (torch.ones(2, 4, 7, 3), [Shard(0), Shard(1)])}, LayoutError,
            ("value is placed [Shard(0), Shard(1)]; " + PLACED
             + "value.redistribute(placements=[Shard(0), Shard(2)])")),
        ({"query": (torch.ones(2, 4, 7, 4), [Shard(3), Shard(2)])}, LayoutError,
            ("query is placed [Shard(3), Shard(2)]; " + PLACED
             + "query.redistribute(placements=[Replicate(), Shard(2)])")),
        ({"query": (torch.ones(2, 4, 7, 4), [Partial(), Shard(2)])}, LayoutError,
            ("query is placed [Partial(sum), Shard(2)]; " + PLACED
             + "query.redistribute(placements=[Replicate(), Shard(2)])")),
        (dict.fromkeys(("key", "value"), (torch.ones(2, 3, 7, 4), [Shard(1), Shard(2)]))
            | {"query": (torch.ones(2, 6, 7, 4), [Shard(1), Shard(2)])}, LayoutError,
            ("6 query heads share 3 key/value heads, and 3 is not divisible by the 2 ranks that shard the heads; "
             "use form='gather', or redistribute so that heads are not sharded")),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change, error, text):
    """Wrong axes, forms, shapes, dtypes, layouts, masks and positions are refused on every rank before any exchange."""

    def on_rank():
        mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        arguments = {
            "query": (torch.ones(2, 4, 7, 4), [Shard(0), Shard(2)]),
            "key": (torch.ones(2, 4, 7, 4), [Shard(0), Shard(2)]),
            "value": (torch.ones(2, 4, 7, 3), [Shard(0), Shard(2)]),
            "axis": "cp",
            "form": "ring",
            **change,
        }
        for name, value in arguments.items():
            if isinstance(value, tuple):
                tensor, placements = value
                pending = any(isinstance(placement, Partial) for placement in placements)
                make = hp.DTensor.from_local if pending else hp.distribute_tensor
                arguments[name] = make(tensor, mesh, placements)
        with pytest.raises(error) as caught:
            hp.context_parallel_attention(**arguments)
        return str(caught.value)

    assert simulate(on_rank, 4, platform="torch") == [NAME + text] * 4
