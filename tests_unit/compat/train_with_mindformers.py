"""MindFormers' Trainer on random tokens: a script, and what tests need of it.

``python train_with_mindformers.py MODEL BATCH PARALLELISM``: a name of :data:`MODELS`, rows per step, and the
parallelism of the configuration as JSON, which one rank leaves out. On the CPU it needs ``--pretend npu``.
"""

from __future__ import annotations

import json
import math
import sys
import zlib

import numpy as np

VOCABULARY, LENGTH, LONG, STEPS = 48, 8, 2048, 2
COMMON = {
    "vocab_size": VOCABULARY, "seq_length": LENGTH, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "max_position_embeddings": 64, "num_attention_heads": 4, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "use_flash_attention": True, "params_dtype": "float32", "compute_dtype": "float32",
    "layernorm_compute_dtype": "float32", "softmax_compute_dtype": "float32", "rotary_dtype": "float32",
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "position_embedding_type": "rope", "rope_theta": 10000,
    "tie_word_embeddings": False, "add_bias_linear": False,
}  # fmt: skip
MODELS = {
    "dense": {
        **COMMON, "model_type": "qwen3", "architectures": "Qwen3ForCausalLM", "num_key_value_heads": 2, "head_dim": 4,
    },
    "long": {  # the shortest sequence whose mask MindFormers compresses, as its context parallelism demands
        **COMMON, "model_type": "qwen3", "architectures": "Qwen3ForCausalLM", "num_key_value_heads": 4, "head_dim": 2,
        "hidden_size": 8, "num_hidden_layers": 1, "seq_length": LONG, "max_position_embeddings": LONG,
        "use_attn_mask_compression": True,
    },
    "experts": {
        **COMMON, "model_type": "deepseek_v3", "architectures": "DeepseekV3ForCausalLM", "num_key_value_heads": 4,
        "kv_lora_rank": 6, "q_lora_rank": 10, "qk_rope_head_dim": 4, "v_head_dim": 4, "qk_nope_head_dim": 4,
        "moe_intermediate_size": 12, "n_routed_experts": 12, "n_shared_experts": 1, "num_experts_per_tok": 2,
        "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
        "moe_router_dtype": "float32", "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall",
    },
}  # fmt: skip
MODELS["latent"] = {  # multi-head latent attention, whose operands come from cells of their own; the one layer is dense
    **MODELS["experts"], "num_hidden_layers": 1, "seq_length": LONG, "max_position_embeddings": LONG,
    "use_attn_mask_compression": True,
}  # fmt: skip


def config(model, batch, parallelism):
    """The configuration of a model with AdamW; ``eps`` keeps steps along tiny gradients small."""
    return {
        "run_mode": "train",
        "checkpoint": {"enable_save": False},
        "training": {
            "steps": STEPS, "local_batch_size": 1, "global_batch_size": batch, "max_norm": 0.2, "seed": 42,
            "deterministic": False,
        },
        "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-3, "weight_decay": 0.01},
        "lr_scheduler": {"type": "ConstantWarmUpLR", "learning_rate": 1e-2, "warmup_ratio": 0},
        "parallelism": {"data_parallel_shard": -1, "sequence_parallel": True, **parallelism},
        "train_dataset": {"dataloader": {"type": "MindDataset"}},  # named, and replaced by Rows
        "model": MODELS[model],
    }  # fmt: skip


class Rows:
    """Random tokens: every ``stride``-th row from ``start`` on.

    Args:
        start: the data rank.
        stride: the number of data ranks.
        length: of a row.
    """

    def __init__(self, start, stride, length):
        self.start, self.stride, self.length = start, stride, length

    def get_dataset_size(self):
        """More rows than are read."""
        return 1000

    def create_dict_iterator(self, **_):
        """Micro-batches of one row."""
        from mindspore import Tensor

        for number in range(1000):
            random = np.random.default_rng(1000 + number * self.stride + self.start)
            tokens = random.integers(1, VOCABULARY, (1, self.length + 1)).astype(np.int32)
            row = {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": np.ones((1, self.length), "f")}
            if self.length == LONG:
                row["position_ids"] = np.arange(self.length, dtype=np.int32)[None]
            yield {name: Tensor(np.ascontiguousarray(values)) for name, values in row.items()}


def make_trainer(model, batch, parallelism, callbacks=()):
    """The Trainer of this rank, with the same weights on every number of ranks."""
    import mindspore as ms
    from mindformers.pynative.trainer.trainer import Trainer
    from mindspore import ops
    from mindspore.mint.distributed import get_rank, get_world_size

    ops.communication.set_comm_ops_inplace(False)  # MindSpore 2.11 takes None as the output in either mode
    size = math.prod(parallelism.get(f"{kind}_parallel", 1) for kind in ("tensor", "context", "pipeline"))
    inner = size // parallelism.get("pipeline_parallel", 1)  # the pipeline is the outermost axis
    data_ranks = max(1, get_world_size() // size)  # a size that does not fit is MindFormers' to refuse
    data = Rows(get_rank() // inner % data_ranks, data_ranks, MODELS[model]["seq_length"])
    trainer = Trainer(config(model, batch, parallelism), train_dataset=data, callbacks=list(callbacks))
    for part in trainer.model:
        for _, cell in part.cells_and_names():
            if type(cell).__name__ == "SelfAttention":  # casts to float16 for Ascend's kernel
                cell.cast = lambda x, dtype: x if dtype == ms.float16 else ops.cast(x, dtype)
        set_weights(part)
    return trainer


def set_weights(model):
    """Give every parameter values that depend on its name only."""
    from mindspore import Tensor

    from hyper_parallel import DTensor, distribute_tensor

    for name, parameter in model.parameters_and_names():
        random = np.random.default_rng(zlib.crc32(name.encode()))
        values = 0.2 * random.standard_normal(tuple(parameter.shape)) + ("norm" in name)
        values *= parameter.requires_grad  # others count tokens
        tensor = Tensor(values.astype(np.float32))
        if isinstance(parameter, DTensor):
            tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
        parameter.set_data(tensor)


def main(model, batch, parallelism):
    """Train; without parallelism on one rank."""
    from mindspore.mint.distributed import get_world_size

    make_trainer(model, int(batch), json.loads(parallelism) if get_world_size() > 1 else {}).train()


if __name__ == "__main__":
    main(*sys.argv[1:])
