"""``hyper-parallel completion``: scripts that complete commands, options and choices, made from the parsers."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hyper_parallel.cli.output import print_result
from hyper_parallel.verify.report import report_json

__all__ = ["SHELLS", "Commands", "add_parser", "commands_of", "script"]

_PROGRAM = "hyper-parallel"

_DESCRIPTION = """\
Print a script that completes commands, options, their choices, and names of files.

For zsh, also add `source ~/.hyper-parallel.zsh` to ~/.zshrc."""

_EXAMPLES = (
    "hyper-parallel completion bash > ~/.local/share/bash-completion/completions/hyper-parallel",
    "hyper-parallel completion zsh > ~/.hyper-parallel.zsh",
    "hyper-parallel completion fish > ~/.config/fish/completions/hyper-parallel.fish",
)


@dataclass(frozen=True)
class Commands:
    """Completions of a command.

    Attributes:
        path: words of the command without the program, ``()`` for the program itself.
        words: names of the subcommands.
        options: the options with their help texts.
        choices: the choices of options that have any, by option.
    """

    path: tuple[str, ...]
    words: tuple[str, ...]
    options: dict[str, str]
    choices: dict[str, tuple[str, ...]]


def add_parser(subcommands: Any, top: Callable[[], argparse.ArgumentParser]) -> None:
    """Declare the subcommand.

    Args:
        subcommands: subcommands of the program.
        top: returns the program's parser, from which the script is generated.
    """
    parser = subcommands.add_parser(
        "completion",
        help="print a completion script for bash, zsh or fish",
        description=_DESCRIPTION,
        examples=_EXAMPLES,
        guide="docs/faq.md",
    )
    parser.add_argument("shell", choices=tuple(SHELLS), help="shell to write the script for")
    parser.add_argument("--json", action="store_true", help="print the script as JSON")
    parser.set_defaults(run=lambda arguments: run(arguments, top()))


def run(arguments: argparse.Namespace, top: argparse.ArgumentParser) -> int:
    """Print the script; return 0."""
    text = script(arguments.shell, top)
    print_result(report_json({"ok": True, "script": text}) if arguments.json else text.removesuffix("\n"))
    return 0


def script(shell: str, top: argparse.ArgumentParser) -> str:
    """Return the script for a shell, one of :data:`SHELLS`."""
    return SHELLS[shell](list(commands_of(top)))


def commands_of(parser: argparse.ArgumentParser, path: tuple[str, ...] = ()) -> Iterator[Commands]:
    """Yield the program and all its commands, each before its subcommands."""
    nested: dict[str, argparse.ArgumentParser] = {}
    options: dict[str, str] = {}
    choices: dict[str, tuple[str, ...]] = {}
    values: tuple[str, ...] = ()
    for action in parser._actions:  # noqa: SLF001 - argparse has no other list of what it parses
        if isinstance(action.choices, dict):  # the choices are subcommands
            nested.update(action.choices)
        elif action.option_strings:
            options.update(dict.fromkeys(action.option_strings, _help(action)))
            if action.choices:
                choices.update(dict.fromkeys(action.option_strings, tuple(map(str, action.choices))))
        elif action.choices:
            values = tuple(map(str, action.choices))
    yield Commands(path, (*nested, *values), options, choices)
    for name, child in nested.items():
        yield from commands_of(child, (*path, name))


def _help(action: argparse.Action) -> str:
    return str(action.help or "").replace("%%", "%").partition("\n")[0]


def _bash(commands: list[Commands]) -> str:
    known = " ".join(shlex.quote(" ".join(command.path)) for command in commands if command.path)
    cases = "\n".join(_bash_case(command) for command in commands)
    return f"""\
_hyper_parallel() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" path="" word next known
  COMPREPLY=()
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    next="${{path:+$path }}$word"
    for known in {known}; do
      if [ "$next" = "$known" ]; then path="$next"; fi
    done
  done
  local words="" values=""
  case "$path" in
{cases}
  esac
  if [ -n "$values" ]; then words="$values"; fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _hyper_parallel {_PROGRAM}
"""


def _bash_case(command: Commands) -> str:
    words = " ".join((*command.words, *command.options))
    lines = [f"    {shlex.quote(' '.join(command.path))})", f"      words={shlex.quote(words)}"]
    if command.choices:
        lines.append('      case "$before" in')
        for option, values in command.choices.items():
            lines.append(f"        {option}) values={shlex.quote(' '.join(values))} ;;")
        lines.append("      esac")
    return "\n".join([*lines, "      ;;"])


def _zsh(commands: list[Commands]) -> str:
    return "autoload -Uz compinit bashcompinit\ncompinit\nbashcompinit\n" + _bash(commands)


def _fish(commands: list[Commands]) -> str:
    lines = [
        f"function __{_PROGRAM.replace('-', '_')}_at",
        "  set -l words (commandline -opc)",
        "  set -l path",
        "  for word in $words[2..-1]",
        "    string match -q -- '-*' $word; or set -a path $word",
        "  end",
        '  test "$path" = "$argv"',
        "end",
    ]
    for command in commands:
        path = " ".join(command.path)
        at = f"complete -c {_PROGRAM} -n {shlex.quote(f'__hyper_parallel_at {path}'.rstrip())}"
        lines += [f"{at} -f -a {shlex.quote(word)}" for word in command.words]
        for option, text in command.options.items():
            name = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            values = f" -x -a {shlex.quote(' '.join(command.choices[option]))}" if option in command.choices else ""
            lines.append(f"{at} {name}{values} -d {shlex.quote(text)}")
    return "\n".join(lines) + "\n"


SHELLS: dict[str, Callable[[list[Commands]], str]] = {"bash": _bash, "zsh": _zsh, "fish": _fish}
"""The functions that generate scripts, by shell."""
