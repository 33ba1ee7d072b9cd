"""nanochat with free heads: its own GPT, optimiser and scripts, no file of it changed.

In its checkout, with its own arguments behind the dashes (torchrun takes `-m
headwise.integrations.nanochat` just the same):

    python -m headwise.integrations.nanochat --num-heads 4 --head-dim 448 -- -m scripts.base_train
    --depth=28

Heads, their rank, the width of their values, KV heads and the scale of the scores are free. Value
embeddings, rotary positions, norms of queries and keys, windows, feed-forward and optimiser stay
nanochat's. What a checkpoint needs besides GPTConfig's own fields (`head_dim`, `v_head_dim`,
`logit_scale`) is written into its model_config, unless the sizes are nanochat's own.

    configs.py       GPTConfig <-> Shape
    layers.py        nanochat's classes with free sizes
    hook.py          `use`: while it is on, nanochat builds them
    checkpoints.py   `read`: a checkpoint's shape and weights, without nanochat
    command.py       the command line
"""

from headwise.integrations.nanochat.checkpoints import Checkpoint, read
from headwise.integrations.nanochat.configs import config_of, shape_of
from headwise.integrations.nanochat.hook import use

__all__ = ["Checkpoint", "config_of", "read", "shape_of", "use"]
