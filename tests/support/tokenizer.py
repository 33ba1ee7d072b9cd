"""A small byte-level tokenizer, trained on a text of letters, accents, Chinese and emoji."""

from pathlib import Path

MANY = "the thin thing thinks the thought; çà et là, 走馬看花, 🙂🙃 and ß.\n" * 40


def trained_tokenizer(path: Path, vocab: int = 300, normalizer: object = None) -> str:
    """A byte-level tokenizer of our own."""
    import tokenizers as hf

    tokenizer = hf.Tokenizer(hf.models.BPE())
    tokenizer.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = hf.decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = hf.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=hf.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([MANY], trainer)
    tokenizer.save(str(path))
    return str(path)
