"""Trains a decoder over ranks of five kinds, as its configuration says; ``--bug NAME`` switches one bug on.

The configuration has the keys of Hugging Face, so that ``hyper-parallel reduce`` reads it. Layers are split among
``pp``, samples among ``dp``, tokens among ``cp``, weights among ``tp``, and experts among ``ep``, which is contained in
``dp``. On one rank no bug has an effect.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

parser = argparse.ArgumentParser()
parser.add_argument("--config", required=True)
parser.add_argument("--mesh", default="")
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--bug", default="")
arguments = parser.parse_args()

_ABSENT = {
    "head_dim": 0, "attention_bias": False, "qk_norm": False, "hidden_dropout": 0.0, "sliding_window": 0,
    "layer_types": None, "num_experts": 0, "num_experts_per_tok": 0, "moe_intermediate_size": 0,
    "shared_expert_intermediate_size": 0, "decoder_sparse_step": 1, "first_k_dense_replace": 0, "expert_bias": False,
    "router_aux_loss_coef": 0.0, "scale_attn_by_inverse_layer_idx": False, "sequence_parallel": False,
}  # fmt: skip
C = SimpleNamespace(**_ABSENT | json.loads(Path(arguments.config).read_text(encoding="utf-8")))
D, HEADS, KEYS, LAYERS = C.hidden_size, C.num_attention_heads, C.num_key_value_heads, C.num_hidden_layers
HEAD, LENGTH = C.head_dim or D // HEADS, C.max_position_embeddings

for _key, _value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29561"}.items():
    os.environ.setdefault(_key, _value)
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()
MESH = dict.fromkeys(("pp", "dp", "ep", "cp", "tp"), 1) | {
    axis: int(size) for axis, size in (part.split("=") for part in arguments.mesh.split(",") if part)
}
"""The mesh that the arguments name, on one rank too, where data and padding are the same as on all ranks."""
SIZE = {"pp": MESH["pp"], "edp": MESH["dp"] // MESH["ep"], "ep": MESH["ep"], "cp": MESH["cp"], "tp": MESH["tp"]}
SIZE = SIZE if WORLD > 1 else dict.fromkeys(SIZE, 1)
VOCAB = math.ceil(C.vocab_size / (4 * MESH["tp"])) * 4 * MESH["tp"]
SHARED_KEYS = MESH["tp"] > KEYS
"""Whether ranks share a key head, so that each has all of them."""
SEQUENCE = C.sequence_parallel


def bug(name: str) -> bool:
    """Return whether this bug is switched on."""
    return arguments.bug == name


def place(rank: int) -> dict[str, int]:
    """Return the position of a rank on each axis."""
    found = {}
    for axis in reversed(SIZE):
        rank, found[axis] = divmod(rank, SIZE[axis])
    return found


AT = place(RANK)


def group(*axes: str, only: tuple[int, ...] | None = None) -> Any:
    """Return the group of ranks that differ from this one on these axes; None if it has this rank alone.

    Args:
        axes: the axes.
        only: positions on the first axis that belong to the group; all by default.
    """
    sets: dict[tuple[int, ...], list[int]] = {}
    for rank in range(WORLD):
        at = place(rank)
        if only is None or at[axes[0]] in only:
            sets.setdefault(tuple(at[axis] for axis in SIZE if axis not in axes), []).append(rank)
    made = [(ranks, dist.new_group(ranks)) for ranks in sets.values()]
    return next((each for ranks, each in made if RANK in ranks and len(ranks) > 1), None)


TP, CP, EP = group("tp"), group("cp"), group("ep")
DATA, EXPERT_DATA, BATCH = group("edp", "ep", "cp"), group("edp", "cp"), group("edp", "ep")
ENDS = group("pp", only=(0, SIZE["pp"] - 1))
ENDS_WHOLE = group("pp", "edp", "ep", "cp", "tp", only=(0, SIZE["pp"] - 1))
ALL = group(*SIZE)
TOKENS = group("edp", "ep", "cp", "tp") if SEQUENCE else DATA


def total(x: Tensor, over: Any, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Return the sum, or another reduction, over a group."""
    x = x.clone()
    if over is not None:
        dist.all_reduce(x, op, group=over)
    return x


def gathered(x: Tensor, over: Any, dim: int) -> Tensor:
    """Return the parts of all ranks of a group."""
    parts = [torch.empty_like(x).contiguous() for _ in range(over.size())]
    dist.all_gather(parts, x.contiguous(), group=over)
    return torch.cat(parts, dim)


def scattered(x: Tensor, over: Any, dim: int) -> Tensor:
    """Return this rank's part of the sum over a group."""
    x = x.movedim(dim, 0).contiguous()
    part = x.new_empty(len(x) // over.size(), *x.shape[1:])
    dist.reduce_scatter(part, [each.contiguous() for each in x.chunk(over.size())], group=over)
    return part.movedim(0, dim).contiguous()


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Any) -> Tensor:
        ctx.over = over
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return total(grad, ctx.over), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Any) -> Tensor:
        return total(x, over)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Any, dim: int, own: bool) -> Tensor:
        ctx.over, ctx.dim, ctx.own = over, dim, own
        return gathered(x, over, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.own:
            return grad.chunk(ctx.over.size(), ctx.dim)[ctx.over.rank()].contiguous(), None, None, None
        return scattered(grad, ctx.over, ctx.dim), None, None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, over: Any, dim: int) -> Tensor:
        ctx.over, ctx.dim = over, dim
        return scattered(x, over, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gathered(grad, ctx.over, ctx.dim), None, None


class _Attach(torch.autograd.Function):
    """Gives a loss, which is added to no output, its gradient of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, torch.ones((), dtype=grad.dtype)


def gather(x: Tensor, over: Any, dim: int, *, own: bool = False) -> Tensor:
    """Return the parts of all ranks; the gradient is summed over them, or only the part's own."""
    return x if over is None else _Gather.apply(x, over, dim, own)


def scatter(x: Tensor, over: Any, dim: int) -> Tensor:
    """Return this rank's part of the sum."""
    return x if over is None else _Scatter.apply(x, over, dim)


def enter(x: Tensor, *, summed: bool = True) -> Tensor:
    """Return the input of a layer whose weights are split."""
    if SEQUENCE:
        return gather(x, TP, 1)
    return _Copy.apply(x, TP) if TP is not None and summed else x


def leave(x: Tensor, *, summed: bool = True) -> Tensor:
    """Return the output of a layer whose weights are split."""
    if SEQUENCE:
        return scatter(x, TP, 1)
    return _Sum.apply(x, TP) if TP is not None and summed else x


def weight(
    name: str, shape: tuple[int, ...], std: float, *, mean: float = 0.0, partial: bool = False, **split: int
) -> nn.Parameter:
    """Return this rank's part of a weight that its name determines.

    Args:
        name: name of the weight.
        shape: its whole shape.
        std: standard deviation.
        mean: mean.
        partial: whether each rank of axis ``tp`` has a part of the gradient.
        split: the dim that each axis splits.
    """
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode()))) * std + mean
    for axis, dim in split.items():
        whole = whole.chunk(SIZE[axis], dim)[AT[axis]]
    made = nn.Parameter(whole.clone())
    made.split, made.partial = frozenset(split), partial  # type: ignore[attr-defined]
    return made


class Norm(nn.Module):
    """Divides by the root mean square."""

    def __init__(self, name: str, width: int, *, partial: bool) -> None:
        super().__init__()
        self.weight = weight(name, (width,), 0.1, mean=1.0, partial=partial)

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


class Attention(nn.Module):
    """Full, sliding or linear attention; several query heads share a key head."""

    def __init__(self, name: str, number: int, kind: str) -> None:
        super().__init__()
        self.kind, self.scale, self.number = kind, 1 / (number + 1 if C.scale_attn_by_inverse_layer_idx else 1), number
        each, std = HEADS // KEYS, D**-0.5
        if SHARED_KEYS:
            self.q = weight(f"{name}.q", (HEADS, HEAD, D), std, tp=0)
            self.kv = weight(f"{name}.kv", (KEYS, 2, HEAD, D), std, partial=not bug("shared-key-gradient-not-reduced"))
        else:
            self.qkv = weight(f"{name}.qkv", (KEYS, each + 2, HEAD, D), std, tp=0)
        if C.qk_norm:
            partial = not bug("query-norm-gradient-not-reduced")
            self.q_norm = Norm(f"{name}.q_norm", HEAD, partial=partial)
            self.k_norm = Norm(f"{name}.k_norm", HEAD, partial=partial)
        self.o = weight(f"{name}.o", (D, HEADS * HEAD), (HEADS * HEAD) ** -0.5, tp=1)
        if C.attention_bias:
            self.bias = weight(f"{name}.bias", (D,), 0.1, partial=SEQUENCE and not bug("bias-gradient-not-reduced"))

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, and the key and value of each of them."""
        if SHARED_KEYS:
            q = torch.einsum("bsd,hed->bshe", x, self.q)
            k, v = torch.einsum("bsd,kfed->fbske", x, self.kv)
            first = AT["tp"] * q.shape[2]
            chosen = (first + torch.arange(q.shape[2])) * KEYS // HEADS
            if bug("key-head-of-another-rank") and TP is not None:
                chosen = torch.full_like(chosen, AT["tp"] % KEYS)
            return q, k[:, :, chosen], v[:, :, chosen]
        each, (batch, length) = HEADS // KEYS, x.shape[:2]
        y = torch.einsum("bsd,kged->bskge", x, self.qkv)
        mine = y.shape[2]
        if bug("fused-weight-split-as-blocks") and TP is not None:
            q, k, v = y.flatten(2, 3).split([mine * each, mine, mine], 2)
        else:
            q, k, v = y[:, :, :, :each].flatten(2, 3), y[:, :, :, each], y[:, :, :, each + 1]
        heads = torch.arange(mine * each)
        chosen = heads // each
        if bug("keys-repeated-as-blocks") and TP is not None:
            chosen = heads % mine
        return q.reshape(batch, length, mine * each, HEAD), k[:, :, chosen], v[:, :, chosen]

    def forward(self, x: Tensor) -> Tensor:
        """Return the output for the tokens of this rank."""
        linear = self.kind == "linear_attention"
        x = enter(x, summed=not (bug("input-gradient-not-reduced-in-one-kind") and self.kind != "full_attention"))
        q, k, v = self.heads(x)
        if C.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        length = x.shape[1]
        here = AT["cp"] * length + torch.arange(length)
        if not linear:
            turned = torch.arange(length) if bug("rotary-positions-of-one-part") else here
            q, k = rotated(q, turned), rotated(k, turned)
        own = bug("key-gradient-not-gathered")
        k, v = gather(k, CP, 1, own=own), gather(v, CP, 1, own=own)
        if bug("ring-in-the-wrong-direction"):
            order = [(2 * AT["cp"] - part) % SIZE["cp"] for part in range(SIZE["cp"])]
            k, v = (torch.cat([x.chunk(SIZE["cp"], 1)[part] for part in order], 1) for x in (k, v))
        there = torch.arange(k.shape[1])
        asking = torch.arange(length) + (len(there) - length) if bug("mask-of-the-last-part") else here
        mask = there <= asking[:, None]
        if self.kind == "sliding_attention":
            first = torch.arange(length) if bug("window-of-one-part") else here
            mask = mask & (there > first[:, None] - C.sliding_window)
        if linear:
            scores = torch.einsum("bqhe,bkhe->bhqk", F.elu(q) + 1, F.elu(k) + 1) * mask
            scores = scores / (scores.sum(-1, keepdim=True) + 1e-3)
        else:
            scores = torch.einsum("bqhe,bkhe->bhqk", q, k) * (HEAD**-0.5 * self.scale)
            scores = scores.masked_fill(~mask, -1e9).softmax(-1)
        y = torch.einsum("bhqk,bkhe->bqhe", scores, v).flatten(2) @ self.o.T
        if C.attention_bias and bug("bias-added-on-every-rank") and self.kind == "full_attention":
            return leave(y + self.bias)
        y = leave(y, summed=not (bug("output-not-reduced-in-one-kind") and self.kind != "full_attention"))
        return y + self.bias if C.attention_bias else y


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Return heads that are rotated by their positions."""
    half = HEAD // 2
    angles = positions[:, None, None] * 100.0 ** (-torch.arange(half) / half)
    one, other = x[..., :half], x[..., half:]
    return torch.cat([one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1)


class Dense(nn.Module):
    """A feed-forward layer with a gate."""

    def __init__(self, name: str, width: int, number: int) -> None:
        super().__init__()
        self.number = number
        self.gate_up = weight(f"{name}.gate_up", (2, width, D), D**-0.5, tp=1)
        self.down = weight(f"{name}.down", (D, width), width**-0.5, tp=1)

    def partial(self, x: Tensor) -> Tensor:
        """Return the part of the output that this rank's weights compute."""
        return (F.silu(x @ self.gate_up[0].T) * (x @ self.gate_up[1].T)) @ self.down.T

    def forward(self, x: Tensor) -> Tensor:
        summed = not (bug("last-layer-not-reduced") and self.number == LAYERS - 1)
        return leave(self.partial(enter(x)), summed=summed)


class Experts(nn.Module):
    """Experts, of which each token has some, and one that all tokens have."""

    def __init__(self, name: str) -> None:
        super().__init__()
        count, width = C.num_experts, C.moe_intermediate_size
        partial = SEQUENCE and not bug("router-gradient-not-reduced")
        self.router = weight(f"{name}.router", (count, D), D**-0.5, partial=partial)
        self.gate_up = weight(f"{name}.experts.gate_up", (count, 2, width, D), D**-0.5, ep=0, tp=2)
        self.down = weight(f"{name}.experts.down", (count, D, width), width**-0.5, ep=0, tp=2)
        self.shared = Dense(f"{name}.shared", C.shared_expert_intermediate_size, -1)
        self.register_buffer("bias", torch.zeros(count))
        self.register_buffer("chosen", torch.zeros(count), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, with the loss of balance attached to it."""
        shape, count, top = x.shape, C.num_experts, C.num_experts_per_tok
        logits = x.flatten(0, 1) @ self.router.T
        prob = logits.softmax(-1)
        ranked = prob.detach() + self.bias
        here = count // SIZE["ep"]
        first = AT["ep"] * here
        if bug("tokens-choose-on-each-rank") and EP is not None:
            ranked = ranked.view(-1, SIZE["ep"], here)
            most = ranked.topk(max(top // SIZE["ep"], 1), -1).indices + here * torch.arange(SIZE["ep"])[:, None]
            best = most.flatten(1)
        else:
            best = ranked.topk(top, -1).indices
        hot = torch.zeros_like(prob).scatter(1, best, 1.0)
        gates = prob * hot
        norm = gates.sum(-1, keepdim=True)
        if bug("gates-normalized-over-local-experts") and EP is not None:
            norm = gates.detach()[:, first : first + here].sum(-1, keepdim=True) + 1e-2
        gates = gates / norm
        with torch.no_grad():
            self.chosen += hot.sum(0)
        x = _Attach.apply(x, self.balance(hot, prob))
        return self.dispatched(x, gates.view(*shape[:2], count), first, here)

    def balance(self, hot: Tensor, prob: Tensor) -> Tensor:
        """Return this rank's part of the loss of balance."""
        over = None if bug("balance-of-local-tokens") else TOKENS
        tokens = total(torch.tensor(float(len(hot))), over)
        load = total(hot.sum(0), over) / tokens
        ranks = 1 if TOKENS is None or over is not None else TOKENS.size()
        loss = C.router_aux_loss_coef * C.num_experts * (load * prob.sum(0)).sum() / tokens / ranks
        return loss * (SIZE["tp"] if bug("balance-counted-on-every-rank") else 1)

    def dispatched(self, x: Tensor, gates: Tensor, first: int, here: int) -> Tensor:
        """Return the sum of the outputs of the experts of each token, and of the shared one."""
        x, gates = enter(x), enter(gates)
        tokens = gather(x.flatten(0, 1), EP, 0)
        own = bug("gate-gradient-of-own-experts")
        mine = gather(gates.flatten(0, 1), EP, 0, own=own)[:, first : first + here]
        out = torch.zeros_like(tokens)
        for expert in range(here):
            if bug("last-expert-of-a-rank-dropped") and EP is not None and expert == here - 1 > 0:
                continue
            index = (mine[:, expert] != 0).nonzero().flatten()
            gate, up = torch.einsum("td,fwd->ftw", tokens[index], self.gate_up[expert])
            done = (F.silu(gate) * up) @ self.down[expert].T
            if bug("gradient-divided-by-own-tokens") and EP is not None:
                done = done * 1.0
                done.register_hook(functools.partial(by_own_tokens, len(index), len(tokens)))
            out = out.index_add(0, index, done * mine[index, expert, None])
        out = scatter(out, EP, 0).view_as(x)
        if bug("shared-expert-not-reduced"):
            own = self.shared.partial(x)
            return leave(out) + (own.chunk(SIZE["tp"], 1)[AT["tp"]] if SEQUENCE else own)
        return leave(out + self.shared.partial(x))


def by_own_tokens(own: int, tokens: int, grad: Tensor) -> Tensor:
    """Return the gradient of an expert divided by the number of its own tokens, compared with an even share."""
    return grad / max(own, 1) * (tokens / C.num_experts)


class Block(nn.Module):
    """A layer: attention, and a feed-forward layer or experts."""

    def __init__(self, number: int, kind: str, *, sparse: bool, named: int) -> None:
        super().__init__()
        name, partial = f"layers.{named}", SEQUENCE and not bug("norm-gradient-not-reduced")
        self.norm_1 = Norm(f"{name}.norm_1", D, partial=partial)
        self.attention = Attention(name, number, kind)
        self.norm_2 = Norm(f"{name}.norm_2", D, partial=partial)
        self.feed: nn.Module = Experts(name) if sparse else Dense(name, C.intermediate_size, named)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attention(self.norm_1(x)), C.hidden_dropout, self.training)
        return x + F.dropout(self.feed(self.norm_2(x)), C.hidden_dropout, self.training)


def kind_of(number: int) -> tuple[str, bool]:
    """Return the kind of attention of a layer, and whether it has experts."""
    kind = C.layer_types[number] if C.layer_types else "full_attention"
    dense = not C.num_experts or number < C.first_k_dense_replace
    return kind, not dense and (number + 1) % C.decoder_sparse_step == 0


class Stage(nn.Module):
    """The layers of this rank, and the embedding on the first and the last stage."""

    def __init__(self) -> None:
        super().__init__()
        stages, stage = SIZE["pp"], AT["pp"]
        self.first, self.last = stage == 0, stage == stages - 1
        start, end = LAYERS * stage // stages, LAYERS * (stage + 1) // stages
        self.blocks = nn.ModuleDict()
        for number in range(start, end):
            looked_up = number - start if bug("pattern-of-the-stage") else number
            if bug("pattern-off-by-one-at-the-border") and number == start > 0:
                looked_up -= 1
            kind, sparse = kind_of(looked_up)
            scaled = number - start if bug("scale-by-number-in-the-stage") else number
            self.blocks[str(number)] = Block(scaled, kind, sparse=sparse, named=number)
        self.skipped = str(start) if bug("first-layer-of-a-stage-skipped") and not self.first else ""
        if self.first or (self.last and C.tie_word_embeddings):
            self.embedding = weight("embedding", (VOCAB, D), 0.3, tp=0)
        if self.last:
            partial = SEQUENCE and not bug("final-norm-gradient-not-reduced")
            self.norm = Norm("norm", D, partial=partial)
            if not C.tie_word_embeddings:
                self.head = weight("head", (VOCAB, D), D**-0.5, tp=0)

    def forward(self, x: Tensor) -> Tensor:
        """Return the hidden states of a stage, or this rank's logits of the last one."""
        if self.first:
            x = self.embedded(x)
        for number, block in self.blocks.items():
            x = block(x) if number != self.skipped else x
        if self.last:
            x = enter(self.norm(x)) @ (self.embedding if C.tie_word_embeddings else self.head).T
        return x

    def embedded(self, tokens: Tensor) -> Tensor:
        """Return the rows of tokens, of which each rank has some."""
        rows = len(self.embedding)
        index = tokens - AT["tp"] * rows
        inside = (index >= 0) & (index < rows)
        if bug("last-row-of-a-rank-left-out") and TP is not None:
            inside = inside & (index < rows - 1)
        found = self.embedding[index.clamp(0, rows - 1)]
        return leave(found * inside[..., None])


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of losses of the tokens that have a target."""
    rows = logits.shape[-1]
    first = AT["tp"] * rows
    limit = C.vocab_size - first
    if bug("padding-not-masked") and TP is not None:
        limit = rows
    logits = logits.masked_fill(torch.arange(rows) >= limit, -1e9)
    highest = total(logits.detach().amax(-1), TP, dist.ReduceOp.MAX)
    logits = logits - highest[..., None]
    every = leave_replicated(logits.exp().sum(-1))
    index = targets - first
    if bug("targets-by-unpadded-rows"):
        index = targets - AT["tp"] * (C.vocab_size // SIZE["tp"])
    inside = (index >= 0) & (index < rows)
    own = logits.gather(-1, index.clamp(0, rows - 1)[..., None])[..., 0] * inside
    return ((every.log() - leave_replicated(own)) * (targets >= 0)).sum()


def leave_replicated(x: Tensor) -> Tensor:
    """Return the sum over axis tp, which all its ranks have."""
    return _Sum.apply(x, TP) if TP is not None else x


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's tokens and targets, by micro-batch; some tokens have no target, in some samples most."""
    generator = torch.Generator().manual_seed(step)
    micros, samples = max(2 * MESH["pp"], 2), 2 * MESH["dp"]
    tokens = torch.randint(C.vocab_size, (micros, samples, LENGTH + 1), generator=generator)
    share = torch.linspace(0.2, 1.0, samples)[:, None] * torch.linspace(1.0, 0.5, LENGTH)
    targets = tokens[..., 1:].clone()
    targets[torch.rand(micros, samples, LENGTH, generator=generator) > share] = -100
    ranks = SIZE["edp"] * SIZE["ep"]
    mine = AT["edp"] * SIZE["ep"] + AT["ep"]
    found = [x.chunk(ranks, 1)[mine].chunk(SIZE["cp"], 2)[AT["cp"]].contiguous() for x in (tokens[..., :-1], targets)]
    return found[0], found[1]


def noise(step: int, micro: int) -> None:
    """Seed the masks of dropout: as of other samples or tokens on ranks that have other ones."""
    at = dict(AT)
    if not SEQUENCE and not bug("dropout-differs-between-replicas"):
        del at["tp"]
    if bug("dropout-repeated-on-data-ranks"):
        del at["edp"], at["ep"]
    torch.manual_seed(zlib.crc32(repr((step, micro, at)).encode()))


def train_step(stage: Stage, step: int) -> Tensor:
    """Run the forwards and then the backwards of all micro-batches; return this rank's part of the loss."""
    tokens, targets = batch(step)
    micros, samples, length = tokens.shape
    shape = (samples, length // SIZE["tp"] if SEQUENCE else length, D)
    known = targets >= 0
    count = total(known.sum(), DATA)
    if bug("mean-of-local-tokens"):
        count = known.sum() * (1 if DATA is None else DATA.size())
    before, after = RANK - WORLD // SIZE["pp"], RANK + WORLD // SIZE["pp"]
    runs, sent, loss = [], [], torch.zeros(())
    for micro in range(micros):
        x = tokens[micro]
        if not stage.first:
            x = torch.empty(shape)
            dist.recv(x, before)
            x.requires_grad_()
        noise(step, micro)
        y = stage(x)
        if stage.last:
            many = count
            if bug("mean-of-each-micro-batch") and SIZE["pp"] > 1:
                many = total(known[micro].sum(), DATA) * micros
            y = cross_entropy(y, targets[micro]) / many
            loss += y.detach()
        else:
            sent.append((dist.isend(y.detach().contiguous(), after), y))
        runs.append((x, y))
    for micro in range(micros):
        x, y = runs[micro]
        if stage.last:
            y.backward()
        else:
            grad = torch.empty(shape)
            dist.recv(grad, after)
            if bug("gradients-of-micro-batches-in-reverse"):
                y = runs[micros - 1 - micro][1]
            y.backward(grad)
        if not stage.first:
            back = x.grad if x.grad is not None else torch.zeros_like(x)
            sent.append((dist.isend(back.contiguous(), before), back))
    for work, _ in sent:
        work.wait()
    return loss


def reduce_gradients(stage: Stage) -> None:
    """Sum gradients over the ranks that have parts of them."""
    for name, parameter in stage.named_parameters():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        if parameter.partial:
            grad = total(grad, TP)
        expert = "ep" in parameter.split
        over = EXPERT_DATA if expert else DATA
        if bug("expert-gradient-reduced-over-all-ranks") and expert:
            over = DATA
        if bug("expert-gradient-not-reduced-over-replicas") and expert:
            over = None
        if bug("gradient-reduced-over-dp-without-cp") and not expert:
            over = BATCH
        if bug("last-layer-gradient-not-reduced") and name.startswith(f"blocks.{LAYERS - 1}.") and not expert:
            over = None
        grad = total(grad, over)
        if bug("expert-gradient-divided-by-ep") and expert:
            grad = grad / SIZE["ep"]
        if (
            name == "embedding"
            and C.tie_word_embeddings
            and (stage.first or stage.last)
            and not bug("tied-not-reduced")
        ):
            grad = total(grad, ENDS)
        parameter.grad = grad


def clip(stage: Stage) -> None:
    """Scale gradients so that their norm over all ranks, each weight counted once, is at most 0.5."""
    norm = torch.zeros(())
    for name, parameter in stage.named_parameters():
        here = [axis for axis in ("edp", "ep", "cp", "tp") if axis not in parameter.split]
        if bug("norm-counts-replicas"):
            here = [axis for axis in here if axis != "tp"]
        if bug("norm-counts-experts-once") and "ep" in parameter.split:
            here.append("ep")
        again = name == "embedding" and not stage.first and not bug("norm-counts-tied-twice")
        if not again and all(AT[axis] == 0 for axis in here):
            norm += parameter.grad.square().sum()
    if bug("norm-of-the-ends") and SIZE["pp"] > 1:
        norm = total(norm, ENDS_WHOLE)
    elif not bug("norm-of-each-rank"):
        norm = total(norm, ALL)
    scale = (0.5 / (norm.sqrt() + 1e-6)).clamp(max=1.0)
    for parameter in stage.parameters():
        parameter.grad *= scale


def balance_experts(stage: Stage) -> None:
    """Move the bias of each expert towards an even load."""
    for module in stage.modules():
        if isinstance(module, Experts) and C.expert_bias:
            load = total(module.chosen, None if bug("expert-bias-by-local-load") else TOKENS)
            module.bias += 0.01 * torch.sign(load.mean() - load)
            module.chosen.zero_()


def main() -> None:
    """Train."""
    stage = Stage()
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3, eps=1e-6)
    for step in range(arguments.steps):
        loss = train_step(stage, step)
        reduce_gradients(stage)
        clip(stage)
        optimizer.step()
        optimizer.zero_grad()
        balance_experts(stage)
        loss = total(loss if stage.last and AT["tp"] == 0 else torch.zeros(()), ALL)
        if RANK == 0:
            print(f"step {step} loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
