"""The words of `headwise inspect`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from headwise.cli.values import whole

PAGE = "headwise-inspect.html"


def add_inspect(add: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    """`headwise inspect`; `add` makes a command of its name, what it does and an example."""
    command = add(
        "inspect",
        "What a checkpoint's attention uses, by its weights: ranks, conditioning and redundancy of "
        "every head, beside random weights of the same sizes.",
        "headwise inspect ./checkpoint\n"
        "compared: headwise inspect step_1000/ step_5000/ step_10000/",
    )
    command.add_argument(
        "path",
        help=(
            "a Hugging Face folder, .safetensors or its index, a PyTorch state dict, nanochat's "
            "folder, a .gguf, a TensorFlow.js model.json, or the folder of a run"
        ),
    )
    command.add_argument(
        "others", nargs="*", metavar="OTHER", help="checkpoints that are compared with it, in order"
    )
    command.add_argument(
        "--mapping", metavar="FILE",
        help="names of tensors by part, in TOML, for a code base that is not known "
        "(examples/fairseq.toml)",
    )  # fmt: skip
    command.add_argument("--config", metavar="FILE", help="a config.json that lies elsewhere")
    command.add_argument(
        "--heads", type=whole, metavar="N", help="heads per layer, where there is no config"
    )
    command.add_argument("--kv-heads", type=whole, metavar="N", help="KV heads per layer, likewise")
    command.add_argument(
        "--prefix", metavar="NAME", help="which of several stacks, such as vision_model.encoder"
    )
    command.add_argument("--layers", metavar="0-3,7", help="some layers; default all")
    command.add_argument(
        "--data", metavar="FILE",
        help="a text, or a JSON list of token ids; images in a folder, or an array of them (.npy): "
        "what the attention uses on it, and the loss when layers are cut to lower rank (Hugging "
        "Face folders and runs)",
    )  # fmt: skip
    command.add_argument(
        "--tokens", type=whole, default=128, metavar="N", help="of a sequence; default 128"
    )
    command.add_argument(
        "--sequences", type=whole, default=8, metavar="N", help="at most; default 8"
    )
    command.add_argument(
        "--page", metavar="FILE", default=PAGE, help=f"where the page goes, default {PAGE}"
    )
    command.add_argument("--no-page", action="store_true", help="write no page")
    command.add_argument("--csv", metavar="FILE", help="write a row per head")
    command.add_argument("--wide", action="store_true", help="all columns of the table")
