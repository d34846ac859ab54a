"""What the library remembers is bounded and told, whatever shapes, meshes and lists a program brings."""

from __future__ import annotations

import functools
import gc
import threading
import weakref

import pytest

from hyper_parallel import DeviceMesh, Layout, Partial, Replicate, Shard, _caches, cache_info
from hyper_parallel._caches import CacheInfo, CacheTable, Owners, empty_layout_caches, register, register_owners
from hyper_parallel.core.dtensor import dtensor, layout, mesh, transition
from hyper_parallel.core.shard import dispatch

S0, R = Shard(0), Replicate()
BY_LAYOUT = ("even shards of from_local", "layouts by placements", "layouts of gradients", "transitions")


@pytest.fixture
def registry(monkeypatch):
    """Only what the test registers is known."""
    monkeypatch.setattr(_caches, "_REGISTERED", [])


@pytest.fixture
def small(monkeypatch):
    """Return the limit that every cache by layout has in the test."""
    limit = 12
    for module, name in ((layout, "_MAX_PLACED"), (dtensor, "_MAX_EVEN"), (transition, "_MAX_CACHED")):
        monkeypatch.setattr(module, name, limit)
    monkeypatch.setattr(dispatch, "_MAX_PLANS", limit)
    monkeypatch.setattr(mesh, "_MAX_MESHES", limit)
    monkeypatch.setattr(mesh._ROOM, "most", 0)
    empty_layout_caches()
    gc.collect()
    return limit


def entries():
    """Return the number of entries by the name of the cache."""
    return {info.name: info.entries for info in cache_info()}


def assert_bounded():
    """No cache has more entries than its limit."""
    assert [info for info in cache_info() if info.limit is not None and info.entries > info.limit] == []


# -- cache_info --------------------------------------------------------------------------------------------------------


class Owner(dict):
    """An object with a cache, which is not hashable."""

    cache: dict


def owner_of(cache):
    """Return an object with this cache."""
    owner = Owner()
    owner.cache = cache
    return owner


@pytest.mark.usefixtures("registry")
def test_every_kind_of_cache_is_told():
    """Mappings, functions that remember, and objects with a cache each are listed by name, with entries and limit."""
    remembered = functools.lru_cache(maxsize=7)(abs)
    remembered(-1)
    owners = Owners()
    kept = [owner_of({1: 2}), owner_of({})]
    for owner in kept:
        owners.add(owner)
    register("squares", {1: 1, 2: 4}, lambda: 16)
    register("in use", {})
    register("absolute values", remembered)
    register_owners(owners, lambda owner: CacheInfo("plans of add", len(owner.cache), 4))
    table = cache_info()
    assert table == (("absolute values", 1, 7), ("in use", 0, None), ("plans of add", 1, 4), ("squares", 2, 16))
    assert str(table) == (
        "cache            entries    limit\n"
        "absolute values        1        7\n"
        "in use                 0        -\n"
        "plans of add           1        4\n"
        "squares                2       16"
    )
    del kept, owner
    gc.collect()
    assert [info.name for info in cache_info()] == ["absolute values", "in use", "squares"]


def test_nothing_registered_is_a_table_with_a_head_alone():
    """Without a cache the table has only its head."""
    assert str(CacheTable()) == "cache  entries    limit"


@pytest.mark.usefixtures("registry")
def test_entries_with_layouts_are_dropped_and_no_others():
    """Emptying drops what may be dropped on one rank alone: entries that hold layouts."""
    remembered = functools.lru_cache(abs)
    remembered(-1)
    caches = [{1: 1} for _ in range(4)]
    kept, other = owner_of(caches[2]), owner_of(caches[3])
    emptied, left = Owners(), Owners()
    emptied.add(kept)
    left.add(other)
    register("a", caches[0], lambda: 4, has_layouts=True)
    register("b", caches[1], lambda: 4)
    register("c", remembered, has_layouts=True)
    register_owners(emptied, lambda owner: CacheInfo("d", len(owner.cache), 4), lambda owner: owner.cache.clear())
    register_owners(left, lambda owner: CacheInfo("e", len(owner.cache), 4))
    empty_layout_caches()
    assert cache_info() == (("a", 0, 4), ("b", 1, 4), ("c", 0, 128), ("e", 1, 4))


@pytest.mark.usefixtures("registry")
def test_caches_are_told_while_others_register():
    """Threads may add owners while another one asks for the sizes."""
    owners, kept, wrong = Owners(), [], []
    register_owners(owners, lambda owner: CacheInfo("x", len(owner.cache), 1))

    def add():
        for _ in range(300):
            kept.append(owner_of({1: 1}))
            owners.add(kept[-1])

    def ask():
        for _ in range(30):
            wrong.extend(info for info in cache_info() if info != ("x", 1, 1))

    threads = [threading.Thread(target=target) for target in (add, add, ask, ask)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(cache_info()) == 600


def test_the_caches_of_the_library_are_known():
    """What is cached by layout, and the meshes and layouts in use, are reported."""
    assert {*BY_LAYOUT, "layouts", "meshes", "signatures"} <= entries().keys()


# -- shapes and meshes -------------------------------------------------------------------------------------------------


def plan_shapes(count):
    """Plan for tensors of ``count`` shapes on one mesh, and let go of everything."""
    grid = DeviceMesh.abstract("cpu", (2,), (0, 1), ("tp",))
    for size in range(1, count + 1):
        rows, whole, partial = (Layout.place(grid, [place], (size, 3)) for place in (S0, R, Partial()))
        transition.plan_transition(rows, whole)
        transition.plan_transition(partial, rows)
        transition.dual(partial)


def plan_meshes(count):
    """Plan on ``count`` meshes, and let go of them."""
    for number in range(count):
        grid = DeviceMesh.abstract("cpu", (2, 2), tuple(range(4)), ("dp", f"tp{number}"))
        rows, whole = (Layout.place(grid, [place, R], (6, 3)) for place in (S0, R))
        assert transition.plan_transition(rows, whole).adjoint is not None


def test_many_shapes_leave_bounded_caches(small):
    """However many shapes come, no cache exceeds its limit, and layouts that nobody has are freed."""
    before = entries()["layouts"]
    plan_shapes(10 * small)
    assert_bounded()
    gc.collect()
    assert entries()["layouts"] - before <= 6 * small


def test_many_meshes_are_forgotten(small):
    """Meshes that nobody has are freed, with their layouts; those in use stay what they are."""
    used = DeviceMesh.abstract("cpu", (2,), (0, 1), ("used",))
    placed = Layout.place(used, [S0], (5,))
    plan_meshes(10 * small)
    assert_bounded()
    gc.collect()
    assert entries()["meshes"] <= 2 * (small + entries_in_use())
    assert DeviceMesh.abstract("cpu", (2,), (0, 1), ("used",)) is used
    assert Layout.place(used, [S0], (5,)) is placed


def entries_in_use():
    """Return the number of meshes that other modules keep."""
    empty_layout_caches()
    gc.collect()
    return entries()["meshes"]


@pytest.mark.sweep
def test_ten_thousand_shapes_and_a_thousand_meshes():
    """The same with the limits as they are: 10,000 shapes and 1,000 meshes."""
    in_use = entries_in_use()
    plan_shapes(10_000)
    assert_bounded()
    plan_meshes(1_000)
    assert_bounded()
    gc.collect()
    assert entries()["meshes"] <= 2 * (mesh._MAX_MESHES + in_use)
    empty_layout_caches()
    gc.collect()
    assert entries()["meshes"] <= in_use + 1


@pytest.mark.platforms("torch")
def test_tensors_of_many_shapes_and_meshes(small):
    """Operators, redistribution and gradients of tensors of many shapes, on many meshes, leave bounded caches."""
    import torch

    from hyper_parallel import DTensor, local_map
    from hyper_parallel.verify import simulate

    def on_rank():
        double = local_map(lambda local: local * 2, out_placements=[S0])
        grid = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("tp",))
        for size in range(1, small + 8):
            x = DTensor.from_local(torch.ones(size, 2), grid, [S0])
            (double(x) + x).redistribute(grid, [R])
            assert_bounded()
        told = next(info for info in cache_info() if info.name == "sizes of outputs of <lambda>")
        for number in range(small):
            other = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=(f"tp{number}",))
            x = DTensor.from_local(torch.ones(2, 2, requires_grad=True), other, [S0])
            (x * 2).sum().backward()
            assert_bounded()
        del x, other
        gc.collect()
        return told.limit, entries()["meshes"]

    for limit, meshes in simulate(on_rank, 3, platform="torch"):
        assert limit == 1024
        assert meshes <= 2 * (small + 3 + entries_in_use())


# -- lists -------------------------------------------------------------------------------------------------------------


def longest_key():
    """Return the number of atoms in the longest key of a plan."""

    def atoms(key):
        return sum(map(atoms, key)) if isinstance(key, tuple) else 1

    return max((atoms(key) for entry in dispatch.ENTRIES for key in list(entry.cache)), default=0)


@pytest.mark.platforms("torch")
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("count", [600, pytest.param(5_000, marks=pytest.mark.sweep)])
def test_optimizer_steps_over_many_parameters(count):
    """A step over thousands of parameters is that over plain ones, and leaves no key that grows with the list."""
    import torch

    from hyper_parallel import distribute_tensor
    from hyper_parallel.verify import simulate

    def on_rank():
        grid = DeviceMesh("cpu", [0, 1], mesh_dim_names=("tp",))
        whole = torch.arange(3.0)
        plain = [torch.nn.Parameter(whole + number % 7) for number in range(3)]
        ours = [
            torch.nn.Parameter(distribute_tensor(plain[number % 3].detach().clone(), grid, [(S0, R)[number % 2]]))
            for number in range(count)
        ]
        gradients = [distribute_tensor(whole - 1, grid, [place]) for place in (S0, R)]
        for number, parameter in enumerate(ours):
            parameter.grad = gradients[number % 2]
        for parameter in plain:
            parameter.grad = whole - 1
        for parameters in (plain, ours):
            torch.optim.SGD(parameters, 0.5, momentum=0.5, foreach=True).step()
        assert longest_key() < 50
        assert_bounded()
        return [torch.equal(ours[number].full_tensor(), plain[number % 3]) for number in (0, 1, 2, count - 1)]

    assert simulate(on_rank, 2, platform="torch") == [[True] * 4] * 2


# -- what users define -------------------------------------------------------------------------------------------------


@pytest.mark.platforms("torch")
def test_classes_of_functions_are_forgotten(monkeypatch):
    """A DFunction that is defined in each step keeps a bounded number of classes, and each computes its own."""
    import torch

    from hyper_parallel import DFunction, DTensor
    from hyper_parallel.core.shard.custom import dfunction
    from hyper_parallel.verify import simulate

    monkeypatch.setattr(dfunction, "_MAX_CLASSES", 3)
    dfunction._NATIVE.clear()
    dfunction._ENTRIES.clear()

    def scaled(factor):
        class Scaled(DFunction):
            _op_name = "neg"

            @staticmethod
            def forward(ctx, x):
                ctx.factor = factor
                return x * factor

            @staticmethod
            def backward(ctx, grad):
                return grad * ctx.factor

        return Scaled

    def on_rank():
        grid = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("tp",))
        local = torch.ones(2, requires_grad=True)
        for factor in range(1, 8):
            (scaled(factor).apply(DTensor.from_local(local, grid, [S0])) * 2).sum().backward()
            assert_bounded()
            assert local.grad.tolist() == [2.0 * factor] * 2
            local.grad = None
        return entries()["functions of DFunction"], entries()["operators of DFunction"]

    for functions, operators in simulate(on_rank, 3, platform="torch"):
        assert 0 < functions <= 3
        assert 0 < operators <= 3


@pytest.mark.platforms("torch")
def test_what_a_propagator_remembers_is_told_and_dropped():
    """Results of a ShardingPropagator are told while it lives, and dropped with other entries that hold layouts."""
    from hyper_parallel.core.shard import OpSchema, ShardingPropagator
    from hyper_parallel.platform.select import use_platform

    rows = Layout.place(DeviceMesh.abstract("cpu", (2,), (0, 1), ("tp",)), [S0], (4, 6))
    propagator = ShardingPropagator()
    with use_platform("torch"):
        first = propagator.propagate_op_sharding(OpSchema("neg", (rows,)))
        assert entries()["results of ShardingPropagator"] >= 1
        empty_layout_caches()
        assert "results of ShardingPropagator" not in entries()
        assert propagator.propagate_op_sharding(OpSchema("neg", (rows,))).output_spec is first.output_spec


@pytest.mark.platforms("torch")
def test_meshes_of_torch_live_as_long_as_ours():
    """The PyTorch mesh of a mesh is made once, and freed with it."""
    import torch

    from hyper_parallel import DTensor
    from hyper_parallel.verify import simulate

    def on_rank():
        grid = DeviceMesh("cpu", [0, 1], mesh_dim_names=("kept",))
        x = DTensor.from_local(torch.ones(2), grid, [S0])
        assert x.to_torch().device_mesh is x.to_torch().device_mesh
        dropped = []
        for number in range(5):
            mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=(f"a{number}",))
            dropped.append(weakref.ref(DTensor.from_local(torch.ones(2), mesh, [S0]).to_torch().device_mesh))
        del mesh
        entries = next(info.entries for info in cache_info() if info.name == "meshes of PyTorch")
        empty_layout_caches()
        gc.collect()
        return entries, [reference() for reference in dropped], x.to_torch().device_mesh is not None

    for entries, dropped, kept in simulate(on_rank, 2, platform="torch"):
        assert entries >= 1
        assert dropped == [None] * 5
        assert kept
