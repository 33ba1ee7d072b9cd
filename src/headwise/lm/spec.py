"""What the training of one decoder on one text is: `Pretraining`, a plain value whose `id` is a
hash of all of it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass
from typing import Any, ClassVar

from headwise.errors import LARGEST, UsageError, nearest
from headwise.lm.corpus import find_text, find_tokenizer, vocab_of
from headwise.lm.optim import OPTIMISERS, SCHEDULES
from headwise.rows import Work
from headwise.shape import Shape

PRECISIONS = ("bf16", "fp32", "tf32")

STYLE = {
    "qk_norm": "free",
    "activation": "relu2",
}  # nanochat's, of any decoder that is not a config's, unless given
# sizes of a shape as the command line takes them, and what a run has unless it is given
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
    """One decoder to train on one text. `id` is a hash of all of it, with the text's and the
    tokenizer's digests for their paths."""

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
    clip: float = 1.0  # largest norm of the gradient; 0: as it is
    precision: str = "bf16"
    evals: int = 4  # how often the held-out part is judged
    eval_tokens: int = 1 << 20  # of it at most
    seed: int = 0
    digest: str = ""  # of text and tokenizer; found when not given, checked when given

    def __post_init__(self) -> None:
        for name in ("steps", "batch_tokens", "length", "evals", "eval_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise UsageError(f"seed must be a whole number, got {self.seed!r}")
        for name, high in (
            ("lr", LARGEST),
            ("warmup", 1),
            ("warmdown", 1),
            ("weight_decay", LARGEST),
            ("clip", LARGEST),
        ):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value <= high
            ):
                raise UsageError(f"{name} must be a number from 0 to {high:g}, got {value!r}")
            object.__setattr__(self, name, float(value))
        for name, choices in (
            ("optimiser", OPTIMISERS),
            ("schedule", SCHEDULES),
            ("precision", PRECISIONS),
        ):
            if getattr(self, name) not in choices:
                raise UsageError(
                    f"unknown {name} {getattr(self, name)!r}; "
                    f"{nearest(str(getattr(self, name)), choices)}"
                )
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
        if self.eval_tokens < self.length:
            raise UsageError(
                f"eval_tokens must be at least length {self.length}, got {self.eval_tokens}"
            )
        if self.batch_tokens % self.length:
            raise UsageError(
                "batch_tokens must be a multiple of length, got batch_tokens "
                f"{self.batch_tokens}, length {self.length}"
            )
        self._check_shape()
        self._check_text()

    def _check_shape(self) -> None:
        shape = self.shape
        if not shape.causal:
            raise UsageError(
                "a decoder's shape must be causal, because later tokens are the answers; got "
                "causal False"
            )
        if shape.output_dim or shape.extras:
            given = f"output_dim {shape.output_dim}, extras {shape.extras}"
            raise UsageError(
                f"a decoder has tokens in and tokens out and no other parts, got {given}"
            )
        if shape.positions != "none" and shape.num_positions < self.length:
            raise UsageError(
                f"num_positions must be at least length {self.length}, got {shape.num_positions}"
            )

    def _check_text(self) -> None:
        tokenizer, of_tokenizer = find_tokenizer(self.tokenizer)
        if self.shape.vocab_size < (vocab := vocab_of(tokenizer)):
            name = self.tokenizer or "bytes"
            raise UsageError(
                f"vocab_size must be at least the {vocab} ids of the tokenizer ({name}), got "
                f"{self.shape.vocab_size}"
            )
        text = find_text(self.source)
        found = text.digest + (f"+{of_tokenizer}" if of_tokenizer else "")
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
        """Arithmetic of one step."""
        return self.shape.flops(self.length, batch=self.rows, training=True)

    def spec(self) -> dict[str, Any]:
        """The run as plain values; `Pretraining.of` is its inverse."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, spec: dict[str, Any]) -> Pretraining:
        """A run from `spec()`, also after a round trip through JSON."""
        rest = {name: value for name, value in spec.items() if name != "shape"}
        return cls(shape=Shape.of(spec["shape"]), **rest)

    def columns(self) -> dict[str, Any]:
        """The same as the columns of a row, and its size; names of files are not part of what a run
        is."""
        shape = {
            key: value for key, value in dataclasses.asdict(self.shape).items() if key != "extras"
        }
        rest = {
            key: value
            for key, value in self.spec().items()
            if key not in ("shape", "source", "tokenizer")
        }
        return {**shape, **rest, "params": self.shape.params}

    @functools.cached_property
    def id(self) -> str:
        spec = {k: v for k, v in self.spec().items() if k not in ("source", "tokenizer")}
        text = json.dumps({"pretrain": spec}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]
