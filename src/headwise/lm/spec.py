"""What the training of one decoder on one text is: `Pretraining`, a plain value; no torch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from headwise.errors import (
    LARGEST,
    UsageError,
    check_most,
    check_seed,
    check_whole_numbers,
    nearest,
    shown,
)
from headwise.lm.text_files import find_text, find_tokenizer, vocab_of
from headwise.rows import Work, columns_of, id_of
from headwise.shape import Shape, not_built

OPTIMISERS = ("adamw", "muon")
SCHEDULES = ("cosine", "trapezoid")
PRECISIONS = ("bf16", "fp32", "tf32")
SHARDS = ("ddp", "fsdp")  # how several processes share a model
COMPILED = ("model", "blocks")  # what is compiled as one

# nanochat's style; a decoder that is given by its sizes has it unless the style is given too
STYLE = {"qk_norm": "free", "activation": "relu2"}

MOST_EVALS = 100_000  # each is a point of a row's curve

# by preset: sizes of a shape as the command line takes them, and fields of Pretraining
PRESETS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "quick": (
        ("dim=64", "depth=3", "num_heads=2", "head_dim=32"),
        {"steps": 300, "batch_tokens": 4096, "length": 256, "lr": 0.01},
    ),
    "base": (
        ("dim=768", "depth=12", "num_heads=6", "head_dim=128"),
        {
            "steps": 2000,
            "batch_tokens": 1 << 19,
            "length": 2048,
            "eval_tokens": 1 << 23,
            "evals": 8,
        },
    ),
}


@dataclass(frozen=True, kw_only=True)
class Pretraining:
    """One decoder to train on one text.

    `id` is a hash of all fields, with the digest of text and tokenizer in place of their paths.

    >>> shape = Shape(dim=8, depth=1, num_heads=2, causal=True, vocab_size=257)
    >>> Pretraining(shape=shape, steps=10, batch_tokens=64, length=16).rows
    4
    """

    work: ClassVar[Work] = "pretrain"
    shape: Shape
    steps: int
    batch_tokens: int  # in one step, over all processes
    length: int  # of a sequence
    source: str = ""  # a file, a folder of .txt files, or "" for a generated text
    tokenizer: str = ""  # a `tokenizers` JSON file, or "" for bytes
    optimiser: str = "muon"
    lr: float = 3e-3
    schedule: str = "trapezoid"
    warmup: float = 0.02  # share of the steps
    warmdown: float = 0.4  # share of the steps, for a trapezoid
    weight_decay: float = 0.0  # of matrices and tables
    clip: float = 1.0  # largest norm of the gradient; 0: not clipped
    precision: str = "bf16"
    evals: int = 4  # how often it is evaluated on the held-out part
    eval_tokens: int = 1 << 20  # held-out tokens of an evaluation, at most
    seed: int = 0
    digest: str = ""  # of text and tokenizer; found when not given, checked when given

    def __post_init__(self) -> None:
        check_whole_numbers(self, 1, "steps", "batch_tokens", "length", "evals", "eval_tokens")
        check_seed(self.seed)
        check_most("evals", min(self.evals, self.steps), MOST_EVALS)
        self._check_number(LARGEST, "lr", "weight_decay", "clip")
        self._check_number(1, "warmup", "warmdown")
        self._check_choice("optimiser", OPTIMISERS)
        self._check_choice("schedule", SCHEDULES)
        self._check_choice("precision", PRECISIONS)
        self._check_schedule()
        self._check_sizes()
        self._check_shape()
        self._check_text()

    def _check_number(self, most: float, *names: str) -> None:
        """Refuse what is no number from 0 to `most`; whole numbers become floats."""
        for name in names:
            value = getattr(self, name)
            real = isinstance(value, int | float) and not isinstance(value, bool)
            if not real or not 0 <= value <= most:
                raise UsageError(f"{name} must be a number from 0 to {most:g}, got {shown(value)}")
            object.__setattr__(self, name, float(value))

    def _check_choice(self, name: str, choices: Sequence[str]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise UsageError(f"unknown {name} {value!r}; {nearest(str(value), choices)}")

    def _check_schedule(self) -> None:
        if self.schedule == "cosine" and self.warmdown != Pretraining.warmdown:
            raise UsageError(
                "a cosine has no warm-down; warmdown is for schedule trapezoid, got "
                f"{self.warmdown:g}"
            )
        if self.schedule == "trapezoid" and self.warmup + self.warmdown > 1:
            raise UsageError(
                f"warmup and warmdown must not exceed 1 together, got {self.warmup} and "
                f"{self.warmdown}"
            )

    def _check_sizes(self) -> None:
        if self.eval_tokens < self.length:
            raise UsageError(
                f"eval_tokens must be at least length {self.length}, got {self.eval_tokens}"
            )
        if self.batch_tokens % self.length:
            raise UsageError(
                "batch_tokens must be a multiple of length, got batch_tokens "
                f"{self.batch_tokens}, length {self.length}"
            )

    def _check_shape(self) -> None:
        shape = self.shape
        if not shape.causal:
            raise UsageError(
                "a decoder's shape must be causal, because later tokens are the answers; got "
                "causal False"
            )
        if missing := not_built(shape):
            raise UsageError(missing)
        if shape.output_dim or shape.extras:
            given = f"output_dim {shape.output_dim}, extras {shape.extras}"
            raise UsageError(
                f"a decoder has tokens in and tokens out and no other parts, got {given}"
            )
        if shape.positions in ("additive", "concatenated") and shape.num_positions < self.length:
            raise UsageError(
                f"num_positions must be at least length {self.length}, got {shape.num_positions}"
            )

    def _check_text(self) -> None:
        # The digest of the text stands for its path in the run's id, so a changed text is another
        # run.
        tokenizer, tokenizer_digest = find_tokenizer(self.tokenizer)
        vocab = vocab_of(tokenizer)
        if self.shape.vocab_size < vocab:
            name = self.tokenizer or "bytes"
            raise UsageError(
                f"vocab_size must be at least the {vocab} ids of the tokenizer ({name}), got "
                f"{self.shape.vocab_size}"
            )
        text = find_text(self.source)
        found = text.digest + (f"+{tokenizer_digest}" if tokenizer_digest else "")
        if self.digest and self.digest != found:
            raise UsageError(
                f"{text.name} or its tokenizer is not what it was: digest {found}, expected "
                f"{self.digest}"
            )
        object.__setattr__(self, "digest", found)

    @property
    def rows(self) -> int:
        """Sequences in one step."""
        return self.batch_tokens // self.length

    @property
    def flops(self) -> int:
        """Operations of one step."""
        return self.shape.flops(self.length, batch=self.rows, training=True)

    def spec(self) -> dict[str, Any]:
        """The run as plain values; `Pretraining.of` is its inverse."""
        return dataclasses.asdict(self) | {"shape": self.shape.spec()}

    @classmethod
    def of(cls, spec: dict[str, Any]) -> Pretraining:
        """A run from `spec()`, also after a round trip through JSON."""
        rest = {name: value for name, value in spec.items() if name != "shape"}
        return cls(shape=Shape.of(spec["shape"]), **rest)

    def columns(self) -> dict[str, Any]:
        """The run as the columns of its row, with its parameters; paths are not part of a run."""
        return {**columns_of(self.spec()), "params": self.shape.params}

    @functools.cached_property
    def id(self) -> str:
        """A hash of all fields but the paths: the run's name in a store."""
        return id_of(self.spec())
