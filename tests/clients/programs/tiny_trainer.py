"""Inputs for the Trainers of transformers and of TRL, and the results that are compared."""

from pathlib import Path
from typing import Any

import accelerate_on_cpu
import cases
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer


def tiny_llama(**settings: Any) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            **settings,
        )
    )


def arguments_for(
    folder: Path, version: int, steps: int, fsdp_config: dict[str, Any]
) -> dict[str, Any]:
    """The arguments of a run with either version of FSDP that saves in the middle."""
    accelerate_on_cpu.pretend_gpus()
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {
            "version": version,
            "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            "cpu_ram_efficient_loading": False,
            "sync_module_states": False,
            **({"use_orig_params": True} if version == 1 else {}),
            **fsdp_config,
        },
        "max_steps": steps,
        "save_steps": steps // 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "disable_tqdm": True,
    }


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
