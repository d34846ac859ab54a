"""Pictures of meshes and of the local shards of a tensor."""

import re

import pytest

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.placements import Partial, Replicate, Shard
from hyper_parallel.errors import LayoutError
from hyper_parallel.verify.pages import layout_svg, mesh_svg


def texts(picture):
    """Return the texts in a picture."""
    return re.findall(r"<text[^>]*>([^<]*)</text>", str(picture))


def description(picture):
    """Return the description of a picture for screen readers."""
    return re.search(r"<desc>(.*?)</desc>", str(picture), re.DOTALL)[1]


def test_a_mesh_names_its_axes_and_numbers_its_ranks(samples):
    """Columns and rows carry the names of the axes with positions, boxes the global ranks."""
    assert texts(mesh_svg(samples.mesh(2, 3))) == [
        "tp 0", "tp 1", "tp 2", "dp 0", "0", "1", "2", "dp 1", "3", "4", "5",
    ]  # fmt: skip
    assert texts(mesh_svg(samples.mesh(3))) == ["tp 0", "tp 1", "tp 2", "", "0", "1", "2"]


def test_every_position_of_more_axes_is_a_grid(samples):
    """A mesh of three axes is one grid per position of the first."""
    shown = texts(mesh_svg(samples.mesh(2, 1, 2)))
    assert shown == ["pp 0", "tp 0", "tp 1", "dp 0", "0", "1", "pp 1", "tp 0", "tp 1", "dp 0", "2", "3"]


def test_a_large_mesh_has_its_size(samples):
    """A mesh that does not fit in the picture ends in dots with the total size."""
    assert "… 192 ranks in all" in texts(mesh_svg(samples.mesh(16, 12)))
    assert "… 6 grids in all" in texts(mesh_svg(samples.mesh(6, 1, 1)))


def test_uneven_and_empty_shards_differ(samples):
    """Sizes are those of the ceil rule; an empty shard is labelled empty and has nothing filled."""
    picture = layout_svg(samples.layout(samples.mesh(3), [Shard(0)], (4, 3)))
    sizes = [text for text in texts(picture) if not text.startswith(("rank", "tp"))]
    assert sizes == ["", *["2 \N{MULTIPLICATION SIGN} 3"] * 2, "empty"]
    assert description(picture) == "rank 0: [0:2, 0:3]; rank 1: [2:4, 0:3]; rank 2: empty"
    assert str(picture).count("fill-opacity:.75") == 2


def test_shards_are_drawn_at_their_position(samples):
    """Each rank's rectangle is its shard's part of the outline, on both axes."""
    picture = str(layout_svg(samples.layout(samples.mesh(2, 2), [Shard(0), Shard(1)], (4, 4))))
    number = r'="([\d.]+)" '
    rectangle = f"<rect x{number}y{number}width{number}height{number}" + r'style="fill:var\(--one'
    shards = re.findall(rectangle, picture)
    left, top, width, height = map(float, shards[0])
    assert [tuple(map(float, shard)) for shard in shards] == [
        (left, top, width, height), (left + width, top, width, height),
        (left, top + height, width, height), (left + width, top + height, width, height),
    ]  # fmt: skip


def test_a_pending_reduction_is_marked(samples):
    """A partial value is striped and has a sum sign, and its description names the axis of the reduction."""
    layout = samples.layout(samples.mesh(2, 2), [Shard(0), Partial()], (5, 7))
    picture = layout_svg(layout)
    assert "3 \N{MULTIPLICATION SIGN} 7 \N{N-ARY SUMMATION}" in texts(picture)
    assert "rank 1: [0:3, 0:7], to be reduced by sum over tp" in description(picture)
    (name,) = re.findall(r'<pattern id="([^"]+)"', str(picture))
    assert str(picture).count(f"url(#{name})") == 4
    assert name not in str(layout_svg(samples.layout(samples.mesh(2, 2), [Replicate(), Partial()], (5, 7))))


def test_values_without_dims_and_tensors_without_elements(samples):
    """A 0-d value is one value on every rank; a tensor of no elements is empty on every rank."""
    assert texts(layout_svg(samples.layout(samples.mesh(2), [Replicate()], ()))).count("one value") == 2
    assert texts(layout_svg(samples.layout(samples.mesh(2), [Shard(0)], (0, 3)))).count("empty") == 2


def test_of_many_dims_the_sharded_ones_are_drawn(samples):
    """For more than two dims the picture shows the sharded ones, and the text has all sizes and ranges."""
    picture = layout_svg(samples.layout(samples.mesh(2, 2), [Shard(1), Shard(2)], (9, 4, 4)))
    assert "9 \N{MULTIPLICATION SIGN} 2 \N{MULTIPLICATION SIGN} 2" in texts(picture)
    assert "rank 3: [0:9, 2:4, 2:4]" in description(picture)
    assert len(set(re.findall(r'<rect x="([\d.]+)" y="([\d.]+)"[^>]*style="fill:var\(--one', str(picture)))) == 4


def test_a_layout_without_a_shape_is_rejected():
    """A layout without a shape is an error that names the missing shape."""
    with pytest.raises(LayoutError, match=r"^layout has no global shape; use with_shape\(\.\.\.\) first$"):
        layout_svg(Layout((2,), ("tp",))("tp"))
    with pytest.raises(LayoutError, match=r"describes only a mesh; call it first to place a tensor"):
        layout_svg(Layout((2,), ("tp",)))


def test_equal_rows_are_drawn_once(samples):
    """Rows, or grids, of three or more equal shards are drawn once, with how many there are; others are all drawn."""
    text = str(layout_svg(Layout.place(samples.mesh(8, 2), (Replicate(), Shard(0)), (5, 4))))
    assert "8 dp rows like this one" in text
    assert re.findall(r">(rank \d+)</text>", text) == ["rank 0", "rank 1"]
    text = str(layout_svg(Layout.place(samples.mesh(2, 2), (Replicate(), Shard(0)), (5, 4))))
    assert "like this one" not in text
    text = str(layout_svg(Layout.place(samples.mesh(3, 2, 2), (Replicate(), Replicate(), Shard(0)), (5, 4))))
    assert "3 pp grids like this one" in text
    assert len(re.findall(r">rank \d+</text>", text)) == 4
    text = str(layout_svg(Layout.place(samples.mesh(5, 2), (Shard(0), Replicate()), (3, 4))))
    assert "like this one" not in text  # two empty rows alone
