"""The bundled scenarios: the reference transformer on real text, and a tutorial, with plans like those of users."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel._text import near_hint
from hyper_parallel.core.dtensor.placements import Replicate, Shard
from hyper_parallel.platform.select import current_platform
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.training import LanguageModelConfig
from hyper_parallel.verify.model_case import ModelCase, ParallelPlan

__all__ = [
    "BEGIN",
    "SCENARIOS",
    "SOURCES",
    "Scenario",
    "Tutorial",
    "scenario_named",
    "text_batches",
    "transformer_case",
    "transformer_plan",
]

SOURCES = ("this.py", "textwrap.py", "heapq.py")
BEGIN = 256
"""Token that starts every sequence; bytes are tokens 0 to 255."""

_BATCHES = 3


@dataclass(frozen=True)
class Scenario:
    """A model, its data, a mesh and a plan.

    Attributes:
        name: name of the scenario in the command.
        mesh_shape: sizes of the axes.
        mesh_names: their names.
        config: configuration of the transformer; only its number of heads is divisible by the mesh.
        batch: number of sequences per batch.
        optimizer: ``sgd`` or ``adamw``.
    """

    name: str
    mesh_shape: tuple[int, ...]
    mesh_names: tuple[str, ...]
    config: LanguageModelConfig
    batch: int = 3
    optimizer: str = "sgd"

    def with_dtype(self, dtype: str) -> Scenario:
        """Return the same scenario in another precision."""
        return replace(self, config=replace(self.config, dtype=dtype))

    def case(self) -> ModelCase:
        """Return model, data and loss, on the current platform."""
        return transformer_case(self.config, self.batch, self.optimizer)

    def plan(self, mesh: Any) -> ParallelPlan:
        """Return a plan of sequence and tensor parallelism over ``tp``, and data parallelism over ``dp``."""
        return ParallelPlan(transformer_plan(), {"dp": Shard(0)} if "dp" in mesh.names else {})


@dataclass(frozen=True)
class Tutorial:
    """A small regression model, trained like in the framework's tutorials, and its tensor-parallel plan.

    The optimizer is created before the first forward. Steps are the framework's own (``Model.train`` with
    ``TrainOneStepCell`` and a callback on MindSpore), and each ends with saving and loading a checkpoint.

    Attributes:
        name: name of the scenario in the command.
        mesh_shape: sizes of the axes.
        mesh_names: their names.
        dtype: ``float64`` or ``float32``.
        sizes: inputs, hidden width and outputs; the width is not divisible by the mesh.
        batch: number of rows per batch.
        optimizer: ``sgd`` or ``adamw``.
    """

    name: str
    mesh_shape: tuple[int, ...]
    mesh_names: tuple[str, ...]
    dtype: str = "float64"
    sizes: tuple[int, int, int] = (7, 11, 5)
    batch: int = 9
    optimizer: str = "sgd"

    def with_dtype(self, dtype: str) -> Tutorial:
        """Return the same scenario in another precision."""
        return replace(self, dtype=dtype)

    def case(self) -> ModelCase:
        """Return model, data, loss and step, on the current platform."""
        platform = current_platform()

        def build() -> Any:
            model = harness_of(platform).tutorial_model(*self.sizes, self.dtype)
            harness_of(platform).load_arrays(model, _weights(harness_of(platform).trainable(model), self.dtype))
            return model

        rng = np.random.default_rng(0)
        shapes = (self.batch, self.sizes[0]), (self.batch, self.sizes[-1])
        return ModelCase(
            build,
            [tuple(rng.standard_normal(shape).astype(self.dtype) for shape in shapes) for _ in range(_BATCHES)],
            lambda output, tensors: (output - tensors[-1]).square().mean(),
            optimizer=self.optimizer,
            step=harness_of(platform).tutorial_step,
        )

    def plan(self, mesh: Any) -> ParallelPlan:
        """Return a plan of tensor parallelism over ``tp``; inputs are plain."""
        from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel

        del mesh
        return ParallelPlan({"up": ColwiseParallel(), "down": RowwiseParallel()})


_GRID, _ROW = ((2, 2), ("dp", "tp")), ((3,), ("tp",))
_TWO = LanguageModelConfig(dim=20, heads=4, kv_heads=2, ffn=37, length=13)
_THREE = LanguageModelConfig(dim=22, heads=6, kv_heads=3, ffn=50, length=11)

SCENARIOS: tuple[Scenario | Tutorial, ...] = (
    Scenario("2x2-rms-tied", *_GRID, replace(_TWO, norm="rms", tied=True)),
    Scenario("2x2-layer-untied", *_GRID, replace(_TWO, norm="layer", tied=False)),
    Scenario("3-rms-untied", *_ROW, replace(_THREE, norm="rms", tied=False), optimizer="adamw"),
    Scenario("3-layer-tied", *_ROW, replace(_THREE, norm="layer", tied=True)),
    Tutorial("3-tutorial", *_ROW),
)


def scenario_named(name: str) -> Scenario | Tutorial:
    """Return the bundled scenario ``name``.

    Raises:
        ValueError: there is no such scenario; the message lists the names.
    """
    for scenario in SCENARIOS:
        if scenario.name == name:
            return scenario
    names = [scenario.name for scenario in SCENARIOS]
    msg = f"scenario {name!r} does not exist{near_hint(name, names) or '; scenarios: ' + ', '.join(names)}"
    raise ValueError(msg)


def transformer_case(config: LanguageModelConfig, batch: int, optimizer: str) -> ModelCase:
    """Return the reference transformer on text of the standard library; its weights are equal on both frameworks."""
    platform = current_platform()

    def build() -> Any:
        model = harness_of(platform).reference_model(config)
        harness_of(platform).load_arrays(model, _weights(harness_of(platform).trainable(model), config.dtype))
        return model

    return ModelCase(
        build,
        text_batches(_BATCHES, batch, config.length),
        lambda logits, tensors: harness_of(platform).reference_loss(logits, tensors[-1]),
        optimizer=optimizer,
        learning_rate=0.1 if optimizer == "sgd" else 0.01,
    )


def transformer_plan() -> dict[str, Any]:
    """Return styles of the reference transformer: the residual stream is sharded by sequence; tensors are DTensors."""
    from hyper_parallel.core.tensor_parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    def split(**options: Any) -> Any:
        return ColwiseParallel(use_local_output=False, **options)

    def joined(**options: Any) -> Any:
        return RowwiseParallel(output_layouts=Shard(1), use_local_output=False, **options)

    constants = (None, None, None)
    return {
        "embed": joined(input_layouts=Replicate()),
        "layers.*.attn_norm": SequenceParallel(),
        "layers.*.attn": PrepareModuleInput(
            input_layouts=(Shard(1), *constants),
            desired_input_layouts=(Replicate(), *constants),
            use_local_output=False,
        ),
        "layers.*.attn.q": split(),
        "layers.*.attn.k": split(),
        "layers.*.attn.v": split(),
        "layers.*.attn.o": joined(),
        "layers.*.mlp_norm": SequenceParallel(),
        "layers.*.mlp": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=False
        ),
        "layers.*.mlp.gate": split(),
        "layers.*.mlp.up": split(),
        "layers.*.mlp.down": joined(),
        "norm": SequenceParallel(),
        "head": split(input_layouts=Shard(1)),
    }


def text_batches(count: int, batch: int, length: int) -> list[tuple[Any, Any]]:
    """Return pairs of tokens and labels from the text; each label is the next token.

    The batches are the same for the same version of Python; sequences do not overlap.

    Args:
        count: number of pairs.
        batch: number of sequences in each.
        length: number of tokens in a sequence.

    Returns:
        pairs of int64 arrays of shape (batch, length).

    Raises:
        ValueError: the text is too short.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join((folder / name).read_bytes() for name in SOURCES)
    size = count * batch * length
    if size > len(text):
        msg = f"{count} batches of {batch} x {length} tokens need {size} bytes, the text has {len(text)}"
        raise ValueError(msg)
    labels = np.frombuffer(text[:size], np.uint8).astype(np.int64).reshape(count, batch, length)
    tokens = np.concatenate([np.full((count, batch, 1), BEGIN, np.int64), labels[:, :, :-1]], axis=2)
    return list(zip(tokens, labels, strict=True))


def _weights(parameters: Any, dtype: str) -> dict[str, Any]:
    """Return random values by path, scaled to keep activations near 1; gains are near 1, and biases are not 0."""
    arrays = {}
    for number, (path, value) in enumerate(sorted(parameters.items())):
        rng = np.random.default_rng(1000 + number)
        shape = tuple(value.shape)
        noise = rng.standard_normal(shape)
        if len(shape) > 1:
            array = noise / np.sqrt(shape[-1])
        elif path.endswith("weight"):
            array = 1 + 0.2 * noise
        else:
            array = 0.2 * noise
        arrays[path] = array.astype(dtype)
    return arrays
