"""Help pages: examples that parse, a guide that exists, one width, every option described."""

import argparse
import shlex
from pathlib import Path

import pytest

from hyper_parallel.cli import parse, parser

ROOT = Path(__file__).parents[2]
WIDTHS = (60, 100, 200)


def commands(command):
    """Return the program and every command below it."""
    yield command
    for action in command._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from commands(child)


COMMANDS = {command.prog: command for command in commands(parser())}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_page_ends_with_examples_and_a_guide(name):
    """At least two command lines of this command that parse, and a page that exists."""
    examples, guide = COMMANDS[name].epilog.split("\n\n")
    lines = [line.strip().rpartition("; ")[2].partition(" > ")[0] for line in examples.split("\n")[1:]]
    assert len(lines) >= 2
    for line in lines:
        words = shlex.split(line)
        assert " ".join(words).startswith(name)
        assert parse(words[1:]).run
    assert (ROOT / guide.removeprefix("guide: ")).is_file()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_page_has_one_width(name, monkeypatch):
    """Lines fill the terminal up to 100 characters; only examples and metavars may be longer."""
    command = COMMANDS[name]
    for columns in WIDTHS:
        monkeypatch.setenv("COLUMNS", str(columns))
        prose = command.format_help().partition("\n\n")[2].partition("\nexamples:")[0]
        assert max(map(len, prose.splitlines())) <= max(min(columns - 2, 100), 60)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_says_what_it_does(name):
    """No option has its default as its whole description, or none at all."""
    for action in COMMANDS[name]._actions:
        if not isinstance(action, argparse._SubParsersAction):
            assert action.help
            assert not action.help.startswith(("default", "of ", "that "))


def test_the_description_is_filled_and_indented_lines_stay():
    """Paragraphs are joined and broken anew; a block with indented lines is printed as it was written."""
    command = type(parser())(prog="x", description="one\ntwo\n\na table:\n    1  2\n    3  4")
    assert "one two\n\na table:\n    1  2\n    3  4\n" in command.format_help()


@pytest.mark.parametrize("word", ["ops", "verify-ops", "verify_ops"])
def test_a_command_of_another_place_is_named(word):
    """A command that a user looks for at the wrong place is answered with the right one."""
    with pytest.raises(ValueError, match=f"^there is no command '{word}'; run hyper-parallel verify ops "):
        parse([word])
