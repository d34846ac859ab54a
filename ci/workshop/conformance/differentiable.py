"""Checks of the facet *differentiable*: forward and backward against NumPy, with random cotangents."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np

from hyper_parallel.errors import CollectiveMismatchError, RendezvousError, UnsupportedOperatorError
from hyper_parallel.platform.contract.differentiable import HookCoordinator
from workshop.conformance.world import Contract, World, covers, raises

__all__ = ["DIFFERENTIABLE"]

DIFFERENTIABLE: Contract = []
_CLOSE = 1e-12


@covers(DIFFERENTIABLE, "differentiable_all_gather_concat")
def gathering(w: World) -> None:
    """Gathering along any dim; backward is the rank's slice, or the sum over the ranks if they use it differently."""
    p, shape = w.platform, (2, 3)
    for dim in (0, 1, -1):
        parts, own = w.everyone(shape), shape[dim]
        for varying in (False, True):
            whole = np.concatenate(parts, dim)
            seeds = [w.sample(whole.shape, 0 if not varying else rank, 5) for rank in w.ranks]
            out, grad = w.gradient(
                partial(
                    p.differentiable_all_gather_concat,
                    group=None,
                    concat_size=w.size,
                    concat_dim=dim,
                    varying=varying,
                ),
                parts[w.rank],
                seeds[w.rank],
            )
            w.same(out, whole)
            total = sum(seeds) if varying else seeds[0]
            w.same(grad, np.take(total, range(own * w.rank, own * (w.rank + 1)), dim), _CLOSE)
    with raises(ValueError, f"concat_size is {w.size + 1}, the group of ranks {list(w.ranks)} has {w.size} members"):
        p.differentiable_all_gather_concat(w.tensor(parts[0]), None, w.size + 1, 0)
    wrong: Any
    for wrong in (2, 0.5, None):
        with raises(ValueError, f"concat_dim is {wrong}, the tensor has 2 dims"):
            p.differentiable_all_gather_concat(w.tensor(parts[0]), None, w.size, wrong)


@covers(DIFFERENTIABLE, "differentiable_all_reduce")
def reducing(w: World) -> None:
    """Sum, avg, max and min with ties; the gradient is the exact one, without a factor."""
    p, parts = w.platform, np.stack(w.everyone((3, 4)))
    parts[:, 0, 0] = parts[0, 0, 0]  # a tie of all ranks
    seed = w.sample((3, 4), 0, 7)
    for op in ("sum", "avg", "max", "min"):
        want = {"sum": parts.sum(0), "avg": parts.mean(0), "max": parts.max(0), "min": parts.min(0)}[op]
        out, grad = w.gradient(partial(p.differentiable_all_reduce, op=op), parts[w.rank], seed)
        w.same(out, want, _CLOSE)
        attained = (parts == want) / (parts == want).sum(0) if op in ("max", "min") else np.ones_like(parts)
        w.same(grad, seed * attained[w.rank] / (w.size if op == "avg" else 1), _CLOSE)
    seeds = w.everyone((3, 4), 8)
    _, grad = w.gradient(lambda x: p.differentiable_all_reduce(x, "sum", varying=True), parts[w.rank], seeds[w.rank])
    w.same(grad, sum(seeds), _CLOSE)
    with raises(UnsupportedOperatorError, "the reduction 'prod' has no gradient; detach() the tensor first"):
        w.gradient(lambda x: p.differentiable_all_reduce(x, "prod"), parts[w.rank], seed)
    w.same(p.differentiable_all_reduce(w.tensor(parts[w.rank]), "prod"), parts.prod(0), _CLOSE)


@covers(DIFFERENTIABLE, "differentiable_all_reduce", "differentiable_reduce_scatter")
def extrema(w: World) -> None:
    """A gradient that is not finite goes to the rank that attains the extremum, and to the rank of a NaN."""
    p, nonfinite = w.platform, np.array([np.inf, -np.inf, np.nan, 1.5] * w.size)
    everyone = np.stack([np.full_like(nonfinite, rank) for rank in w.ranks])
    everyone[0, -1] = np.nan
    calls = (
        (p.differentiable_all_reduce, nonfinite),
        (partial(p.differentiable_reduce_scatter, dev_num=w.size, axis=0), nonfinite[:4]),
    )
    for call, seed in calls:
        for op, winner in (("max", w.size - 1), ("min", 0)):
            _, grad = w.gradient(partial(call, op=op), everyone[w.rank], seed)
            owner = np.where(np.isnan(everyone).any(0), 0, winner)  # NaN is greater and less than everything
            expected = np.where(owner == w.rank, nonfinite, 0.0)
            assert np.array_equal(w.array(grad), expected, equal_nan=True), f"{grad}, expected {expected}"


@covers(DIFFERENTIABLE, "differentiable_reduce_scatter")
def scattering(w: World) -> None:
    """Scattering along any dim, for every reduction that has a gradient; backward gathers."""
    p = w.platform
    for axis, shape in ((0, (2 * w.size, 3)), (1, (3, 2 * w.size)), (-1, (w.size,))):
        parts = np.stack(w.everyone(shape))
        seeds = w.everyone(tuple(np.split(parts[0], w.size, axis)[0].shape), 3)
        for op in ("sum", "avg", "max", "min"):
            want = {"sum": parts.sum(0), "avg": parts.mean(0), "max": parts.max(0), "min": parts.min(0)}[op]
            out, grad = w.gradient(
                partial(p.differentiable_reduce_scatter, dev_num=w.size, axis=axis, op=op), parts[w.rank], seeds[w.rank]
            )
            w.same(out, np.split(want, w.size, axis)[w.rank], _CLOSE)
            attained = (parts == want) / (parts == want).sum(0) if op in ("max", "min") else np.ones_like(parts)
            whole = np.concatenate(seeds, axis) / (w.size if op == "avg" else 1)
            w.same(grad, whole * attained[w.rank], _CLOSE)
    with raises(ValueError, f"dim 0 of size {w.size + 1} is not divisible by {w.size} ranks"):
        p.differentiable_reduce_scatter(w.tensor(np.ones(w.size + 1)), w.size, 0)
    with raises(ValueError, "dev_num is 1"):
        p.differentiable_reduce_scatter(w.tensor(np.ones(w.size)), 1, 0)


@covers(DIFFERENTIABLE, "differentiable_all_to_all")
def exchanging(w: World) -> None:
    """Equal slices arrive in the output's shape, and their gradients return."""
    p, parts = w.platform, w.everyone((w.size, 2))
    seeds = w.everyone((2 * w.size,), 4)
    out, grad = w.gradient(lambda x: p.differentiable_all_to_all(x, (2 * w.size,)), parts[w.rank], seeds[w.rank])
    w.same(out, np.stack([part[w.rank] for part in parts]).reshape(-1))
    w.same(grad, np.stack([seed.reshape(w.size, 2)[w.rank] for seed in seeds]))
    with raises(ValueError, "cannot be reshaped to [5]"):
        p.differentiable_all_to_all(w.tensor(parts[0]), (5,))


@covers(DIFFERENTIABLE, "differentiable_all_to_all_single", "differentiable_all_to_all_single_async")
def routing(w: World) -> None:
    """Any number of rows arrives, none included, and gradients return; wrong splits are refused before sending."""
    p = w.platform
    table = np.array([[(sender + 2 * receiver) % 3 for receiver in w.ranks] for sender in w.ranks])
    sent, received = table[w.rank].tolist(), table[:, w.rank].tolist()
    rows = [w.sample((int(table[rank].sum()), 2), rank) for rank in w.ranks]
    seeds = [w.sample((int(table[:, rank].sum()), 2), rank, 6) for rank in w.ranks]

    def cut(values: Any, sizes: Any, position: int) -> Any:
        return np.split(values, np.cumsum(sizes)[:-1])[position]

    for member in (p.differentiable_all_to_all_single, p.differentiable_all_to_all_single_async):

        def read(x: Any, routed: Any = member) -> Any:
            return p.narrow(routed(x, sent, received), 0, 0, sum(received))

        out, grad = w.gradient(read, rows[w.rank], seeds[w.rank])
        w.same(out, np.concatenate([cut(rows[rank], table[rank], w.rank) for rank in w.ranks]))
        w.same(grad, np.concatenate([cut(seeds[rank], table[:, rank], w.rank) for rank in w.ranks]))
        mine = w.tensor(rows[w.rank])
        with raises(ValueError, f"input_splits {[9] * w.size} add up to {9 * w.size}, the input has {sum(sent)} rows"):
            member(mine, [9] * w.size, received)
        with raises(ValueError, "output_splits [1] must be one row count per rank"):
            member(mine, sent, [1])
        with raises(ValueError, "must be one row count per rank"):
            member(mine, sent, [-1] * w.size)
        with raises(ValueError, "must be one row count per rank"):
            member(mine, sent, [0.5] * w.size)  # type: ignore[list-item] # wrong
    if w.size > 1:
        # Rank 0 expects a row more from every other rank than is sent.
        with raises(CollectiveMismatchError):
            more = [rows + (w.rank == 0 != sender) for sender, rows in enumerate(received)]
            p.differentiable_all_to_all_single(mine, sent, more)
        members = [p.differentiable_all_to_all_single]
        if w.survives_mismatch:
            members.append(p.differentiable_all_to_all_single_async)
            with raises(CollectiveMismatchError):
                p.narrow(p.differentiable_all_to_all_single_async(mine, sent, more), 0, 0, 1)
        # Far fewer rows than are sent, and rows of another size; the next exchange is right.
        large = w.tensor(np.ones((w.size * 4000, 3)))
        less = [4000 - (w.rank == 0 != sender) * 3999 for sender in w.ranks]
        for rows_sent, splits in ((large, less), (large if w.rank else p.narrow(large, 1, 0, 2), None)):
            for member in members:
                with raises(CollectiveMismatchError, "rank"):
                    p.narrow(member(rows_sent, None, splits), 0, 0, 1)
                w.same(member(mine, sent, received), w.array(out))
    p.barrier()


@covers(DIFFERENTIABLE, "differentiable_async_a2a_wait")
def overlapping(w: World) -> None:
    """Slices of one dim are joined along another; backward waits itself, or puts its handle into the box."""
    p, n = w.platform, w.size
    shape, concat, split = (2, 2 * n, 3), 0, 1
    parts = w.everyone(shape)
    gathered = np.concatenate([np.split(part, n, split)[w.rank] for part in parts], concat)
    seeds = w.everyone(gathered.shape, 9)
    expected = np.concatenate([np.split(seed, n, concat)[w.rank] for seed in seeds], split)
    boxes: tuple[list[Any] | None, ...] = (None, [])
    for box in boxes:

        def forward(x: Any, handles: list[Any] | None = box) -> Any:
            stacked = w.tensor(np.stack(np.split(parts[w.rank], n, split)))
            out_perm, work = p.all_to_all_single(stacked, stacked.shape, None, True)
            return p.differentiable_async_a2a_wait(x, work, out_perm, None, n, concat, split, handles)

        out, grad = w.gradient(forward, parts[w.rank], seeds[w.rank])
        w.same(out, gathered)
        if box is not None:
            assert np.isnan(w.array(grad)).all(), "a gradient that was not waited for must be visible"
            (_, buffer), gradient = box[0], box[0][0].wait()
            w.same(gradient, expected)
            w.same(buffer, np.stack(np.split(expected, n, split)))
            grad = gradient
        w.same(grad, expected)
    with raises(ValueError, "out_perm is [1, 1]"):
        p.differentiable_async_a2a_wait(w.tensor(parts[0]), None, w.tensor(np.ones((1, 1))), None, n, concat, split)


@covers(DIFFERENTIABLE, "differentiable_sync_hook")
def rendezvous(w: World) -> None:
    """The hook is the identity both ways; it waits for the other thread, and a timeout names the partner."""
    p, x, seed = w.platform, w.sample((2, 3)), w.sample((2, 3), turn=2)
    coordinator, met = HookCoordinator(timeout=20.0), []

    def partner() -> None:
        with coordinator.taking_part():
            met.extend([coordinator.rendezvous("C", "backward"), coordinator.rendezvous("D", "backward")])

    other = threading.Thread(target=partner, name="partner")
    other.start()
    out, grad = w.gradient(lambda t: p.differentiable_sync_hook(t, "A", coordinator), x, seed)
    other.join()
    w.same(out, x)
    w.same(grad, seed)
    assert met == ["A (forward)", "A (backward)"], met
    lonely = HookCoordinator(timeout=0.05)
    with raises(RendezvousError, "waited 0.05 s at B (forward) for its partner, which never reached any position"):
        p.differentiable_sync_hook(w.tensor(x), "B", lonely)
    with raises(ValueError, "position must be one of A, B, C, D, got 'E'"):
        p.differentiable_sync_hook(w.tensor(x), "E", coordinator)


@covers(DIFFERENTIABLE, "p2p_exchange")
def swapping(w: World) -> None:
    """Pairs exchange tensors, backward exchanges gradients, and alone it is the identity."""
    p, peer = w.platform, w.rank ^ 1
    peer = peer if peer < w.size else w.rank
    out, grad = w.gradient(lambda x: p.p2p_exchange(x, peer), w.sample((2, 3)), w.sample((2, 3), turn=1))
    w.same(out, w.sample((2, 3), peer))
    w.same(grad, w.sample((2, 3), peer, 1))
    with raises(CollectiveMismatchError, f"rank {w.size} is not in the group of ranks {list(w.ranks)}"):
        p.p2p_exchange(w.tensor(np.ones(2)), w.size)
