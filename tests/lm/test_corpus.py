"""Text to ids to batches: nothing lost, nothing twice, nothing held out that is trained on; bytes
counted for any tokenizer."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.data import refused, written
from support.tokenizer import MANY, trained_tokenizer
from support.tolerance import examples

from headwise.lm import text_files
from headwise.lm.corpus import (
    Corpus,
    _epoch_starts,
    check_length,
    encode,
    held_out_rows,
    held_out_starts,
    load,
    recall_rows,
    rows_at,
)
from headwise.lm.text_files import (
    BYTE_IDS,
    TextFiles,
    chunks,
    end_of,
    find_text,
    find_tokenizer,
    vocab_of,
)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> str:
    return trained_tokenizer(tmp_path_factory.mktemp("bpe") / "tokenizer.json")


def text_of(*documents: bytes) -> TextFiles:
    return TextFiles("a text", documents, sum(map(len, documents)), "")


def encoded(tokenizer: Any, data: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Ids of a piece, and the bytes behind them."""
    ((ids, behind),) = encode(tokenizer, [data])
    return ids, behind()


def corpus_of(count: int, held: int) -> Corpus:
    ids = np.arange(count + held, dtype=np.uint16)
    return Corpus(ids, count, np.arange(1, held + 1), 1 << 16, None)


# ---- ids


def test_load_gives_bytes_and_ends_of_documents(tmp_path: Path) -> None:
    written(tmp_path / "text" / "b.txt", "then")
    written(tmp_path / "text" / "a.txt", "first, and é")
    written(tmp_path / "text" / "sub" / "c.txt", "")
    written(tmp_path / "text" / "notes.md", "not this")
    text = find_text(str(tmp_path / "text"))
    corpus = load(text, None)
    assert corpus.ids.tolist() == [*"first, and é".encode(), 256, *b"then", 256]
    assert (text.size, text.cut) == (17, 16)
    assert corpus.cut == 17  # 13 bytes, an end, and three of the four that follow
    assert corpus.bytes_to.tolist() == [1, 1]  # the last byte, and an end that has none
    assert (corpus.vocab, corpus.end) == (BYTE_IDS, 256) == (vocab_of(None), end_of(None))


@examples(200)
@given(
    st.lists(st.text(st.sampled_from("ab\n é走🙂"), max_size=12), min_size=1, max_size=4),
    st.integers(4, 9),
)
def test_chunks_are_the_text_cut_once_at_a_character(documents: list[str], size: int) -> None:
    text = text_of(*(d.encode() for d in documents))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_files, "CHUNK_BYTES", size)
        found = list(chunks(text))
    assert all(0 < len(data) <= size for data, _, _ in found)
    assert b"".join(data for data, _, _ in found) == "".join(documents).encode()
    assert all(data.decode() is not None for data, _, _ in found)
    assert [last for _, _, last in found].count(True) == sum(bool(d) for d in documents)
    held = [h for _, h, _ in found]
    assert held == sorted(held)
    share = sum(len(data) for data, h, _ in found if h)
    assert text.size // 10 - 3 <= share <= text.size // 10


def test_load_holds_out_the_same_bytes_whatever_the_tokenizer(bpe: str) -> None:
    text, (tokenizer, _) = text_of(MANY.encode(), b"and one more document."), find_tokenizer(bpe)
    plain, coded = load(text, None), load(text, tokenizer)
    assert len(coded.ids) < len(plain.ids) / 2
    assert coded.bytes_to[-1] == plain.bytes_to[-1] == text.size - text.cut
    assert (coded.ids == end_of(tokenizer)).sum() == (plain.ids == 256).sum() == 2
    back = tokenizer.decode(coded.ids[coded.cut :].tolist(), skip_special_tokens=True)
    assert back.encode() == bytes(
        plain.ids[plain.cut :][plain.ids[plain.cut :] < 256].astype(np.uint8)
    )


def test_encode_counts_bytes_as_the_tokens_do(bpe: str) -> None:
    """A byte-level token has one sign for each of its bytes; the two counts agree wherever a
    character ends."""
    tokenizer, _ = find_tokenizer(bpe)
    ids, behind = encoded(tokenizer, MANY.encode())
    own = np.cumsum([len(tokenizer.id_to_token(int(i))) for i in ids])
    whole = np.array(
        [tokenizer.decode(ids[: n + 1].tolist()).count("\ufffd") == 0 for n in range(200)]
    )
    assert 0 < whole.sum() < 200, "no character is cut"
    assert (own[:200][whole] == behind[:200][whole]).all()
    assert own[-1] == behind[-1] == len(MANY.encode())
    assert (np.diff(behind) >= 0).all()


class Words:
    """A tokenizer of one word an id, whose spans leave the blanks out, as some do."""

    text = "é b  c \n"
    ids, offsets = (0, 1, 2), ((0, 1), (2, 3), (5, 6))

    def encode_batch(self, texts: list[str], add_special_tokens: bool) -> list["Words"]:
        return [self for _ in texts]

    def decode_batch(self, ids: list[object], skip_special_tokens: bool) -> list[str]:
        return [self.text for _ in ids]


def test_encode_counts_skipped_blanks_for_the_next_id() -> None:
    assert encoded(Words(), Words.text.encode())[1].tolist() == [2, 4, 9]


def test_find_tokenizer_turns_truncation_and_padding_off(bpe: str, tmp_path: Path) -> None:
    settings = json.loads(Path(bpe).read_text())
    settings["truncation"] = {
        "direction": "Right",
        "max_length": 5,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    settings["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "x",
    }
    cut, _ = find_tokenizer(written(tmp_path / "cut.json", json.dumps(settings)))
    assert (
        encoded(cut, MANY.encode())[0].tolist()
        == encoded(find_tokenizer(bpe)[0], MANY.encode())[0].tolist()
    )


# ---- ids on disk


def test_load_from_a_folder_is_as_in_memory(
    bpe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 97)
    text = text_of(MANY.encode(), b"more")
    for path in ("", bpe):
        tokenizer, key = find_tokenizer(path)
        here, there = load(text, tokenizer), load(text, tokenizer, tmp_path, f"k{key}")
        again = load(text_of(b"never read again"), tokenizer, tmp_path, f"k{key}")
        for other in (there, again):
            assert here.ids.tolist() == other.ids.tolist()
            assert here.bytes_to.tolist() == other.bytes_to.tolist()
            assert (here.cut, here.vocab, here.end) == (other.cut, other.vocab, other.end)
        assert isinstance(there.ids, np.memmap)


def test_load_makes_unfinished_ids_again_and_refuses_torn_ones(tmp_path: Path) -> None:
    text = text_of(MANY.encode())
    complete = load(text, None, tmp_path, "k").ids.tolist()
    (tmp_path / "k.json").unlink()  # as after a kill before the description
    (tmp_path / "k.ids").write_bytes(b"half")
    (tmp_path / ".k.ids.half").write_bytes(b"half")
    assert load(text, None, tmp_path, "k").ids.tolist() == complete
    assert sorted(p.name for p in tmp_path.iterdir()) == ["k.behind", "k.ids", "k.json", "k.lock"]
    (tmp_path / "k.ids").write_bytes(b"half")
    assert "is not complete" in refused(load, text, None, tmp_path, "k")
    (tmp_path / "k.ids").write_bytes(b"")
    assert "is not complete, 0 of" in refused(load, text, None, tmp_path, "k")
    for bad in ("{", "[]", '{"format": 1, "ids": "many"}', "null"):
        written(tmp_path / "k.json", bad)
        assert "k.json cannot be read: remove it" in refused(load, text, None, tmp_path, "k")
    written(tmp_path / "k.json", '{"format": 99}')
    assert "has format 99" in refused(load, text, None, tmp_path, "k")


@pytest.mark.parametrize("text", ["a", "abc", "abcdefghi"])
def test_load_of_a_few_letters_leaves_no_files(text: str, tmp_path: Path) -> None:
    assert "too short to hold a tenth of it out" in refused(
        load, text_of(text.encode()), None, tmp_path, "k"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["k.lock"]


def test_check_length_needs_more_than_the_end_of_a_document() -> None:
    for size in (10, 11, 19):
        assert "must hold text, got the end" in refused(
            check_length, load(text_of(b"a" * size), None), 1, "a.txt"
        )


# ---- batches


def test_rows_at_is_a_pure_function_of_seed_and_number() -> None:
    corpus = corpus_of(1009, 101)
    rows = rows_at(corpus, 13, 5, 0, 300)
    for first, count in ((0, 1), (7, 70), (76, 1), (75, 4), (150, 150), (299, 1)):
        _epoch_starts.cache_clear()
        assert torch.equal(rows_at(corpus, 13, 5, first, count), rows[first : first + count])
    assert not torch.equal(rows_at(corpus, 13, 6, 0, 76), rows[:76])


def test_rows_at_covers_an_epoch_once_and_nothing_that_is_held_out() -> None:
    corpus, length = corpus_of(1009, 101), 13
    windows = (1009 - 13) // 13
    rows = rows_at(corpus, length, 0, 0, 9 * windows).view(9, windows, length + 1)
    assert (rows.diff(dim=-1) == 1).all(), "a row is not a piece of the text"
    assert int(rows.max()) < corpus.cut
    shifts = []
    for epoch in rows:
        starts = epoch[:, 0].sort().values
        assert (starts.diff() == length).all()
        assert not torch.equal(starts, epoch[:, 0])
        shifts.append(int(starts[0]))
    assert 0 <= min(shifts) < max(shifts) < length
    assert not torch.equal(rows[0, :, 0] - shifts[0], rows[1, :, 0] - shifts[1])


@pytest.mark.parametrize("count", [14, 15, 26, 27, 28, 39, 40])
def test_rows_at_of_short_texts(count: int) -> None:
    rows = rows_at(corpus_of(count, 0), 13, 0, 0, 200)
    assert rows.shape == (200, 14)
    assert int(rows.min()) >= 0
    assert int(rows.max()) < count
    assert int(rows.max()) - int(rows.min()) >= min(count, 27) - 2, "a part is never seen"


def test_held_out_windows_are_adjacent_or_evenly_spread() -> None:
    corpus = corpus_of(1000, 101)
    assert held_out_starts(corpus, 13, 99).tolist() == [1000 + 13 * i for i in range(7)]
    assert held_out_starts(corpus, 13, 3).tolist() == [1000, 1026, 1052]
    ids, size = held_out_rows(corpus, 13, held_out_starts(corpus, 13, 99))
    assert ids[3].tolist() == list(range(1039, 1053))
    assert size.tolist() == [13] * 7


def test_check_length_of_both_parts() -> None:
    check_length(corpus_of(14, 14), 13, "it")
    assert (
        refused(check_length, corpus_of(13, 50), 13, "it")
        == "the training part of it must be longer than length 13, got 13 ids"
    )
    assert (
        refused(check_length, corpus_of(50, 13), 13, "it")
        == "the held-out tenth of it must be longer than length 13, got 13 ids"
    )


# ---- what is not a text, and tokenizers that do not fit


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"text\0text", "is not text: byte 4 is 0"),
        ("déjà".encode("latin-1"), "is not text in UTF-8 (byte 1)"),
        ("caf\u00e9".encode()[:-1], "is not text in UTF-8 (byte 3)"),
        (b"x" * 30 + b"\xff", "is not text in UTF-8 (byte 30)"),
        (b"abcdef\xc3\xc3", "is not text in UTF-8 (byte 6)"),
    ],
)
def test_find_text_refuses_what_is_not_text(
    data: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "CHUNK_BYTES", 7)
    assert message in refused(find_text, written(tmp_path / "a.txt", data))
    written(tmp_path / "b.txt", "fine" if data.strip() else "")
    assert message in refused(find_text, str(tmp_path))


def test_find_text_refuses_what_is_not_there(tmp_path: Path) -> None:
    assert refused(find_text, str(tmp_path / "none")).startswith(
        f"there is no text at {tmp_path / 'none'}; give a file"
    )
    assert refused(find_text, str(tmp_path)) == f"the folder {tmp_path} holds no .txt files"


def test_find_text_digest_is_of_the_documents(tmp_path: Path) -> None:
    one = [find_text(written(tmp_path / name / "a.txt", "some text")).digest for name in ("x", "y")]
    assert one[0] == one[1]
    written(tmp_path / "z" / "a.txt", "some")
    written(tmp_path / "z" / "b.txt", " text")
    assert find_text(str(tmp_path / "z")).digest != one[0]
    assert find_text("").digest == find_text("").digest != one[0]


def test_find_tokenizer_refuses_what_does_not_fit(tmp_path: Path) -> None:
    import tokenizers as hf

    assert refused(find_tokenizer, str(tmp_path / "none.json")).endswith(
        "cannot be read: No such file or directory"
    )
    assert "is not a tokenizers JSON file" in refused(
        find_tokenizer, written(tmp_path / "a.json", "{}")
    )
    assert "is not a tokenizers JSON file" in refused(
        find_tokenizer, written(tmp_path / "b.json", b"\xff\x00")
    )
    lower, _ = find_tokenizer(
        trained_tokenizer(tmp_path / "lower.json", normalizer=hf.normalizers.Lowercase())
    )
    message = refused(load, text_of(b"as Said"), lower)
    assert message.endswith("it must give every character back: 'Said' became 'said'")
    words = hf.Tokenizer(hf.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    assert "must give every character back" in refused(load, text_of(b"a b"), words)


# ---- recall


def test_recall_rows_repeat_every_pair_in_another_order() -> None:
    corpus = Corpus(np.zeros(10, np.uint16), 5, np.zeros(5, np.int64), 30, 7)
    ids = recall_rows(corpus, 9, 40, seed=3)
    assert ids.shape == (40, 36)
    assert ids.min() >= 0
    assert ids.max() < 30
    assert not (ids == 7).any(), "the end of a document is no word"
    moved = 0
    for row in ids.tolist():
        once, again = (
            list(zip(half[::2], half[1::2], strict=True)) for half in (row[:18], row[18:])
        )
        assert len({key for key, _ in once}) == 9
        assert sorted(once) == sorted(again)
        moved += once != again
    assert moved > 35
    assert recall_rows(corpus, 9, 40, seed=3).equal(ids)
    assert not recall_rows(corpus, 9, 40, seed=4).equal(ids)
