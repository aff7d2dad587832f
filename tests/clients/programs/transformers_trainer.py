"""The Trainer of transformers with its FSDP settings, with and without peft."""

import sys
from pathlib import Path
from typing import Any

import accelerate_on_cpu
import cases
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

STEPS = 6


def model(lora: bool) -> Any:
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=16,
    )
    built = LlamaForCausalLM(config)
    if lora:
        return get_peft_model(built, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    return built


def examples() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 32, (48, 8), generator=torch.Generator().manual_seed(3))
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(folder: Path, version: int, lora: bool, **settings: Any) -> Trainer:
    accelerate_on_cpu.pretend_gpus()
    fsdp_config = {
        "version": version,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": False,
        "sync_module_states": False,
    }
    fsdp_config |= settings.pop("fsdp_config", {})
    if version == 1:
        fsdp_config.setdefault("use_orig_params", True)
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        fsdp="full_shard auto_wrap",
        fsdp_config=fsdp_config,
        max_steps=STEPS,
        save_steps=STEPS // 2,
        logging_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    torch.manual_seed(0)
    return Trainer(model=model(lora), args=arguments, train_dataset=examples())


def logs(run: Trainer) -> dict[str, Any]:
    """The losses and norms of the steps, and the weights that `save_model` writes."""
    steps = [entry for entry in run.state.log_history if "loss" in entry]
    folder = Path(run.args.output_dir) / "saved"
    run.save_model(str(folder))
    return {
        "losses": [entry["loss"] for entry in steps],
        "norms": [float(entry["grad_norm"]) for entry in steps],
        "units": cases.num_units(run.model_wrapped),
        "saved": {file.name: load_file(file) for file in folder.glob("*.safetensors")},
    }


def train(version: int, lora: bool, settings: dict[str, Any]) -> Any:
    def case(folder: Path) -> Any:
        run = trainer(folder, version, lora, **settings)
        run.train()
        return logs(run)

    return case


def resume(version: int, lora: bool, settings: dict[str, Any]) -> Any:
    """Go on in the middle of the run beside this one."""

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
