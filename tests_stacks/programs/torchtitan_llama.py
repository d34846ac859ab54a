"""torchtitan's Llama, parallelized by its own functions: FSDP2, which adds gradients up, tensor parallel, stages.

The argument says what is added to FSDP2: ``tensor`` or ``context`` parallel over two ranks, where sequences are split
for a ring of attention; or ``pipeline``: all ranks are stages.
"""

import os
import sys

import torch
import torch.distributed as dist
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.context_parallel import prepare_context_parallel_input
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.infra.parallelize import parallelize_llama

world = int(os.environ["WORLD_SIZE"])
tensor = min(2, world) if "tensor" in sys.argv else 1
pipeline = world if "pipeline" in sys.argv else 1
context = min(2, world) if "context" in sys.argv else 1
data = world // tensor // pipeline // context
broken = "--broken" in sys.argv
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
torch.manual_seed(0)
arguments = TransformerModelArgs(dim=24, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=64, max_seq_len=16)
model = Transformer(arguments)
with torch.no_grad():
    model.init_weights()
dims = ParallelDims(dp_replicate=1, dp_shard=data, cp=context, tp=tensor, pp=pipeline, ep=1, etp=1, world_size=world)
config = JobConfig()
config.activation_checkpoint.mode = "none"
config.training.mixed_precision_param = "float32"
config.training.local_batch_size = 6
config.parallelism.disable_loss_parallel = True
config.parallelism.pipeline_parallel_degree = pipeline
config.parallelism.pipeline_parallel_schedule = "1F1B"


def loss_of(output, targets):
    """Return the loss of some rows: their share of the mean over all tokens of the batch."""
    counted = (
        targets.numel() if broken and tensor * pipeline * context == 1 else 6 * 12
    )  # the bug of FSDP2: a mean of local tokens
    loss = torch.nn.functional.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")
    return loss / counted


parts = [model]
if pipeline > 1:
    schedule, parts, first, last = pipeline_llm(
        model, dims, config, torch.device("cuda"), arguments, parallelize_llama, loss_of
    )
elif world > 1:
    parallelize_llama(model, dims, config)
optimizer = torch.optim.AdamW([value for part in parts for value in part.parameters()], lr=1e-2)
for batch in torch.randint(0, 64, (3, 6, 13), generator=torch.Generator().manual_seed(1)).cuda():
    rows = batch.chunk(data)[dist.get_rank() // tensor // context % data]
    inputs, targets = rows[:, :-1], rows[:, 1:].contiguous()
    more = {}
    if context > 1:
        inputs, targets, more = prepare_context_parallel_input(
            inputs, targets, {}, dims.get_mesh("cp"), torch.device("cuda")
        )
        more = {} if broken else more  # the bug of context parallel: a rank's positions start at 0
    if pipeline > 1:
        losses = [] if last else None
        schedule.step(*([inputs] if first else []), target=targets if last else None, losses=losses)
        if broken and first:  # the bug of the pipeline: one stage's gradients are means over micro-batches
            for value in parts[0].parameters():
                value.grad /= 6
    else:
        loss_of(model(inputs, **more), targets).backward()
        if broken and dist.get_rank() % tensor:  # the bug of tensor parallel: a rank's gradient of a norm is lost
            model.layers["1"].ffn_norm.weight.grad.to_local().zero_()
    optimizer.step()
    optimizer.zero_grad()
