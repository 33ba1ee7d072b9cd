"""Public model configs as shapes. Standard library only.

The parameter count is that of the class people mean by the family's name: `GPT2LMHeadModel`,
`LlamaForCausalLM` and the `ForCausalLM` of every other decoder, `BertModel` (with its pooler),
`ViTForImageClassification`, and `GPT` for nanochat's own config. A key that config.json leaves out
takes the default of the transformers library.

Ignored, because neither the shape nor its costs depend on them: dropout, softcaps, rope scaling
(with its factor on the scores), epsilons, embedding scales, nanochat's norm of the embeddings, and
the rope base of Gemma 3's windowed layers. Whatever else a `Shape` has no field for is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.configs.families import (
    FAMILIES,
    HYBRIDS,
    PARTS,
    text_of,
    to_shape_fields,
)
from headwise.configs.values import NANOCHAT_KEYS, Config, is_nanochat
from headwise.errors import UsageError, nearest
from headwise.files import NotReadableError, read_file, read_json

MOST_BYTES = 4 << 20  # of a config.json, a thousand times what one has

__all__ = ["FAMILIES", "HYBRIDS", "PARTS", "read_config", "text_of", "to_shape_fields"]


def read_config(config: str | Path | Config) -> dict[str, Any]:
    """The config as a dict, from a config.json, the folder that holds it, or a mapping."""
    found = dict(config) if isinstance(config, Mapping) else _read_json(config)
    inner = found.get("model_config")
    if found.get("model_type") is None and isinstance(inner, Mapping):
        # What nanochat writes beside a checkpoint; from before there were windows, without them.
        found = {"window_pattern": "L", **inner}
    if found.get("model_type") is None and not is_nanochat(found):
        keys = ", ".join(NANOCHAT_KEYS)
        raise UsageError(
            f"the config has no model_type, nor nanochat's own keys ({keys}); "
            f"{nearest('', FAMILIES)}"
        )
    return found


def _read_json(source: str | Path) -> dict[str, Any]:
    if not isinstance(source, str | Path):
        raise UsageError(
            f"a config must be a config.json, its folder or a mapping, got {type(source).__name__}"
        )
    path = Path(source) / "config.json" if Path(source).is_dir() else Path(source)
    try:
        found = read_json(read_file(path, MOST_BYTES, links=True))
    except NotReadableError as error:
        raise UsageError(f"cannot read {str(path)!r}: {error}") from None
    except OSError as error:
        raise UsageError(
            f"cannot read {str(path)!r} ({error.strerror}); give a config.json or the folder that "
            "holds it"
        ) from None
    except ValueError as error:
        raise UsageError(f"{str(path)!r} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{str(path)!r} must hold a JSON object, got {type(found).__name__}")
    return found
