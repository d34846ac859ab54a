"""The conformance suite of transports: every collective of the active transport against NumPy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from hyper_parallel.platform.select import platform_named
from hyper_parallel.transport.base import REDUCTIONS, Parts, Ranks, Shape, Transport, active_transport
from hyper_parallel.transport.host.numpy_ops import BFLOAT16, NumpyOps, narrow, widen
from hyper_parallel.transport.work import Work

__all__ = ["DTYPES", "check_transport"]

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool", "complex64")

_HOSTS = {
    "torch": "hyper_parallel.transport.host.torch.ops",
    "mindspore": "hyper_parallel.transport.frontends.mindspore_comm.host",
}
_UNORDERED = ("max", "min")

Array = np.ndarray[Any, Any]


def check_transport(
    platform: str, *, exact: bool = True, seed: int = 0, dtypes: Sequence[str] = DTYPES, device: str = "cpu"
) -> list[Array]:
    """Run every collective on every dtype, on equal, uneven, empty and 0-d shapes, and compare with NumPy.

    Call it on every rank of a world with its transport active, for example ``simulate(check_transport, 3, "torch",
    ("torch",))``.

    Args:
        platform: ``"torch"`` or ``"mindspore"``: the framework of the tensors.
        exact: whether reductions must equal the fold in rank order bit for bit, as they do on the simulated
            transport and on gloo; False allows the rounding of an accelerator's own order.
        seed: of the data.
        dtypes: of the tensors; the same on every rank.
        device: ``cpu``, ``cuda`` or ``npu``, where the tensors are.

    Returns:
        all results of this rank as NumPy arrays, to be compared between transports.

    Raises:
        AssertionError: a result differs; the message names the collective, dtype and ranks.
        RuntimeError: no transport is active.
    """
    transport = active_transport()
    if transport is None:
        msg = "no transport is active here: call this inside simulate() or launch()"
        raise RuntimeError(msg)
    move = partial(platform_named(platform).to_device, device_type=device)
    suite = _Suite(transport, importlib.import_module(_HOSTS[platform]), move, exact=exact, seed=seed)
    for ranks in _orders(transport.world_size):
        if transport.rank in ranks:
            for dtype in dtypes:
                suite.gathers(dtype, ranks)
                suite.rows(dtype, ranks)
                suite.reductions(dtype, ranks)
                suite.started(dtype, ranks)
            suite.objects(ranks)
    suite.messages()
    suite.posted()
    return suite.results


def _orders(world_size: int) -> Iterator[Ranks]:
    """Yield groups: all ranks, all in reverse order, all but the last, and the last alone."""
    everyone = tuple(range(world_size))
    yield from (everyone, everyone[::-1])
    if world_size > 1:
        yield everyone[:-1]
    yield everyone[-1:]


class _Suite:
    """One rank's run of the suite. Every rank can sample the data of all ranks, so each knows the expected results."""

    def __init__(self, transport: Transport, host: Any, move: Callable[[Any], Any], *, exact: bool, seed: int) -> None:
        self.results: list[Array] = []
        self._transport = transport
        self._host = host
        self._exact = exact
        self._seed = seed
        self._ops = NumpyOps()
        self._move = move

    def gathers(self, dtype: str, ranks: Ranks) -> None:
        """Check all_gather, all_to_all and broadcast."""
        me = ranks.index(self._transport.rank)
        for sizes in _shapes(len(ranks)):
            parts = [self._sample(dtype, rank, sizes[i]) for i, rank in enumerate(ranks)]
            got = self._transport.all_gather(self._tensor(parts[me]), ranks, sizes)
            self._same(f"all_gather {dtype} {ranks}", got, parts)
            got = self._transport.all_to_all(*self._exchanged(dtype, ranks, sizes))
            self._same(f"all_to_all {dtype} {ranks}", [got], [self._arriving(dtype, ranks, sizes)])
        source = ranks[-1]
        for shape in ((), (0, 2), (3, 2)):
            received = self._transport.broadcast(self._tensor(self._sample(dtype, ranks[me], shape)), source, ranks)
            self._same(f"broadcast {dtype} {ranks}", [received], [self._sample(dtype, source, shape)])

    def rows(self, dtype: str, ranks: Ranks) -> None:
        """Check the collectives on rows, with every reduction that the dtype has."""
        me = ranks.index(self._transport.rank)
        for shape in ((3, 2), (), (0, 2)):
            shapes = (shape,) * len(ranks)
            parts = [self._sample(dtype, rank, shape) for rank in ranks]
            got = self._transport.all_gather_rows(self._tensor(parts[me]), ranks, shapes)
            self._same(f"all_gather_rows {dtype} {ranks}", [got], [np.stack(parts)])
            sent = [np.stack([self._sample(dtype, rank + 7 * i, shape) for i in range(len(ranks))]) for rank in ranks]
            mine = [rows[me] for rows in sent]
            got = self._transport.all_to_all_rows(self._tensor(sent[me]), ranks, shapes, shapes)
            self._same(f"all_to_all_rows {dtype} {ranks}", [got], [np.stack(mine)])
            for op in REDUCTIONS:
                if _has(dtype, op):
                    got = self._transport.reduce_scatter_rows(self._tensor(sent[me]), op, ranks, shapes)
                    self._same(f"reduce_scatter_rows {op} {dtype} {ranks}", [got], [self._ops.reduce(mine, op)])

    def reductions(self, dtype: str, ranks: Ranks) -> None:
        """Check all_reduce and reduce_scatter with every reduction that the dtype has."""
        me = ranks.index(self._transport.rank)
        # Some transports handle a large tensor differently; one that the ranks divide and one that they do not.
        large: list[Shape] = [(137, 131), (129, 130)] if ranks == tuple(range(len(ranks))) else []
        shapes: list[Shape] = [(), (0, 2), (5, 3), *large]
        for op in REDUCTIONS:
            if not _has(dtype, op):
                continue
            for shape in shapes:
                parts = [self._sample(dtype, rank, shape) for rank in ranks]
                got = self._transport.all_reduce(self._tensor(parts[me]), op, ranks)
                self._same(f"all_reduce {op} {dtype} {ranks}", [got], [self._ops.reduce(parts, op)])
            for sizes in _shapes(len(ranks)):
                chunks = [self._tensor(self._sample(dtype, ranks[me] + 7 * i, sizes[i])) for i in range(len(ranks))]
                got = self._transport.reduce_scatter(chunks, op, ranks)
                want = self._ops.reduce([self._sample(dtype, rank + 7 * me, sizes[me]) for rank in ranks], op)
                self._same(f"reduce_scatter {op} {dtype} {ranks}", [got], [want])

    def started(self, dtype: str, ranks: Ranks) -> None:
        """Check all five collectives in flight at once, waited for in another order on every rank."""
        me = ranks.index(self._transport.rank)
        sizes: list[Shape] = [(i + 1, 2) for i in range(len(ranks))]
        parts = [self._sample(dtype, rank, sizes[i]) for i, rank in enumerate(ranks)]
        same = [self._sample(dtype, rank, (5, 3)) for rank in ranks]
        chunks = [self._tensor(self._sample(dtype, ranks[me] + 7 * i, sizes[i])) for i in range(len(ranks))]
        mine = [self._sample(dtype, rank + 7 * me, sizes[me]) for rank in ranks]
        op, joined = "sum", self._arriving(dtype, ranks, sizes)
        begin = self._transport.start
        flights: list[tuple[str, Work, list[Array]]] = [
            ("all_gather", begin("all_gather", self._tensor(parts[me]), ranks, sizes), parts),
            ("all_to_all", begin("all_to_all", *self._exchanged(dtype, ranks, sizes)), [joined]),
            ("all_reduce", begin("all_reduce", self._tensor(same[me]), op, ranks), [self._ops.reduce(same, op)]),
            ("reduce_scatter", begin("reduce_scatter", chunks, op, ranks), [self._ops.reduce(mine, op)]),
            ("broadcast", begin("broadcast", self._tensor(same[me]), ranks[-1], ranks), [same[-1]]),
        ]
        for name, pending, want in flights[me % 5 :] + flights[: me % 5]:
            got = pending.wait()
            self._same(f"started {name} {dtype} {ranks}", got if isinstance(got, list) else [got], want)
            assert pending.waited, f"{name} {dtype}"

    def _exchanged(self, dtype: str, ranks: Ranks, sizes: list[Shape]) -> tuple[Any, Ranks, Parts, Parts]:
        """Return the arguments of an all-to-all in which each member receives parts of its shape in ``sizes``."""
        me = ranks.index(self._transport.rank)
        parts = [self._sample(dtype, ranks[me] + 7 * i, shape).reshape(-1) for i, shape in enumerate(sizes)]
        x = self._tensor(np.concatenate(parts))
        return x, ranks, Parts.of(sizes), Parts.of([sizes[me]] * len(ranks))

    def _arriving(self, dtype: str, ranks: Ranks, sizes: list[Shape]) -> Array:
        """Return what this rank receives then."""
        me = ranks.index(self._transport.rank)
        return np.concatenate([self._sample(dtype, rank + 7 * me, sizes[me]).reshape(-1) for rank in ranks])

    def posted(self) -> None:
        """Check that two posted receives from one rank get their messages in the order of posting, not of waiting."""
        size, rank = self._transport.world_size, self._transport.rank
        if size == 1:
            return
        target, source = (rank + 1) % size, (rank - 1) % size
        like = self._tensor(self._sample("float32", rank, (2,)))
        posted = [self._transport.start("recv", like, source, 5) for _ in range(2)]
        arrays = [[self._sample("float32", sender + 11 * turn, (2,)) for turn in range(2)] for sender in range(size)]
        sent = [self._transport.start("send", self._tensor(array), target, 5) for array in arrays[rank]]
        second = posted[1].wait()
        self._same("posted receives", [posted[0].wait(), second], arrays[source])
        for work in sent:
            work.wait()

    def objects(self, ranks: Ranks) -> None:
        """Check all_gather_object, barrier and group handles."""
        objects = self._transport.all_gather_object({"rank": self._transport.rank}, ranks)
        assert objects == [{"rank": rank} for rank in ranks], f"all_gather_object {ranks}: {objects}"
        self._transport.barrier(ranks)
        handle = self._transport.group(ranks)
        assert sorted(self._transport.ranks_of(handle)) == sorted(ranks), f"group {ranks}"
        assert self._transport.ranks_of(None) == tuple(range(self._transport.world_size)), "ranks_of(None)"

    def messages(self) -> None:
        """Check a message from every rank to the next, of every dtype, also 0-d and empty."""
        size, rank = self._transport.world_size, self._transport.rank
        if size == 1:
            return
        for dtype in DTYPES:
            for shape in ((), (0,), (2, 3)):
                for source in range(size):
                    target = (source + 1) % size
                    if rank == source:
                        self._transport.send(self._tensor(self._sample(dtype, source, shape)), target, tag=3)
                    elif rank == target:
                        like = self._tensor(self._sample(dtype, rank, shape))
                        got = self._transport.recv(like, source, tag=3)
                        self._same(f"send {dtype} {source} to {target}", [got], [self._sample(dtype, source, shape)])

    def _tensor(self, array: Array) -> Any:
        return self._move(self._host.from_host(array))

    def _same(self, name: str, got: list[Any], want: list[Array]) -> None:
        assert len(got) == len(want), f"{name}: {len(got)} results, expected {len(want)}"
        for tensor, expected in zip(got, want, strict=True):
            array = np.array(self._host.to_host(tensor))
            facts = (array.dtype, array.shape), (expected.dtype, expected.shape)
            assert facts[0] == facts[1], f"{name}: {facts[0]}, expected {facts[1]}"
            # Frameworks round products and quotients of complex numbers differently, in the same order.
            exact = self._exact and not np.issubdtype(array.dtype, np.complexfloating)
            assert _equal(array, expected, exact=exact), f"{name}: {array}, expected {expected}"
            self.results.append(array)

    def _sample(self, dtype: str, rank: int, shape: Shape) -> Array:
        """Return the data of ``rank``, the same on every rank."""
        random = np.random.default_rng([self._seed, rank, *shape])
        values = np.asarray(random.standard_normal(shape))
        if dtype == "bfloat16":
            return narrow(np.asarray(values.astype(np.float32)))
        if dtype == "complex64":
            return np.asarray(values + 1j * np.asarray(random.standard_normal(shape))).astype(dtype)
        if dtype == "bool":
            return np.asarray(values > 0)
        return np.asarray(values if dtype.startswith("float") else np.floor(np.abs(values) * 3)).astype(dtype)


def _shapes(count: int) -> list[list[Shape]]:
    """Return shapes per member: equal ones, 0-d ones, and uneven ones of which the first is empty."""
    return [[(3, 2)] * count, [()] * count, [(i, 2) for i in range(count)]]


def _has(dtype: str, op: str) -> bool:
    """Return whether ``op`` is defined: integers have no average, complex numbers no order."""
    if op == "avg":
        return "float" in dtype or "complex" in dtype
    return not (dtype == "complex64" and op in _UNORDERED)


def _equal(got: Array, want: Array, *, exact: bool) -> bool:
    tolerance = None
    if got.dtype == BFLOAT16:
        got, want, tolerance = widen(got), widen(want), 2**-6  # two units in the last place
    if exact or not np.issubdtype(got.dtype, np.inexact):
        return bool(np.array_equal(got, want, equal_nan=np.issubdtype(got.dtype, np.inexact)))
    if tolerance is None:
        tolerance = float((4 if got.dtype == np.float16 else 32) * np.finfo(got.dtype).eps)
    return bool(np.allclose(got, want, rtol=tolerance, atol=tolerance))
