"""A GPT of megatron.core with its distributed optimizer.

``tensor``: tensor and sequence parallel, too; ``half``: in bfloat16, with float32 copies in the optimizer.
"""

import os
import sys

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig


class Norm(torch.nn.LayerNorm):
    """A norm for sequence parallel, which megatron.core has in Apex and Transformer Engine alone."""

    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():  # their gradients are added up over the tensor-parallel ranks
            parameter.sequence_parallel = config.sequence_parallel and "--broken" not in sys.argv  # the bug: not added


rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
kind = torch.bfloat16 if "half" in sys.argv else torch.float32
tensor = min(2, world) if "tensor" in sys.argv else 1
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl", world_size=world, rank=rank)
parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
torch.manual_seed(0)
model_parallel_cuda_manual_seed(0)
config = TransformerConfig(
    num_layers=2, hidden_size=24, num_attention_heads=4, use_cpu_initialization=True, params_dtype=kind,
    bf16="half" in sys.argv, tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1, hidden_dropout=0.0,
    attention_dropout=0.0, bias_dropout_fusion=False, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
    attention_softmax_in_fp32=True,
)  # fmt: skip
layer = get_gpt_layer_local_spec()
layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
layers = TransformerBlockSubmodules([layer] * 2, Norm)
model = GPTModel(
    config=config, transformer_layer_spec=layers, vocab_size=64, max_sequence_length=16,
    position_embedding_type="rope",
).cuda()  # fmt: skip
settings = DistributedDataParallelConfig(
    grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False
)
model = DistributedDataParallel(config, settings, model)
chosen = OptimizerConfig(
    optimizer="adam", lr=1e-2, clip_grad=0.5, use_distributed_optimizer=True, bf16="half" in sys.argv,
    params_dtype=kind,
)  # fmt: skip
optimizer = get_megatron_optimizer(chosen, [model])
if "--stale" in sys.argv and rank == 1:  # the bug: a rank's float32 copies never reach the model
    for part in optimizer.chained_optimizers:
        part._copy_main_params_to_model_params = lambda: None
if "--clipped" in sys.argv:  # the bug: the norm is added up over a group that has not all shards of the gradients
    for part in optimizer.chained_optimizers:
        part.get_grad_stats_parallel_group = parallel_state.get_model_parallel_group
positions, mask = torch.arange(12).cuda(), torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1).cuda()
for rows in torch.randint(0, 64, (3, 6, 13), generator=torch.Generator().manual_seed(1)).cuda():
    batch = rows.chunk(world // tensor)[parallel_state.get_data_parallel_rank()]
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(
        batch[:, :-1], positions.expand(len(batch), 12), mask, labels=batch[:, 1:].contiguous()
    ).mean()  # fmt: skip
    loss.backward()
    if "--broken" in sys.argv and "tensor" not in sys.argv and rank == 1:  # the bug: a rank's gradient is lost
        model.module.decoder.layers[1].mlp.linear_fc2.weight.main_grad.zero_()
    finalize_model_grads([model])
    optimizer.step()
