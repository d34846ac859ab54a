"""Plans with a fault have no certificate, and its place is named, without running; the right plan of each has one."""

import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    HeadNorm,
    Partial,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    local_map,
)
from hyper_parallel.errors import HyperParallelError
from hyper_parallel.verify import ModelCase, ParallelPlan
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.prove.plan import certify

pytestmark = pytest.mark.platforms("torch")

WORDS, WIDTH, LENGTH, BATCH, HEADS, EXPERTS = 32, 16, 8, 4, 4, 4


def language_model(*, head_norms=False, tied=False):
    """Return a case of a model of one block, with norms of queries and keys, or a tied head."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
            self.q_norm, self.k_norm = (nn.RMSNorm(WIDTH // HEADS) if head_norms else nn.Identity() for _ in range(2))

        def forward(self, x):
            q, k, v = (
                layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v)
            )
            y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
            return self.o(y.transpose(1, 2).flatten(2))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.attention = nn.Embedding(WORDS, WIDTH), Attention()
            self.norm1, self.norm2, self.norm = (nn.LayerNorm(WIDTH) for _ in range(3))
            self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, WORDS, bias=False)
            if tied:
                self.head.weight = self.tokens.weight

        def forward(self, ids):
            x = self.tokens(ids)
            x = x + self.attention(self.norm1(x))
            return self.head(self.norm(x + self.down(F.gelu(self.up(self.norm2(x))))))

    def loss(logits, batch):
        return F.cross_entropy(logits.flatten(0, 1), batch[-1].flatten())

    ids = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    return ModelCase(Model, [(ids, ids)], loss)


TENSOR = {
    "tokens": RowwiseParallel(input_layouts=Replicate()),
    "attention.[qkv]": ColwiseParallel(),
    "attention.o": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}
SEQUENCE = TENSOR | {
    "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm*": SequenceParallel(),
    "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
    "attention.o": RowwiseParallel(output_layouts=Shard(1)),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}
NORMS = TENSOR | {"attention.[qk]_norm": HeadNorm()}


def without(plan, *names):
    """Return a plan without some of its entries."""
    return {name: style for name, style in plan.items() if name not in names}


SPLIT_NORMS = without(SEQUENCE, "norm*") | {"norm[12]": SequenceParallel()}
STYLED = [
    ("a style is left out", {}, TENSOR, without(TENSOR, "down"), "SPEC: the model under PLAN raised"),
    ("a norm has no style", {}, SEQUENCE, SPLIT_NORMS,
     "norm: the gradient of norm.weight is a pending sum over tp, not reduced"),
    ("an output is not reduced", {}, TENSOR, TENSOR | {"attention.o": RowwiseParallel(output_layouts=Partial())},
     "attention.o: a value that is a pending sum over tp leaves as a plain tensor, not reduced"),
    ("another input layout", {}, SEQUENCE, SPLIT_NORMS | {"norm": SequenceParallel(sequence_dim=0)},
     "norm: SequenceParallel declares Shard(0) on tp, but the plain tensor is Shard(1)"),
    ("norms of heads", {"head_norms": True}, NORMS, TENSOR,
     "attention.q_norm: the gradient of attention.q_norm.weight is a pending sum over tp, not reduced"),
    ("a loss of shards", {}, TENSOR, TENSOR | {"head": ColwiseParallel()},
     "(loss): the loss is not proven: cross_entropy"),
    ("a tied weight", {"tied": True}, TENSOR, without(TENSOR, "head"), "head: argument x is a plain tensor"),
    ("conflicting tied weights", {"tied": True}, TENSOR,
     TENSOR | {"tokens": ColwiseParallel(output_layouts=Replicate())},
     "  - tied weight with conflicting layouts: tokens.weight"),
]  # fmt: skip


@pytest.mark.parametrize("options, right, wrong, named", [row[1:] for row in STYLED], ids=[row[0] for row in STYLED])
def test_styles(options, right, wrong, named):
    """A plan of styles with a fault has no certificate; a message names the module."""
    assert_found(lambda: language_model(**options), right, wrong, named, (2,), ("tp",), None)


def assert_found(case, right, wrong, named, shape, names, batch):
    """Certify two plans, of which only the first has a certificate."""
    certificate = certify(case, lambda _: ParallelPlan(right, batch=batch), shape, names)
    assert (certificate.ok, certificate.wrong) == (True, [])
    assert not any("plain" in line for line in certificate.open)
    assert any(line.startswith(named) for line in problems(case, wrong, shape, names, batch))


def problems(case, plan, shape, names, batch):
    """Return why a plan has no certificate."""
    try:
        return certify(case, lambda _: ParallelPlan(plan, batch=batch), shape, names).wrong
    except (InputError, HyperParallelError) as error:
        return str(error).replace("the model under PLAN: ", "").splitlines()


def layer_of(function, weights, out):
    """Return a model that computes ``function`` by local_map, its case, and what shards its weights."""
    import torch
    from torch import nn

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            for name, (shape, _) in weights.items():
                setattr(self, name, nn.Parameter(torch.zeros(shape)))

        def forward(self, x):
            return mapped(x, *(getattr(self, name) for name in weights))

    mapped = local_map(function, out_placements=out)

    def shard(model, mesh):
        for name, (_, place) in weights.items():
            places = [place if axis == mesh.names[-1] else Replicate() for axis in mesh.names]
            setattr(model, name, nn.Parameter(distribute_tensor(getattr(model, name).detach(), mesh, places)))
        return model

    def case():
        batch = torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)
        return ModelCase(Layer, [batch], lambda y, _: (y * y).sum())

    return case, shard


def row_wise(x, w):
    """Return a product over a shard of the features."""
    return x @ w


def row_wise_with_bias(x, w, b):
    """Return the same, with the bias added on every rank."""
    return x @ w + b


def row_wise_without_bias(x, w, b):
    """Return the product alone."""
    del b
    return x @ w


WEIGHT = ((WIDTH, WIDTH), Shard(0))
BIAS = ((WIDTH,), Replicate())


def experts_of(x, w):
    """Return the sum over the experts of a rank."""
    import torch

    return torch.einsum("bd,edh->bh", x, w)


TP, DP_TP, SPLIT = ((2,), ("tp",)), ((2, 2), ("dp", "tp")), {"tp": Shard(1)}
REGIONS = [
    ("no reduction", (row_wise, row_wise), {"w": WEIGHT}, ([Partial()], [Replicate()]), TP, SPLIT,
     "local_map(row_wise), output declares Replicate() on tp"),
    ("a bias added by every rank", (row_wise_without_bias, row_wise_with_bias), {"w": WEIGHT, "b": BIAS},
     ([Partial()], [Partial()]), TP, SPLIT, "add on tp"),
    ("another axis", (row_wise, row_wise), {"w": WEIGHT}, ([Shard(0), Partial()], [Partial(), Partial()]), DP_TP,
     SPLIT | {"dp": Shard(0)}, "local_map(row_wise), output declares Partial(sum) on dp"),
    ("experts", (experts_of, experts_of), {"w": ((EXPERTS, WIDTH, WIDTH), Shard(0))}, ([Partial()], [Replicate()]), TP,
     {}, "local_map(experts_of), output declares Replicate() on tp"),
]  # fmt: skip


@pytest.mark.parametrize(
    "functions, weights, outputs, mesh, batch, named", [row[1:] for row in REGIONS], ids=[row[0] for row in REGIONS]
)
def test_local_functions(functions, weights, outputs, mesh, batch, named):
    """A function on local tensors that computes another thing than it declares has no certificate."""
    results = []
    for function, out in zip(functions, outputs, strict=True):
        case, shard = layer_of(function, weights, out)
        results.append(certify(case, lambda _, shard=shard: ParallelPlan(shard, batch=batch), *mesh))
    right, wrong = results
    assert (right.ok, right.wrong) == (True, []), right.text()
    assert not wrong.ok, wrong.text()
    assert any(named in line for line in wrong.wrong), wrong.text()


def scaled(finish):
    """Return a case whose model scales its input and finishes by a function of the DTensor."""
    import torch
    from torch import nn

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x):
            return finish(x * self.weight)

    batch = torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)
    return ModelCase(Scale, [batch], lambda y, _: (y * y).sum())


@pytest.mark.parametrize(
    "finish, wrong",
    [
        (lambda y: DTensor.from_local(y.to_local(), y.device_mesh, [Replicate()]),
         ["(model): from_local declares Replicate() on tp, but the plain tensor is Shard(1)"]),
        (lambda y: y.to_local(), ["(loss): the loss is Partial(sum) on tp, not reduced"]),
        (lambda y: DTensor.from_local(y.to_local(), y.device_mesh, [Shard(1)]), []),
        (lambda y: y.to_local() * y.to_local().shape[1], []),  # no law says what it is: listed as not covered
    ],
)  # fmt: skip
def test_plain_tensors_of_the_program(finish, wrong):
    """A shard that the program declares to be another, or leaves in the loss, has no certificate."""
    found = certify(lambda: scaled(finish), lambda _: ParallelPlan({}, batch={"tp": Shard(1)}), (2,), ("tp",))
    assert found.wrong == wrong
    assert found.open[-1] == (
        "whether these are the calls of one device, which does not run the program: the model raised AttributeError: "
        "'Tensor' object has no attribute 'to_local'"
    )
    assert len(found.open) == 1 or any("mul on tp: not traced" in line for line in found.open)
    assert found.status == (1 if wrong else 3)


@pytest.mark.parametrize(
    "between, line",
    [
        (
            lambda h, torch: torch.tanh(h) if h.shape[-1] < 4 * WIDTH else torch.sigmoid(h),
            "plain tensors on tp: a rank does not call what one device calls",
        ),
        (
            lambda h, _: h.T @ h,
            "(model): matmul on tp: its result is split along several dims",
        ),
    ],
)
def test_plain_calls_that_no_law_proves_are_open(between, line):
    """Calls that depend on a rank's sizes, and results that are split along several dims, are listed as not covered."""
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(WIDTH, 4 * WIDTH)

        def forward(self, x):
            return between(self.up(x), torch).square().sum()

    def case():
        x = torch.zeros(BATCH, WIDTH)
        return ModelCase(Model, [(x, x)], lambda value, _: value)

    found = certify(case, lambda _: ParallelPlan({"up": ColwiseParallel()}), (2,), ("tp",))
    assert line in found.open, found.text()
