"""The command line: `headwise run | choose | theory | pretrain | list | report | draw | generate |
chat | export | cost | policies | plan | explore | explain | infer | check | inspect | convert |
cancel | worker`.

argparse, because it is on every machine that has torch and because its errors can be one line.
Heavy imports happen inside the commands. Exit codes: 0 done, 1 failed, 2 bad usage; 130, 143 and
129 after Ctrl-C, SIGTERM and SIGHUP.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import json
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence

from headwise.cli.arguments import parser
from headwise.cli.output import prepare_streams, say
from headwise.errors import UsageError, bounded, nearest, one_line, shown
from headwise.lm.launch import World, from_env
from headwise.signals import Stop, Stopped, installed, message, resume, stop_of_command

# command -> (module, function); imported when it is run
COMMANDS = {
    "run": ("run", "run"),
    "choose": ("choose", "choose"),
    "theory": ("theory", "theory"),
    "pretrain": ("lm", "pretrain"),
    "list": ("store", "list_runs"),
    "report": ("store", "report"),
    "draw": ("store", "draw"),
    "generate": ("generate", "generate"),
    "chat": ("generate", "chat"),
    "export": ("export", "export"),
    "cost": ("shapes", "cost"),
    "policies": ("shapes", "policies"),
    "plan": ("plan", "plan"),
    "explore": ("explore", "explore"),
    "explain": ("shapes", "explain"),
    "infer": ("shapes", "infer"),
    "check": ("check", "check"),
    "cancel": ("cluster", "cancel"),
    "worker": ("cluster", "worker"),
    "inspect": ("inspect", "inspect"),
    "convert": ("convert", "convert"),
}


# What values that no check foresaw may raise. Other exceptions are our mistakes, and show where.
BAD_VALUES = (ArithmeticError, UnicodeError, ValueError, RecursionError)
FAILURES = (OSError, RuntimeError, MemoryError)


def _dispatch(words: Sequence[str], speaks: bool, stop: Stop) -> int:
    """Run one command; of several processes the first one speaks."""
    with contextlib.nullcontext() if speaks else contextlib.redirect_stdout(io.StringIO()):
        if words and not words[0].startswith("-") and words[0] not in COMMANDS:
            raise UsageError(f"unknown command {shown(words[0])}; {nearest(words[0], COMMANDS)}")
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


def _world(words: Sequence[str]) -> World:
    """The processes that share this command: several under torchrun, which `pretrain` alone is for.
    A pod's own RANK silences nothing else."""
    if words[:1] != ["pretrain"]:
        return World()
    return from_env()


def _why(error: BaseException) -> str:
    """What failed, in one line. Python's own MemoryError says nothing, so the place is named."""
    text = " ".join(str(error).split())
    if isinstance(error, BAD_VALUES):
        text = one_line(error)
    wanted = re.search(r"tried to allocate (\d+) bytes", text)  # as PyTorch says it on a CPU
    if isinstance(error, MemoryError) or wanted:
        place = [
            f"{frame.f_globals['__name__']}.{frame.f_code.co_name}"
            for frame, _ in traceback.walk_tb(error.__traceback__)
            if str(frame.f_globals.get("__name__")).startswith("headwise.")
        ][-1:]
        size = f"{int(wanted[1]) / 2**30:,.1f} GiB at once" if wanted else text
        wanted_here = f" wants {size}" if size else ""
        text = f"out of memory: {''.join(place) or 'the command'}{wanted_here or ' wants too much'}"
    return bounded(text)


def main(argv: Sequence[str] | None = None, stop: Stop | None = None) -> int:
    """Run one command; returns the exit code. Without a `stop` signals are handled meanwhile."""
    if stop is None:
        with installed(stop_of_command()) as stop:
            return main(argv, stop)
    words = list(sys.argv[1:] if argv is None else argv)
    prepare_streams()
    world = World()
    try:
        try:
            world = _world(words)
            return _dispatch(words, world.is_main, stop)
        finally:
            sys.stdout.flush()  # a reader that is gone shows here, not at exit
    except UsageError as e:
        if world.is_main:
            say(f"headwise: error: {e}")
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt as e:
        stopped = e if isinstance(e, Stopped) else Stopped(signal.SIGINT)
        bar = "\n" if sys.stderr.isatty() else ""  # the progress bar's line is left first
        if world.is_main:
            with contextlib.suppress(OSError):  # a terminal that was closed
                say(f"{bar}headwise: {message(stopped.number, stopped.saved)}{resume(words)}")
        return 128 + stopped.number
    except (*FAILURES, *BAD_VALUES) as e:
        if isinstance(e, OSError) and e.errno == errno.ENAMETOOLONG:
            say(f"headwise: error: {bounded(str(e))}")
            return 2
        if os.environ.get("HEADWISE_TRACEBACK"):
            raise
        who = "" if world.is_main else f" in process {world.rank}"
        say(f"headwise: error{who}: {_why(e)} (HEADWISE_TRACEBACK=1 shows where)")
        return 1
