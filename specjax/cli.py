"""The command `specjax`: each subcommand is a dataclass of flags (`flags/`) handed to its file in `commands/`.

Progress and tables go to stderr, generated text to stdout, `--json FILE` (`-` = stdout) gets one object at the very end.
Exit status 0 = done, 1 = `lossless` did not pass, 2 = bad input, told in one line on stderr.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from specjax.commands import RUN
from specjax.console import check_goal, environment, keep_compiled, say, silent, write, write_json
from specjax.flags import parse
from specjax.models.fetch import cache_dir


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (the process's own by default); the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        command = parse(arguments)
        goal = command.output.json
        check_goal(goal)
        keep_compiled(cache_dir() / "compiled")
        result = RUN[type(command)](command, silent if goal == "-" else write)
        status = result.pop("exit_status", 0)
        if goal is not None:
            summary = {"command": shlex.join(["specjax", *arguments]), **environment(), **result["summary"]}
            write_json(goal, {**result, "summary": summary})
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        say(f"specjax: {' '.join(str(error).split())}")
        return 2
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except KeyboardInterrupt:
        return 130
    return status
