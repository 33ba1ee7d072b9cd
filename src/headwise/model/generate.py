"""Text from a decoder: read the prompt once, then one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from headwise.errors import UsageError
from headwise.model.cache import Cache
from headwise.model.transformer import Decoder, Encoder


def prefill(model: Decoder | Encoder, prompt: Tensor, cache: Cache, chunk: int = 0) -> Tensor:
    """Read a prompt, (batch, tokens) ids or (batch, tokens, width) vectors, into the cache; what
    follows its last token, (batch, outputs).

    `chunk` bounds how many tokens are read at once, and with it the memory; 0 reads all.
    """
    _check_inputs(model, prompt)
    if chunk < 0:
        raise UsageError(f"chunk must be 0 (all at once) or more tokens, got {chunk}")
    # Every piece follows those before it in the cache; only the last one's output is wanted.
    h = None
    for piece in prompt.split(chunk or prompt.shape[1], 1):
        h = read(model, piece, cache)
    assert h is not None
    return h


def decode(model: Decoder | Encoder, newest: Tensor, cache: Cache) -> Tensor:
    """Read one more token per sequence, (batch,) ids or (batch, width) vectors; what follows it,
    (batch, outputs)."""
    _check_inputs(model, newest.unsqueeze(1))
    return read(model, newest.unsqueeze(1), cache)


@torch.no_grad()
def read(model: Decoder | Encoder, inputs: Tensor, cache: Cache) -> Tensor:
    """The step of both, inputs taken as they are: nothing waits for the device, so it can be
    captured in a CUDA graph."""
    return model.unembed(model.follow(inputs, cache)[:, -1:])[:, 0]


@torch.no_grad()
def generate(
    model: Decoder | Encoder,
    prompt: Tensor,
    tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
    cached: bool = True,
    inputs: bool = False,
    chunk: int = 0,
) -> Tensor:
    """The prompt (batch, length) with `tokens` more behind it.

    Each is the likeliest (temperature 0), or drawn from softmax(logits / temperature) over the
    `top_k` likeliest (0: all). Without `cached` everything is computed anew for every token: slow,
    the same text. `inputs` as in `Cache`, `chunk` as in `prefill`.
    """
    check_sampling(model, tokens, temperature, top_k)
    _check_inputs(model, prompt)
    # Room for all tokens that are read.
    cache = None
    if cached:
        weight = next(model.parameters())
        most = prompt.shape[1] + tokens - 1  # the last one is not read
        cache = Cache(
            model.shape, len(prompt), most, dtype=weight.dtype, device=weight.device, inputs=inputs
        )
    # Each turn finds what follows the text and appends one token. The first one reads the whole
    # prompt, later ones the newest token alone.
    text, logits = prompt, None
    for _ in range(tokens):
        if cache is None:
            logits = model(text)[0][:, -1]
        elif logits is None:
            logits = prefill(model, prompt, cache, chunk)
        else:
            logits = read(model, text[:, -1:], cache)
        text = torch.cat((text, pick(logits, temperature, top_k, generator).unsqueeze(1)), 1)
    return text


def pick(
    logits: Tensor,
    temperature: float = 0.0,
    top_k: int = 0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """One token per row of logits (batch, vocabulary)."""
    if temperature == 0:
        return logits.argmax(-1)
    # Everything below the k-th largest logit gets probability 0; ties with it stay.
    if top_k:
        least = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial((logits / temperature).softmax(-1), 1, generator=generator)[:, 0]


def check_sampling(model: Decoder | Encoder, tokens: int, temperature: float, top_k: int) -> None:
    shape = model.shape
    if not shape.vocab_size or shape.output_dim:
        raise UsageError(
            f"only tokens can be generated, got vocab_size {shape.vocab_size}, output_dim "
            f"{shape.output_dim}"
        )
    if not shape.lm_head:
        raise UsageError("only a model that reads tokens out generates them, got lm_head False")
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise UsageError(f"tokens to generate must be a whole number of at least 1, got {tokens!r}")
    if not 0 <= temperature < float("inf"):
        raise UsageError(
            f"temperature must be 0 (the likeliest token) or a positive number, got {temperature}"
        )
    if not isinstance(top_k, int) or not 0 <= top_k <= shape.vocab_size:
        raise UsageError(f"top_k must be 0 (all) to vocab_size {shape.vocab_size}, got {top_k}")


def _check_inputs(model: Decoder | Encoder, inputs: Tensor) -> None:
    """Refuse what embedding would answer with an error of the device, or not at all."""
    shape = model.shape
    if not isinstance(inputs, Tensor):
        raise UsageError(f"a prompt must be a tensor of ids, got {inputs!r:.60}")
    if not shape.vocab_size:
        if inputs.ndim != 3 or inputs.shape[-1] != shape.in_dim or not inputs.shape[1]:
            raise UsageError(
                f"inputs must be (batch, tokens, {shape.in_dim}) vectors, one token or more, got "
                f"{tuple(inputs.shape)}"
            )
        return
    if inputs.ndim != 2 or inputs.is_floating_point() or not inputs.numel():
        kind = str(inputs.dtype).removeprefix("torch.")
        raise UsageError(
            "a prompt must be (batch, tokens) whole numbers, one token or more, got "
            f"{tuple(inputs.shape)} of {kind}"
        )
    low, high = inputs.min().item(), inputs.max().item()
    if low < 0 or high >= shape.vocab_size:
        raise UsageError(
            f"token ids must be 0 to {shape.vocab_size - 1}, got {high if low >= 0 else low}"
        )
