"""A tracker by name, or from a user's file; each mistake is one line."""

import importlib.util
from pathlib import Path

import pytest
from support.tracked_rows import SMALL, small_row

from headwise.errors import UsageError
from headwise.tracking import find, tracked
from headwise.tracking.find import TRACKERS

OWN = """
import dataclasses, json
from pathlib import Path

@dataclasses.dataclass
class Lines:
    path: str = "lines.jsonl"

    def __call__(self, run):
        with Path(self.path).open("a") as f:
            f.write(json.dumps([run.id, run.history]) + "\\n")

def shout(run):
    return run.id != "known"

def nothing():
    pass

class Silent:
    pass

LIMIT = 3
"""


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(OWN)
    return str(tmp_path / "mine.py")


def test_own_class_is_made_with_its_destination(own: str, tmp_path: Path) -> None:
    run = tracked(small_row(SMALL))
    tracker = find(f"{own}:Lines", str(tmp_path / "out"))
    tracker(run)
    tracker(run)
    lines = (tmp_path / "out").read_text().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f'["{SMALL.id}", [[22, ')


def test_own_function_is_taken_as_it_is(own: str, tmp_path: Path) -> None:
    run = tracked(small_row(SMALL))
    assert find(f"{own}:shout")(run) is True
    alone = tmp_path / "alone.py"
    alone.write_text("from json import dumps\ndef track(run): return run.id\n_hidden = track")
    assert find(str(alone))(run) == SMALL.id


@pytest.mark.parametrize(
    ("name", "destination", "error"),
    [
        ("wandbb", "", r"unknown tracker 'wandbb'; did you mean wandb\? choices: mlflow, "),
        ("wandbb", "", r"or a file of yours, my_tracker.py:MyTracker$"),
        ("none.py", "", r"there is no file none.py$"),
        ("{own}", "", r"must name its tracker, as in .*; it has Lines, shout, nothing, Silent$"),
        ("{own}:Linse", "", r"has no 'Linse'; did you mean Lines\?"),
        ("{own}:shout", "x", r"shout is no class and takes no destination, got 'x'$"),
        ("{own}:nothing", "", r"must be a function of one run, or a class with __call__"),
        ("{own}:Silent", "", r"must be a function of one run, or a class with __call__"),
        ("{own}:Silent", "x", r"Silent cannot be made: TypeError: "),
        ("{own}:LIMIT", "", r"must be a function of one run, .*, got 3$"),
    ],
)
def test_mistake_is_one_line(own: str, name: str, destination: str, error: str) -> None:
    with pytest.raises(UsageError, match=error) as caught:
        find(name.format(own=own), destination)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [("def f(:", "is not Python: line 1"), ("1/0", "cannot be loaded: ZeroDivisionError")],
)
def test_file_that_cannot_be_loaded_is_one_line(tmp_path: Path, text: str, error: str) -> None:
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(UsageError, match=error):
        find(str(tmp_path / "mine.py"))


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_missing_package_says_what_to_install(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip(f"{name} is installed")
    if name == "wandb":  # its runs' folder, which Python takes for a package without files
        (tmp_path / name).mkdir()
        monkeypatch.syspath_prepend(tmp_path)
    error = rf"^the tracker {name} needs {name}: pip install 'headwise\[{name}\]'$"
    with pytest.raises(UsageError, match=error):
        find(name)


def test_tracker_of_every_name_has_its_extra() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    for name in TRACKERS.keys() - {"tensorboard"}:  # written without TensorBoard
        assert f'\n{name} = ["{name}>=' in text
