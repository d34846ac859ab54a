"""A user's mistakes: models, data and plans that cannot be verified."""

import numpy as np
import torch
from torch import nn

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel
from hyper_parallel.verify import ModelCase, ParallelPlan


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(6, 10, dtype=torch.float64)
        self.fc2 = nn.Linear(10, 5, dtype=torch.float64)

    def forward(self, x):
        return self.fc2(torch.tanh(self.fc1(x)))


def batches():
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((3, 6)), rng.standard_normal((3, 5)))]


def loss(output, batch):
    return ((output - batch[1]) ** 2).sum()


def model():
    return Net, batches(), loss


def plan(mesh):
    return {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}


def plan_of_strings(mesh):
    return {"fc1": "colwize", "fc2": "rowwise"}


def plan_of_classes(mesh):
    return {"fc1": ColwiseParallel}


def plan_of_numbers(mesh):
    return {1: ColwiseParallel()}


def plan_row_first(mesh):
    return {"fc1": RowwiseParallel(), "fc2": ColwiseParallel()}


def plan_of_batch_list(mesh):
    return ParallelPlan(plan(mesh), batch=[Shard(0)])


def plan_of_batch_axis(mesh):
    return ParallelPlan(plan(mesh), batch={"nosuch": Shard(0)})


def plan_of_batch_value(mesh):
    return ParallelPlan(plan(mesh), batch={"tp": "shard"})


def plan_of_none(mesh):
    return None


def plan_misspelt(mesh):
    return {"fc3": ColwiseParallel()}


def plan_on_activation(mesh):
    return {"": ColwiseParallel()}


def plan_half(mesh):
    return {"fc1": ColwiseParallel(use_local_output=False)}


def plan_raises(mesh):
    raise KeyError("mine")


def plan_exits(mesh):
    raise SystemExit(0)


def plan_no_arguments():
    return {}


def empty_batches():
    return Net, [], loss


def batches_of_numbers():
    return Net, [1, 2], loss


def batches_of_text():
    return Net, "abc", loss


def loss_number():
    return Net, batches(), 3


def nothing():
    return 7


def mapping_extra():
    return {"model": Net, "batches": batches(), "loss": loss, "losss": 1}


def case_optimizer():
    return ModelCase(Net, batches(), loss, optimizer="adamm")


def case_rate():
    return ModelCase(Net, batches(), loss, learning_rate="fast")


def case_inputs():
    return ModelCase(Net, batches(), loss, inputs=7)


def case_inputs_text():
    return ModelCase(Net, batches(), loss, inputs="2")


def case_clip():
    return ModelCase(Net, batches(), loss, clip=-1)


def case_accumulate():
    return ModelCase(Net, batches(), loss, accumulate=0)


def case_build():
    return ModelCase(lambda: 7, batches(), loss)


def case_batches():
    return ModelCase(Net, 3, loss)


def case_nan():
    return ModelCase(Net, batches(), lambda output, _: (output * float("nan")).sum())


def case_overflow():
    return ModelCase(Net, batches(), lambda output, batch: loss(output, batch) * float("inf"))


def case_meta():
    with torch.device("meta"):
        net = Net()
    return net, batches(), loss


def case_sparse():
    return Net, [(torch.eye(6)[:3].double().to_sparse(), torch.ones(3, 5))], loss


async def case_async():
    return model()


def plan_empty(mesh):
    return {"fc1": {}, "fc2": "local"}


def plan_of_pytorch(mesh):
    from torch.distributed.tensor import parallel

    return {"fc1": parallel.ColwiseParallel()}


def plan_of_pytorch_class(mesh):
    return {"fc1": type(plan_of_pytorch(mesh)["fc1"])}


def two_items():
    return Net, batches()


def four_items():
    return Net, batches(), loss, None


def no_items():
    return ()


def mapping_without_loss():
    return {"model": Net, "batches": batches()}


def mapping_misspelt():
    return {"modle": Net, "batches": batches(), "loss": loss}


def items_in_another_order():
    return Net, loss, batches()


def batches_of_one_tuple():
    return Net, batches()[0], loss


def batches_of_strings():
    return Net, [("a", "b")], loss


def batch_of_another_width():
    return Net, [(np.ones((3, 7)), np.ones((3, 5)))], loss


def loss_of_one_argument():
    return Net, batches(), lambda output: output.sum()


def loss_returns_nothing():
    return Net, batches(), lambda *_: None


def loss_is_a_vector():
    return Net, batches(), lambda output, batch: output - batch[1]


def case_steps():
    return ModelCase(Net, batches(), loss, optimizer=3)


def takes_arguments(size):
    return model()


def raises():
    raise FileNotFoundError("data/train.bin")


def net_is_none():
    return None, batches(), loss


def plan_of_list(mesh):
    return [ColwiseParallel()]


def plan_of_text(mesh):
    return "colwise"


def plan_of_style(mesh):
    return ColwiseParallel()


def plan_of_numbers_as_styles(mesh):
    return {"fc1": 1}


def plan_of_shards(mesh):
    return {"fc1": Shard(0)}


def plan_of_typo_in_name(mesh):
    return {"fc1": "colwsie"}


def plan_two_arguments(mesh, model):
    return plan(mesh)


def plan_axis(mesh):
    return ParallelPlan(plan(mesh["dp"]))


def case_frozen():
    return Net().requires_grad_(False), batches(), loss


def case_detached():
    return Net(), batches(), lambda output, batch: loss(output.detach(), batch)


def batches_of_mappings():
    return Net(), [dict(enumerate(batch)) for batch in batches()], loss


def yields():
    yield model()


def plan_again(mesh):
    return {"fc1": ColwiseParallel(), "fc*": ColwiseParallel()}


def plan_of_parameter(mesh):
    return {"fc1.weight": ColwiseParallel()}


def plan_of_module(mesh):
    return Net()


def plan_with_prefix(mesh):
    return {f"model.{path}": style for path, style in plan(mesh).items()}


def plan_with_int_path(mesh):
    return {1: ColwiseParallel()}


def plan_of_layout_text(mesh):
    return {"fc1": ColwiseParallel(output_layouts="shard")}


def plan_of_unknown_option(mesh):
    return {"fc1": ColwiseParallel(outptu_layouts=Shard(0))}


number = 3
