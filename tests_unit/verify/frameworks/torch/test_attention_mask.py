"""The dropout inside a fused attention is recorded as its mask; where it cannot be determined, the report says so."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from hyper_parallel.verify import simulate, verify_program
from hyper_parallel.verify.frameworks.contract.record_log import RecordLog
from hyper_parallel.verify.frameworks.torch.attention_mask import attention_mask, masked_attention
from hyper_parallel.verify.frameworks.torch.hooks import recording

pytestmark = pytest.mark.platforms("torch")


def attend(query, key, value, **options):
    """Return an attention's output, the recorded masks, and the generator's state afterwards."""
    log = RecordLog(0)
    with recording(log):
        output = nn.functional.scaled_dot_product_attention(query, key, value, **options)
    return output, [entry.value for entry in log.result().records if entry.kind == "mask"], log.notes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_masks_of_attention_are_those_that_were_drawn(dtype, causal):
    """Weights that the mask drops are zero, the output is that of the others, and no random number is drawn more."""
    torch.manual_seed(3)
    query, key, value = (torch.randn(2, 3, 5, 8).to(dtype) for _ in range(3))
    state = torch.get_rng_state()
    plain = nn.functional.scaled_dot_product_attention(query, key, value, None, 0.4, causal)
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    output, (mask,), notes = attend(query, key, value, dropout_p=0.4, is_causal=causal)
    assert torch.equal(output, plain)
    assert torch.equal(torch.get_rng_state(), after)
    assert "masks that were not recorded" not in notes
    scores = query.double() @ key.double().transpose(-1, -2) / 8**0.5
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf")) if causal else scores
    weights = scores.softmax(-1) * torch.from_numpy(mask) / 0.6
    assert 0 < mask.mean() < 1
    torch.testing.assert_close(
        weights @ value.double(), output.double(), atol=3e-2 if dtype is torch.bfloat16 else 1e-6, rtol=0
    )


def test_grouped_queries_have_masks():
    """Fewer heads of keys than of queries: there is a mask per head of queries."""
    query, key = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 4, 8)
    _, (mask,), _ = attend(query, key, key, dropout_p=0.3, enable_gqa=True)
    assert mask.shape == (2, 6, 5, 4)


def test_attention_without_dropout_has_no_mask():
    """Nothing was drawn."""
    query = torch.randn(2, 5, 8)
    assert attend(query, query, query)[1] == []


def test_a_mask_that_cannot_be_told_is_noted():
    """A DTensor's mask is drawn by its operator; the module is listed, once, and nothing is guessed."""

    def body():
        mesh = init_device_mesh("cpu", (2,))
        query = distribute_tensor(torch.randn(4, 5, 8), mesh, [Shard(0)])
        log = RecordLog(0)
        with recording(log):
            for _ in range(2):
                nn.functional.scaled_dot_product_attention(query, query, query, dropout_p=0.2)
        return log.notes["masks that were not recorded"]

    assert simulate(body, 2, "torch") == [["(model)"]] * 2


def test_a_generator_that_draws_otherwise_is_no_mask():
    """An attention that draws as many numbers as its values say cannot be repeated with others."""
    query, drawn = torch.zeros(2, 5, 8), iter((5, 7))

    def attention(query, key, value):
        torch.rand(next(drawn))
        return query

    state = torch.get_rng_state()
    attention(query, query, query)
    after = torch.get_rng_state()
    assert attention_mask(attention, query, query, state) is None
    assert torch.equal(torch.get_rng_state(), after)


class Attending(nn.Module):
    """A projection, and an attention with dropout."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(5, 6)
        self.attend = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)

    def forward(self, x):
        """Attend to the projected positions."""
        x = self.project(x)
        return self.attend(x, x, x, need_weights=False)[0]


def train():
    """Train on a part of the batch; all ranks draw the same masks."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = Attending()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(7, 4, 5)
    model(x.tensor_split(ranks)[rank]).square().sum().backward()
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
    optimizer.step()


def test_shared_masks_of_attention_are_named():
    """Ranks whose attention drops the same weights of different samples are told that they share random numbers."""
    report = verify_program(train, 2, platform="torch")
    assert not report.ok
    first = report.verdict.first
    assert (first.kind, first.cause.kind) == ("mask", "random-shared")


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"attn_mask": torch.ones(4, 5).tril(1).bool(), "scale": 0.3},
        {"attn_mask": torch.randn(4, 5), "enable_gqa": True},
    ],
    ids=["causal", "booleans and scale", "numbers and groups"],
)
def test_an_attention_with_a_given_mask_is_that_of_pytorch(options):
    """Given the mask that PyTorch drew, output and gradients of every input are PyTorch's, in each form of the call."""
    torch.manual_seed(1)
    heads = 2 if options.get("enable_gqa") else 4
    query = torch.randn(2, 4, 4, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(2, heads, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    options = {
        name: each.double() if isinstance(each, torch.Tensor) and each.is_floating_point() else each
        for name, each in options.items()
    }
    state = torch.get_rng_state()
    plain = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=0.4, **options)
    dropped = {"dropout_p": 0.4, "enable_gqa": options.get("enable_gqa", False)}
    kept = attention_mask(
        lambda *tensors: nn.functional.scaled_dot_product_attention(*tensors, **dropped), query, key, state
    )
    again = masked_attention((kept != 0).numpy(), query, key, value, dropout_p=0.4, **options)
    torch.testing.assert_close(again, plain)
    g = torch.randn_like(plain)
    for own, wanted in zip(
        *(torch.autograd.grad((out * g).sum(), (query, key, value)) for out in (again, plain)), strict=True
    ):
        torch.testing.assert_close(own, wanted)
