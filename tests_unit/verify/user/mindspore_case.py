"""A user's own file: a MindSpore model, its data and loss, and plans for it."""

import mindspore
import numpy as np
from mindspore import mint, nn

from hyper_parallel.core.dtensor.placements import Shard
from hyper_parallel.core.tensor_parallel import ColwiseParallel, RowwiseParallel
from hyper_parallel.verify import ModelCase, ParallelPlan


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.fc1 = mint.nn.Linear(6, 10, dtype=mindspore.float64)
        self.fc2 = mint.nn.Linear(10, 5, dtype=mindspore.float64)

    def construct(self, x):
        return self.fc2(mint.tanh(self.fc1(x)))


def batches(count=2):
    rng = np.random.default_rng(0)
    return [(rng.standard_normal((3, 6)), rng.standard_normal((3, 5))) for _ in range(count)]


def loss(output, batch):
    error = output - batch[1]
    return (error * error).sum()


def case():
    return ModelCase(Net, batches(), loss, learning_rate=0.01)


def as_triple():
    return Net(), batches(), loss


def as_mapping():
    return {"model": Net(), "batches": batches(), "loss": loss, "optimizer": "adamw", "learning_rate": 0.01}


def with_unused_layer():
    class Wider(Net):
        def __init__(self):
            super().__init__()
            self.spare = mint.nn.Linear(2, 3, dtype=mindspore.float64)

    return Wider, batches(), loss


def nothing():
    return 7


def plan(mesh):
    if len(mesh.names) == 1:
        return {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
    styles = {"fc1": ColwiseParallel(use_local_output=False), "fc2": RowwiseParallel(use_local_output=False)}
    return ParallelPlan(styles, {"dp": Shard(0)})


def wrong_key(mesh):
    del mesh
    return {"fc3": ColwiseParallel()}


def no_plan(mesh):
    del mesh
    return [1]


def centred():
    class Centred(Net):
        def construct(self, x):
            inner = self.fc1(x)
            return self.fc2(mint.tanh(inner - inner.mean(0, keep_dims=True)))

    return ModelCase(Centred, batches(), loss)


def frozen():
    def build():
        net = Net()
        for parameter in net.get_parameters():
            parameter.requires_grad = False
        return net

    return ModelCase(build, batches(), loss)


def detached_loss():
    return Net, batches(), lambda output, batch: loss(mindspore.ops.stop_gradient(output), batch)


def loss_per_column():
    return Net, batches(), lambda output, batch: (output - batch[1]).mean(0)


def loss_as_number():
    return Net, batches(), lambda output, batch: float(loss(output, batch))


def with_options():
    """Accumulation, clipping, a scheduler and an optimizer of the user's, all with dropout."""
    return ModelCase(
        Dropping,
        batches(3),
        loss,
        optimizer=lambda parameters: mindspore.experimental.optim.AdamW(parameters, lr=0.02),
        scheduler=lambda optimizer: mindspore.experimental.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        accumulate=2,
        clip=0.5,
    )


class Dropping(Net):
    def __init__(self):
        super().__init__()
        self.drop = mint.nn.Dropout(0.3)
        self.set_train()

    def construct(self, x):
        return self.fc2(self.drop(mint.tanh(self.fc1(x))))


def own_step(training):
    value, gradients = mindspore.value_and_grad(training.loss, None, training.parameters)()
    training.clip(0.1, gradients)
    training.optimizer(gradients)
    return value


def with_step():
    return ModelCase(Dropping, batches(), loss, optimizer="adamw", learning_rate=0.01, step=own_step)
