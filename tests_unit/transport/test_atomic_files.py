"""Files that are whole or not there."""

import pytest

from hyper_parallel.transport.atomic_files import atomic_write_text


def test_a_file_is_replaced_at_once(tmp_path):
    """A text takes the place of the earlier one; what cannot be encoded leaves that one, and nothing beside it."""
    path = tmp_path / "report.txt"
    atomic_write_text(path, "first")
    atomic_write_text(path, "zweite é")
    with pytest.raises(UnicodeEncodeError):
        atomic_write_text(path, "\ud800")
    assert path.read_text(encoding="utf-8") == "zweite é"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_plain_file_is_written_to(tmp_path):
    """A link stays a link, to a file that has the text; a device stays a device."""
    (tmp_path / "link").symlink_to(tmp_path / "file")
    atomic_write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
