"""Measures the memory of activations, one process per mode, and of building without storage."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.mesh import DeviceMesh
from hyper_parallel.core.dtensor.module import place_parameter
from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.platform.select import platform_named, use_platform
from hyper_parallel.transport.processes import python_command
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.training import LanguageModelConfig
from hyper_parallel.verify.simulate import simulate

__all__ = ["MODES", "building", "delayed_layer", "footprints", "growth_of", "peak"]

MODES = ("plain", "checkpoint", "selective", "swap")
_CONFIG = LanguageModelConfig(
    dim=128, layers=12, heads=4, kv_heads=4, head_dim=32, ffn=512, length=192, dtype="float32"
)
_BATCH = 4
_PEAK = "peak: "
_RANKS, _LAYERS, _WIDE, _NARROW = 8, 8, 1 << 14, 1 << 12


def footprints(platform_name: str) -> dict[str, int]:
    """Return the peak bytes that a training step of a 12-layer transformer adds to a process, by mode.

    Each mode runs in its own process, forked from one that has imported the framework and computed nothing.
    Linux only: the peak is the kernel's high-water mark of resident memory.
    """
    # Freed blocks go back to the system at once, so that the mark is that of memory in use at the same time.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        python_command("workshop.conformance.footprint", platform_name),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    peaks = [line.removeprefix(_PEAK) for line in done.stdout.splitlines() if line.startswith(_PEAK)]
    return dict(zip(MODES, map(int, peaks), strict=True))


def peak(platform_name: str, mode: str) -> int:
    """Return the peak bytes that one step adds to this process, after a small step."""
    with use_platform(platform_name):
        platform = platform_named(platform_name)
        model = harness_of(platform).reference_model(_CONFIG)
        contexts = lambda: platform.create_selective_checkpoint_contexts(harness_of(platform).kept_operators())  # noqa: E731
        wrap: Any = {
            "plain": lambda layer: layer,
            "checkpoint": platform.ckpt_wrapper,
            "selective": lambda layer: platform.ckpt_wrapper(layer, context_fn=contexts),
            "swap": platform.swap_wrapper,
        }[mode]
        layers = dict(platform.get_cells_and_names(model))["layers"]
        for index in range(_CONFIG.layers):
            layers[index] = wrap(layers[index])
        _step(platform, model, 1)
        return growth_of(lambda: _step(platform, model, _BATCH))


def building(platform_name: str) -> dict[str, float]:
    """Measure how 8 simulated ranks lay out 8 GiB of parameters without storage, and fill a shard of 64 MiB.

    Returns:
        ``parameters``: bytes of the model; ``seconds``: of computing, on all ranks together; ``grown``: the most bytes
        that building adds to a process; ``shard``: bytes of the shard; ``filling``: bytes that filling it adds.
    """
    ranks = simulate(_build, _RANKS, platform_name, (platform_name,))
    seconds = sum(rank["seconds"] for rank in ranks)
    return {**{name: max(rank[name] for rank in ranks) for name in ranks[0]}, "seconds": seconds}


def _build(platform_name: str) -> dict[str, float]:
    platform = platform_named(platform_name)
    platform.init_parameters(delayed_layer(platform, _RANKS))  # the imports of the first one do not count
    layers: list[Any] = []
    start = time.thread_time()
    grown = growth_of(lambda: layers.extend(delayed_layer(platform, _WIDE) for _ in range(_LAYERS)))
    seconds = time.thread_time() - start
    weights = [parameter for layer in layers for parameter in platform.parameters_dict(layer).values()]
    assert all(platform.is_meta(platform.get_param_local_data(weight)) for weight in weights)
    layer = delayed_layer(platform, _NARROW)
    filling = growth_of(lambda: platform.init_parameters(layer))
    return {
        "parameters": sum(math.prod(weight.shape) * platform.get_param_type_size(weight) for weight in weights),
        "seconds": seconds,
        "grown": grown,
        "shard": platform.get_tensor_storage_size(
            platform.get_param_local_data(platform.parameters_dict(layer)["weight"])
        ),
        "filling": filling,
    }


def delayed_layer(platform: Any, size: int) -> Any:
    """Return a square linear layer without storage, its parameters sharded over the world of 8."""
    with platform.init_on_device(platform.meta_device):
        layer = harness_of(platform).linear_layer(size, size, dtype=platform.str_to_dtype("float32"))
    for name in ("weight", "bias"):
        place_parameter(platform, layer, name, DeviceMesh("cpu", list(range(_RANKS))), [Shard(0)])
    return layer


def growth_of(call: Callable[[], Any]) -> int:
    """Return the bytes that ``call`` adds to the resident memory of this process at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the mark
    before = _mark()
    call()
    return _mark() - before


def _step(platform: Any, model: Any, batch: int) -> None:
    tokens = np.random.default_rng(0).integers(0, _CONFIG.vocab, (batch, _CONFIG.length))
    batch = platform.from_numpy(tokens)
    harness_of(platform).training_step(model, lambda: harness_of(platform).reference_loss(model(batch), batch))


def _mark() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def _print_peaks(platform_name: str) -> None:
    """Print the peak of every mode, each in a forked process."""
    platform_named(platform_name)
    for mode in MODES:
        child = os.fork()
        if not child:
            _print_peak(platform_name, mode)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"the process that measures {mode} has died")


def _print_peak(platform_name: str, mode: str) -> None:
    code = 1
    try:
        print(f"{_PEAK}{peak(platform_name, mode)}", flush=True)
        code = 0
    except BaseException:  # noqa: BLE001 - a forked process must not continue with its parent's code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # the framework's own exit hooks may wait for threads that a forked process does not have


if __name__ == "__main__":
    _print_peaks(sys.argv[1])
