"""MindFormers' Trainer, its files unmodified, trains on simulated ranks as on one device.

What MindSpore 2.10 lacks on CPU is replaced by :func:`stand_in`, on one device as on many. Environment `mindformers` of
tox installs the wheel.
"""

from __future__ import annotations

import functools
import importlib.util
import zlib

import numpy as np
import pytest

from hyper_parallel.verify.simulate import simulate

pytestmark = [
    pytest.mark.platforms("mindspore"),
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mindformers") is None,
        reason="[no-tool] MindFormers is not installed: tox -e mindformers",
    ),
]

VOCABULARY, LENGTH, STEPS = 48, 8, 2
MODEL = {
    "model_type": "qwen3", "architectures": "Qwen3ForCausalLM", "vocab_size": VOCABULARY, "seq_length": LENGTH,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "max_position_embeddings": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "use_flash_attention": True, "params_dtype": "float32", "compute_dtype": "float32",
    "layernorm_compute_dtype": "float32", "softmax_compute_dtype": "float32", "rotary_dtype": "float32",
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "position_embedding_type": "rope", "rope_theta": 10000,
    "tie_word_embeddings": False, "add_bias_linear": False,
}  # fmt: skip


def config(batch, parallelism):
    """The configuration of a dense model with AdamW; ``eps`` keeps steps along tiny gradients small."""
    return {
        "run_mode": "train",
        "checkpoint": {"enable_save": False},
        "training": {
            "steps": STEPS, "local_batch_size": 1, "global_batch_size": batch, "max_norm": 1.0, "seed": 42,
            "deterministic": False,
        },
        "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.01},
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1e-2, "warmup_ratio": 0},
        "parallelism": {"data_parallel_shard": -1, "sequence_parallel": True, **parallelism},
        "train_dataset": {"dataloader": {"type": "MindDataset"}},  # named, and replaced by Rows
        "model": MODEL,
    }  # fmt: skip


class Rows:
    """Random tokens: every ``stride``-th row from ``start`` on.

    Args:
        start: the data rank.
        stride: the number of data ranks.
    """

    def __init__(self, start, stride):
        self.start, self.stride = start, stride

    def get_dataset_size(self):
        """More rows than are read."""
        return 1000

    def create_dict_iterator(self, **_):
        """Micro-batches of one row."""
        from mindspore import Tensor

        for number in range(1000):
            random = np.random.default_rng(1000 + number * self.stride + self.start)
            tokens = random.integers(0, VOCABULARY, (1, LENGTH + 1)).astype(np.int32)
            mask = Tensor(np.ones((1, LENGTH), np.float32))
            yield {"input_ids": Tensor(tokens[:, :-1]), "labels": Tensor(tokens[:, 1:]), "loss_mask": mask}


def stand_in():
    """Replace kernels that only Ascend has, and what MindFormers expects of MindSpore 2.11; once per process."""
    from mindspore import Tensor, ops

    ops.communication.set_comm_ops_inplace(False)  # 2.11 takes None as the output in either mode
    if not hasattr(Tensor, "stands_in"):
        Tensor.stands_in = True
        stand_in_for_methods()
        stand_in_for_functions()
        stand_in_for_kernels()


def stand_in_for_methods():
    """``to_empty`` leaves the meta device by itself; methods that write in place do so on CPU."""
    from mindspore import Tensor, mint, nn, ops

    from hyper_parallel.platform.mindspore.ops.kernels import write_over
    from hyper_parallel.platform.select import get_platform

    no_grad, to_empty = get_platform().no_grad, nn.Cell.to_empty
    nn.Cell.to_empty = lambda self, device=None, **options: to_empty(self, device=device or "CPU", **options)

    def in_place(name, compute):
        own = getattr(Tensor, name)

        def method(self, *args, **kwargs):
            if hasattr(self, "_local"):
                return own(self, *args, **kwargs)
            with no_grad():  # MindSpore's copy_ into a transposed tensor writes nothing
                return write_over(self, compute(self, *args, **kwargs).astype(self.dtype))

        setattr(Tensor, name, method)

    in_place("normal_", lambda x, mean=0.0, std=1.0: Tensor(np.random.default_rng(0).normal(mean, std, x.shape)))
    in_place("fill_", lambda x, value: ops.full(tuple(x.shape), value, dtype=x.dtype))
    in_place("zero_", lambda x: mint.zeros(tuple(x.shape), dtype=x.dtype))
    in_place("mul_", lambda x, y: x * y)


def stand_in_for_functions():
    """Functions without a kernel on CPU, and ``split``, whose gradient is wrong there."""
    from mindspore import Tensor, mint, ops

    def split(x, split_size_or_sections, dim=0):
        size, sections = x.shape[dim], split_size_or_sections
        if isinstance(sections, int):
            sections = [min(sections, size - start) for start in range(0, size, sections)]
        starts = np.cumsum([0, *sections[:-1]])
        return tuple(mint.narrow(x, dim % x.ndim, int(start), n) for start, n in zip(starts, sections, strict=True))

    def arange(start, end=None, step=1, *, dtype=None):
        numbers = Tensor(np.arange(start, end, step) if end is not None else np.arange(start))
        return numbers if dtype is None else numbers.astype(dtype)

    mint.split, mint.arange = split, arange
    mint.addcmul = lambda x, a, b, *, value=1: x + a * b * value
    mint.full = lambda size, fill_value, *, dtype=None: ops.full(tuple(size), fill_value, dtype=dtype)
    mint.index_select = lambda x, dim, index: ops.gather(x, index, dim)
    mint.ones_like = lambda x, *, dtype=None: mint.ones(tuple(x.shape), dtype=dtype or x.dtype)
    mint.outer = lambda a, b: a.reshape(-1, 1) * b.reshape(1, -1)
    mint.repeat_interleave = ops.repeat_interleave
    mint.scatter_add = lambda x, dim, index, src: ops.tensor_scatter_elements(x, index, src, dim, "add")
    mint.stack = lambda tensors, dim=0: mint.cat([mint.unsqueeze(each, dim) for each in tensors], dim)
    mint.tril, mint.triu = ops.tril, ops.triu
    mint.zeros_like = lambda x, *, dtype=None: mint.zeros(tuple(x.shape), dtype=dtype or x.dtype)


def stand_in_for_kernels():
    """SwiGLU, RMS norm and causal attention, which MindFormers calls as kernels of Ascend devices."""
    import mindspore as ms
    from mindformers.pynative.layers import layer_norm
    from mindspore import Tensor, mint, ops
    from mindspore.ops.operations.nn_ops import FlashAttentionScore

    def swiglu(x, dim=-1):
        gate, linear = mint.chunk(x, 2, dim)
        return gate * mint.sigmoid(gate) * linear

    def rms_norm(x, gamma, epsilon=1e-6):
        factor = mint.rsqrt(mint.mean(x * x, -1, True) + epsilon)
        return x * factor * gamma, factor

    def attention(self, query, key, value, attn_mask=None, **others):
        assert query.ndim == 4
        assert all(other is None for other in others.values())
        groups = query.shape[1] // key.shape[1]
        key, value = (mint.repeat_interleave(each, groups, 1) for each in (key, value))
        scores = mint.matmul(query, key.swapaxes(-1, -2)) * self.scale_value
        later = Tensor(np.triu(np.ones((query.shape[2], key.shape[2]), bool), 1))
        scores = mint.where(later, Tensor(-1e30, ms.float32), scores)
        return None, None, None, mint.matmul(mint.nn.functional.softmax(scores, -1), value)

    ops.swiglu, layer_norm.rms_norm, FlashAttentionScore.__call__ = swiglu, rms_norm, attention


def whole(value):
    """The values of the whole tensor."""
    from hyper_parallel import DTensor

    return np.array((value.full_tensor() if isinstance(value, DTensor) else value).asnumpy())


def set_weights(model):
    """Give every parameter values that depend on its name only."""
    from mindspore import Tensor

    from hyper_parallel import DTensor, distribute_tensor

    for name, parameter in model.parameters_and_names():
        random = np.random.default_rng(zlib.crc32(name.encode()))
        values = 0.2 * random.standard_normal(tuple(parameter.shape)) + ("norm" in name)
        tensor = Tensor(values.astype(np.float32))
        if isinstance(parameter, DTensor):
            tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
        parameter.set_data(tensor)


def train(batch, parallelism):
    """Train on this rank; return losses, norms, the clipped gradients of the first step, and the last weights."""
    import mindspore as ms
    from mindformers.pynative.callback import TrainerCallback
    from mindformers.pynative.trainer import trainer as module
    from mindspore import ops
    from mindspore.mint.distributed import get_rank, get_world_size

    stand_in()
    record = {"losses": [], "norms": [], "gradients": {}}

    class Recorder(TrainerCallback):
        def on_step_end(self, *_, loss, grad_norm, **__):
            record["losses"].append(float(loss.asnumpy()))
            record["norms"].append(float(grad_norm.asnumpy()))

    size = parallelism.get("tensor_parallel", 1)
    data = Rows(get_rank() // size, get_world_size() // size)
    trainer = module.Trainer(config(batch, parallelism), train_dataset=data, callbacks=[Recorder()])
    (model,) = trainer.model
    for _, cell in model.cells_and_names():
        if type(cell).__name__ == "SelfAttention":  # casts to float16 for Ascend's kernel
            cell.cast = lambda x, dtype: x if dtype == ms.float16 else ops.cast(x, dtype)
    set_weights(model)
    update = trainer._optimizer_update

    def recorded_update():
        optimizer, step = trainer.optimizer, trainer.optimizer.construct

        def construct(gradients):
            names = [parameter.name for parameter in optimizer.parameters]
            record["gradients"] = record["gradients"] or dict(zip(names, map(whole, gradients), strict=True))
            return step(gradients)

        optimizer.construct = construct
        try:
            return update()
        finally:
            optimizer.construct = step

    trainer._optimizer_update = recorded_update
    trainer.train()
    record["weights"] = {name: whole(parameter) for name, parameter in model.parameters_and_names()}
    return record


@functools.cache
def on_one_device(batch):
    """The record of one device, which accumulates the gradients of the batch."""
    return simulate(train, 1, platform="mindspore", args=(batch, {}), timeout=600)[0]


@pytest.mark.parametrize(
    "world, batch, parallelism",
    [
        pytest.param(2, 4, {"tensor_parallel": 2}, id="tensor parallel"),
        pytest.param(3, 6, {}, id="fully sharded, uneven"),
        pytest.param(4, 4, {"tensor_parallel": 2}, id="fully sharded and tensor parallel"),
        pytest.param(4, 8, {"data_parallel_shard": 2}, id="two replicas, accumulated"),
    ],
)
def test_the_trainer_trains_as_on_one_device(world, batch, parallelism, tmp_path, monkeypatch):
    """Losses, gradient norms, gradients and weights are those of one device, on every rank, for two clipped steps."""
    monkeypatch.chdir(tmp_path)  # MindFormers writes its log beside
    expected = on_one_device(batch)
    assert len(expected["gradients"]) == len(expected["weights"]) == 19
    assert max(expected["norms"]) > 1, "nothing is clipped"
    for record in simulate(train, world, platform="mindspore", args=(batch, parallelism), timeout=600):
        np.testing.assert_allclose(record["losses"], expected["losses"], rtol=1e-5)
        np.testing.assert_allclose(record["norms"], expected["norms"], rtol=1e-5)
        for kind in ("gradients", "weights"):
            assert record[kind].keys() == expected[kind].keys()
            for name, values in expected[kind].items():
                scale = np.abs(values).max()
                np.testing.assert_allclose(record[kind][name] / scale, values / scale, atol=2e-5, err_msg=name)
