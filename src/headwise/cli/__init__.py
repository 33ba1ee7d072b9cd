"""The command line: `headwise run | theory | pretrain | list | report | draw | cost | policies |
explain | infer | check`.

argparse, because it is on every machine that has torch and because its errors can be one line.
Heavy imports happen inside the commands. Exit codes: 0 done, 1 failed, 2 bad usage; 130, 143 and
129 after Ctrl-C, SIGTERM and SIGHUP.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import signal
import sys
from collections.abc import Sequence

from headwise.cli.arguments import parser
from headwise.cli.output import first, say
from headwise.errors import UsageError, nearest
from headwise.signals import RESUME, Stop, Stopped, installed, message, stop_of_command

# command -> (module, function); imported when it is run
COMMANDS = {
    "run": ("run", "run"),
    "theory": ("theory", "theory"),
    "pretrain": ("lm", "pretrain"),
    "list": ("store", "list_runs"),
    "report": ("store", "report"),
    "draw": ("store", "draw"),
    "cost": ("shapes", "cost"),
    "policies": ("shapes", "policies"),
    "explain": ("shapes", "explain"),
    "infer": ("shapes", "infer"),
    "check": ("check", "check"),
}


def _dispatch(words: Sequence[str], stop: Stop) -> int:
    """Run one command; of several processes the first one speaks."""
    with contextlib.nullcontext() if first() else contextlib.redirect_stdout(io.StringIO()):
        if words and not words[0].startswith("-") and words[0] not in COMMANDS:
            raise UsageError(f"unknown command {words[0]!r}; {nearest(words[0], COMMANDS)}")
        known = parser()
        args = known.parse_args(words, argparse.Namespace(stop=stop))
        if args.version:
            from headwise import __version__

            print(f"headwise {__version__}")
        elif args.command is None:
            known.print_help()
        else:
            file, function = COMMANDS[args.command]
            module = importlib.import_module(f"headwise.cli.{file}")
            answer = getattr(module, function)(args, words)
            if args.json:
                print(json.dumps(answer))
            return 1 if answer.get("failed") else 0
        return 0


def main(argv: Sequence[str] | None = None, stop: Stop | None = None) -> int:
    """Run one command; returns the exit code. Without a `stop` signals are handled meanwhile."""
    if stop is None:
        with installed(stop_of_command()) as stop:
            return main(argv, stop)
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _dispatch(words, stop)
        finally:
            sys.stdout.flush()  # a reader that is gone shows here, not at exit
    except UsageError as e:
        say(f"headwise: error: {e}")
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as e:
        stopped = e if isinstance(e, Stopped) else Stopped(signal.SIGINT)
        bar = "\n" if sys.stderr.isatty() else ""  # the progress bar's line is left first
        with contextlib.suppress(OSError):  # a terminal that was closed
            say(f"{bar}headwise: {message(stopped.number, stopped.saved)}; {RESUME}")
        return 128 + stopped.number
    except (OSError, RuntimeError, MemoryError) as e:
        if os.environ.get("HEADWISE_TRACEBACK"):
            raise
        who = "" if first() else f" in process {os.environ['RANK']}"
        print(
            f"headwise: error{who}: {' '.join(str(e).split())} (HEADWISE_TRACEBACK=1 shows where)",
            file=sys.stderr,
            flush=True,
        )
        return 1
