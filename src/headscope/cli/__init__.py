"""The command line. `main` is the entry point; every command lives in a module of its subject."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def main() -> None:
    """Run the command line. Exit status: 0 fine, 1 failed, 2 bad usage, 130 stopped by Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it was closed
            stream.reconfigure(errors="replace")  # a terminal without a letter shows a question mark for it
    # torch's threads spin while they wait for one another; where another program has one of the cores, that made a scan
    # five times slower. Read when torch is loaded, which is later.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    import typer

    from headscope.cli.app import app
    from headscope.core.errors import HeadscopeError

    try:
        status = app(arguments, standalone_mode=False, prog_name="headscope")
        if status == 130:  # newer typers take Ctrl-C for themselves and give this
            raise KeyboardInterrupt
        return status if isinstance(status, int) else 0
    except HeadscopeError as error:
        return _say(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return _say("Stopped; nothing was written.", 130)
    except BrokenPipeError:  # the reader of a pipe went away, such as `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if hasattr(error, "format_message"):  # bad usage; typer raises click's errors, of click or of its own copy
            return _bad_usage(error)
        if os.environ.get("HEADSCOPE_TRACEBACK"):
            raise
        reason = (str(error).strip().splitlines() or [""])[0]
        return _say(
            f"Something went wrong that headscope did not foresee ({type(error).__name__}: {reason[:300]}). "
            "HEADSCOPE_TRACEBACK=1 shows where; please report it.",
            1,
        )


def _bad_usage(error: Any) -> int:
    if type(error).__name__ == "NoArgsIsHelpError":  # the help was the answer
        return 2
    # subcommands know their own --help
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "headscope"
    return _say(f"{error.format_message().rstrip('.')}. See {path} --help.", 2)


def _say(sentence: str, status: int) -> int:
    sentence = " ".join(sentence.split())
    print(f"Error: {sentence}" if status != 130 else sentence, file=sys.stderr, flush=True)
    return status
