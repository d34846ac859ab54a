"""Facet *training*: one spelling for both frameworks."""

import dataclasses
from importlib import metadata
from unittest.mock import create_autospec

import numpy as np
import pytest

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.platform.select import platform_named, use_platform
from hyper_parallel.verify.frameworks import harness_of
from hyper_parallel.verify.frameworks.contract.training import (
    LanguageModelConfig,
    causal_mask,
    first_paths,
    rotary_tables,
)
from hyper_parallel.verify.scenarios import transformer_case

SMALL = LanguageModelConfig(dim=8, heads=2, kv_heads=1, head_dim=4, ffn=5, length=7, layers=1)
PATHS = [
    "embed.weight",
    *(f"layers.0.{name}" for name in (
        "attn_norm.weight", "attn.q.weight", "attn.q.bias", "attn.k.weight", "attn.k.bias", "attn.v.weight",
        "attn.v.bias", "attn.o.weight", "attn.o.bias", "mlp_norm.weight", "mlp.gate.weight", "mlp.gate.bias",
        "mlp.up.weight", "mlp.up.bias", "mlp.down.weight", "mlp.down.bias",
    )),
    "norm.weight",
    "head.weight",
]  # fmt: skip


LEARNING_RATE, STEPS = 0.1, 2


def train(platform, config, optimizer):
    """Losses, first gradients and last weights of a short training."""
    with use_platform(platform.platform_type):
        case = transformer_case(config, 2, optimizer)
    model, losses, first, step = case.build(), [], None, None
    for number in range(STEPS):
        batch = tuple(platform.from_numpy(value) for value in case.micro_batches(number)[0])
        result = harness_of(platform).training_step(model, lambda batch=batch: case.loss(model(batch[0]), batch))
        step = step or harness_of(platform).optimizer(model, optimizer, LEARNING_RATE)
        first = first or {path: platform.tensor_to_numpy(value).copy() for path, value in result.gradients.items()}
        step(result)
        losses.append(float(platform.tensor_to_numpy(result.loss)))
    weights = {
        path: platform.tensor_to_numpy(platform.detach(value))
        for path, value in harness_of(platform).trainable(model).items()
    }
    return losses, first, weights


def test_parameter_paths(platform_name):
    """Paths are the same on every framework; a tied head has none of its own, a layer norm has a bias."""
    platform = platform_named(platform_name)
    assert list(harness_of(platform).trainable(harness_of(platform).reference_model(SMALL))) == PATHS
    tied = harness_of(platform).reference_model(dataclasses.replace(SMALL, tied=True, norm="layer", bias=False))
    paths = list(harness_of(platform).trainable(tied))
    assert "head.weight" not in paths
    assert "norm.bias" in paths
    assert "layers.0.attn.q.bias" not in paths


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_training_changes_every_weight(platform_name, optimizer):
    """One step gives every parameter a gradient and a new value, in float64."""
    platform = platform_named(platform_name)
    with use_platform(platform_name):
        before = transformer_case(SMALL, 2, optimizer).build()
    start = {
        path: platform.tensor_to_numpy(platform.detach(value))
        for path, value in harness_of(platform).trainable(before).items()
    }
    losses, gradients, weights = train(platform, SMALL, optimizer)
    assert losses[0] != losses[1]
    for path in PATHS:
        assert gradients[path].dtype == weights[path].dtype == np.float64
        assert np.abs(gradients[path]).max() > 0, path
        assert np.abs(weights[path] - start[path]).max() > 0, path


@pytest.mark.platforms("torch", "mindspore", together=True)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("norm, tied", [("rms", True), ("layer", False)])
def test_frameworks_train_the_same_model(norm, tied, optimizer):
    """Losses, gradients and weights of both frameworks agree to the float32 in which MindSpore keeps scalars.

    AdamW divides by 1 - beta2 = 0.001, which makes a rounding of beta2 a thousand times as large, per step, in units
    of the learning rate.
    """
    bound = 2**-22 if optimizer == "sgd" else 2**-24 * 1000 * LEARNING_RATE * STEPS
    config = dataclasses.replace(SMALL, norm=norm, tied=tied)
    (loss, gradients, weights), (other_loss, other_gradients, other_weights) = (
        train(platform_named(name), config, optimizer) for name in ("torch", "mindspore")
    )
    assert loss == pytest.approx(other_loss, rel=bound)
    for path, gradient in gradients.items():
        scale = np.abs(gradient).max()
        np.testing.assert_allclose(other_gradients[path], gradient, rtol=0, atol=2**-22 * scale, err_msg=path)
        largest = max(1, np.abs(weights[path]).max())
        np.testing.assert_allclose(other_weights[path], weights[path], rtol=0, atol=bound * largest, err_msg=path)


def test_unknown_names(platform_name):
    """An unknown parameter or optimizer is an error that lists the known ones."""
    platform = platform_named(platform_name)
    model = harness_of(platform).reference_model(SMALL)
    with pytest.raises(ValueError, match=r"load_arrays: no parameter embed.bias; the model has embed.weight, "):
        harness_of(platform).load_arrays(model, {"embed.bias": np.zeros(3)})
    with pytest.raises(ValueError, match="optimizer 'lion' is unknown; known optimizers: sgd, adamw"):
        harness_of(platform).optimizer(model, "lion", 0.1)


def test_buffers_can_be_loaded(platform_name):
    """Buffers are loaded by path like parameters."""
    platform = platform_named(platform_name)
    model = harness_of(platform).reference_model(SMALL)
    harness_of(platform).load_arrays(model, {"mask": np.zeros((7, 7)), "norm.weight": np.full(8, 3.0)})
    assert float(platform.tensor_to_numpy(model.mask).sum()) == 0
    assert platform.tensor_to_numpy(platform.detach(model.norm.weight)).tolist() == [3.0] * 8


@pytest.mark.parametrize(
    "wrong, text",
    [
        ({"heads": 3, "kv_heads": 2}, "heads=3 must be a multiple of kv_heads=2, and head_dim=6 must be even"),
        ({"head_dim": 5}, "heads=4 must be a multiple of kv_heads=2, and head_dim=5 must be even"),
        ({"norm": "batch"}, "norm='batch' must be 'rms' or 'layer'"),
    ],
)
def test_wrong_sizes(wrong, text):
    """Invalid sizes of a transformer are refused."""
    with pytest.raises(ValueError, match="must be") as caught:
        LanguageModelConfig(**wrong)
    assert str(caught.value) == text


def test_tables():
    """Rotary tables start with the identity, the mask hides what comes later, shared values appear once."""
    cos, sin = rotary_tables(SMALL)
    assert cos.shape == sin.shape == (7, 2)
    np.testing.assert_array_equal(cos[0], 1)
    np.testing.assert_allclose(cos**2 + sin**2, 1)
    mask = causal_mask(SMALL)
    assert (np.isinf(mask) == (np.arange(7)[None, :] > np.arange(7)[:, None])).all()
    shared = object()
    assert first_paths({"a": shared, "b": shared, "c": 1}) == {"a": shared, "c": 1}


@pytest.mark.platforms("mindspore")
def test_the_bytes_of_a_device_are_counted_when_its_work_is_done(monkeypatch):
    """The peak of MindSpore's memory pool between two times at which nothing was left to compute."""
    from mindspore import runtime

    called = []
    for name, told in (("synchronize", None), ("reset_peak_memory_stats", None), ("max_memory_allocated", 4096)):
        stand_in = create_autospec(getattr(runtime, name))
        stand_in.side_effect = lambda name=name, told=told: called.append(name) or told
        monkeypatch.setattr(runtime, name, stand_in)
    most = harness_of(platform_named("mindspore")).peak_bytes("npu")
    assert called == ["synchronize", "reset_peak_memory_stats"]
    assert most() == 4096
    assert called[2:] == ["synchronize", "max_memory_allocated"]


def test_a_device_that_is_not_here_is_told_with_what_to_do(platform_name, monkeypatch):
    """Tensors are not made on a device that the framework does not see; the message has what the framework knows."""
    platform = platform_named(platform_name)
    monkeypatch.setattr(type(platform), "device_type", lambda _: "cpu")
    with pytest.raises(UnsupportedOnBackend) as caught:
        harness_of(platform).on_device("npu")
    start = f"--device npu: {platform_name} sees no such device here, only cpu; "
    version = metadata.version(platform_name)
    reasons = {"torch": "torch_npu is not installed: ", "mindspore": f"MindSpore {version} "}
    assert str(caught.value).startswith(start + reasons[platform_name])
    assert str(caught.value).endswith(", or use --device cpu")


def test_another_device_than_the_process_has_is_told(platform_name, monkeypatch):
    """Where the framework sees the device and the process computes on another type, that type is named."""
    platform, found = platform_named(platform_name), {"torch": "missing_device", "mindspore": "missing_ascend"}
    name = f"hyper_parallel.verify.frameworks.{platform_name}.harness.{found[platform_name]}"
    monkeypatch.setattr(name, lambda *_: "")
    assert harness_of(platform).missing_device("npu") == f"this process computes on {platform.device_type()}"
