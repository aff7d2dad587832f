"""TRL's supervised fine-tuning, of all weights and of LoRA adapters."""

import sys
from pathlib import Path
from typing import Any

import cases
import torch
from datasets import Dataset
from peft import LoraConfig
from tiny_trainer import arguments_for, logs, tiny_llama
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast
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
    fsdp_config = {"state_dict_type": "SHARDED_STATE_DICT"} if version == 1 else {}
    given = arguments_for(folder, version, STEPS, fsdp_config)
    arguments = SFTConfig(**given, bf16=False, gradient_checkpointing=False, max_length=16)
    torch.manual_seed(0)
    adapters = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return SFTTrainer(
        model=tiny_llama(pad_token_id=1, eos_token_id=2),
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
        return logs(run)

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
