"""The process of a command: it hears signals before anything large is imported."""

import signal

# Until handlers are there, Ctrl-C ends the process as SIGTERM does, without a traceback.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from headwise.signals import install, silence, stop_of_command


def main() -> int:
    """Run the command of this process; returns the exit code."""
    stop = stop_of_command()
    install(stop)
    from headwise import cli

    try:
        return cli.main(stop=stop)
    finally:
        silence()


if __name__ == "__main__":
    raise SystemExit(main())
