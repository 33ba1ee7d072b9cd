"""Bad words on the command line: options, `--set key=value`, names, arguments of own files."""

from __future__ import annotations

import random

from support.commands import TINY

from tests.fuzz.cases import Case, Special
from tests.fuzz.values import STRANGE_TEXTS, typed, word

COMMANDS = (
    "run", "theory", "pretrain", "list", "report", "draw", "cost", "policies", "explain", "infer",
    "check", "plan", "cancel", "worker", "inspect", "choose", "export", "convert",
)  # fmt: skip
SHAPE = {
    "dim": "8", "depth": "2", "num_heads": "2", "head_dim": "4", "v_head_dim": "4",
    "num_kv_heads": "1", "ffn_dim": "16", "activation": "gelu", "norm": "rms", "norm_at": "pre",
    "positions": "additive", "num_positions": "16", "qk_rope_head_dim": "4", "rope_theta": "1e4",
    "qk_norm": "head", "kv_lora_rank": "4", "q_lora_rank": "4", "windows": "3,0", "causal": "true",
    "vocab_size": "11", "output_dim": "3", "input_dim": "3", "tied": "true", "qkv_bias": "true",
    "out_bias": "false", "ffn_bias": "true", "average": "1", "logit_scale": "0.5",
    "max_logit": "2", "extras": "1", "shared_kv": "true", "o_lora_rank": "3", "o_groups": "2",
    "attn_gate": "head", "sinks": "true", "rope_at": "first", "num_experts": "4",
    "rope_interleaved": "true",
    "num_experts_per_tok": "2", "expert_ffn_dim": "8", "shared_ffn_dim": "8",
    "shared_gate": "true", "router_bias": "true", "layers": "2", "n_head": "2,1",
    "hidden_size": "8", "d_ff": "8,0",
}  # fmt: skip
SETTINGS = {
    **dict(change.split("=", 1) for change in TINY),
    "seeds": "1", "schedule": "cosine", "protocols": "stream", "init": "library", "beta2": "0.9",
    "precision": "fp32", "warmup": "0.1", "evals": "1", "weight_decay": "0", "rates": "0.1",
}  # fmt: skip
SMALL = {  # experiments that train in no time, with settings of theirs
    "fig1": TINY,
    "map": ["dim=4", "points=3", "steps=4", "epoch=2", "batch=4", "held_out=8"],
    "regression": ["steps=4", "epoch=2", "batch=4", "held_out=8", "seeds=1"],
}
QUICKLY = ["--device", "cpu", "--workers", "1", "--no-report"]


def shapes(rng: random.Random) -> Case:
    """`--set` of a shape for the commands that take one."""
    command = rng.choice(("cost",) * 4 + ("policies",) * 3 + ("explain", "infer"))
    fields = {name: SHAPE[name] for name in ("dim", "depth", "num_heads")}
    for name in rng.sample(sorted(SHAPE), rng.randint(0, 4)):
        fields[name] = SHAPE[name]
    for name in rng.sample(sorted(fields), rng.randint(1, 2)):
        fields[name] = word(rng)
    words = [command, "--set", *(f"{key}={value}" for key, value in fields.items())]
    if command == "infer":
        words += ["--tokens", "8", "--steps", "3", "--batch", "1"]
    if rng.random() < 0.3:
        words += spoiled_option(rng, command)
    return Case(tuple(words))


OPTIONS = {  # option -> a value that will do
    "run": ("--preset=quick", "--seeds=1", "--workers=1", "--device=cpu", "--checkpoint-every=0",
            "--set=steps=2", "--task=farthest", "--model=m.py", "--rows=r.jsonl", "--store=store",
            "--no-train", "--keep-weights", "--on=local", "--devices=cpu:1", "--lost-after=9",
            "--tries=1"),
    "theory": ("--only=kernels", "--seed=0", "--store=store", "--no-report"),
    "pretrain": ("--preset=quick", "--steps=1", "--batch-tokens=8", "--length=4", "--lr=0.1",
                 "--optimiser=adamw", "--schedule=cosine", "--warmup=0.1", "--warmdown=0.1",
                 "--weight-decay=0", "--clip=1", "--precision=fp32", "--evals=1", "--seed=0",
                 "--eval-tokens=8", "--accumulate=1", "--shard=ddp", "--peak-tflops=1",
                 "--device=cpu", "--store=store", "--checkpoint-every=0", "--tokenizer=t.json",
                 "--text=book.txt"),
    "list": ("--store=store", "--older", "--live"),
    "report": ("--store=store", "--output=out.html"),
    "draw": ("--output=out.png", "--view=depth"),
    "cost": ("--tokens=8",),
    "policies": ("--policy=split", "--to=1,2", "--budget=flops", "--target=1000", "--tokens=8",
                 "--within=widen", "--exact", "--multiple=2"),
    "explain": ("--tokens=8", "--batch=1", "--device=cpu", "--dtype=float32"),
    "infer": ("--tokens=8", "--steps=3", "--batch=1", "--device=cpu", "--dtype=float32"),
    "check": ("--task=my_task.py",),
    "plan": ("--params=2M", "--kv-bytes=2KiB", "--train-flops=<=9M", "--activation-bytes=>=1MB",
             "--weight-bytes=1MB..9MB", "--decode-flops=3M", "--context=64", "--batch=2",
             "--dtype=fp8", "--tolerance=2%", "--keep=params", "--multiple=8", "--rows=3",
             "--sort=-depth", "--columns=dim,params", "--pareto=params", "--csv=out.csv",
             "--only-pareto", "--row=2", "--write=row", "--set=head_dim=8,16",
             "--set=windows=3/0", "--set=tied=true,false", "--set=dim/depth=1..99"),
    "cancel": ("--store=store", "--on=local"),
    "worker": ("--attempt=2", "--code=own.py", "--probe=own.py:probe"),
    "inspect": ("--heads=2", "--kv-heads=1", "--layers=0-3", "--prefix=model", "--mapping=m.toml",
                "--config=config.json", "--data=ids.json", "--tokens=8", "--sequences=2",
                "--page=out.html", "--csv=out.csv", "--no-page"),
    "choose": ("--params=2k", "--dim=8", "--depths=1", "--heads=1,2", "--ranks=8,4", "--most=2",
               "--model=m.py", "--hours=1", "--seconds=9", "--delta=0.1", "--epsilon=0",
               "--seeds=2", "--steps=4", "--batch=4", "--rates=0.01", "--trials=1",
               "--extrapolate=1k,2k", "--text=book.txt", "--length=8", "--batch-tokens=64",
               "--eval-tokens=64", "--tokenizer=t.json", "--optimiser=adamw", "--precision=fp32",
               "--kv-bytes=2KiB", "--decode-flops=3M", "--workers=1", "--device=cpu", "--on=local",
               "--checkpoint-every=0", "--store=store", "--no-report", "--wide"),
    "export": ("--to=csv", "--experiment=fig1", "--store=store"),
    "convert": ("--to=num_kv_heads=2", "--rank=4", "--out=new", "--dry-run", "--as=hf",
                "--data=ids.json", "--tokens=8", "--sequences=2", "--no-controls", "--finetune=1",
                "--lr=0.1", "--seed=0"),
}  # fmt: skip


def spoiled_option(rng: random.Random, command: str) -> list[str]:
    name, equals, _ = rng.choice(OPTIONS[command]).partition("=")
    if rng.random() < 0.1:
        return [name + rng.choice(("s", "-", "=", "\n"))]
    return [f"{name}={word(rng)}"] if equals or rng.random() < 0.2 else [name]


def options(rng: random.Random) -> Case:
    """Any command with words that it does not know, or values that no option takes."""
    command = rng.choice(COMMANDS)
    arguments = {
        "run": ["fig1", *QUICKLY, "--no-train", "--set", *TINY],
        "theory": ["--only", "softmax", "--no-report"],
        "pretrain": ["--steps", "1", "--batch-tokens", "64", "--length", "32", "--evals", "1",
                     "--eval-tokens", "64", "--set", "dim=8", "depth=1", "num_heads=1"],
        "list": [], "report": ["--store", "store"], "draw": ["fig1", "store"],
        "cost": ["--set", "dim=8", "depth=1", "num_heads=1"],
        "policies": ["--set", "dim=8", "depth=2", "num_heads=2", "--to", "1,2"],
        "explain": ["--set", "dim=8", "depth=1", "num_heads=1"],
        "infer": ["--set", "dim=8", "depth=1", "num_heads=1", "causal=true", "vocab_size=11",
                  "--tokens", "8", "--steps", "3", "--batch", "1"],
        "check": ["none.py"], "cancel": ["--store", "store"], "worker": ["store/groups/0a"],
        "plan": ["--params", "1M", "--set", "vocab_size=64", "depth=2"],
        "inspect": ["model.safetensors", "--no-page"],
        "choose": ["farthest", "--params", "2k", "--dim", "8", "--heads", "1,2", "--depths", "1",
                   "--steps", "4", "--batch", "4", "--seeds", "2", "--rates", "0.01",
                   "--trials", "1", "--workers", "1", "--device", "cpu", "--no-report"],
        "export": ["--to", "csv", "--store", "store"],
        "convert": ["model", "--dry-run"],
    }[command]  # fmt: skip
    if command == "theory":  # the checks themselves take seconds
        arguments = ["--only", word(rng)]
    words = [command, *arguments]
    for _ in range(rng.randint(1, 2)):
        if command != "theory" or rng.random() < 0.5:
            words += spoiled_option(rng, command)
    how = rng.random()
    if how < 0.08:
        words.insert(rng.randrange(len(words) + 1), typed(rng.choice(STRANGE_TEXTS)))
    elif how < 0.12:
        del words[rng.randrange(len(words))]
    return Case(tuple(words), store=True)


def settings(rng: random.Random) -> Case:
    """`run` with settings that are none; it trains where they will do."""
    name = rng.choice(("fig1",) * 4 + ("map", "regression"))
    changes = list(SMALL[name])
    for _ in range(rng.randint(1, 2)):
        key = rng.choice(sorted(SETTINGS))
        near = rng.choice(("0", "1", "2", "-1", "0.5", "1,2", SETTINGS[key]))
        changes.append(f"{key}={near if rng.random() < 0.4 else word(rng)}")
    few = ["--no-train"] if name != "fig1" else rng.choice(([], ["--no-train"]))
    words = ["run", name, *QUICKLY, "--store", "store", "--seeds", "1", *few]
    if rng.random() < 0.1:
        words.append(rng.choice(("farthest", "recall", "text", typed(rng.choice(STRANGE_TEXTS)))))
    return Case((*words, "--set", *changes), store=True)


def nanochat(rng: random.Random) -> Case:
    """The words before and behind the dashes of the nanochat command."""
    own: list[str] = []
    for name in rng.sample(
        ("--num-heads", "--head-dim", "--v-head-dim", "--num-kv-heads", "--logit-scale",
         "--max-logit"), rng.randint(0, 3),
    ):  # fmt: skip
        own += [name, rng.choice(("2", "0.5", word(rng)))]
    module = rng.choice(("scripts.none", "no.such", "", ".", "..x", "a b", "-m", word(rng)))
    script = rng.choice((["--", "-m", module], ["--", "-m"], ["--"], [], ["--", module, "-m"]))
    return Case((*own, *script), command="nanochat")


def places(rng: random.Random) -> Case:
    """Stores, sources and outputs at paths where nothing can be."""
    # What is written stays within the case's folder: root could replace a device of the system.
    inside = ("", ".", "no/such/folder", "book.txt", "book.txt/x", "x" * 300, "a" * 5000, "\n", "~",
              "store/runs", "é/ü", "loop", "fifo", word(rng))  # fmt: skip
    read = rng.choice((*inside, "/", "/proc/self", "/dev/null", "/dev/zero", "/dev/full/x"))
    written = rng.choice(inside)
    words = rng.choice(
        (
            ["list", "--store", read],
            ["report", "--store", written],
            ["report", "--store", "store", "--output", written],
            ["draw", "fig1", read, "--output", "fig1.png"],
            ["draw", "fig1", "store", "--output", written],
            ["draw", "fig1", "store", "--output", written + ".svg"],
            ["run", "fig1", *QUICKLY, "--no-train", "--store", written],
            ["run", "fig1", *QUICKLY, "--store", "store", "--rows", read, "--set", *TINY],
            ["cost", read],
            ["pretrain", "--text", read, "--store", "store", "--steps", "1"],
            ["pretrain", "--tokenizer", read, "--store", "store", "--steps", "1"],
            ["check", read],
            ["run", read, *QUICKLY],
            ["run", "map", read, *QUICKLY],
            ["run", "fig1", "--model", read, *QUICKLY, "--no-train"],
        )
    )
    files = {"book.txt": b"some words\n" * 30, "loop": Special("link", "loop")}
    return Case(tuple(words), {**files, "fifo": Special("fifo")}, store=True)
