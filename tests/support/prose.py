"""How a page of documentation reads: numbers per 100 words and words per sentence, outside its
tables, code and headings."""

import re
from dataclasses import dataclass
from statistics import median

# A number, but not what is part of a name: H200, d^2.5, d², figure1, 2407.16153 in a link.
NUMBER = re.compile(r"(?<![\w^.,/])[-+±]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?(?![\w²³]|\.\d)")
WORD = re.compile(r"[^\W\d_][\w'^²³-]*")
SHAPE = re.compile(r"\d+ x \d+")  # the name of a shape: 4 heads of rank 128
NOT_AN_END = ("e.g.", "i.e.", "et al.", "vs.")


@dataclass(frozen=True)
class Prose:
    """What was counted on one page."""

    words: int
    numbers: int
    sentences: tuple[str, ...]

    @property
    def numbers_per_100_words(self) -> float:
        return 100 * self.numbers / max(self.words, 1)

    @property
    def median_sentence(self) -> float:
        return median([len(sentence.split()) for sentence in self.sentences] or [0])

    @property
    def longest_sentence(self) -> str:
        return max(self.sentences, key=lambda sentence: len(sentence.split()), default="")


def paragraphs(page: str) -> list[str]:
    """The running text of a Markdown page: one string per paragraph or list item."""
    page = re.sub(r"^```.*?^```", "\n", page, flags=re.M | re.S)
    page = re.sub(r"!\[[^]]*\]\([^)]*\)", "", page)
    page = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", page)
    page = re.sub(r"^(#.*|\s*\|.*)$", "", page, flags=re.M)
    page = re.sub(r"^\s*(?:[-*]|\d+\.) +", "\n\n", page, flags=re.M)
    out = [" ".join(block.split()) for block in re.split(r"\n\s*\n", page)]
    return [block.replace("**", "").replace("*", "") for block in out if block]


def prose(page: str) -> Prose:
    """Count a page. Inline code, and the name of a shape, is one word without a number."""
    texts = [SHAPE.sub("shape", re.sub(r"`[^`]*`", "code", text)) for text in paragraphs(page)]
    sentences = [s for text in texts for s in _sentences(text)]
    numbers = sum(len(NUMBER.findall(text)) for text in texts)
    words = sum(len(WORD.findall(text)) for text in texts)
    return Prose(words, numbers, tuple(sentences))


def _sentences(text: str) -> list[str]:
    for dotted in NOT_AN_END:
        text = text.replace(dotted, dotted.replace(".", ""))
    found = re.split(r"(?<=[.!?])[)\"]? +(?=[(\"\w*`±+-])", text)
    return [sentence for sentence in found if WORD.search(sentence)]
