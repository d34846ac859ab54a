"""Completion in shells: the scripts offer what the parsers take."""

import argparse
import json
import shutil
import subprocess

import pytest

from hyper_parallel.cli import main, parser
from hyper_parallel.cli.completion import SHELLS, commands_of, script


def completed(words, top=None):
    """Return what bash offers after these words, of which the last is begun."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("[no-tool] bash is not installed")
    body = script("bash", top or parser()) + 'COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _hyper_parallel\n'
    body += 'printf "%s\\n" "${COMPREPLY[@]}"\n'
    done = subprocess.run([bash, "-c", body, "-", *words], check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.split()


@pytest.mark.parametrize(
    "words, offered",
    [
        (["ver"], ["verify"]),
        (["verify", "m"], ["model"]),
        (["verify", "model", "--sc"], ["--scenario"]),
        (["verify", "model", "--dtype", ""], ["float64", "float32"]),
        (["verify", "model", "--steps", "3", "--dtype", "float3"], ["float32"]),
        (["verify", "bugs", "--on"], ["--only"]),
        (["completion", "f"], ["fish"]),
        (["--v"], ["--version"]),
        (["nosuch", "--v"], ["--version"]),
    ],
)
def test_bash_completes(words, offered):
    """Commands, options of the command that the words name, and choices of an option are offered."""
    assert completed(["hyper-parallel", *words]) == offered


def test_bash_offers_every_command():
    """Of every command, all subcommands and options are offered."""
    for command in commands_of(parser()):
        if command.path in ((), ("verify",), ("verify", "bugs"), ("trace",)):
            offered = completed(["hyper-parallel", *command.path, ""])
            assert sorted(offered) == sorted((*command.words, *command.options)), command.path


def test_the_parsers_are_read_whole():
    """Subcommands stand under their command, choices under their option, help in one line."""
    commands = {command.path: command for command in commands_of(parser())}
    assert {"verify", "completion", "trace"} <= set(commands[()].words)
    assert commands["verify", "program"].choices["--platform"] == ("torch", "mindspore")
    assert commands["completion",].words == tuple(SHELLS)
    assert all("\n" not in text for command in commands.values() for text in command.options.values())


def test_scripts_of_the_other_shells(capsys):
    """Zsh takes the functions of bash; fish gets a line for every word and option, quoted."""
    assert main(["completion", "zsh"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("autoload")
    assert text.endswith(script("bash", parser()))
    assert main(["completion", "zsh", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["script"] == text
    assert main(["completion", "fish"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "complete -c hyper-parallel -n __hyper_parallel_at -f -a verify" in lines
    assert any(" -n '__hyper_parallel_at verify model' -l dtype -x -a 'float64 float32' -d " in line for line in lines)
    top = argparse.ArgumentParser()
    top.add_argument("-x", help="it's 5 %% more")
    assert """ -s x -d 'it'"'"'s 5 % more'""" in script("fish", top)
