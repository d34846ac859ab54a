"""DeepSpeed's ZeRO; its stage is the argument."""

import sys

import deepspeed
import torch
import torch.distributed as dist

deepspeed.init_distributed("gloo")
world, rank = dist.get_world_size(), dist.get_rank()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 3))
settings = {
    "train_batch_size": 8,
    "train_micro_batch_size_per_gpu": 8 // world,
    "zero_optimization": {"stage": int(sys.argv[1])},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.5,
}
if "--broken" in sys.argv and rank == 1:  # the bug: a rank's part of one gradient is counted twice
    net[2].weight.register_hook(lambda gradient: gradient * 2)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
engine, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=settings)
if "--clipped" in sys.argv:  # the bug: each rank clips its partition by the partition's own norm
    engine.optimizer.get_grad_norm_direct = lambda gradients, *_, **__: torch.nn.utils.get_total_norm(gradients)
for batch in torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(1)):
    loss = engine(batch.chunk(world)[rank]).square().mean()
    engine.backward(loss)
    engine.step()
