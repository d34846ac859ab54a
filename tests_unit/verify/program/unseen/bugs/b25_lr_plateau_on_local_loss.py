# world: 3
"""Hand-written data parallelism: flatten all gradients, one all_reduce; odd batch, unequal shares."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

BATCH = 31


def setup():
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def sync_gradients(parameters, world):
    if world == 1:
        return
    grads = [p.grad for p in parameters]
    flat = _flatten_dense_tensors(grads)
    dist.all_reduce(flat)
    for grad, synced in zip(grads, _unflatten_dense_tensors(flat, grads)):
        grad.copy_(synced)


def main():
    rank, world = setup()
    torch.manual_seed(100 + rank)  # different seeds: weights come from rank 0
    model = nn.Sequential(nn.Linear(29, 150), nn.Tanh(), nn.Linear(150, 81), nn.Tanh(), nn.Linear(81, 7))
    if world > 1:
        for p in model.parameters():
            dist.broadcast(p.data, 0)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.0)
    gen = torch.Generator().manual_seed(55)
    for step in range(6):
        x = torch.randn(BATCH, 29, generator=gen)
        y = (x[:, :7] * x[:, 7:14]).argmax(1)
        x, y = x.tensor_split(world)[rank], y.tensor_split(world)[rank]
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / BATCH
        opt.zero_grad()
        loss.backward()
        sync_gradients(list(model.parameters()), world)
        opt.step()
        sched.step(loss.item() * world)
        value = loss.detach().clone()
        if world > 1:
            dist.all_reduce(value)
        if rank == 0:
            print(f"step={step} loss={value.item():.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
