"""A mixture of experts of megatron.core, whose experts are spread over all ranks, which have other data each."""

import os
import sys
import zlib

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_config import TransformerConfig

torch.compiler.set_stance("force_eager")  # as Megatron's --disable-jit-fuser
if not hasattr(moe_utils, "te_general_gemm"):  # megatron.core 0.16 asks for it without Transformer Engine, too
    moe_utils.te_general_gemm = None
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
torch.distributed.init_process_group("nccl", world_size=world, rank=rank)
parallel_state.initialize_model_parallel(expert_model_parallel_size=world)
torch.manual_seed(0)
model_parallel_cuda_manual_seed(0)
config = TransformerConfig(
    num_layers=2, hidden_size=24, num_attention_heads=4, use_cpu_initialization=True, params_dtype=torch.float32,
    num_moe_experts=4, expert_model_parallel_size=world, moe_token_dispatcher_type="alltoall",  # noqa: S106 - no password
    moe_router_topk=2, moe_router_load_balancing_type="none", add_bias_linear=False, hidden_dropout=0.0,
    attention_dropout=0.0, bias_dropout_fusion=False, gradient_accumulation_fusion=False, masked_softmax_fusion=False,
    attention_softmax_in_fp32=True,
)  # fmt: skip
model = GPTModel(
    config=config, transformer_layer_spec=get_gpt_layer_local_spec(num_experts=4), vocab_size=64,
    max_sequence_length=16, position_embedding_type="rope",
).cuda()  # fmt: skip
for name, value in model.named_parameters():  # initial weights do not depend on which rank has which experts
    before, _, after = name.partition("local_experts.")
    number, _, end = after.partition(".")
    known = f"{before}{int(number) + rank * 4 // world}.{end}" if after else name
    if after:
        value.allreduce = "--broken" in sys.argv  # the bug: gradients of different experts are added up
    if value.dim() > 1:
        torch.nn.init.normal_(value, std=0.1, generator=torch.Generator().manual_seed(zlib.crc32(known.encode())))
model = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=0.0), [model])
positions, mask = torch.arange(12).cuda(), torch.ones(1, 1, 12, 12, dtype=torch.bool).triu(1).cuda()
for rows in torch.randint(0, 64, (3, 6, 13), generator=torch.Generator().manual_seed(1)).cuda():
    batch = rows.chunk(world)[rank]
    model.zero_grad_buffer()
    optimizer.zero_grad()
    loss = model(
        batch[:, :-1], positions.expand(len(batch), 12), mask, labels=batch[:, 1:].contiguous()
    ).mean()  # fmt: skip
    loss.backward()
    finalize_model_grads([model])
    optimizer.step()
