"""Ring attention on local tensors: keys and values go from rank to rank; each rank merges its queries' results."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.context_parallel.plan import RingPlan, Run
from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.contract.platform import Platform
from hyper_parallel.transport.base import Parts

__all__ = ["Ring", "ring_function"]

_NAME = "hyper_parallel_ring_attention"


@dataclass(frozen=True)
class Ring:
    """The plan of one call, with the arguments of its local computation.

    Attributes:
        platform: platform of the tensors.
        plan: the positions that each rank holds.
        scale: scale of the scores.
        mask: local part of the mask, [B or 1, H or 1, Lq or 1, S], boolean (true: seen) or added to the scores; None
            for no mask.
    """

    platform: Platform
    plan: RingPlan
    scale: float
    mask: Any

    def forward(self, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        """Return the result [B, H, Lq, F] and the logarithm of each query's sum of exponentials, [B, Hk, G, Lq, 1].

        Parts are merged by their running maximum and sum (online softmax; Milakov and Gimelshein, 2018), as in Ring
        Attention (Liu, Zaharia and Abbeel, 2023).
        """
        grouped = _grouped(_wide(q), k)
        queries = self._parts(grouped, self.plan.own)
        merged = [_Merged(part, v) for part in queries]
        for member, (keys, values) in self._around([k, v]):
            wide = [_wide(tensor).unsqueeze(2) for tensor in (keys, values)]
            for place, scores, index in self._visible(queries, wide[0], member):
                merged[place].add(scores, self._part(wide[1], self.plan.runs[member][index]))
        outer = grouped.shape[:-2]
        out = self._whole([part.result() for part in merged], grouped.new_zeros((*outer, 0, v.shape[-1])))
        lse = self._whole([part.logarithm() for part in merged], grouped.new_zeros((*outer, 0, 1)))
        return out.reshape((*q.shape[:-1], v.shape[-1])).to(q.dtype), lse

    def backward(self, saved: tuple[Any, ...], grad: Any) -> tuple[Any, Any, Any]:
        """Return the gradients of q, k and v; those of keys and values travel with them and arrive at their owner."""
        q, k, v, out, lse = saved
        grouped = _grouped(_wide(q), k)
        queries, results, grads = (
            self._parts(x, self.plan.own) for x in (grouped, _grouped(_wide(out), k), _grouped(_wide(grad), k))
        )
        largest = [_finite(part) for part in self._parts(lse, self.plan.own)]
        shares = [(grad_part * result).sum(-1, keepdim=True) for grad_part, result in zip(grads, results, strict=True)]
        q_grads = [self.platform.zeros_like(part) for part in queries]
        k_grad, v_grad = (self.platform.zeros_like(_wide(tensor)) for tensor in (k, v))
        for member, (keys, values) in self._around([k, v]):
            wide, runs = [_wide(tensor).unsqueeze(2) for tensor in (keys, values)], self.plan.runs[member]
            k_grads, v_grads = self._parts(k_grad, runs), self._parts(v_grad, runs)
            for place, scores, index in self._visible(queries, wide[0], member):
                key_part, value_part = (self._part(tensor, runs[index]) for tensor in wide)
                weights = (scores - largest[place]).exp()
                into = weights * (grads[place] @ value_part.transpose(-2, -1) - shares[place]) * self.scale
                q_grads[place] = q_grads[place] + into @ key_part
                k_grads[index] = k_grads[index] + (into.transpose(-2, -1) @ queries[place]).sum(2)
                v_grads[index] = v_grads[index] + (weights.transpose(-2, -1) @ grads[place]).sum(2)
            following = self.plan.member_at(self.plan.member_at(0) - member + 1)
            whole = [self._whole(parts, total) for parts, total in ((k_grads, k_grad), (v_grads, v_grad))]
            k_grad, v_grad = self._shifted(whole, following).wait()
        q_grad = self._whole(q_grads, grouped).reshape(tuple(q.shape))
        return q_grad.to(q.dtype), k_grad.to(k.dtype), v_grad.to(v.dtype)

    def _parts(self, tensor: Any, runs: Sequence[Run]) -> list[Any]:
        return [self._part(tensor, run) for run in runs]

    def _part(self, tensor: Any, run: Run) -> Any:
        return self.platform.narrow(tensor, len(tensor.shape) - 2, run.offset, run.length)

    def _whole(self, parts: list[Any], empty: Any) -> Any:
        """Concatenate the runs of a shard; return ``empty`` if there are none."""
        return self.platform.cat(parts, len(empty.shape) - 2) if parts else empty

    def _visible(self, queries: list[Any], keys: Any, member: int) -> Iterator[tuple[int, Any, int]]:
        """Yield the scores of each run of queries and each run of ``member``'s keys that it sees, with both indices."""
        for place, own in enumerate(self.plan.own):
            for index, run in enumerate(self.plan.runs[member]):
                if not self.plan.causal or own.sees(run):
                    scores = queries[place] @ self._part(keys, run).transpose(-2, -1) * self.scale
                    yield place, self._masked(scores, own, run, member), index

    def _masked(self, scores: Any, own: Run, run: Run, member: int) -> Any:
        if self.plan.causal and not own.sees_all(run):
            arange, device = self.platform.arange, scores.device
            rows = arange(own.position, own.position + own.length, device=device)
            hidden = arange(run.position, run.position + run.length, device=device) > rows.unsqueeze(-1)
            scores = scores.masked_fill(hidden, -math.inf)
        if self.mask is None:
            return scores
        mask = self.mask
        if mask.shape[-1] != 1:
            mask = self.platform.narrow(mask, len(mask.shape) - 1, self.plan.start(member) + run.offset, run.length)
        mask = self._part(mask, own) if mask.shape[-2] != 1 else mask
        mask = mask.unsqueeze(2) if mask.shape[1] == 1 else _grouped(mask, scores)
        return scores.masked_fill(~mask, -math.inf) if str(mask.dtype).lower().endswith("bool") else scores + mask

    def _around(self, tensors: list[Any]) -> Iterator[tuple[int, list[Any]]]:
        """Yield each member and its tensors, this rank's own first; the next ones are in flight meanwhile."""
        for step in range(len(self.plan.ranks)):
            last = step == len(self.plan.ranks) - 1
            arriving = None if last else self._shifted(tensors, self.plan.member_at(step + 1))
            yield self.plan.member_at(step), tensors
            if arriving is not None:
                tensors = arriving.wait()

    def _shifted(self, tensors: list[Any], member: int) -> _Arriving:
        """Start to send tensors to the next rank; those that arrive are the shard of ``member``."""
        platform, plan = self.platform, self.plan
        shapes = [(*tensor.shape[:-2], plan.sizes[member], tensor.shape[-1]) for tensor in tensors]
        if len(plan.ranks) == 1:
            return _Arriving(platform, None, tensors, shapes)
        flat = platform.cat([tensor.reshape(-1) for tensor in tensors], 0)
        ahead, behind = ((plan.index + step) % len(plan.ranks) for step in (1, -1))
        sent, size = flat.shape[0], sum(map(math.prod, shapes))
        sends = Parts.of([(sent if index == ahead else 0,) for index in range(len(plan.ranks))])
        expects = Parts.of([(size if index == behind else 0,) for index in range(len(plan.ranks))])
        work = platform.transport().start("all_to_all", flat, plan.ranks, sends, expects)
        return _Arriving(platform, work, tensors, shapes)


class _Arriving:
    """Tensors in flight from the previous rank."""

    def __init__(self, platform: Platform, work: Any, tensors: list[Any], shapes: list[Any]) -> None:
        self._platform, self._work, self._tensors, self._shapes = platform, work, tensors, shapes

    def wait(self) -> list[Any]:
        """Wait for the tensors and return them; with one rank, return its own."""
        if self._work is None:
            return self._tensors
        flat, start, tensors = self._work.wait(), 0, []
        for shape in self._shapes:
            tensors.append(self._platform.narrow(flat, 0, start, math.prod(shape)).reshape(shape))
            start += math.prod(shape)
        return tensors


class _Merged:
    """The softmax over all keys that a run of queries has seen so far."""

    def __init__(self, queries: Any, v: Any) -> None:
        self._total = queries.new_zeros((*queries.shape[:-1], 1))
        self._largest = self._total - math.inf
        self._sum = queries.new_zeros((*queries.shape[:-1], v.shape[-1]))

    def add(self, scores: Any, values: Any) -> None:
        """Add the keys of ``scores`` [B, Hk, G, Lq, Ls]."""
        largest = self._largest.maximum(scores.amax(-1).unsqueeze(-1))
        weights, shrink = (scores - _finite(largest)).exp(), (self._largest - _finite(largest)).exp()
        self._total = self._total * shrink + weights.sum(-1, keepdim=True)
        self._sum = self._sum * shrink + weights @ values
        self._largest = largest

    def result(self) -> Any:
        """Return the weighted mean of the values; zero for a query that has seen no key."""
        return (self._sum / self._total).masked_fill(self._total == 0, 0.0)

    def logarithm(self) -> Any:
        """Return the logarithm of the sum of exponentials."""
        return self._largest + self._total.log()


def ring_function(platform: Platform) -> Any:
    """Return the framework's custom autograd function: ``apply(q, k, v, ring)``."""
    cached = platform.__dict__.get(_NAME)
    return platform.__dict__.setdefault(_NAME, _make(platform)) if cached is None else cached


def _make(platform: Platform) -> Any:
    base: Any = platform.Function

    class RingAttention(base):  # type: ignore[misc] # the framework's class is known at run time only
        """Ring attention; it has no second gradient."""

        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, ring: Ring) -> Any:
            """Return the local result."""
            out, lse = ring.forward(q, k, v)
            ctx.ring = ring
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, Any, Any, None]:
            """Return the local gradients.

            Raises:
                UnsupportedOnBackend: the gradient is to be differentiated.
            """
            if ctx.ring.platform.grad_enabled():
                msg = (
                    "context_parallel_attention: form='ring' has no second gradient (create_graph=True); use "
                    "form='gather' or form='all_to_all'"
                )
                raise UnsupportedOnBackend(msg)
            return (*ctx.ring.backward(ctx.saved_tensors, grad), None)

    return RingAttention


def _grouped(tensor: Any, k: Any) -> Any:
    """Return [B, H, L, E] as [B, Hk, G, L, E]: the query heads grouped by their key head."""
    batch, heads, *sizes = tensor.shape
    key_heads = k.shape[1]
    return tensor.reshape((batch, key_heads, heads // key_heads, *sizes)) if key_heads else tensor.unsqueeze(2)


def _finite(largest: Any) -> Any:
    """Return the maxima, with 0 for queries that see no key, whose scores are all minus infinity."""
    return largest.masked_fill(largest == -math.inf, 0.0)


def _wide(tensor: Any) -> Any:
    """Return half precision as float32, in which scores and sums are computed."""
    return tensor.float() if tensor.itemsize < 4 else tensor
