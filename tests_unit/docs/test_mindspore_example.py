"""The example in MindSpore, which trains as its tutorials do, is verified like any script."""

from pathlib import Path

import pytest

from hyper_parallel.cli import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "mindspore_training.py"

pytestmark = [
    pytest.mark.platforms("mindspore"),
    pytest.mark.skipif(not EXAMPLE.exists(), reason="[no-tool] the examples are not installed"),
]


@pytest.mark.parametrize("world, arguments", [("3", []), ("2", ["--", "--graph-mode"])])
def test_the_example_trains_as_one_device(world, arguments, capsys):
    """Steps compiled by MindSpore, callbacks and a checkpoint are equal on ranks, in both modes."""
    status = main(["verify", "program", str(EXAMPLE), "--world-size", world, "--platform", "mindspore", *arguments])
    out = capsys.readouterr().out
    assert status == 0, out
    assert f"equal on {world} ranks" in out
    assert "6 optimizer steps" in out


def test_an_example_with_another_learning_rate_on_ranks_is_found(tmp_path, capsys):
    """With the learning rate scaled by the number of ranks, the status is 1 and the difference is in the first step."""
    text, line = EXAMPLE.read_text(), "nn.Adam(net.trainable_params(), 0.02)"
    assert text.count(line) == 1
    broken = tmp_path / "broken.py"
    broken.write_text(text.replace(line, "nn.Adam(net.trainable_params(), 0.02 * get_group_size())"))
    assert main(["verify", "program", str(broken), "--world-size", "2", "--platform", "mindspore"]) == 1
    assert "step 1" in capsys.readouterr().out.splitlines()[1]
