"""Random small PyTorch models with random correct plans, to count false alarms and unnoticed errors of the verifier.

``python tests_unit/verify/random_models.py --count 10000`` verifies models 0 to 9999, and ends with the counts;
``--inject`` multiplies one random gradient component of each parallel run by ``1 + 1e-9``, which must be noticed.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
import torch
from torch import nn

from hyper_parallel.core.dtensor.dtensor import DTensor
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.core.tensor_parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from hyper_parallel.verify.model.run import verify_model
from hyper_parallel.verify.model_case import ModelCase, ParallelPlan

MESHES = (((2,), ("tp",)), ((3,), ("tp",)), ((4,), ("tp",)), ((2, 2), ("dp", "tp")))
ACTIVATIONS = (nn.Tanh, nn.GELU, nn.SiLU, nn.ReLU)
OPTIMIZERS = {
    "sgd": "sgd",
    "adamw": "adamw",
    "nesterov": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.8, nesterov=True),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01, amsgrad=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.003, momentum=0.5),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.02),
}
ERROR, VISIBLE = 1e-9, 1e-3


class MLP(nn.Module):
    """A norm, a wide layer, an activation and a narrow layer beside a residual."""

    def __init__(self, dim, inner, activation, norm, bias):
        super().__init__()
        self.norm = norm(dim)
        self.up, self.down = nn.Linear(dim, inner, bias=bias), nn.Linear(inner, dim, bias=bias)
        self.act = activation()

    def forward(self, x):
        """Return activations of the shape of ``x``."""
        return x + self.down(self.act(self.up(self.norm(x))))


class Attention(nn.Module):
    """A norm and self-attention beside a residual; the key's bias has no gradient but rounding."""

    def __init__(self, dim, heads, width, norm, bias):
        super().__init__()
        self.width = width
        self.norm = norm(dim)
        self.q, self.k, self.v = (nn.Linear(dim, heads * width, bias=bias) for _ in range(3))
        self.o = nn.Linear(heads * width, dim, bias=bias)

    def forward(self, x):
        """Return activations of the shape of ``x``."""
        normed = self.norm(x)
        q, k, v = (layer(normed).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = torch.softmax(q @ k.transpose(-1, -2) / self.width**0.5, -1)
        return x + self.o((scores @ v).transpose(1, 2).flatten(2))


class Drawn:
    """Model, data, mesh, plan and optimizer number ``seed``.

    Args:
        seed: every choice follows from it.
        inject: change one gradient component of the parallel run.
        dtype: of weights and data.
    """

    def __init__(self, seed, inject=False, dtype=torch.float64):
        self.seed, self.inject, self.dtype = seed, inject, dtype
        rng = np.random.default_rng(seed)
        self.shape, self.names = MESHES[rng.integers(len(MESHES))]
        self.dim, self.length, self.batch = (int(rng.integers(low, high)) for low, high in ((3, 12), (2, 8), (2, 5)))
        self.kinds = [str(rng.choice(["mlp", "attention"])) for _ in range(rng.integers(1, 3))]
        self.inner = int(rng.integers(4, 20))
        self.width, self.heads = int(rng.integers(1, 5)), self.shape[-1] * int(rng.integers(1, 3))
        self.activation = ACTIVATIONS[rng.integers(len(ACTIVATIONS))]
        self.norm = (nn.LayerNorm, nn.RMSNorm, lambda _: nn.Identity())[rng.integers(3)]
        self.bias, self.sequence = bool(rng.integers(2)), bool(rng.integers(2))
        self.optimizer = str(rng.choice(list(OPTIMIZERS)))
        self.accumulate = int(rng.integers(1, 3))
        self.clip = float(rng.choice([0.01, 1.0, 100.0])) if rng.integers(3) == 0 else None
        self.decay = bool(rng.integers(3) == 0) and self.optimizer not in ("sgd", "adamw")
        self.steps = int(rng.integers(1, 4))
        self.place = int(rng.integers(2**31))

    def build(self):
        """Return the model, with random weights and norms."""
        torch.manual_seed(self.seed)
        layers = [
            MLP(self.dim, self.inner, self.activation, self.norm, self.bias)
            if kind == "mlp"
            else Attention(self.dim, self.heads, self.width, self.norm, self.bias)
            for kind in self.kinds
        ]
        model = nn.Sequential(*layers, nn.Linear(self.dim, self.dim)).to(self.dtype)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                nn.init.normal_(parameter, 0.5, 0.5)
        return model

    def case(self):
        """Return what SPEC returns."""
        rng = np.random.default_rng((self.seed, 1))
        size, kind = (self.batch, self.length, self.dim), "float64" if self.dtype is torch.float64 else "float32"
        batches = [tuple(rng.standard_normal(size).astype(kind) for _ in range(2)) for _ in range(3)]
        schedule = (lambda engine: torch.optim.lr_scheduler.ExponentialLR(engine, 0.7)) if self.decay else None
        return ModelCase(
            self.build,
            batches,
            lambda output, batch: ((output - batch[-1]) ** 2).mean(),
            optimizer=OPTIMIZERS[self.optimizer],
            learning_rate=0.01,
            scheduler=schedule,
            accumulate=self.accumulate,
            clip=self.clip,
        )

    def plan(self, mesh):
        """Return what PLAN returns: whole or sequence-sharded activations between blocks."""
        del mesh
        styles = {}
        local = {"use_local_output": False}
        between = Shard(1) if self.sequence else Replicate()
        for number, kind in enumerate(self.kinds):
            block = str(number)
            ins, out = (("up",), "down") if kind == "mlp" else (("q", "k", "v"), "o")
            if self.sequence:
                if number == 0:
                    styles[block] = PrepareModuleInput(
                        input_layouts=Replicate(), desired_input_layouts=between, use_local_output=False
                    )
                if self.norm in (nn.LayerNorm, nn.RMSNorm):
                    styles[f"{block}.norm"] = SequenceParallel()
            for name in ins:
                styles[f"{block}.{name}"] = ColwiseParallel(input_layouts=between, **local)
            styles[f"{block}.{out}"] = RowwiseParallel(output_layouts=between, **local)
        styles[str(len(self.kinds))] = ColwiseParallel(input_layouts=between, output_layouts=Replicate(), **local)
        batch = {"dp": Shard(0)} if "dp" in self.names else {}
        return ParallelPlan(styles, batch, optimizer=self.wrong_optimizer if self.inject else None)

    def wrong_optimizer(self, parameters):
        """Return the optimizer, which sees one component of one gradient in one step wrong."""
        made = OPTIMIZERS[self.optimizer]
        if made == "sgd":
            engine = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
        elif made == "adamw":
            engine = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
        else:
            engine = made(parameters)
        rng, step = np.random.default_rng(self.place), [0]

        def spoil(*_):
            step[0] += 1
            if step[0] == self.place % self.steps + 1:
                spoil_component(parameters, rng)

        engine.register_step_pre_hook(spoil)
        return engine

    def report(self):
        """Return the verifier's report."""
        return verify_model(
            self.case, self.plan, self.shape, self.names, platform="torch", steps=self.steps, name=str(self.seed)
        )


def spoil_component(parameters, rng):
    """Multiply one component of a gradient by ``1 + ERROR``; every rank that has it changes its copy.

    The component is at least ``VISIBLE`` of its tensor's largest: below some 1e-5, such an error is smaller than what
    rounding does to its tensor. Tensors that are only rounding noise are left out.
    """
    gradients = [parameter.grad for parameter in parameters]
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in gradients]
    noise = 1e-12 * max(float(tensor.abs().max()) for tensor in whole)
    least = [max(noise, VISIBLE * float(tensor.abs().max())) for tensor in whole]
    visible = [(tensor.abs() > size).nonzero() for tensor, size in zip(whole, least, strict=True)]
    candidates = [number for number, places in enumerate(visible) if len(places)]
    number = candidates[rng.integers(len(candidates))]
    index = visible[number][rng.integers(len(visible[number]))].tolist()
    gradient = gradients[number]
    local, start = gradient, [0] * len(index)
    if isinstance(gradient, DTensor):
        local, start = gradient.to_local(), [low for low, _ in gradient.layout.local_box()]
    place = [position - low for position, low in zip(index, start, strict=True)]
    if all(0 <= position < size for position, size in zip(place, local.shape, strict=True)):
        local[tuple(place)] *= 1 + ERROR


def main(arguments):
    """Verify models and print the counts; return 1 after an alarm, or an injected error that was not noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--inject", action="store_true")
    parser.add_argument("--float32", action="store_true")
    options = parser.parse_args(arguments)
    wrong, largest = [], 0.0
    for seed in range(options.first, options.first + options.count):
        report = Drawn(seed, options.inject, torch.float32 if options.float32 else torch.float64).report()
        largest = max(largest, report.worst.share if report.worst is not None and report.ok else 0.0)
        right = report.ok if not options.inject else report.first is not None and not report.error
        if not right:
            wrong.append(seed)
            print(report.verdict(), flush=True)
        if (seed + 1 - options.first) % 100 == 0:
            done = seed + 1 - options.first
            print(f"{done} models, {len(wrong)} wrong verdicts, largest share {largest:.3g}", flush=True)
    print(f"{options.count} models, {len(wrong)} wrong verdicts {wrong}, largest share of a bound {largest:.3g}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
