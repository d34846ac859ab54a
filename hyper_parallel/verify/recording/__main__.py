"""One rank of ``hyper-parallel record``: runs the user's program as ``python FILE ARGS`` would, and records it."""

from __future__ import annotations

import json
import sys

from hyper_parallel.errors import UnsupportedOnBackend
from hyper_parallel.verify.frameworks.contract.records import RecordingError
from hyper_parallel.verify.input_error import InputError
from hyper_parallel.verify.program.framework import program_framework
from hyper_parallel.verify.program.program import find_program, start_program, started_by_python
from hyper_parallel.verify.recording.run import record_run

_BAD_INPUT = 2


def main() -> None:
    """Record a program; the arguments of this module are the settings as JSON, then the program and its arguments."""
    settings, *words = sys.argv[1:]
    target, arguments = (" ".join(words[:2]), words[2:]) if words[0] == "-m" else (words[0], words[1:])
    try:
        program = find_program(target, arguments, "FILE")
        given = json.loads(settings)
        given["platform"] = given.get("platform") or program_framework(program)
        with started_by_python(program, "stdout", "one rank"), record_run(**given):
            start_program(program, ())
    except (InputError, RecordingError, UnsupportedOnBackend) as error:
        sys.stderr.write(f"hyper-parallel record: error: {error}\n")
        sys.exit(_BAD_INPUT)


if __name__ == "__main__":
    main()
