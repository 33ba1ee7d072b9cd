"""What a signal does: a note while work is being saved, the end otherwise, and nothing to signals
that are somebody else's."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support.stops import StopAtQuestion, handlers

from headwise.files import whole_file
from headwise.signals import AT_ONCE, SIGNALS, Stop, Stopped, installed, message, saving

SIGINT, SIGTERM, SIGHUP = SIGNALS


def stop_that_lists() -> tuple[Stop, list[int]]:
    """A Stop whose end of the process is an entry in a list."""
    ended: list[int] = []
    return Stop(ended.append), ended


def test_signal_ends_at_once_what_saves_nothing() -> None:
    stop, ended = stop_that_lists()
    stop.handle(SIGTERM)
    assert ended == [SIGTERM]
    assert not stop.asked()


def test_signal_is_a_note_while_work_is_saved() -> None:
    stop, ended = stop_that_lists()

    def work() -> None:
        with saving(stop) as heard:
            ask(heard)

    def ask(heard: Stop) -> None:
        assert heard is stop
        assert not heard.asked()
        stop.handle(SIGHUP)
        assert heard.asked()
        stop.handle(SIGINT)  # as torchrun and `timeout` send two at once
        assert ended == []
        stop.first -= AT_ONCE
        stop.handle(SIGINT)
        assert ended == [SIGINT]

    with pytest.raises(Stopped) as stopped:
        work()
    assert stopped.value.number == SIGHUP, "what came after the last question is not forgotten"
    assert not stop.saving


def test_signal_after_the_work_is_saved_ends_at_once() -> None:
    stop, ended = stop_that_lists()
    with saving(stop):
        pass
    stop.handle(SIGINT)
    assert ended == [SIGINT]


def test_handlers_of_others_and_ignored_signals_are_left_alone() -> None:
    def own(*_: object) -> None:
        pass

    stop, _ = stop_that_lists()
    for handler, handled in ((signal.SIG_IGN, False), (own, False), (signal.SIG_DFL, True)):
        with handlers(handler):
            with installed(stop):
                found = [signal.getsignal(number) for number in SIGNALS]
                assert found == [stop.handle if handled else handler] * 3
            assert [signal.getsignal(number) for number in SIGNALS] == [handler] * 3


def test_handlers_are_installed_in_the_main_thread_only() -> None:
    found = []

    def work() -> None:
        with saving(None) as heard:
            found.append(heard.asked())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


def test_script_gets_its_keyboard_interrupt_after_the_work_is_saved() -> None:
    steps = []

    def work() -> None:
        with saving(None) as heard:
            for step in range(5):
                if step == 2:
                    signal.raise_signal(SIGINT)
                steps.append(step)
                if heard.asked():
                    raise Stopped(heard.number, [("0a1b", step + 1)])

    with handlers(signal.default_int_handler):
        with pytest.raises(KeyboardInterrupt):
            work()
        assert steps == [0, 1, 2]
        assert signal.getsignal(SIGINT) is signal.default_int_handler
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(SIGINT)


SCRIPT = """
import signal, sys
from headwise.signals import Stopped, saving
with saving(None) as heard:
    signal.raise_signal(int(sys.argv[1]))
    raise Stopped(heard.number, [("0a1b", 7)])
"""


@pytest.mark.parametrize("number", [SIGTERM, SIGHUP])
def test_script_ends_by_the_signal_after_the_work_is_saved(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(number)], capture_output=True, text=True, check=False
    )
    assert done.returncode == -number
    name = signal.Signals(number).name
    assert done.stderr == (
        f"headwise: interrupted by {name}; saved run 0a1b at step 7; the same call resumes\n"
    )


COMMAND = """
import os, signal, sys
from pathlib import Path
from headwise.files import whole_file
from headwise.signals import install, stop_of_command
install(stop_of_command())
with whole_file(Path(sys.argv[1])) as temporary:
    temporary.write_text("half")
    assert len(os.listdir(temporary.parent)) == 1
    signal.raise_signal(int(sys.argv[2]))
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_command_ends_in_one_line_and_leaves_no_half_written_file(
    number: int, tmp_path: Path
) -> None:
    with handlers(signal.SIG_DFL):  # a shell's background jobs ignore Ctrl-C, and pass that on
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, str(tmp_path / "file"), str(number)],
            capture_output=True,
            text=True,
            check=False,
        )
    by = {SIGINT: "", SIGTERM: " by SIGTERM", SIGHUP: " by SIGHUP"}[signal.Signals(number)]
    assert done.returncode == 128 + number
    assert done.stderr == f"headwise: interrupted{by}; run the same command to resume\n"
    assert list(tmp_path.iterdir()) == []


def test_file_that_is_finished_is_not_removed(tmp_path: Path) -> None:
    stop, ended = stop_that_lists()
    with handlers(signal.SIG_DFL), installed(stop):
        with whole_file(tmp_path / "file") as temporary:
            assert stop.half_written == {temporary}
        assert stop.half_written == set()
        os.kill(os.getpid(), SIGTERM)
    assert ended == [SIGTERM]
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_message_names_steps() -> None:
    runs = [(str(i), 10 * i) for i in range(1, 6)]
    assert message(SIGINT) == "interrupted"
    assert message(SIGINT, runs) == "interrupted; saved 5 runs at steps 10 to 50"
    assert message(SIGHUP, runs[:1]) == "interrupted by SIGHUP; saved run 1 at step 10"


def test_stop_of_tests_is_asked_for_at_its_question() -> None:
    stop = StopAtQuestion(2)
    assert [stop.asked(), stop.asked(), stop.asked()] == [False, True, True]
