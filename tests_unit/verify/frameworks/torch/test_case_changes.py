"""Changes of a PyTorch program's case while it is recorded, and the notes that say what was changed."""

import numpy as np
import pytest
import torch
from torch import nn

from hyper_parallel.verify.frameworks.contract.case_changes import CaseChanges, kept_elements, noise_of
from hyper_parallel.verify.frameworks.contract.record_log import RecordingError, RecordLog
from hyper_parallel.verify.frameworks.torch.hooks import recording

pytestmark = pytest.mark.platforms("torch")


def recorded(program, **changes):
    """Run a program with changes; return what its rank leaves behind."""
    log = RecordLog(0, changes=CaseChanges(**changes))
    with recording(log):
        program()
    return log.result()


class Identity(nn.Module):
    """Keeps what it is called with."""

    def forward(self, x, *rest):
        """Return ``x``."""
        self.seen = (x, *rest)
        return x


def test_weights_are_written_once_before_the_first_forward():
    """The first forward sees them; the program may change them after that."""
    layer, values = nn.Linear(3, 2), np.arange(6.0, dtype=np.float32).reshape(2, 3)

    def program():
        layer(torch.ones(1, 3))
        with torch.no_grad():
            layer.weight += 1
        layer(torch.ones(1, 3))

    result = recorded(program, weights={"weight": values, "other": values})
    assert result.notes["changed weights"] == ["weight"]
    assert np.array_equal(result.records[0].value, values)
    assert np.array_equal(layer.weight.detach().numpy(), values + 1)


def test_weights_of_another_shape_are_an_error():
    """Values of a part that the rank does not have are not written."""
    with pytest.raises(RecordingError) as caught:
        recorded(lambda: nn.Linear(3, 2)(torch.ones(1, 3)), weights={"weight": np.ones((1, 3), np.float32)})
    assert str(caught.value) == "weight has the shape [2, 3] in this run, and had [1, 3] before"


def test_losses_are_weighted_in_the_backward_only():
    """The recorded loss is the program's; its gradients are multiplied, also those of several losses."""
    weight = torch.tensor([2.0, 3.0], requires_grad=True)

    def program():
        weight.sum().backward()
        torch.autograd.backward([weight[0] * 1, weight[1] * 2])

    result = recorded(program, share=0.5)
    assert weight.grad.tolist() == [1.0, 1.5]
    assert [float(record.value) for record in result.records] == [5.0, 2.0, 6.0]
    assert result.notes["shared losses"] == 0.5


def test_outputs_are_multiplied_after_they_were_recorded():
    """The program sees the product; another shape is an error."""
    factors = np.array([[2.0, 3.0, 4.0]], np.float32)
    seen = []

    def program():
        layer = Identity()
        with torch.no_grad():
            layer(torch.ones(2, 3))
        seen.extend([layer(torch.ones(1, 3)), layer(torch.ones(1, 3))])

    result = recorded(program, outputs={("Identity", 0, 1): factors})
    assert [value.tolist() for value in seen] == [[[1.0, 1.0, 1.0]], [[2.0, 3.0, 4.0]]]
    assert result.records[2].value.tolist() == [[1.0, 1.0, 1.0]]
    assert result.notes["changed outputs"] == 1
    with pytest.raises(RecordingError) as caught:
        recorded(program, outputs={("Identity", 0, 0): factors[:, :2]})
    assert str(caught.value) == "the output 'Identity' has the shape [1, 3], and had [1, 2] before"


def test_inputs_are_changed_by_their_place_in_memory():
    """Views of one batch get the noise of their own elements; gradients, integers and scalars stay."""
    whole, model = torch.zeros(7, 3), Identity()
    noise = torch.from_numpy(noise_of(4, 21)).float().reshape(7, 3)
    for part in (slice(2, 5), slice(0, 7, 3)):
        recorded(lambda part=part: model(whole[part], torch.ones(2, dtype=int), torch.tensor(2)), input_seed=4)
        assert torch.equal(model.seen[0], noise[part])
        assert model.seen[1].tolist() == [1, 1]
    computed = torch.zeros(3, requires_grad=True)
    recorded(lambda: model(computed), input_seed=4)
    assert model.seen[0] is computed


def test_masks_and_labels_drop_elements():
    """What was left out before stays so; integers without a left-out label are no labels."""
    kept, model = torch.from_numpy(kept_elements(4, 9)), Identity()
    mask, labels = torch.tensor([True, False, True] * 3), torch.tensor([5, -100, 6] * 3)
    recorded(lambda: model(mask[3:], labels[:4], torch.ones(9, dtype=int), torch.ones(9)), mask_seed=4)
    assert torch.equal(model.seen[0], (mask & kept)[3:])
    assert torch.equal(model.seen[1], torch.where(kept, labels, -100)[:4])
    assert model.seen[2].tolist() == [1] * 9
    assert model.seen[3].tolist() == [1] * 9


def test_strides_change_and_values_stay():
    """Matrices are not contiguous any more, vectors are."""
    matrix, vector, model = torch.randn(5, 3), torch.randn(5), Identity()
    result = recorded(lambda: model(matrix, vector), strided=True)
    assert torch.equal(model.seen[0], matrix)
    assert model.seen[0].stride() == (1, 5)
    assert model.seen[1] is vector
    assert result.notes["contiguous inputs"] is False


def test_own_gradients_are_noted_before_hooks_that_come_later():
    """Parameters that already have hooks are left out; nothing stays behind."""
    layer = nn.Linear(3, 2)
    layer.bias.register_hook(lambda gradient: gradient * 2)
    result = recorded(lambda: layer(torch.ones(1, 3)).sum().backward())
    assert list(result.notes["own gradients"]) == ["weight"]
    assert not layer.weight._backward_hooks
