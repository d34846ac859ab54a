"""Checks of the facets *tensors*, *runtime* and *pipeline*, most of which need one rank only."""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.module import distribute_tensor
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import ArgumentTypeError, HandleError, MeshMismatchError, ShardMismatchError
from workshop.conformance.world import Contract, World, covers, raises

__all__ = ["PIPELINE", "RUNTIME", "TENSORS"]

TENSORS: Contract = []
RUNTIME: Contract = []
PIPELINE: Contract = []


@covers(TENSORS, "is_tensor", "get_op_name", "set_tensor_requires_grad", "tensor_to_numpy", "list_to_size")
def basics(w: World) -> None:
    """Tensors are distinguished from other values; operators have names, and sizes their type."""
    p, x = w.platform, w.tensor(np.ones((2, 3)))
    assert p.is_tensor(x)
    assert not p.is_tensor(np.ones(2))
    assert p.get_op_name(type(x).reshape) == "reshape"
    assert p.set_tensor_requires_grad(x) is x
    assert p.tensor_to_numpy(p.tensor_type_cast(x, "bfloat16")).dtype == np.float32
    assert tuple(p.list_to_size([2, 3])) == tuple(x.shape)
    assert isinstance(p.list_to_size([2, 3]), type(x.shape))


@covers(TENSORS, "chunk", "cat", "construct_strided_slice")
def cutting(w: World) -> None:
    """Chunks follow the ceil rule, the last ones may be empty, and join to the whole; slices have strides."""
    p, array = w.platform, w.sample((5, 7))
    x = w.tensor(array)
    for dim, count in ((0, 4), (1, 3), (-1, 5)):
        chunks = [p.chunk(x, dim, count, index) for index in range(count)]
        rows = -(-array.shape[dim] // count)
        assert [chunk.shape[dim] for chunk in chunks] == [
            max(0, min(rows, array.shape[dim] - rows * index)) for index in range(count)
        ]
        w.same(p.cat(chunks, dim), array)
    with raises(ValueError, "a tensor of [5, 7] has no chunk 4 of 4 along dim 0"):
        p.chunk(x, 0, 4, 4)
    w.same(p.construct_strided_slice(x, [1, 0], [5, 7], [2, 3]), array[1:5:2, 0:7:3])
    w.same(p.construct_strided_slice(x, [1], [3]), array[1:3])
    with raises(ValueError, "strides must be positive"):
        p.construct_strided_slice(x, [0], [5], [-1])


@covers(TENSORS, "tensor_type_cast", "cast_fp_tensor", "str_to_dtype")
def casting(w: World) -> None:
    """A dtype has several names; a floating cast changes floating tensors only; unknown names are refused."""
    p, x = w.platform, w.tensor(np.array([1.5, -2.0, 0.0]))
    for name in ("float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"):
        dtype = p.str_to_dtype(name)
        for spelling in (f"torch.{name}", f"mindspore.{name}", name.capitalize()):
            assert p.str_to_dtype(spelling) == dtype
        assert p.tensor_type_cast(x, name).dtype == dtype
        assert p.tensor_type_cast(x, dtype).dtype == dtype
    half, integers = p.str_to_dtype("float16"), w.tensor(np.ones(2, np.int64))
    assert p.cast_fp_tensor(half, x).dtype == half
    assert p.cast_fp_tensor(half, integers) is integers
    assert p.cast_fp_tensor(half, "text") == "text"
    for wrong in ("float33", "numpy.float32", "", None, 5):
        with raises(ValueError, f"unknown dtype {wrong!r}; known: b", " bfloat16, ", " float32, "):
            p.str_to_dtype(wrong)  # type: ignore[arg-type] # wrong


@covers(TENSORS, "get_tensor_storage_size", "get_element_size")
def measuring(w: World) -> None:
    """The sizes are those of an element, and of the storage that views share, in bytes."""
    p, x = w.platform, w.tensor(np.ones((4, 6), np.float32))
    assert (p.get_element_size(x), p.get_tensor_storage_size(x)) == (4, 96)
    assert p.get_tensor_storage_size(p.narrow(x, 0, 1, 1)) == 96
    assert p.get_element_size(p.tensor_type_cast(x, "bfloat16")) == 2


@covers(TENSORS, "arange", "zeros", "full_like", "empty_like", "new_tensor")
def creating(w: World) -> None:
    """Values, shapes and dtypes are those of the arguments."""
    p, f64 = w.platform, w.platform.str_to_dtype("float64")
    x = w.tensor(np.ones((2, 3)))
    w.same(p.arange(2, 11, 3), np.arange(2, 11, 3))
    w.same(p.arange(0, 4, dtype=f64), np.arange(4.0))
    w.same(p.zeros((2, 0)), np.zeros((2, 0)))
    w.same(p.zeros(()), np.zeros(()))
    w.same(p.ones(()), np.ones(()))
    w.same(p.ones((2,), f64), np.ones(2))
    w.same(p.full((2,), 7, f64), np.full(2, 7.0))
    w.same(p.full_like(x, 2.5), np.full((2, 3), 2.5))
    assert p.full_like(x, 1, dtype=p.str_to_dtype("int32")).dtype == p.str_to_dtype("int32")
    pinned = p.empty_like(x, device=p.device_of(p.from_numpy(w.sample((1,)), "cpu")), pin_memory=True)
    for tensor in (p.empty_like(x), pinned, p.new_tensor((2, 3), f64), p.empty((2, 3), f64)):
        assert (tuple(tensor.shape), tensor.dtype) == ((2, 3), f64)
    assert p.empty_like(x, dtype=p.str_to_dtype("int64")).dtype == p.str_to_dtype("int64")


class _Named(NamedTuple):
    """A user-defined named tuple."""

    value: Any
    text: str


@dataclasses.dataclass(frozen=True)
class _Record:
    """A dataclass of a user's."""

    value: Any
    parts: list[Any]


@covers(TENSORS, "tree_map", "apply_to_tensors")
def structures(w: World) -> None:
    """Containers keep their types, and values that are no tensors are unchanged."""
    p, x = w.platform, w.tensor(np.ones(2))
    mapping = collections.defaultdict(list, {"a": [x, 1]})
    tree = [_Named(x, "n"), (x, None), {"k": _Record(x, [x, "s"])}, mapping]
    result = p.apply_to_tensors(lambda tensor: tensor + 1, tree)
    assert [type(item) for item in result] == [type(item) for item in tree]
    w.same(result[0].value, np.full(2, 2.0))
    w.same(result[2]["k"].parts[0], np.full(2, 2.0))
    w.same(result[3]["a"][0], np.full(2, 2.0))
    assert (result[0].text, result[1][1], result[2]["k"].parts[1], result[3]["a"][1]) == ("n", None, "s", 1)
    assert result[3]["new"] == []
    w.same(x, np.ones(2))
    assert p.tree_map(lambda leaf: leaf * 2, [1, (2, {"k": 3})]) == [2, (4, {"k": 6})]


@covers(TENSORS, "get_tensor_transform")
def transforming(w: World) -> None:
    """A DTensor moves between meshes of different shapes and orders of the same ranks; gradients come back."""
    p, array = w.platform, w.sample((5, 6), 0)
    line = DeviceMesh(w.device, list(w.ranks), mesh_dim_names=("x",))
    grid = DeviceMesh(w.device, [[rank] for rank in w.ranks[::-1]], mesh_dim_names=("a", "b"))
    move = p.get_tensor_transform().transform
    for source in (Shard(0), Shard(1), Replicate(), Partial()):
        for target in (
            [Shard(0), Shard(1)],
            [Replicate(), Shard(1)],
            [Shard(1), Replicate()],
            [Replicate(), Partial()],
        ):
            start = distribute_tensor(w.tensor(array), line, [source])
            moved = move(start, Layout.place(grid, target, (5, 6)))
            assert moved.device_mesh is grid
            w.same(moved.full_tensor(), array)
    seed = w.sample((5, 6), 0, 2)

    def whole(x: Any) -> Any:
        layout = Layout.place(line, [Shard(0)], (5, 6))
        local = p.narrow(x, 0, *_rows(layout))
        sharded = p.wrap(p.contiguous(local), layout)
        return move(sharded, Layout.place(grid, [Shard(1), Replicate()], (5, 6))).full_tensor()

    out, grad = w.gradient(whole, array, seed)
    w.same(out, array)
    low, count = _rows(Layout.place(line, [Shard(0)], (5, 6)))
    w.same(p.narrow(grad, 0, low, count), seed[low : low + count])
    with raises(ArgumentTypeError, "transform: expected a DTensor"):
        move(w.tensor(array), Layout.place(grid, [Replicate(), Replicate()], (5, 6)))
    with raises(ShardMismatchError, "the layout is [6, 6]"):
        move(start, Layout.place(grid, [Replicate(), Replicate()], (6, 6)))
    with raises(MeshMismatchError, "they must have the same ranks"):
        move(start, Layout.place(DeviceMesh(w.device, [w.rank]), [Replicate()], (5, 6)))


def _rows(layout: Layout) -> tuple[int, int]:
    start, stop = layout.local_box()[0]
    return start, stop - start


@covers(RUNTIME, "new_stream", "get_stream_context", "get_current_stream", "new_event")
def streams(w: World) -> None:
    """Streams and events have one interface on every device; on CPU they have no effect."""
    p = w.platform
    stream, begin, end = p.new_stream(), p.new_event(), p.new_event()
    with p.get_stream_context()(stream):
        begin.record(stream)
        stream.wait_stream(p.get_current_stream())
        stream.wait_event(begin)
        end.record(stream)
    stream.synchronize()
    end.synchronize()
    end.wait(stream)
    assert stream.query()
    assert end.query()
    if p.device_type() == "cpu":
        assert begin.elapsed_time(end) >= 0
        assert stream.record_event().query()
        with raises(ValueError, "elapsed_time: both events must be recorded first"):
            p.new_event().elapsed_time(end)


class _Counted:
    """A handle that counts its waits, and may fail."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.waits, self._failure = 0, failure

    def wait(self) -> None:
        """Count the wait, and fail if there is a failure."""
        self.waits += 1
        if self._failure is not None:
            raise self._failure


@covers(RUNTIME, "set_grad_reduce_handle", "wait_grad_handle", "_process_current_handle")
def reductions_in_flight(w: World) -> None:
    """Every handle is waited for once and processed once, also when one of them raises."""
    p = w.platform
    done: list[Any] = []
    handles = [_Counted(), _Counted(), _Counted()]
    for number, handle in enumerate(handles):
        p.set_grad_reduce_handle(handle, functools.partial(done.append, number))
    p._process_current_handle()  # noqa: SLF001 - a member of the contract
    assert (done, [handle.waits for handle in handles]) == ([0], [1, 0, 0])
    p.wait_grad_handle()
    p.wait_grad_handle()
    assert (done, [handle.waits for handle in handles]) == ([0, 1, 2], [1, 1, 1])

    bad, good = _Counted(ValueError("lost")), _Counted()
    p.set_grad_reduce_handle(bad, lambda: done.append("never"))
    p.set_grad_reduce_handle(good, lambda: done.append("good"))
    with raises(ValueError, "lost"):
        p.wait_grad_handle()
    p.wait_grad_handle()
    assert (done[-1], bad.waits, good.waits) == ("good", 1, 1)
    with raises(HandleError, "set_grad_reduce_handle: 5 is not a handle: it has no wait()"):
        p.set_grad_reduce_handle(5)
    output, handle = p.all_reduce(w.tensor(np.ones(2)), None, True)
    p.set_grad_reduce_handle(handle, lambda: done.append(w.array(output).tolist()))
    p.wait_grad_handle()
    assert done[-1] == [w.size, w.size]


class _BrokenError(Exception):
    """What a user's backward raises."""


@covers(RUNTIME, "set_grad_reduce_handle", "wait_grad_handle")
def reductions_of_a_backward_that_raises(w: World) -> None:
    """Reductions started by a backward that raises on some ranks are waited for once; the next step is right."""
    p, array, seeds = w.platform, w.sample((3,), 0), w.everyone((3,), 1)
    reduced: list[Any] = []
    broken: tuple[int, ...] = ()

    class Reducing(p.Function):  # type: ignore[misc, name-defined] # the framework's, known at run time only
        """An identity whose backward starts the reduction of its gradient."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            """Return a copy."""
            del ctx
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            """Return the gradient, with its reduction in flight."""
            del ctx
            output, handle = p.all_reduce(grad, None, True)
            p.set_grad_reduce_handle(handle, lambda: reduced.append((w.array(output), handle.waited)))
            return grad

    class Breaking(p.Function):  # type: ignore[misc, name-defined] # as above
        """A doubling whose backward may raise."""

        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            """Double the input."""
            del ctx
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            """Double the gradient, or raise on a broken rank."""
            del ctx
            if w.rank in broken:
                raise _BrokenError("half-way")
            return grad * 2

    def step() -> Any:
        return w.gradient(lambda x: Reducing.apply(Reducing.apply(Breaking.apply(x))), array, seeds[w.rank])[1]

    for broken in (w.ranks, w.ranks[:1], ()):
        if w.rank in broken:
            with raises(_BrokenError, "half-way"):
                step()
        else:
            w.same(step(), 2 * seeds[w.rank])
        assert reduced == []
        p._process_current_handle()  # noqa: SLF001 - a member of the contract
        assert len(reduced) == 1
        p.wait_grad_handle()
        p.wait_grad_handle()
        assert [waited for _, waited in reduced] == [True, True]
        for total, _ in reduced:
            w.same(w.tensor(total), sum(seeds))
        reduced.clear()


@covers(RUNTIME, "get_symmetric_memory_handler")
def symmetric(w: World) -> None:
    """The handler is the framework's own, on devices that have it."""
    assert w.platform.get_symmetric_memory_handler() is not None


@covers(RUNTIME, "no_grad", "profiler_record")
def quiet(w: World) -> None:
    """Nothing inside ``no_grad`` is recorded, and a named range has no effect on values."""
    p, x, seed = w.platform, w.sample((3,)), w.sample((3,), turn=1)

    def partly(t: Any) -> Any:
        with p.no_grad():
            assert not p.grad_enabled()
            constant = t * 2
        with p.profiler_record("a range"):
            return t * p.detach(constant)

    out, grad = w.gradient(partly, x, seed)
    w.same(out, 2 * x * x, 1e-12)
    w.same(grad, 2 * x * seed, 1e-12)


@covers(PIPELINE, "micro_batch")
def batches(w: World) -> None:
    """Micro-batches are slices of the global tensors, with gradients; an argument that does not divide is refused."""
    p, array = w.platform, w.sample((4, 6), 0)
    mesh = DeviceMesh(w.device, list(w.ranks))
    x, whole = w.tensor(array), distribute_tensor(w.tensor(array), mesh, [Shard(0)])
    args, kwargs = p.micro_batch(2, [0, 1, None], {"k": 1})([x, x, x], {"k": whole, "flag": True})
    for part in range(2):
        rows, cols = slice(2 * part, 2 * part + 2), slice(3 * part, 3 * part + 3)
        w.same(args[part][0], array[rows])
        w.same(args[part][1], array[:, cols])
        w.same(args[part][2], array)
        w.same(kwargs[part]["k"].full_tensor(), array[:, cols])
        assert kwargs[part]["flag"] is True
    (first, second), _ = p.micro_batch(2)([whole])
    w.same(first[0].full_tensor(), array[:2])
    w.same(second[0].full_tensor(), array[2:])
    _, grad = w.gradient(lambda t: p.micro_batch(2)([t])[0][1][0] * 3, array, w.sample((2, 6), 0, 1))
    w.same(grad, np.concatenate([np.zeros((2, 6)), 3 * w.sample((2, 6), 0, 1)]))
    with raises(ValueError, "args[0] has 4 rows along dim 0, not divisible into 3 micro-batches"):
        p.micro_batch(3)([x])
    with raises(ValueError, "k has 6 rows along dim 1, not divisible into 4 micro-batches"):
        p.micro_batch(4, None, {"k": 1})([], {"k": x})
    with raises(ValueError, "args_batch_dim names 1 arguments, 2 were given"):
        p.micro_batch(2, [0])([x, x])
    with raises(ValueError, "args[0] of [4, 6] has no dim 2"):
        p.micro_batch(2, [2])([x])
    for wrong in (0, 1.5, "2", True):
        with raises(ValueError, f"micro_batch_num is {wrong!r}; it must be at least 1"):
            p.micro_batch(wrong)  # type: ignore[arg-type] # which is the point
