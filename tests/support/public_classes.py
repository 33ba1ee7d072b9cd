"""The public class of each family, as transformers has it, on the meta device or small on a CPU."""

import importlib
import warnings

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING

transformers.logging.set_verbosity_error()

# Classes that no automatic mapping names: the model is that of text or of images alone.
NAMED = {
    "glm4v_moe_text": ("glm4v_moe", "Glm4vMoeText"),
    "glm4v_text": ("glm4v", "Glm4vText"),
    "glm5_next_text": ("glm5_next", "Glm5NextText"),
    "muse_spark_text": ("muse_spark", "MuseSparkText"),
    "qwen2_5_vl_text": ("qwen2_5_vl", "Qwen2_5_VLText"),
    "qwen2_vl_text": ("qwen2_vl", "Qwen2VLText"),
    "qwen3_vl_moe_text": ("qwen3_vl_moe", "Qwen3VLMoeText"),
    "qwen3_vl_text": ("qwen3_vl", "Qwen3VLText"),
    "siglip_text_model": ("siglip", "SiglipText"),
    "siglip_vision_model": ("siglip", "SiglipVision"),
    "step3p7_text": ("step3p7", "Step3p7Text"),
}
ENCODERS = (
    *("albert", "bert", "camembert", "clip_text_model", "clip_vision_model", "deit", "dinov2"),
    *("dinov2_with_registers", "distilbert", "electra", "modernbert", "roberta"),
    *("siglip_text_model", "siglip_vision_model", "vit", "xlm-roberta"),
)
SAME = {"kimi_k2": "deepseek_v3"}  # names that are not transformers' own


def classes(model_type):
    """The config class and the model class that people mean by a family's name."""
    model_type = SAME.get(model_type, model_type)
    if model_type in NAMED:
        module, name = NAMED[model_type]
        place = f"transformers.models.{module}"
        configs = importlib.import_module(f"{place}.configuration_{module}")
        models = importlib.import_module(f"{place}.modeling_{module}")
        return getattr(configs, f"{name}Config"), getattr(models, f"{name}Model")
    if model_type == "vit":
        return transformers.ViTConfig, transformers.ViTForImageClassification
    if model_type == "mistral4":
        from transformers.models.mistral4 import modeling_mistral4 as mistral4

        return CONFIG_MAPPING["mistral4"], mistral4.Mistral4ForCausalLM
    config = CONFIG_MAPPING[model_type]
    mapping = MODEL_MAPPING if model_type in ENCODERS else MODEL_FOR_CAUSAL_LM_MAPPING
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, in gpt_bigcode
        return config, mapping[config]


def build(model_type, device="meta", **values):
    """The config and the model with these values; on the meta device only shapes exist."""
    config_class, model_class = classes(model_type)
    config = config_class(**values)
    config._attn_implementation = "eager"  # scores written out
    with torch.device(device):
        return config, model_class(config)


def without_head(model_type):
    """Whether the class leaves out the head that its wrapper has."""
    return model_type in NAMED and model_type not in ENCODERS


def count(model, model_type=""):
    """Parameters of a model, with the head of a text model whose wrapper has it."""
    params = sum({id(p): p.numel() for p in model.parameters()}.values())
    config = model.config
    if without_head(model_type) and not getattr(config, "tie_word_embeddings", False):
        params += config.vocab_size * config.hidden_size
    return params
