"""Functions of local tensors called with DTensors: values and gradients of one device, misuse refused."""

from __future__ import annotations

import numpy as np
import pytest

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.shard.custom.function_map import local_map
from hyper_parallel.errors import (
    ArgumentTypeError,
    LayoutError,
    MixedTensorError,
    RankFailedError,
    ShardMismatchError,
    UnsupportedOperatorError,
)
from hyper_parallel.platform.select import current_platform
from hyper_parallel.verify.checker.function import check_function
from hyper_parallel.verify.simulate import simulate

both = pytest.mark.platforms("torch", "mindspore")
torch_only = pytest.mark.platforms("torch")


def values(*shape, seed=0):
    """Random numbers of both signs."""
    return np.random.default_rng(seed).uniform(-2.0, 2.0, shape)


def holds(platform_name, out, entries, shapes, mesh):
    """Assert that `x @ w` on local tensors gives the values and gradients of one device, whatever the layouts."""
    region = local_map(lambda x, w: x @ w, out, entries, redistribute_inputs=True)
    arrays = [values(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    report = check_function(region, arrays, mesh, platform=platform_name)
    assert report.ok, report.wrong[:3]
    assert not report.rejected, report.rejected[:3]


@both
@pytest.mark.parametrize("world", [2, 3])
def test_whole_operand_of_a_sharded_computation_has_its_gradient_summed(platform_name, world):
    """`x @ w` on shards of x: the gradient of a replicated w is the sum over the ranks, for uneven shards too."""
    holds(platform_name, [Shard(0)], ([Shard(0)], [Replicate()]), [(5, 3), (3, 4)], (world,))


@both
def test_contraction_gives_partial_values(platform_name):
    """Outputs of a contraction of sharded dims are declared Partial."""
    holds(platform_name, [Partial()], ([Shard(1)], [Shard(0)]), [(2, 7), (7, 4)], (3,))


@both
@pytest.mark.untraced
def test_two_axes(platform_name):
    """On a 2x2 mesh each axis is treated independently."""
    entries = ([Shard(0), Replicate()], [Replicate(), Shard(1)])
    holds(platform_name, [Shard(0), Shard(1)], entries, [(5, 3), (3, 7)], (2, 2))


@torch_only
def test_aliases():
    """Aliases and layouts mean the same as placements, for one output and for several."""
    import torch

    def body():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = distribute_tensor(torch.arange(20.0).reshape(4, 5), mesh, ("dp", "None"))
        w = distribute_tensor(torch.ones(5, 6), mesh, ("None", "tp"))
        aliased = local_map(lambda x, w: x @ w, ("dp", "tp"), (("dp", "None"), ("None", "tp")))(x, w)
        laid = local_map(lambda x, w: x @ w, Layout.place(mesh, ("dp", "tp"), (4, 6)))(x, w)
        two = local_map(lambda x, w: (x + 1, w * 2), (("dp", "None"), ("None", "tp")))(x, w)
        assert aliased.placements == (Shard(0), Shard(1))
        assert torch.equal(aliased.full_tensor(), x.full_tensor() @ w.full_tensor())
        assert laid.placements == aliased.placements
        assert torch.equal(laid.to_local(), aliased.to_local())
        assert [part.placements for part in two] == [x.placements, w.placements]
        return True

    assert all(simulate(body, 4, platform="torch"))


@torch_only
def test_nested_outputs_and_keywords():
    """Outputs keep their nesting; keyword arguments enter as they are laid out, or as the mapping declares."""
    import torch

    def body():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        x = torch.arange(10.0).reshape(5, 2)
        wrapped = local_map(
            lambda x, *, scale, note: {"a": (x * scale, x.sum(0)), "n": note},
            {"a": ([Shard(0)], [Partial()]), "n": None},
            {"x": [Shard(0)], "scale": [Replicate()]},
            redistribute_inputs=True,
        )
        output = wrapped(distribute_tensor(x, mesh), scale=distribute_tensor(torch.tensor(2.0), mesh), note="kept")
        assert output["n"] == "kept"
        assert output["a"][0].placements == (Shard(0),)
        assert torch.equal(output["a"][0].full_tensor(), 2 * x)
        assert torch.equal(output["a"][1].full_tensor(), x.sum(0))
        return True

    assert all(simulate(body, 3, platform="torch"))


@torch_only
def test_plain_call_is_the_function():
    """Without a DTensor operand the function is called unchanged."""
    import torch

    def body():
        return float(local_map(lambda x: x + 1, [Shard(0)])(torch.zeros(())))

    assert simulate(body, 2, platform="torch") == [1.0, 1.0]


@torch_only
def test_declared_gradients_replace_the_contract():
    """A gradient that `in_grad_placements` declares replicated is not summed again."""
    import torch

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        w = distribute_tensor(torch.ones(3, requires_grad=True), mesh)
        x = distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [Shard(0)])
        for grads, factor in ((None, 2.0), ((None, [Replicate()]), 1.0)):
            w.grad = None
            out = local_map(lambda x, w: x * 0 + w, [Shard(0)], None, grads)(x, w)
            out.sum().backward()
            assert torch.equal(w.grad.full_tensor(), torch.full((3,), factor))
        return True

    assert all(simulate(body, 2, platform="torch"))


def refused(kind, call, *operands):
    """The message with which `call` on DTensors is refused, on rank 0."""

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(kind) as caught:
            call(*[operand(mesh) for operand in operands])
        return str(caught.value)

    return simulate(body, 2, platform="torch")[0]


def rows(mesh):
    """A DTensor of four rows, sharded."""
    import torch

    return distribute_tensor(torch.zeros(4, 2), mesh, [Shard(0)])


def plain(mesh):
    """A plain tensor."""
    import torch

    del mesh
    return torch.zeros(4, 2)


def same(x, y=None):
    """The first argument."""
    del y
    return x


@torch_only
@pytest.mark.parametrize(
    "kind, options, operands, message",
    [
        (LayoutError, {"out_placements": [Shard(0)], "in_placements": ([Replicate()],)}, (rows,),
         ("local_map(same): x is laid out as f32[4@tp, 2], in_placements asks for f32[4, 2]; use "
         "x.redistribute(placements=[Replicate()]), or redistribute_inputs=True")),
        (LayoutError, {"out_placements": [Shard(0)], "in_placements": ([Shard(0)], None)}, (rows,),
         ("local_map(same): in_placements has 2 entries, the call has 1 positional values in 1 arguments; give one "
         "entry each, None for a value that is not a DTensor")),
        (LayoutError, {"out_placements": [Shard(0)], "in_placements": (None,)}, (rows,),
         "local_map(same): x is a DTensor, its entry of in_placements is None; give its placements"),
        (LayoutError, {"out_placements": [Shard(0)], "in_placements": {"z": [Shard(0)]}}, (rows,),
         "local_map(same): in_placements names 'z'; the call has x"),
        (MixedTensorError, {"out_placements": [Shard(0)], "in_placements": ([Shard(0)], [Shard(0)])}, (rows, plain),
         ("local_map(same): y is a plain tensor, its entry of in_placements is [Shard(0)]; use None there, or pass "
         "a DTensor")),
        (LayoutError, {"out_placements": ([Shard(0)], [Shard(0)])}, (rows,),
         ("local_map(same): output is a Tensor, its out_placements are ([Shard(0)], [Shard(0)]); they must be "
         "the placements of one tensor")),
        (LayoutError, {"out_placements": None}, (rows,),
         "local_map(same): output is a Tensor, its out_placements are None; they must be the placements of one tensor"),
    ],
)  # fmt: skip
def test_declarations_that_do_not_fit(kind, options, operands, message):
    """Declarations and arguments must agree; the error names argument, facts and fix."""
    assert refused(kind, local_map(same, **options), *operands) == message


def listed(xs):
    """The sum of the tensors in a list."""
    return xs[0] + xs[1]


@torch_only
def test_a_list_is_named_by_its_argument():
    """A mapping has one entry per value of a list, or None where none of them is a DTensor."""
    import torch

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x, y = rows(mesh) + 1.0, rows(mesh) + 2.0
        kept = local_map(listed, [Shard(0)], {"xs": [[Shard(0)], [Shard(0)]]})([x, y])
        scaled = local_map(lambda x, sizes: x * sum(sizes), [Shard(0)], {"x": [Shard(0)], "sizes": None})(x, [2, 3])
        with pytest.raises(LayoutError) as caught:
            local_map(listed, [Shard(0)], {"xs": [[Shard(0)]]})([x, y])
        return kept.full_tensor(), scaled.full_tensor(), str(caught.value)

    kept, scaled, message = simulate(body, 2, platform="torch")[0]
    assert torch.equal(kept, torch.full((4, 2), 3.0))
    assert torch.equal(scaled, torch.full((4, 2), 5.0))
    assert message == "local_map(listed): in_placements['xs'] has 1 entries for 2 values"


@torch_only
def test_a_function_without_signature():
    """A C function is called and its arguments named by position; the decorator form wraps it too."""

    def body():
        import operator

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        assert local_map(out_placements=[Shard(0)])(operator.neg)(rows(mesh) + 1.0).full_tensor().sum() == -8.0
        with pytest.raises(LayoutError) as caught:
            local_map(max, [Shard(0)], ([Replicate()],))(rows(mesh))
        return str(caught.value)

    assert simulate(body, 2, platform="torch")[0] == (
        "local_map(max): args[0] is laid out as f32[4@tp, 2], in_placements asks for f32[4, 2]; use "
        "args[0].redistribute(placements=[Replicate()]), or redistribute_inputs=True"
    )


@torch_only
def test_a_mapping_that_comes_out_has_placements_for_its_keys():
    """The declared keys of an output mapping must be those of the output."""

    def call(x):
        return local_map(lambda x: {"a": x}, {"b": [Shard(0)]})(x)

    assert refused(LayoutError, call, rows) == (
        "local_map(<lambda>): output is a dict, its out_placements are {'b': [Shard(0)]}; "
        "they must be a mapping with the keys ['a']"
    )


@torch_only
def test_mappings_go_in_and_come_out():
    """Values of a mapping have placements by their keys, in inputs and outputs."""

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        tree = {"a": rows(mesh) + 1.0, "b": [rows(mesh) + 2.0]}
        specs = {"a": [Shard(0)], "b": [[Shard(0)]]}
        output = local_map(lambda tree: {"b": tree["b"], "a": tree["a"] * 3.0}, specs, {"tree": [[Shard(0)]] * 2})(tree)
        assert list(output) == ["b", "a"]
        whole = local_map(lambda tree: [2 * len(tree)], None, {"tree": None})({"size": 4})
        return output["a"].full_tensor().unique().tolist(), output["b"][0].full_tensor().unique().tolist(), whole

    assert simulate(body, 2, platform="torch") == [([3.0], [2.0], [2])] * 2


@torch_only
@pytest.mark.parametrize("out, placements, wanted", [
    (lambda x: [x, x], [[Shard(0)]], "output is a list, its out_placements are [[Shard(0)]]; a sequence of 2"),
    (lambda x: {1: x}, [Shard(0)], "output is a dict, its out_placements are [Shard(0)]; a mapping with the keys [1]"),
    (lambda x: [x], None, "output is a list, its out_placements are None; placements"),
])  # fmt: skip
def test_outputs_that_were_declared_otherwise(out, placements, wanted):
    """An output of another structure than declared is refused."""
    message = refused(LayoutError, local_map(out, placements), rows)
    assert message == f"local_map(<lambda>): {wanted.replace('; ', '; they must be ')}"


@torch_only
def test_output_that_is_a_dtensor():
    """A function that returns a DTensor is refused."""

    def call(x):
        return local_map(lambda _: x, [Shard(0)])(x)

    assert refused(ArgumentTypeError, call, rows) == ("local_map(<lambda>): output is a DTensor; return local tensors")


@torch_only
def test_local_shards_that_make_no_tensor():
    """Local shards that do not follow the ceil rule are refused on every rank."""

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = rows(mesh)
        with pytest.raises(ShardMismatchError) as caught:
            local_map(lambda x: x[: 1 + mesh.rank], [Shard(0)])(x)
        return str(caught.value)

    message = (
        "local_map(<lambda>): the local shards of output do not form one f32[3@tp, 2] (rank 0: [1, 2], rank 1: [2, "
        "2]); every shard must have ceil(size / ranks) elements, except the last ones, which may have fewer"
    )
    assert simulate(body, 2, platform="torch") == [message] * 2


@torch_only
def test_sizes_that_depend_on_values():
    """A later call whose local output has another size than the first is refused."""

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        sizes = iter([2, 1])
        cut = local_map(lambda x: x[: next(sizes)], [Shard(0)])
        assert tuple(cut(rows(mesh)).shape) == (4, 2)
        with pytest.raises(ShardMismatchError) as caught:
            cut(rows(mesh))
        return str(caught.value)

    assert simulate(body, 2, platform="torch")[0] == (
        "local_map(<lambda>): output has the local shape [1, 2] but had the local shape [2, 2] in an earlier call "
        "with the same layouts; the other ranks do not know about the change. If an argument determines "
        "the sizes, wrap the function for each of its values: local_map(functools.partial(func, argument=value), ...)"
    )


@torch_only
def test_a_write_into_an_operand_that_moved_is_refused():
    """An in-place write is allowed for an operand that did not move and refused for one that did."""

    def double(t):
        t *= 2
        return t

    def body():
        platform = current_platform()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        x = distribute_tensor(platform.from_numpy(np.ones(4)), mesh)
        with pytest.raises(UnsupportedOperatorError) as caught:
            local_map(double, [Shard(0)], ([Shard(0)],), redistribute_inputs=True)(x)
        return str(caught.value)

    assert simulate(body, 2, platform="torch")[0] == (
        "local_map(double): t was written in place, but had to be moved to f64[4@tp] first, so the write is lost; "
        "return the new value instead"
    )


@torch_only
def test_whole_outputs_have_one_size():
    """An output declared replicated must have the same sizes on all ranks."""

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(ShardMismatchError) as caught:
            local_map(lambda x: x[: 1 + mesh.rank], [Replicate()])(rows(mesh))
        return str(caught.value)

    assert simulate(body, 2, platform="torch") == [
        ("local_map(<lambda>): ranks returned different sizes of output in dims that (Replicate(),) do not shard "
        "(rank 0: [1, 2], rank 1: [2, 2])"),
    ] * 2  # fmt: skip


@torch_only
def test_an_argument_that_differs_between_ranks_does_not_part_them():
    """All ranks exchange sizes in the same calls, even if they pass different numbers, flags or texts."""
    import torch

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        scaled = local_map(lambda x, n: x * (len(n) if isinstance(n, str) else int(n)), [Shard(0)])
        x = distribute_tensor(torch.ones(5, 2), mesh, [Shard(0)])
        rank = mesh.rank
        for first, second in ((1, 1 + rank), (True, rank == 0), ("a", "ab"[: 1 + rank]), (1, (1, "ab")[rank])):
            assert scaled(x, first).sum().full_tensor() == 10
            mine = scaled(x, second).to_local()
            assert torch.equal(mine, torch.full_like(mine, float(mine[0, 0])))
        return [tuple(scaled(x, 1 + rank).shape), scaled(x, 1 + rank).sum().full_tensor().item()]

    assert simulate(body, 2, platform="torch") == [[(5, 2), 3 * 2 + 2 * 2 * 2]] * 2


@torch_only
def test_sizes_that_an_argument_decides():
    """A function with the argument bound by partial has sizes of its own for each value."""
    import functools

    import torch

    def repeated(x, times):
        return x.repeat(1, times)

    def body():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        x = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])
        once = local_map(repeated, [Shard(0)])
        assert tuple(once(x, 2).shape) == (4, 4)
        with pytest.raises(ShardMismatchError, match=r"wrap the function for each of its values"):
            once(x, 3)
        return [tuple(local_map(functools.partial(repeated, times=times), [Shard(0)])(x).shape) for times in (1, 2, 3)]

    assert simulate(body, 3, platform="torch") == [[(4, 2), (4, 4), (4, 6)]] * 3


@torch_only
def test_outputs_in_different_places():
    """Ranks that return tensors in different places of one structure raise an error instead of waiting."""

    def body():
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        with pytest.raises(ShardMismatchError) as caught:
            local_map(lambda x: {"a": x, "b": [x] * mesh.rank}, {"a": [Shard(0)], "b": [[Shard(0)]] * mesh.rank})(
                rows(mesh)
            )
        return str(caught.value)

    assert simulate(body, 2, platform="torch") == [
        ("local_map(<lambda>): ranks returned tensors in different places "
        "(rank 0: output['a'], rank 1: output['a'], output['b'][0])"),
    ] * 2  # fmt: skip


@torch_only
def test_an_operand_whose_gradient_is_complete_is_not_summed_twice():
    """A function that makes a replicated DTensor of an operand says so; its gradient is then one device's."""
    import torch

    def program(grads):
        mesh = init_device_mesh("cpu", (3,))
        rows = torch.arange(35, dtype=torch.float32).reshape(7, 5).sin()
        x, w = distribute_tensor(rows, mesh, [Shard(0)]), distribute_tensor(torch.ones(5, 2), mesh, [Replicate()])
        w.requires_grad_()

        def outer(x, w):
            inner = DTensor.from_local(x, mesh, [Shard(0)], shape=(7, 5)) @ DTensor.from_local(w, mesh, [Replicate()])
            return inner.to_local()

        local_map(outer, [Shard(0)], None, grads)(x, w).sum().backward()
        return w.grad.full_tensor(), rows.sum(0)

    (gradient, expected), *_ = simulate(lambda: program([[Shard(0)], [Replicate()]]), 3)
    torch.testing.assert_close(gradient, expected[:, None].expand(5, 2))
    with pytest.raises(RankFailedError) as caught:
        simulate(lambda: program(None), 3)
    assert str(caught.value.__cause__) == (
        "from_local: w is replicated over 0, so its gradient is complete, and local_map would sum it over 0 once more; "
        "give w the entry [Replicate()] in in_grad_placements"
    )
