"""A GPT of megatron.core whose layers are stages of a pipeline, with tied embeddings on the first and the last one."""

import os
import sys

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl", world_size=world, rank=rank)
parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world)
torch.manual_seed(0)
model_parallel_cuda_manual_seed(0)


def finalize(models, *arguments, **options):
    """Add up gradients that several ranks have: those of the tied embeddings."""
    if "--broken" not in sys.argv:  # the bug: they are not added up
        finalize_model_grads(models, *arguments, **options)


config = TransformerConfig(
    num_layers=2, hidden_size=24, num_attention_heads=4, use_cpu_initialization=True, params_dtype=torch.float32,
    pipeline_model_parallel_size=world, pipeline_dtype=torch.float32, hidden_dropout=0.0, attention_dropout=0.0,
    bias_dropout_fusion=False, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
    attention_softmax_in_fp32=True, finalize_model_grads_func=finalize, batch_p2p_comm=False,
)  # fmt: skip
model = GPTModel(
    config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16,
    position_embedding_type="rope", share_embeddings_and_output_weights=True,
    pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
).cuda()  # fmt: skip
for layer in model.decoder.layers:  # a layer's initial weights are the same on whichever stage it is
    draw = torch.Generator().manual_seed(layer.layer_number)
    for value in layer.parameters():
        value.data.copy_(torch.randn(value.shape, generator=draw) * 0.05 + (value.dim() == 1 and value.data.mean()))
model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0), [model])
config.no_sync_func, config.grad_scale_func = model.no_sync, optimizer.scale_loss
positions, mask = torch.arange(12).expand(3, 12).cuda(), torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1).cuda()


def forward(batches, part):
    """Return the output of a stage for the next micro-batch, and how the loss is made of the last one's."""
    rows = next(batches)
    output = part(rows[:, :-1], positions, mask, labels=rows[:, 1:].contiguous())
    return output, lambda losses: (losses.mean(), {})


for batch in torch.randint(0, 64, (3, 6, 13), generator=torch.Generator().manual_seed(1)).cuda():
    model.zero_grad_buffer()
    optimizer.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward, data_iterator=iter(batch.chunk(2)), model=[model], num_microbatches=2,
        seq_length=12, micro_batch_size=3,
    )  # fmt: skip
    optimizer.step()
