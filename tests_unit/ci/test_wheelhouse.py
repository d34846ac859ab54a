"""`ci/wheelhouse.py`: what is installed for the tests is, byte for byte, what was pinned."""

import hashlib
import json
import sys

import pytest

NAME = "one-1.0-py3-none-any.whl"
DIGEST = hashlib.sha256(b"content").hexdigest()


@pytest.fixture
def wheelhouse(tmp_path, monkeypatch, script):
    """The script as a module, with one pin, its hash, and a folder that has been fetched."""
    module = script("wheelhouse")
    monkeypatch.setattr(module, "CONSTRAINTS", tmp_path / "constraints.txt")
    monkeypatch.setattr(module, "HASHES", tmp_path / "hashes.json")
    module.CONSTRAINTS.write_text("# pins\none==1.0\n")
    module.HASHES.write_text(json.dumps({NAME: [DIGEST]}))
    folder = tmp_path / "wheels"
    folder.mkdir()
    (folder / NAME).write_bytes(b"content")
    (folder / module.COMPLETE).touch()
    return module


@pytest.fixture
def said(wheelhouse, tmp_path, capsys):
    """Run the script on the folder: its status, and what it said."""

    def run(*options):
        status = wheelhouse.main([*options, str(tmp_path / "wheels")])
        return status, capsys.readouterr().err

    return run


def test_what_was_pinned_is_accepted(said):
    """A folder with the pinned files is accepted without a word."""
    assert said() == (0, "")


def test_one_changed_byte_is_refused(wheelhouse, said, tmp_path):
    """A file of a known name with one changed byte is refused, with `--add` too."""
    path = tmp_path / "wheels" / NAME
    path.write_bytes(b"contenu")
    here = hashlib.sha256(b"contenu").hexdigest()
    message = (
        f"wheelhouse: {NAME} is not the file that was pinned: its sha256 is {here}, and ci/hashes.json accepts "
        f"{DIGEST}. Nothing was installed. Remove {path} and run this again; if it happens again, the index serves "
        "another file: find out why before you accept it in ci/hashes.json.\n"
    )
    assert said() == (1, message)
    assert said("--add") == (1, message)
    assert json.loads(wheelhouse.HASHES.read_text()) == {NAME: [DIGEST]}


def test_a_file_without_a_hash_is_refused_until_it_is_added(wheelhouse, said, tmp_path):
    """A pin without a hash is refused with the computed hash and the command that adds it."""
    wheelhouse.HASHES.write_text("{}")
    folder = tmp_path / "wheels"
    message = (
        "wheelhouse: ci/hashes.json has no hash of 1 files that the index of this machine serves; nothing was "
        f"installed:\n  {NAME} sha256:{DIGEST}\nIf you trust where they came from, accept them with:  "
        f"{sys.executable} {wheelhouse.CI / 'wheelhouse.py'} --add {folder}\n"
    )
    assert said() == (1, message)
    assert said("--add")[0] == 0
    assert json.loads(wheelhouse.HASHES.read_text()) == {NAME: [DIGEST]}
    assert said() == (0, "")


def test_a_pin_without_a_file_is_refused(wheelhouse, said, tmp_path):
    """A pin of which the folder has no file is refused: pip would find nothing, or another version."""
    wheelhouse.CONSTRAINTS.write_text('one==1.0\nTwo_x==2.0 ; python_version >= "3.2"\n')
    folder = tmp_path / "wheels"
    assert said() == (
        1,
        f"wheelhouse: {folder} has no wheel of two-x==2.0; remove {folder} and run this again\n",
    )


def test_another_version_and_a_source_archive_are_refused(wheelhouse, said, tmp_path):
    """A file of another version than pinned, and one that would run code to be read, are refused."""
    path = tmp_path / "wheels" / "one-1.1-py3-none-any.whl"
    path.write_bytes(b"")
    assert said() == (1, f"wheelhouse: {path.name}: ci/constraints.txt pins one==1.0; remove {path}\n")
    path.rename(path.with_name("two-1.0.tar.gz"))
    assert said() == (
        1,
        "wheelhouse: two-1.0.tar.gz is no wheel, and only wheels can be checked before they run code; remove it\n",
    )
    assert wheelhouse.identity("torch-2.13.0+cpu-cp311-cp311-linux_x86_64.whl") == ("torch", "2.13.0")


def test_a_line_that_is_no_exact_pin_is_refused(wheelhouse, said):
    """A range, or a marker that the script cannot decide, is refused: it would fetch what nobody chose."""
    wheelhouse.CONSTRAINTS.write_text("one>=1.0\n")
    message = (
        "wheelhouse: constraints.txt, line 1: 'one>=1.0' is not of the form `name==version` or "
        '`name==version ; python_version < "3.11"`\n'
    )
    assert said() == (1, message)


def test_markers_choose_the_line_of_the_python(wheelhouse):
    """A line counts for the Pythons that its marker names, and for all without a minor version."""
    text = 'a==1 ; python_version < "3.11"\na==2 ; python_version >= "3.11"\n'
    assert wheelhouse.pins(text, 10) == [("a", "1")]
    assert wheelhouse.pins(text, 11) == [("a", "2")]
    assert wheelhouse.pins(text) == [("a", "1"), ("a", "2")]


def test_every_pin_has_a_hash(script):
    """The committed file covers every line of constraints.txt, with hashes of the right form."""
    module = script("wheelhouse")
    hashes = json.loads(module.HASHES.read_text())
    assert set(module.pins(module.CONSTRAINTS.read_text())) - {module.identity(name) for name in hashes} == set()
    assert all(len(digest) == 64 and int(digest, 16) for known in hashes.values() for digest in known)
