"""Models with headwise's attention under Trainer and PEFT, where these are installed."""

import pytest
import torch
from support.hf_models import VOCAB, make, padded, tokens, transformers
from support.tolerance import close, seeded


def losses(how, folder, model=None, **settings):
    """The losses of a few steps on padded sequences that repeat a few tokens."""
    pytest.importorskip("accelerate")
    model = model or make("mistral window", how)
    ids = torch.randint(2, VOCAB, (24, 3), generator=seeded(2)).repeat(1, 4)
    seen = padded("right", 12).repeat(12, 1)
    rows = [
        {"input_ids": i, "attention_mask": s, "labels": i.where(s == 1, -100)}
        for i, s in zip(ids, seen, strict=True)
    ]
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            max_steps=8,
            per_device_train_batch_size=6,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **settings,
        ),
        train_dataset=rows,
    )
    trainer.train()
    return torch.tensor([row["loss"] for row in trainer.state.log_history if "loss" in row])


@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": True}, {"bf16": True}])
def test_trainer_gives_the_losses_of_the_library(tmp_path, settings):
    ours, theirs = (losses(how, tmp_path, **settings) for how in ("headwise", "sdpa"))
    assert ours.shape == (8,)
    assert ours[-1] < ours[0]
    torch.testing.assert_close(ours, theirs, rtol=2e-2 if settings.get("bf16") else 1e-3, atol=0)


def test_lora_trains_its_own_weights_alone(tmp_path):
    peft = pytest.importorskip("peft")
    model = make("mistral window", "headwise")
    before = {name: p.clone() for name, p in model.named_parameters()}
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    adapted = peft.get_peft_model(model, config)
    found = losses("headwise", tmp_path, adapted)
    assert found[-1] < found[0]
    for name, p in adapted.named_parameters():
        if "lora" not in name:
            name = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(p, before[name]), name
    adapted.eval()
    wanted = adapted(tokens()).logits
    close(adapted.merge_and_unload()(tokens()).logits, wanted)
