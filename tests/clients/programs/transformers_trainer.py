"""The Trainer of transformers with its FSDP settings, with and without peft."""

import sys
from pathlib import Path
from typing import Any

import cases
import torch
from peft import LoraConfig, get_peft_model
from tiny_trainer import arguments_for, logs, tiny_llama
from transformers import Trainer, TrainingArguments

STEPS = 6


def model(lora: bool) -> Any:
    built = tiny_llama(max_position_embeddings=16)
    if lora:
        return get_peft_model(built, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    return built


def examples() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 32, (48, 8), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(folder: Path, version: int, lora: bool, **settings: Any) -> Trainer:
    given = arguments_for(folder, version, STEPS, settings.pop("fsdp_config", {}))
    arguments = TrainingArguments(**given, gradient_accumulation_steps=2, **settings)
    torch.manual_seed(0)
    return Trainer(model=model(lora), args=arguments, train_dataset=examples())


def train(version: int, lora: bool, settings: dict[str, Any]) -> Any:
    def case(folder: Path) -> Any:
        run = trainer(folder, version, lora, **settings)
        run.train()
        return logs(run)

    return case


def resume(version: int, lora: bool, settings: dict[str, Any]) -> Any:
    """Resume in the middle of the run beside this one."""

    def case(folder: Path) -> Any:
        run = trainer(folder, version, lora, **settings)
        first = folder.with_name(folder.name.removeprefix("resume_"))
        run.train(resume_from_checkpoint=str(first / f"checkpoint-{STEPS // 2}"))
        return logs(run)

    return case


SHARDED = {"state_dict_type": "SHARDED_STATE_DICT"}
VARIANTS: dict[str, tuple[int, bool, dict[str, Any]]] = {
    "fsdp2": (2, False, {}),
    "fsdp2_sharded": (2, False, {"fsdp_config": SHARDED}),
    "fsdp2_bf16": (2, False, {"bf16": True}),
    "fsdp2_lora": (2, True, {}),
    "fsdp2_checkpointed": (2, False, {"fsdp_config": {"activation_checkpointing": True}}),
    "fsdp1": (1, False, {"fsdp_config": SHARDED}),
    "fsdp1_bf16": (1, False, {"bf16": True, "fsdp_config": SHARDED}),
    "fsdp1_lora": (1, True, {"fsdp_config": SHARDED}),
    "fsdp1_full": (1, False, {}),
}
ALL = {
    name: kind(*settings)
    for form, kind in (("{}", train), ("resume_{}", resume))
    for variant, settings in VARIANTS.items()
    for name in [form.format(variant)]
}

if __name__ == "__main__":
    sys.argv[2:] = sys.argv[2:] or list(ALL)
    cases.run(ALL)
