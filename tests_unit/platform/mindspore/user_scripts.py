"""Training scripts as users of MindSpore write them; each is called with what makes it parallel, or with nothing.

``script(net, data)`` takes two functions: ``net`` returns a cell as it is or distributed, ``data`` an array as a tensor
or distributed. It returns what is compared: losses, weights, and what else it computes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import initializer

SCRIPTS = {}


def script(function):
    """Register a script under its name."""
    SCRIPTS[function.__name__] = function
    return function


def numbers(*shape, seed=0):
    """Random float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def classes(size, count, seed=0):
    """Random labels, as MindSpore's losses take them."""
    return np.random.default_rng(seed).integers(0, count, size).astype(np.int32)


def started(cell):
    """Set the weights of a cell to random numbers that are the same everywhere."""
    for number, parameter in enumerate(cell.get_parameters()):
        if parameter.requires_grad:
            spread = 0.3 * numbers(*parameter.shape, seed=100 + number)
            parameter.set_data(Tensor(spread if parameter.ndim > 1 else 1 + spread).astype(parameter.dtype))
    return cell


def weights(*cells):
    """All parameters of cells."""
    return [parameter for cell in cells for parameter in cell.get_parameters()]


@script
def mlp_and_train_one_step(net, data):
    """The first page of the tutorials."""
    model = net(started(nn.SequentialCell(nn.Flatten(), nn.Dense(12, 16), nn.ReLU(), nn.Dense(16, 5))))
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    step = nn.TrainOneStepCell(nn.WithLossCell(model, loss), nn.Momentum(model.trainable_params(), 0.05, 0.9))
    step.set_train()
    return [step(data(numbers(7, 3, 4, seed=i)), data(classes(7, 5, i))) for i in range(3)] + weights(model)


@script
def convolutions_with_batch_norm(net, data):
    """An image classifier, evaluated at the end."""
    layers = (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten())
    model = net(started(nn.SequentialCell(*layers, nn.Dense(24, 4))))
    optimizer, loss = nn.Adam(model.trainable_params(), 0.01), nn.CrossEntropyLoss()
    grad = ms.value_and_grad(lambda x, y: loss(model(x), y), None, optimizer.parameters)
    losses = []
    for i in range(3):
        model.set_train()
        value, gradients = grad(data(numbers(7, 3, 4, 4, seed=i)), data(classes(7, 4, i)))
        optimizer(gradients)
        losses.append(value)
    model.set_train(False)
    return [*losses, model(data(numbers(7, 3, 4, 4, seed=9))), *weights(model)]


class Recurrent(nn.Cell):
    """A recurrent layer and a head on its last output."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.head = layer, nn.Dense(6, 3)

    def construct(self, x):
        """Classify sequences (batch, length, 5)."""
        return self.head(self.layer(x)[0][:, -1])


def _recurrent(layer, net, data):
    model = net(started(Recurrent(layer)))
    optimizer, loss = nn.Adam(model.trainable_params(), 0.02), nn.CrossEntropyLoss()
    grad = ms.value_and_grad(lambda x, y: loss(model(x), y), None, optimizer.parameters)
    losses = []
    for i in range(2):
        value, gradients = grad(data(numbers(7, 4, 5, seed=i)), data(classes(7, 3, i)))
        optimizer(gradients)
        losses.append(value)
    return losses + weights(model)


@script
def gru(net, data):
    """A GRU on sequences."""
    return _recurrent(nn.GRU(5, 6, batch_first=True), net, data)


@script
def lstm(net, data):
    """An LSTM on sequences."""
    return _recurrent(nn.LSTM(5, 6, batch_first=True), net, data)


class Encoder(nn.Cell):
    """Embedding, position, a transformer layer and a head."""

    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(11, 8), Parameter(initializer("zeros", (4, 8)), name="position")
        self.block, self.head = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), nn.Dense(8, 11)

    def construct(self, tokens):
        """Logits of the next token."""
        return self.head(self.block(self.embed(tokens) + self.position))


@script
def transformer_encoder(net, data):
    """MindSpore's own encoder layer with a language model's loss."""
    model = net(started(Encoder()))
    optimizer = nn.AdamWeightDecay(model.trainable_params(), 0.01, weight_decay=0.1)

    def forward(tokens, labels):
        logits = model(tokens)
        return ops.cross_entropy(logits.reshape((-1, 11)), labels.reshape((-1,))), logits

    grad = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)
    losses = []
    for i in range(2):
        (value, logits), gradients = grad(data(classes((7, 4), 11, i)), data(classes((7, 4), 11, i + 1)))
        optimizer(gradients)
        losses += [value, logits]
    return losses + weights(model)


@script
def two_optimizers(net, data):
    """A generator against a discriminator."""
    maker = net(started(nn.SequentialCell(nn.Dense(3, 8), nn.Tanh(), nn.Dense(8, 5))))
    judge = net(started(nn.SequentialCell(nn.Dense(5, 7), nn.LeakyReLU(0.2), nn.Dense(7, 1))))
    make_step, judge_step = nn.Adam(maker.trainable_params(), 0.01), nn.Adam(judge.trainable_params(), 0.02)
    loss = nn.BCEWithLogitsLoss()

    def judged(noise, real):
        good, bad = judge(real), judge(ops.stop_gradient(maker(noise)))
        return loss(good, ops.ones_like(good)) + loss(bad, ops.zeros_like(bad))

    def made(noise):
        verdict = judge(maker(noise))
        return loss(verdict, ops.ones_like(verdict))

    grad_judge = ms.value_and_grad(judged, None, judge_step.parameters)
    grad_maker = ms.value_and_grad(made, None, make_step.parameters)
    losses = []
    for i in range(2):
        noise, real = data(numbers(7, 3, seed=i)), data(numbers(7, 5, seed=i + 7))
        for optimizer, (value, gradients) in ((judge_step, grad_judge(noise, real)), (make_step, grad_maker(noise))):
            optimizer(gradients)
            losses.append(value)
    return losses + weights(maker, judge)


@script
def dynamic_loss_scale(net, data):
    """Half precision by ``amp.auto_mixed_precision``, a loss scaler, and a check for overflow."""
    model = net(started(nn.SequentialCell(nn.Dense(5, 8), nn.ReLU(), nn.Dense(8, 3))).to_float(ms.float16))
    optimizer, scaler = nn.SGD(model.trainable_params(), 0.05), ms.amp.DynamicLossScaler(1024, 2, 1)
    loss = nn.MSELoss()

    def forward(x, y):
        return scaler.scale(loss(model(x).astype(ms.float32), y))

    grad = ms.value_and_grad(forward, None, optimizer.parameters)
    losses = []
    for i in range(3):
        value, gradients = grad(data(numbers(7, 5, seed=i)), data(numbers(7, 3, seed=i + 5)))
        gradients = scaler.unscale(gradients)
        finite = ms.amp.all_finite(gradients)
        if finite:
            optimizer(gradients)
        scaler.adjust(finite)
        losses += [scaler.unscale(value), scaler.scale_value.astype(ms.float32)]
    return losses + weights(model)


@script
def accumulation(net, data):
    """Gradients of two batches are added before a step."""
    model = net(started(nn.SequentialCell(nn.Dense(5, 6), nn.Sigmoid(), nn.Dense(6, 2))))
    optimizer, loss = nn.SGD(model.trainable_params(), 0.1, momentum=0.9), nn.MSELoss()
    grad = ms.value_and_grad(lambda x, y: loss(model(x), y) / 2, None, optimizer.parameters)
    total, losses = None, []
    for i in range(4):
        value, gradients = grad(data(numbers(7, 5, seed=i)), data(numbers(7, 2, seed=i + 5)))
        total = gradients if total is None else tuple(a + b for a, b in zip(total, gradients, strict=True))
        losses.append(value)
        if i % 2:
            optimizer(total)
            total = None
    return losses + weights(model)


@script
def clipped_by_global_norm(net, data):
    """Gradients are clipped, and the learning rate decays."""
    model = net(started(nn.SequentialCell(nn.Dense(5, 6), nn.GELU(), nn.LayerNorm((6,)), nn.Dense(6, 2))))
    rate = nn.cosine_decay_lr(0.01, 0.1, 6, 3, 2)
    optimizer, loss = nn.AdamWeightDecay(model.trainable_params(), rate), nn.HuberLoss()
    grad = ms.value_and_grad(lambda x, y: loss(model(x), y), None, optimizer.parameters)
    losses = []
    for i in range(3):
        value, gradients = grad(data(numbers(7, 5, seed=i)), data(numbers(7, 2, seed=i + 5)))
        optimizer(ops.clip_by_global_norm(gradients, 0.1))
        losses.append(value)
    return losses + weights(model)


@script
def model_train_with_callbacks(net, data):
    """``Model.train`` with a callback that keeps losses; the dataset is whole on every rank."""
    del data

    class Losses(ms.Callback):
        """Keeps the loss of each step."""

        def __init__(self):
            super().__init__()
            self.losses = []

        def on_train_step_end(self, run_context):
            """Keep the step's loss."""
            self.losses.append(run_context.original_args().net_outputs)

    model, kept = net(started(nn.SequentialCell(nn.Dense(5, 6), nn.ReLU(), nn.Dense(6, 2)))), Losses()
    columns = (numbers(12, 5), numbers(12, 2, seed=3))
    batches = ms.dataset.NumpySlicesDataset(columns, ["x", "y"], shuffle=False).batch(4)
    trainer = ms.Model(model, nn.MSELoss(), nn.RMSProp(model.trainable_params(), 0.01), metrics={"mae"})
    trainer.train(2, batches, callbacks=[kept, ms.TimeMonitor()], dataset_sink_mode=False)
    return [*kept.losses, np.array(trainer.eval(batches, dataset_sink_mode=False)["mae"]), *weights(model)]


@script
def checkpoint(net, data):
    """Training goes on from a checkpoint, in another model."""
    loss, losses = nn.MSELoss(), []

    def train(model, first):
        optimizer = nn.Adagrad(model.trainable_params(), learning_rate=0.1)
        grad = ms.value_and_grad(lambda x, y: loss(model(x), y), None, optimizer.parameters)
        for i in range(first, first + 2):
            value, gradients = grad(data(numbers(7, 5, seed=i)), data(numbers(7, 2, seed=i + 5)))
            optimizer(gradients)
            losses.append(value)

    first, second = (net(started(nn.SequentialCell(nn.Dense(5, 6), nn.Tanh(), nn.Dense(6, 2)))) for _ in range(2))
    train(first, 0)
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "model.ckpt")
        ms.save_checkpoint(first, path)
        ms.load_param_into_net(second, ms.load_checkpoint(path))
    train(second, 2)
    return losses + weights(second)


@script
def optimizers_of_mint(net, data):
    """``mint.optim.AdamW`` and layers of ``mint``."""
    model = net(started(nn.SequentialCell(mint.nn.Linear(5, 6), mint.nn.SiLU(), mint.nn.Linear(6, 3))))
    optimizer = ms.experimental.optim.AdamW(model.trainable_params(), lr=0.01, weight_decay=0.1)
    schedule = ms.experimental.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    grad = ms.value_and_grad(lambda x, y: mint.mean(mint.square(model(x) - y)), None, model.trainable_params())
    losses = []
    for i in range(3):
        value, gradients = grad(data(numbers(7, 5, seed=i)), data(numbers(7, 3, seed=i + 5)))
        optimizer(gradients)
        schedule.step()
        losses.append(value)
    return losses + weights(model)


class Tied(nn.Cell):
    """A language model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.norm = nn.Embedding(13, 6), nn.Dense(6, 6), nn.LayerNorm((6,))

    def construct(self, tokens):
        """Logits (batch, length, vocabulary)."""
        hidden = self.norm(ops.relu(self.mix(self.embed(tokens))))
        return ops.matmul(hidden, self.embed.embedding_table.T)


@script
def language_model_with_a_tied_head(net, data):
    """Padding is left out of the loss."""
    model = net(started(Tied()))
    optimizer, loss = nn.Adam(model.trainable_params(), 0.02), nn.CrossEntropyLoss(ignore_index=0)
    grad = ms.value_and_grad(
        lambda tokens, labels: loss(model(tokens).transpose((0, 2, 1)), labels), None, optimizer.parameters
    )
    losses = []
    for i in range(2):
        value, gradients = grad(data(classes((7, 4), 13, i)), data(classes((7, 4), 13, i + 1)))
        optimizer(gradients)
        losses.append(value)
    return losses + weights(model)


class Mixed(nn.Cell):
    """Half precision inside, and single precision around it."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Dense(5, 6, dtype=ms.float16), nn.Dense(6, 3)

    def construct(self, x):
        """Cast in and out."""
        return self.outer(self.inner(x.astype(ms.float16)).astype(ms.float32))


@script
def mixed_dtypes(net, data):
    """Parameters of two dtypes in one optimizer per dtype."""
    model = net(started(Mixed()))
    optimizer, loss = nn.Momentum(model.trainable_params(), 0.05, 0.9), nn.L1Loss()
    grad = ms.value_and_grad(lambda x, y: loss(model(x), y), None, optimizer.parameters)
    losses = []
    for i in range(2):
        value, gradients = grad(data(numbers(7, 5, seed=i)), data(numbers(7, 3, seed=i + 5)))
        optimizer(gradients)
        losses.append(value)
    return losses + weights(model)


@script
def cell_with_hooks(net, data):
    """Hooks scale an output and keep its gradient."""
    model, seen = net(started(nn.SequentialCell(nn.Dense(5, 6), nn.ReLU(), nn.Dense(6, 2)))), []

    def halved(cell, inputs, output):
        del cell, inputs
        output.register_hook(seen.append)
        return output * 0.5

    model[0].register_forward_hook(halved)
    optimizer = nn.SGD(model.trainable_params(), 0.1)
    grad = ms.value_and_grad(lambda x: ops.square(model(x)).mean(), None, optimizer.parameters)
    losses = []
    for i in range(2):
        value, gradients = grad(data(numbers(7, 5, seed=i)))
        optimizer(gradients)
        losses.append(value)
    return [*losses, *seen, *weights(model)]


@script
def backward_hooks(net, data):
    """A hook on the gradients of a layer."""
    model = net(started(nn.Dense(5, 2)))
    model.register_backward_hook(lambda *_: None)
    return [ms.grad(lambda x: model(x).sum())(data(numbers(7, 5)))]


@script
def a_training_step_of_its_own(net, data):
    """A Cell that differentiates by ``GradOperation`` and steps, with frozen layers and groups."""

    class Step(nn.Cell):
        """One step."""

        def __init__(self, model, optimizer):
            super().__init__(auto_prefix=False)
            self.model, self.optimizer, self.parameters = model, optimizer, optimizer.parameters
            self.grad = ops.GradOperation(get_by_list=True)

        def construct(self, x, y):
            """Return the loss before the step."""
            loss = self.model(x, y)
            return ops.depend(loss, self.optimizer(self.grad(self.model, self.parameters)(x, y)))

    layers = started(nn.SequentialCell(nn.Dense(5, 6), nn.ELU(), nn.Dense(6, 6), nn.Dense(6, 2)))
    for parameter in layers[0].get_parameters():
        parameter.requires_grad = False
    model = net(layers)
    trained = model.trainable_params()
    groups = [{"params": trained[:2], "lr": 0.05, "weight_decay": 0.1}, {"params": trained[2:]}]
    step = Step(nn.WithLossCell(model, nn.SmoothL1Loss()), nn.Adam(groups, 0.01))
    losses = [step(data(numbers(7, 5, seed=i)), data(numbers(7, 2, seed=i + 5))).mean() for i in range(3)]
    return losses + weights(model)
