"""The page of a store that is still being filled: on the loopback address, and it follows."""

import contextlib
import http.client
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Browser
from support.report_page import browser, make_store  # noqa: F401

from headwise.experiments.pages import followed
from headwise.show.serve import server, server_near
from headwise.store import Store


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tmp_path_factory.mktemp("serve") / "store")


@contextlib.contextmanager
def serving(store: Path) -> Iterator[ThreadingHTTPServer]:
    """A server in a thread of its own."""
    with server(followed(store), 0) as listening:
        thread = threading.Thread(target=listening.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield listening
        finally:
            listening.shutdown()
            thread.join()


def ask(listening: ThreadingHTTPServer, path: str, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", listening.server_address[1])
    try:
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_server_answers_this_machine_alone(made: Path) -> None:
    with serving(made) as listening:
        assert listening.server_address[0] == "127.0.0.1"
        port = listening.server_address[1]
        status, page = ask(listening, "/")
        assert (status, page[:15]) == (200, b"<!doctype html>")
        assert ask(listening, "/", Host=f"localhost:{port}")[0] == 200
        assert ask(listening, "/", Host=f"other.example:{port}")[0] == 403
        assert ask(listening, "/state", Host="other.example")[0] == 403
        for path in ("/runs", "/../store.json", "/headwise.json", "//etc/passwd"):
            assert ask(listening, path)[0] == 404, path


def test_server_takes_a_free_port_where_its_own_is_taken(made: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with server_near(followed(made), taken.getsockname()[1]) as listening:
            assert listening.server_address[1] not in (0, taken.getsockname()[1])


def test_page_follows_a_store_that_is_filled(browser: Browser, made: Path, tmp_path: Path) -> None:  # noqa: F811
    shutil.copytree(made, tmp_path / "store")
    store = Store(tmp_path / "store")
    rows = store.rows()
    away = tmp_path / "away"
    (store.runs_path / rows[0]["id"]).rename(away)
    with serving(store.path) as listening:
        page = browser.new_context().new_page()
        said: list[str] = []
        asked: set[str] = set()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.add(request.url))
        address = f"http://127.0.0.1:{listening.server_address[1]}/"
        page.goto(address)
        page.get_by_text("23 of 24 runs finished").wait_for()
        page.get_by_text("following the store").wait_for()
        away.rename(store.runs_path / rows[0]["id"])
        page.get_by_text("24 of 24 runs finished").wait_for()
        assert said == []
        assert asked <= {address, f"{address}state", "data:,"}
        page.context.close()


def test_report_serves_until_ctrl_c(made: Path) -> None:
    words = [sys.executable, "-m", "headwise", "report", "--store", str(made), "--serve"]
    command = subprocess.Popen(
        [*words, "--port", "0"], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with command:
        assert command.stderr
        line = command.stderr.readline()
        assert "until Ctrl-C" in line
        port = int(line.partition("127.0.0.1:")[2].partition("/")[0])
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
            connection.request("GET", "/state")
            assert connection.getresponse().status == 200
        command.send_signal(signal.SIGINT)
        assert command.wait(20) == 130, "as every command after Ctrl-C"


def test_report_refuses_a_port_without_a_server(
    made: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from headwise.cli import main

    assert main(["report", "--store", str(made), "--port", "80"]) == 2
    assert "--port goes with --serve" in capsys.readouterr().err
    assert main(["report", "--store", str(made), "--serve", "--port", "70000"]) == 2
    assert "must be a port from 0 to 65535, got 70000" in capsys.readouterr().err
