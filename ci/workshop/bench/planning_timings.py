"""Times plans between layouts, and explanations of models, on meshes of thousands of ranks; no rank runs."""

from __future__ import annotations

import contextlib
import itertools
import math
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh import init_device_mesh
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.core.dtensor.transition import clear_transition_cache, plan_transition
from hyper_parallel.platform.select import use_platform
from hyper_parallel.transport.base import use_transport
from hyper_parallel.verify.explain import explain_model, rehearsed_transport
from workshop.bench.harness_timings import Figure

__all__ = ["planning_figures"]

_SHAPE = (1000, 777, 65)
_PLACEMENTS = (Shard(0), Shard(1), Replicate(), Partial())
_PLANS = 200
"""Plans that are timed on a mesh, at most: pairs of placements at equal distances in the list of all."""
_MANY = 10_000
"""Plans between layouts of a small mesh, of which a second is to be enough."""
_AXES = ("dp", "tp", "cp")

_MODEL = """\
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import ColwiseParallel, RowwiseParallel


class Layer(nn.Module):
    def __init__(self, width, hidden, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def model(layers, width, hidden, heads):
    parts = nn.Embedding(32000, width), *(Layer(width, hidden, heads) for _ in range(layers))
    tokens = torch.zeros(1024, 128, dtype=torch.int64)
    return nn.Sequential(*parts), [(tokens, torch.zeros(1))], lambda output, batch: output.square().mean()


def small():
    return model(10, 512, 1280, 8)


def large():
    return model(80, 8192, 28672, 64)


def plan(mesh):
    by_columns = dict.fromkeys(("*.q", "*.k", "*.v", "*.gate", "*.up"), ColwiseParallel(use_local_output=False))
    return {"0": RowwiseParallel(use_local_output=False), **by_columns,
            **dict.fromkeys(("*.o", "*.down"), RowwiseParallel(use_local_output=False))}
"""


def planning_figures() -> list[Figure]:
    """Return the figures, which need PyTorch: CPU time, for plans that of the slowest one."""
    result = [
        Figure(f"slowest plan on {'x'.join(map(str, sizes))} ranks", budget, partial(_slowest_plan, sizes))
        for sizes, budget in (((64, 64), 0.05), ((512, 8), 0.05), ((1024, 8, 8), 1.0))
    ]
    result.extend(
        Figure(f"{_MANY:,} plans on {'x'.join(map(str, sizes))} ranks", 1.0, partial(_many_plans, sizes))
        for sizes in ((8,), (2, 3))
    )
    models = (("46 M", "small", (64, 8), 2.0), ("70 B", "large", (512, 8), 10.0))
    for size, name, mesh, budget in models:
        what = f"explain {size} parameters on {'x'.join(map(str, mesh))} ranks"
        result.append(Figure(what, budget, partial(_explained, name, mesh)))
    return result


def _slowest_plan(sizes: Sequence[int]) -> tuple[float, str]:
    """Plan between layouts that were not planned yet; return the CPU time of the slowest plan."""
    with _pairs_of_layouts(sizes) as pairs:
        return max(_planned(pairs[:: -(-len(pairs) // _PLANS)])), ""


def _many_plans(sizes: Sequence[int]) -> tuple[float, str]:
    """Plan between all layouts again and again, and forget the plans each time; return the CPU time of many plans."""
    seconds: list[float] = []
    with _pairs_of_layouts(sizes) as pairs:
        while len(seconds) < _MANY:
            seconds.extend(_planned(pairs))
    return sum(seconds[:_MANY]), ""


@contextlib.contextmanager
def _pairs_of_layouts(sizes: Sequence[int]) -> Iterator[list[tuple[Layout, Layout]]]:
    """Yield every layout and every one to go to, on a mesh of ``sizes``."""
    with use_platform("torch"), use_transport(rehearsed_transport("torch", math.prod(sizes), 0)):
        mesh = init_device_mesh("cpu", tuple(sizes), mesh_dim_names=_AXES[: len(sizes)])
        placements = itertools.product(_PLACEMENTS, repeat=len(sizes))
        layouts = [Layout.place(mesh, places, _SHAPE) for places in placements]
        yield list(itertools.product(layouts, layouts))


def _planned(pairs: Iterable[tuple[Layout, Layout]]) -> list[float]:
    """Plan from the first to the second layout of each pair, without a plan from before; return CPU times."""
    clear_transition_cache()
    seconds = []
    for source, target in pairs:
        start = time.thread_time()
        plan_transition(source, target)
        seconds.append(time.thread_time() - start)
    return seconds


def _explained(name: str, mesh: Sequence[int]) -> tuple[float, str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "explained_model.py"
        path.write_text(_MODEL)
        start = time.process_time()
        explanation = explain_model(f"{path}:{name}", f"{path}:plan", mesh, _AXES[: len(mesh)], platform="torch")
        seconds = time.process_time() - start
    with_values = [f"with values: {explanation.with_values}"] if explanation.with_values else []
    return seconds, "; ".join((*explanation.wrong, *with_values))
