# world: 3
# world: 2 --opt nadam --sched lambda --dtype autocast --batch 11 --accum 1
# world: 3 --opt adagrad --sched poly --batch 21 --accum 3 --clip 0
# world: 2 --opt adamax --sched onecycle --batch 13 --accum 2 --dtype autocast --clip 0.1
"""DDP classifier: label smoothing, decay groups, a schedule per batch, accumulation of unequal micro-batches."""
import argparse, contextlib, math, os
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=3); p.add_argument("--batch", type=int, default=17); p.add_argument("--accum", type=int, default=2)
p.add_argument("--opt", default="adamw"); p.add_argument("--sched", default="onecycle"); p.add_argument("--dtype", default="float32")
p.add_argument("--smooth", type=float, default=0.1); p.add_argument("--clip", type=float, default=0.5); p.add_argument("--hook", action="store_true")
a = p.parse_args()
dist.init_process_group("gloo"); rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(3)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(3, 10, 3, padding=1); self.norm = nn.GroupNorm(2, 10); self.gate = nn.Parameter(torch.tensor(0.7))
        self.body = nn.ModuleList(nn.Linear(10, 10) for _ in range(2)); self.ln = nn.LayerNorm(10); self.out = nn.Linear(10, 7)
    def forward(self, x):
        h = self.norm(self.stem(x)).mean(-1)
        for b in self.body: h = h + self.gate * torch.nn.functional.silu(b(h))
        return self.out(self.ln(h))
model = Net(); ddp = DDP(model)
if a.hook:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
    ddp.register_comm_hook(None, bf16_compress_hook)
decay = [q for q in model.parameters() if q.ndim > 1]; rest = [q for q in model.parameters() if q.ndim < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
opt = {"adamw": lambda: torch.optim.AdamW(groups, lr=2e-2, betas=(0.8, 0.95)), "nadam": lambda: torch.optim.NAdam(groups, lr=1e-2),
       "rmsprop": lambda: torch.optim.RMSprop(groups, lr=1e-2, momentum=0.9, centered=True), "adagrad": lambda: torch.optim.Adagrad(groups, lr=5e-2),
       "sgd": lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True), "adamax": lambda: torch.optim.Adamax(groups, lr=1e-2)}[a.opt]()
sched = {"onecycle": lambda: torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=[3e-2, 1e-2], total_steps=a.steps + 4, cycle_momentum=False),
         "step": lambda: torch.optim.lr_scheduler.StepLR(opt, 2, 0.3), "poly": lambda: torch.optim.lr_scheduler.PolynomialLR(opt, a.steps + 1, 2.0),
         "lambda": lambda: torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 3) / math.sqrt(s + 1))}[a.sched]()
auto = torch.autocast("cpu", torch.bfloat16) if a.dtype == "autocast" else contextlib.nullcontext()
for step in range(a.steps):
    g = torch.Generator().manual_seed(100 + step)
    x = torch.randn(a.batch, 3, 9, generator=g); y = torch.randint(7, (a.batch,), generator=g)
    xs, ys = x.tensor_split(a.accum), y.tensor_split(a.accum)
    for m in range(a.accum):
        last = m == a.accum - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            mx, my = xs[m].tensor_split(world)[rank], ys[m].tensor_split(world)[rank]
            with auto:
                logits = ddp(mx)
                loss = nn.functional.cross_entropy(logits.float(), my, label_smoothing=a.smooth, reduction="sum") * world / a.batch
            loss.backward()
    if a.clip: nn.utils.clip_grad_norm_(model.parameters(), a.clip)
    opt.step(); sched.step(); opt.zero_grad()
