"""TRL's supervised fine-tuning, of all weights and of LoRA adapters."""

import sys
from pathlib import Path
from typing import Any

import accelerate_on_cpu
import cases
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

STEPS = 4
WORDS = ["<unk>", "<pad>", "<eos>", *(f"w{number}" for number in range(29))]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>"
    )


def texts() -> Dataset:
    ids = torch.randint(3, 32, (32, 8), generator=torch.Generator().manual_seed(3))
    return Dataset.from_list([{"text": " ".join(WORDS[at] for at in row)} for row in ids.tolist()])


def sft(folder: Path, version: int, lora: bool) -> SFTTrainer:
    accelerate_on_cpu.pretend_gpus()
    fsdp_config = {
        "version": version,
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": False,
        "sync_module_states": False,
    }
    if version == 1:
        fsdp_config |= {"use_orig_params": True, "state_dict_type": "SHARDED_STATE_DICT"}
    arguments = SFTConfig(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        fsdp="full_shard auto_wrap",
        fsdp_config=fsdp_config,
        gradient_checkpointing=False,
        max_steps=STEPS,
        save_steps=STEPS // 2,
        logging_steps=1,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
        max_length=16,
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=1,
        eos_token_id=2,
    )
    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return SFTTrainer(
        model=LlamaForCausalLM(config),
        args=arguments,
        train_dataset=texts(),
        processing_class=tokenizer(),
        peft_config=adapters if lora else None,
    )


def case_of(version: int, lora: bool, resumes: bool) -> Any:
    def case(folder: Path) -> Any:
        run = sft(folder, version, lora)
        first = folder.with_name(folder.name.removeprefix("resume_"))
        run.train(
            resume_from_checkpoint=str(first / f"checkpoint-{STEPS // 2}") if resumes else None
        )
        saved = folder / "saved"
        run.save_model(str(saved))
        steps = [entry for entry in run.state.log_history if "loss" in entry]
        return {
            "losses": [entry["loss"] for entry in steps],
            "norms": [float(entry["grad_norm"]) for entry in steps],
            "units": cases.num_units(run.model_wrapped),
            "saved": {file.name: load_file(file) for file in saved.glob("*.safetensors")},
        }

    return case


VARIANTS = {
    "fsdp2": (2, False),
    "fsdp2_lora": (2, True),
    "fsdp1": (1, False),
    "fsdp1_lora": (1, True),
}
ALL = {
    name: case_of(*settings, resumes)
    for resumes, form in ((False, "{}"), (True, "resume_{}"))
    for variant, settings in VARIANTS.items()
    for name in [form.format(variant)]
}

if __name__ == "__main__":
    sys.argv[2:] = sys.argv[2:] or list(ALL)
    cases.run(ALL)
