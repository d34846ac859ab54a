# world: 2
"""Knowledge distillation into a frozen student with LoRA adapters, bfloat16 autocast, DDP over trainable weights."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class LoRALinear(nn.Linear):
    def __init__(self, i, o, rank=4):
        super().__init__(i, o)
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, i) * i ** -0.5)
        self.lora_b = nn.Parameter(torch.zeros(o, rank))

    def forward(self, x):
        return super().forward(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * 2.0


def net(linear):
    return nn.Sequential(linear(36, 110), nn.GELU(), linear(110, 110), nn.GELU(), linear(110, 15))


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29553")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(87)
    teacher = net(nn.Linear).requires_grad_(False).eval()
    student = DDP(net(LoRALinear))
    trainable = [p for p in student.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(trainable, lr=1e-2, eps=1e-6)
    gen = torch.Generator().manual_seed(88)
    temperature = 2.0
    for step in range(5):
        x = torch.randn(20, 36, generator=gen)
        y = x[:, :15].argmax(1)
        x, y = x[rank::world], y[rank::world]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                wanted = teacher(x)
            out = student(x)
        out, wanted = out.float(), wanted.float()
        kd = F.kl_div((out / temperature).log_softmax(-1), (wanted / temperature).log_softmax(-1), log_target=True, reduction="batchmean")
        loss = 0.7 * kd * temperature**2 + 0.3 * F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
