"""Data sets of the hub: what is asked of its library, every refusal one line, and, where the
library is there, folders it reads itself."""

import sys
import types

import numpy as np
import pytest
from support.data import forget, letters, refused, written
from support.tolerance import seeded

from headwise.tasks import Images, Masked, Sentences, Text
from headwise.tasks.ids import BLANK

pytestmark = pytest.mark.usefixtures("no_network")


class Table(dict):
    """A part of a data set, as the library has it."""

    @property
    def column_names(self):
        return list(self)


class Unknown(FileNotFoundError):
    """The library's own error of this kind is one too."""


@pytest.fixture
def library(monkeypatch):
    """The library with the data sets that a test puts into it: (path, configuration) -> parts, or
    an error."""
    sets, asked = {}, []

    def load_dataset(path, name=None):
        asked.append((path, name))
        found = sets.get(
            (path, name),
            Unknown(f"Dataset '{path}' doesn't exist on the Hub\nor cannot be accessed."),
        )
        if isinstance(found, Exception):
            raise found
        return found

    forget()
    hub = types.SimpleNamespace(load_dataset=load_dataset, __version__="4.0.0")
    monkeypatch.setitem(sys.modules, "datasets", hub)
    yield types.SimpleNamespace(sets=sets, asked=asked)
    forget()


SST = {
    "train": Table(sentence=["so good", "so bad"], label=[1, 0], idx=[0, 1]),
    "validation": Table(sentence=["good"], label=[1], idx=[0]),
    "test": Table(sentence=["bad"], label=[-1], idx=[0]),
}


def test_missing_library_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    forget()
    for make in (Text, Masked, Sentences):
        assert (
            refused(make, 8, "hf:owner/name")
            == "hf:owner/name needs the library datasets: pip install 'headwise[hub]'"
        )
    assert (
        refused(Images, 4, "hf:owner/name")
        == "hf:owner/name needs the library datasets: pip install 'headwise[hub]'"
    )


@pytest.mark.parametrize(
    ("source", "there", "asked"),
    [
        ("hf:glue", ("glue", None), [("glue", None)]),
        ("hf:stanford/sst", ("stanford/sst", None), [("stanford/sst", None)]),
        ("hf:glue/sst2", ("glue", "sst2"), [("glue/sst2", None), ("glue", "sst2")]),
        ("hf:nyu-mll/glue/sst2", ("nyu-mll/glue", "sst2"), [("nyu-mll/glue", "sst2")]),
        ("hf:./data/sst", ("./data/sst", None), [("./data/sst", None)]),
        ("hf:/data/glue/sst", ("/data/glue/sst", None), [("/data/glue/sst", None)]),
    ],
)
def test_name_may_end_in_a_configuration(library, source, there, asked):
    library.sets[there] = SST
    task = Sentences(8, source)
    assert library.asked == asked
    ids, labels = task.sample(seeded(0), 5)
    assert ids.tolist() == [[*b"good", BLANK, BLANK, BLANK, BLANK]] * 5, (
        "the validation part is held out, the test part has no labels"
    )
    assert labels.tolist() == [1] * 5
    ids, labels = task.sample(seeded(0), 50, 0)
    assert {
        (bytes(row[:6]), label) for row, label in zip(ids.tolist(), labels.tolist(), strict=True)
    } == {(b"so goo", 1), (b"so bad", 0)}
    assert library.asked == asked, "it is loaded once"


def test_local_folder_comes_first_and_asks_nothing(library, tmp_path):
    for name in ("train", "dev"):
        written(tmp_path / f"{name}.tsv", "sentence\tlabel\na\t0\nb\t1\n")
    Sentences(8, str(tmp_path))
    Text(7, written(tmp_path / "a.txt", letters(200)))
    Sentences(8)
    assert library.asked == []


def test_text_is_the_column_of_that_name(library):
    lines = letters(400), letters(300, 1)
    library.sets["owner/book", None] = {
        "train": Table(text=list(lines)),
        "test": Table(text=["no"]),
    }
    library.sets["owner/half", None] = {"train": Table(content=["x"])}
    library.sets["owner/gap", None] = {"train": Table(text=["x", None])}
    library.sets["owner/empty", None] = {"train": Table(text=["", " "])}
    task = Text(7, "hf:owner/book", "byte")
    assert task.digest == Text(7, "hf:owner/book").digest == Masked(7, "hf:owner/book").digest
    text = "\n".join(lines)
    windows, following = task.sample(seeded(1), 99, 0)
    for row, after in zip(windows.tolist(), following.tolist(), strict=True):
        assert bytes(row).decode() in text
        assert row[1:] == after[:-1]
    assert (
        refused(Text, 7, "hf:owner/half")
        == "hf:owner/half needs a column named text, it has content"
    )
    assert (
        refused(Text, 7, "hf:owner/gap") == "the column text of hf:owner/gap has nothing in row 2"
    )
    assert refused(Text, 7, "hf:owner/empty") == "the text at hf:owner/empty is empty"


def test_images_are_the_columns_image_and_label(library):
    rng = np.random.default_rng(0)
    grey, colour = (
        rng.integers(0, 256, (5, 4, 4), np.uint8),
        rng.integers(0, 256, (5, 4, 4, 3), np.uint8),
    )
    for name, images in (("grey", grey), ("colour", colour)):
        library.sets[name, None] = {
            part: Table(image=list(images), label=[0, 1, 0, 1, 1]) for part in ("train", "test")
        }
    assert Images(2, "hf:grey").in_dim == 4
    task = Images(4, "hf:colour")
    assert (task.in_dim, task.tokens, task.classes) == (48, 1, 2)
    x, y = task.sample(seeded(0), 50)
    pixels = colour.reshape(5, -1, 3).astype(float)
    scaled = ((pixels - pixels.mean((0, 1))) / pixels.std((0, 1))).reshape(5, -1)
    for row, label in zip(x[:, 0].numpy(), y.tolist(), strict=True):
        far = np.abs(scaled - row).max(1)
        assert far.min() < 0.05
        assert [0, 1, 0, 1, 1][far.argmin()] == label
    library.sets["words", None] = {
        part: Table(image=list(grey), label=list("ababa")) for part in ("train", "test")
    }
    assert refused(Images, 4, "hf:words").startswith(
        "hf:words should hold whole numbers as labels, got <U1"
    )
    library.sets["sizes", None] = {
        part: Table(img=[grey[0], grey[1, :2]], label=[0, 1]) for part in ("train", "test")
    }
    assert refused(Images, 4, "hf:sizes") == "images must have one size, got 2 sizes in hf:sizes"
    library.sets["none", None] = {"train": Table(picture=list(grey), label=[0, 1, 0, 1, 1])}
    assert (
        refused(Images, 4, "hf:none")
        == "hf:none needs a column named image or img, it has picture, label"
    )


BAD = [
    ("hf:", None, "hf: must be followed by a data set's name, as in hf:nyu-mll/glue/sst2"),
    ("hf:no/one", None, (
        "there is no data set no/one on the Hugging Face hub; names are OWNER/NAME, maybe with "
        "/CONFIG behind"
    )),
    ("hf:a/b", ConnectionError("Couldn't reach 'a/b' on the Hub"),
     "the Hugging Face hub cannot be reached for hf:a/b; a folder with the data needs no network"),
    ("hf:a/b", ValueError("Config name is missing.\nPlease pick one"),
     "hf:a/b cannot be loaded: ValueError: Config name is missing. Please pick one"),
    ("hf:a/b", RuntimeError("x" * 999), f"hf:a/b cannot be loaded: RuntimeError: {'x' * 200}"),
    ("hf:a/b", {"train": SST["train"]}, (
        "hf:a/b needs a part named validation or validation_matched or dev or test, it has train"
    )),
    ("hf:a/b", {"test": SST["train"]}, "hf:a/b needs a part named train, it has test"),
    ("hf:a/b", {"train": Table(sentence=["a"], score=[0.5]), "test": SST["test"]},
     ("hf:a/b needs a column named label or gold_label or is_duplicate or Quality, it has "
     "sentence, score")),
    ("hf:a/b", {"train": Table(sentence=["a", "b"], label=[0, None]), "test": SST["test"]},
     "the column label of hf:a/b has nothing in row 2"),
    ("hf:a/b", {"train": SST["train"], "test": SST["test"]},
     "held-out classes must be among the training part's, 0, 1, got '-1' in hf:a/b"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "found", "message"), BAD, ids=[message[:40] for _, _, message in BAD]
)
def test_failure_of_any_kind_is_one_line(library, source, found, message):
    if found is not None:
        library.sets["a/b", None] = found
    assert refused(Sentences, 8, source) == message


# ---- the library itself, on folders alone


@pytest.fixture
def real(monkeypatch, tmp_path):
    """The library, with its cache in a folder of the test."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("datasets", reason="the hub's library is an extra")
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    forget()
    yield tmp_path
    forget()


@pytest.mark.filterwarnings("default")
def test_library_reads_a_folder_of_tables(real):
    for name, rows in (("train", ["so good,1", "so bad,0"]), ("validation", ["good,1"])):
        written(real / "sst" / f"{name}.csv", "\n".join(["sentence,label", *rows]) + "\n")
    source = f"hf:{real / 'sst'}"
    ids, labels = Sentences(8, source).sample(seeded(0), 3)
    assert ids.tolist() == [[*b"good", BLANK, BLANK, BLANK, BLANK]] * 3
    assert labels.tolist() == [1] * 3
    assert refused(Text, 7, source) == f"{source} needs a column named text, it has sentence, label"


@pytest.mark.filterwarnings("default")
def test_library_reads_a_folder_of_texts(real):
    """Line by line, so that the text is the file."""
    lines = [letters(60, i) for i in range(9)]
    path = written(real / "book" / "train.txt", "\n".join(lines))
    assert Text(7, f"hf:{real / 'book'}").digest == Text(7, path).digest


@pytest.mark.filterwarnings("default")
def test_refusal_of_the_library_is_one_line(real):
    gone = f"hf:{real / 'gone'}"
    assert refused(Sentences, 8, gone).startswith(
        f"there is no data set {real / 'gone'} on the Hugging Face hub"
    )
    written(real / "odd" / "train.csv", "a,b\n1,2\n3,4,5,6\n")
    assert refused(Sentences, 8, f"hf:{real / 'odd'}").startswith(
        f"hf:{real / 'odd'} cannot be loaded: "
    )
    assert refused(Sentences, 8, "hf:nyu-mll/glue/sst2").startswith(
        "the Hugging Face hub cannot be reached for hf:nyu-mll/glue/sst2"
    )
