"""What a trained decoder writes, against one token at a time without a cache; `generate` and
`chat`."""

import io
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from support.tokenizer import trained_tokenizer

from headwise.cli import main
from headwise.cli.generate import find_decoder
from headwise.errors import UsageError
from headwise.experiments.pages import write_report
from headwise.lm.writing import Writer, _Pieces, load_writer
from headwise.rows import SAMPLE_FILE
from headwise.store import Store

LENGTH = 23
SHAPE = ["--set", "dim=22", "depth=2", "num_heads=3", "head_dim=6", "ffn_dim=13"]
STEPS = ["--steps", "3", "--length", str(LENGTH), "--batch-tokens", str(4 * LENGTH)]
STEPS += ["--eval-tokens", "115", "--device", "cpu"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three decoders: two on bytes, one with a tokenizer."""
    folder = tmp_path_factory.mktemp("writing")
    text = folder / "text.txt"
    lines = [f"Line {i} of the böok, as it was written. Ünd so weiter.\n" for i in range(400)]
    text.write_text("".join(lines))
    trained_tokenizer(folder / "tokenizer.json")
    words = ["pretrain", "--text", str(text), *SHAPE, *STEPS, "--store", str(folder / "store")]
    for more in ([], ["--seed", "1"], ["--tokenizer", str(folder / "tokenizer.json")]):
        assert main([*words, *more]) == 0
    return folder / "store"


def folders(store: Path) -> dict[str, Path]:
    """The folders of the runs by what they were trained on."""
    rows = Store(store).rows()
    return {
        "tokens" if row["tokenizer"] else f"bytes {row['seed']}": store / "runs" / row["id"]
        for row in rows
    }


def writer_of(store: Path, name: str) -> Writer:
    return load_writer(folders(store)[name])


def likeliest(writer: Writer, ids: list[int], tokens: int) -> list[int]:
    """One token at a time without a cache: all that fits is read anew each time."""
    out = list(ids)
    for _ in range(tokens):
        with torch.no_grad():
            logits = writer.model(torch.tensor([out]))[0][0, -1]
        out.append(int(logits[: writer.ids].argmax()))
    return out[len(ids) :]


# ---- text


@pytest.mark.parametrize("name", ["bytes 0", "tokens"])
def test_writer_gives_the_likeliest_text(name: str, store: Path) -> None:
    writer = writer_of(store, name)
    ids = writer.encode("Line 7")
    wanted = likeliest(writer, ids, LENGTH - len(ids))
    given = list(writer._continued(ids, len(wanted), 0.0, 0, None))
    assert given == wanted
    text = "".join(writer.write("Line 7", tokens=len(wanted), temperature=0))
    known = [i for i in wanted if writer.tokenizer or i < 256]
    whole = writer.tokenizer.decode(known, skip_special_tokens=False) if writer.tokenizer else ""
    assert text == (whole or bytes(known).decode(errors="replace"))


def test_writer_begins_anew_with_the_newer_half_when_its_length_is_full(store: Path) -> None:
    writer = writer_of(store, "bytes 0")
    ids = writer.encode("Line 7 of the book, as it")  # longer than a sequence of its training
    assert len(ids) > LENGTH
    given = list(writer._continued(ids, 3 * LENGTH, 0.0, 0, None))
    text = ids + given
    # First it sees all but one of its length; each time it is full, the newer half.
    at, seen = len(ids), LENGTH - 1
    while at < len(text):
        room = min(LENGTH - seen + 1, len(text) - at)
        assert text[at : at + room] == likeliest(writer, text[at - seen : at], room)
        at, seen = at + room, LENGTH // 2


def test_writer_draws_by_its_seed(store: Path) -> None:
    writer = writer_of(store, "bytes 0")

    def text(seed: int, **options: float) -> str:
        generator = torch.Generator().manual_seed(seed)
        return "".join(writer.write("It", tokens=60, generator=generator, **options))

    assert text(1) == text(1)
    assert text(1) != text(2)
    assert text(1, temperature=0.0) == text(2, temperature=0.0)
    assert text(1, top_k=1) == text(2, top_k=1)


def test_writer_never_gives_an_id_that_means_nothing(store: Path) -> None:
    """The table has 320 rows for 257 ids; the others are drawn a fifth of the time if they may."""
    writer = writer_of(store, "bytes 0")
    assert (writer.ids, writer.model.shape.vocab_size) == (257, 320)
    generator = torch.Generator().manual_seed(3)
    drawn = list(writer._continued(writer.encode("a"), 300, 1e6, 0, generator))
    assert max(drawn) < 257
    assert len(set(drawn)) > 150


def test_writer_begins_a_document_where_there_is_no_prompt(store: Path) -> None:
    assert writer_of(store, "bytes 0").encode("") == [256]


def test_pieces_are_whole_characters() -> None:
    pieces = _Pieces(None)
    given = [pieces.add(byte) for byte in "aü€🙂".encode()] + [pieces.end()]
    assert [piece for piece in given if piece] == ["a", "ü", "€", "🙂"]
    cut = _Pieces(None)
    assert cut.add("é".encode()[0]) == ""
    assert cut.end() == "\ufffd"


# ---- which decoder


def test_decoder_is_found_by_its_id_its_beginning_its_folder_and_a_store_of_one(
    store: Path, tmp_path: Path
) -> None:
    folder = folders(store)["bytes 0"]
    assert find_decoder(folder.name, store) == folder
    ids = [path.name for path in folders(store).values()]
    short = next(n for n in range(1, 17) if sum(i.startswith(folder.name[:n]) for i in ids) == 1)
    assert find_decoder(folder.name[:short], store) == folder
    assert find_decoder(str(folder), tmp_path) == folder
    alone = Store(tmp_path / "alone")
    alone.open()
    shutil.copytree(folder, alone.runs_path / folder.name)
    assert find_decoder(str(alone.path), tmp_path).name == folder.name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["generate", "zz"], "no decoder of STORE begins with 'zz'; it has "),
        (["generate", "STORE"], "RUN must be one decoder of STORE, got 3 of them: "),
        (["generate", "zz", "--store", "none"], "none, where its id would be looked for, is no"),
        (["generate", "BYTES", "--temperature", "-1"], "temperature must be 0 (the likeliest"),
        (["generate", "BYTES", "--temperature", "nan"], "temperature must be 0 (the likeliest"),
        (["generate", "BYTES", "--top-k", "999"], "top_k must be 0 (all) to vocab_size 320"),
        (["generate", "BYTES", "--tokens", "0"], "must be at least 1, got 0"),
        (["generate", "BYTES", "--seed", "-1"], "must be a whole number of 0 or more, got -1"),
        (["generate", "BYTES", "--tokenizer", "t.json"], "was trained on bytes, got --tokenizer"),
        (["chat", "zz"], "no decoder of STORE begins with 'zz'; it has "),
    ],
)
def test_writing_refuses_in_one_line(
    words: list[str], said: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"STORE": str(store), "BYTES": folders(store)["bytes 0"].name}
    words = [names.get(word, word) for word in words]
    words += [] if "--store" in words else ["--store", str(store)]
    assert main(words) == 2
    error = capsys.readouterr().err.rstrip("\n")
    assert said.replace("STORE", str(store)) in error
    assert "\n" not in error


def test_decoder_whose_tokenizer_is_gone_takes_it_from_elsewhere(
    store: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved.json"
    source = store.parent / "tokenizer.json"
    wanted = "".join(writer_of(store, "tokens").write("Line", tokens=9, temperature=0))
    source.rename(moved)
    try:
        with pytest.raises(UsageError, match=r"needs its tokenizer, which was at .*tokenizer.json"):
            writer_of(store, "tokens")
        found = load_writer(folders(store)["tokens"], tokenizer=str(moved))
    finally:
        moved.rename(source)
    assert "".join(found.write("Line", tokens=9, temperature=0)) == wanted


# ---- commands


def test_generate_prints_what_it_answers(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = folders(store)["bytes 1"].name
    words = ["generate", run, "--store", str(store), "--prompt", "Line", "--tokens", "31"]
    assert main([*words, "--samples", "2", "--seed", "5", "--json"]) == 0
    *printed, last = capsys.readouterr().out.splitlines()
    answer = json.loads(last)
    assert (answer["run"], answer["seed"], len(answer["texts"])) == (run, 5, 2)
    assert main([*words, "--seed", "6", "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["texts"] == answer["texts"][1:], "the second text is that of the next seed"
    assert printed[0] == "--- seed 5"
    assert all(c.isprintable() for line in printed for c in line.replace("\t", ""))


def test_chat_continues_line_by_line(
    store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["chat", folders(store)["bytes 0"].name, "--store", str(store), "--tokens", "20"]
    turns = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Line one\nline two\n\nnot read\n"))
        assert main([*words, "--json"]) == 0
        turns.append(json.loads(capsys.readouterr().out.splitlines()[-1])["turns"])
    assert [turn["you"] for turn in turns[0]] == ["Line one", "line two"]
    assert turns[0] == turns[1]


# ---- the sample that training leaves


def test_pretrain_leaves_a_sample_that_the_page_shows(store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "store")
    copy = Store(tmp_path / "store")
    samples = {
        path.parent.name: json.loads(path.read_text())
        for path in copy.runs_path.glob(f"*/{SAMPLE_FILE}")
    }
    assert len(samples) == 3
    assert all("Line" in one["prompt"] and one["text"] for one in samples.values())
    page = write_report(copy).read_text()
    assert page.count("continues the marked words") == 3
    for content in ("[]", "{", '{"prompt": 7, "text": "a"}', "\ud800"):
        for run_id in samples:
            file = copy.runs_path / run_id / SAMPLE_FILE
            file.write_text(content, errors="surrogatepass")
        assert "continues the marked words" not in write_report(copy).read_text()
