"""Models in Hugging Face's layout: a folder with config.json, safetensors and a tokenizer."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fullshard.errors import CheckpointError, ConfigError, LifecycleError, UnsupportedError
from fullshard.losses import head_loss
from fullshard.state import (
    LoadedWeights,
    load_safetensors,
    recreate_buffers,
    row_reader,
    stored_shapes,
    tensor_shards,
)
from fullshard.wrap import repeated_blocks
from fullshard_train.models.adapters import (
    LoraSettings,
    add_adapters,
    base_name,
    fill_adapters,
    fill_base,
    is_adapter,
)
from fullshard_train.models.architecture import Architecture, token_ids, write_json
from fullshard_train.models.optional import first_line, optional
from fullshard_train.models.quantized import is_quantized, weight_name
from fullshard_train.models.tokenizers import (
    FolderTokenizer,
    Tokenizer,
    has_tokenizer,
)

# What a wrapper adds to the names of its modules.
_WRAPPED = "_fsdp_wrapped_module."
# The most names listed in an error.
_NUM_LISTED = 8


class FolderArchitecture(Architecture):
    """A causal language model of `transformers`, loaded from the folder's safetensors files.

    Parameters are float32 regardless of the files; the mixed precision policy decides the compute
    dtype. Code in the folder is never run, and the network is never used.
    """

    def __init__(self, folder: Path, lora: LoraSettings | None = None) -> None:
        self.name = str(folder)
        self.lora = lora
        self._folder = folder
        self._transformers: Any = optional("transformers", f"model {folder}", "huggingface")
        self._config = self._read_config()
        self._require_weights()
        text = self._config.get_text_config()
        if getattr(text, "vocab_size", None) is None:
            raise self._other_kind(f"a {self._config.model_type!r}, which has no vocabulary")
        self.vocabulary: int = text.vocab_size
        self.max_sequence: int | None = getattr(text, "max_position_embeddings", None)
        self.default_tokenizer = "model" if has_tokenizer(folder) else "bytes"

    def build(self) -> nn.Module:
        model = self._without_adapters()
        return model if self.lora is None else add_adapters(model, self.lora, self.block_classes())

    def block_classes(self) -> tuple[type[nn.Module], ...]:
        return self._block_classes

    def fill(self, model: nn.Module, seed: int) -> None:
        # Not strict: no file contains adapters, and some contain more than the model uses.
        loaded = load_safetensors(self._folder, model, strict=False, rename=base_name)
        reference = self._without_adapters()
        self._require_whole(loaded, reference)
        self._restore_buffers(model, reference)
        fill_base(fill_adapters(tensor_shards(model), seed), self.lora, row_reader(self._folder))

    def logits(self, model: nn.Module, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        # transformers makes a mask from positions that begin again.
        packed = {} if positions is None else {"position_ids": positions}
        logits: Tensor = model(input_ids=tokens, use_cache=False, **packed).logits
        return logits

    def loss(
        self, model: nn.Module, tokens: Tensor, targets: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        head: Any = model.get_output_embeddings() if self._returns_head else None  # type: ignore[operator]
        if head is None or not isinstance(getattr(head, "module", head), nn.Linear):
            return super().loss(model, tokens, targets, positions)
        with head_loss(head, targets, reduction="sum"):
            return self.logits(model, tokens, positions)

    def next_token_logits(self, model: nn.Module) -> Callable[[Tensor], Tensor]:
        cache, num_cached = None, 0  # of the kind that the model makes for itself

        def read(tokens: Tensor) -> Tensor:
            nonlocal cache, num_cached
            if tokens.shape[1] <= num_cached:  # the window moved: all positions changed
                cache, num_cached = None, 0
            past: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
            output = model(input_ids=tokens[:, num_cached:], use_cache=True, **past)
            cache = getattr(output, "past_key_values", None)
            num_cached = 0 if cache is None else tokens.shape[1]
            logits: Tensor = output.logits[0, -1]
            return logits

        return read

    def own_tokenizer(self) -> Tokenizer:
        if not has_tokenizer(self._folder):
            raise ConfigError(
                f"model {self.name}: the folder has no tokenizer files; copy them there, or "
                "choose the tokenizer 'bytes'."
            )
        return FolderTokenizer(self._folder)

    def write_config(self, folder: Path, dtype: str, tokenizer: Tokenizer) -> None:
        config = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
        config.pop("torch_dtype", None)  # the older name
        ids = {} if isinstance(tokenizer, FolderTokenizer) else token_ids(tokenizer)
        write_json(folder / "config.json", {**config, "dtype": dtype, **ids})
        generation = self._folder / "generation_config.json"
        if generation.is_file() and not ids:
            shutil.copyfile(generation, folder / generation.name)

    @cached_property
    def _block_classes(self) -> tuple[type[nn.Module], ...]:
        families = repeated_blocks(self._without_adapters())
        return tuple({type(member): None for family in families for member in family})

    @cached_property
    def _returns_head(self) -> bool:
        """Whether the model returns what its linear head returns, and does not change it."""
        model: Any = self._without_adapters()
        head, returned = model.get_output_embeddings(), []
        if not isinstance(head, nn.Linear):
            return False
        head.register_forward_hook(lambda *called: returned.append(called[-1]))
        tokens = torch.zeros(1, 2, dtype=torch.int64, device="meta")
        mask = torch.zeros(1, 1, 2, 2, device="meta")  # to make one, transformers reads values
        try:
            with torch.no_grad(), head_loss(head, tokens):
                found = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
        except Exception:  # it changes what should be logits, or reads values
            return False
        return [found is each for each in returned] == [True]

    def _read_config(self) -> Any:
        if not (self._folder / "config.json").is_file():
            raise ConfigError(
                f"model {self.name}: the folder has no config.json; pass the folder that "
                "contains it."
            )
        try:
            config = self._transformers.AutoConfig.from_pretrained(
                self._folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the type depends on the file and on the version
            raise ConfigError(
                f"model {self.name}: transformers cannot read its config.json: {first_line(error)}"
            ) from error
        config.use_cache = False
        return config

    def _require_weights(self) -> None:
        try:
            stored_shapes(self._folder)
        except (CheckpointError, OSError) as error:
            raise ConfigError(
                f"model {self.name}: the folder has no weights as safetensors beside "
                f"config.json: {error}"
            ) from error

    def _without_adapters(self) -> nn.Module:
        try:
            with torch.device("meta"):
                # Building the model writes the dtype into the config.
                model: nn.Module = self._transformers.AutoModelForCausalLM.from_config(
                    copy.deepcopy(self._config), dtype=torch.float32, trust_remote_code=False
                )
        except Exception as error:  # the type depends on the kind of model
            raise self._other_kind(first_line(error)) from error
        return model

    def _other_kind(self, found: str) -> ConfigError:
        return ConfigError(f"model {self.name} is not a causal language model: {found}")

    def _require_whole(self, loaded: LoadedWeights, reference: nn.Module) -> None:
        """Raise unless the files have every parameter, and no others except ignored ones."""
        ignored = {name for name, _ in reference.named_buffers()}
        patterns = getattr(reference, "_keys_to_ignore_on_load_unexpected", None) or ()
        unexpected = [
            name
            for name in loaded.unexpected
            if name not in ignored and not any(re.search(each, name) for each in patterns)
        ]
        missing = [base_name(name) for name in loaded.missing if not is_adapter(name)]
        misfits = [f"{base_name(name)}: {why}" for name, why in loaded.mismatched.items()]
        # Weights are read when they are quantized: for now, their names have not been found.
        quantized = [weight_name(name) for name in missing if is_quantized(name)]
        unexpected = [name for name in unexpected if name not in quantized]
        missing = [name for name in missing if not is_quantized(name)]
        stored, read = stored_shapes(self._folder), row_reader(self._folder)
        for name in quantized:
            shape, own = stored.get(name), reference.get_parameter(name).shape
            if shape is None:
                missing.append(name)
            elif shape != own:
                misfits.append(f"{name}: its shape is {list(own)}, but {list(shape)} in the files")
            elif not (dtype := read(name, range(0)).dtype).is_floating_point:
                misfits.append(f"{name}: its dtype in the files is {dtype}, which is not quantized")
        problems = [
            *([f"missing in the files: {_listed(missing)}"] if missing else []),
            *([f"not in the model: {_listed(unexpected)}"] if unexpected else []),
            *misfits[:_NUM_LISTED],
        ]
        if problems:
            raise ConfigError(
                f"model {self.name}: the weights do not fit its config.json: {'; '.join(problems)}."
            )

    def _restore_buffers(self, model: nn.Module, reference: nn.Module) -> None:
        """Recompute buffers that are in no file, such as rotary frequencies.

        A second model, whose parameters stay on the meta device, computes them: the code that
        computes buffers may also initialize parameters.
        """
        try:
            recreate_buffers(reference)
        except LifecycleError as error:
            raise UnsupportedError(
                f"model {self.name} cannot recompute its buffers: {error}"
            ) from error
        expected = dict(reference.named_buffers(remove_duplicate=False))
        for path, module in model.named_modules():
            for name in sorted(module._non_persistent_buffers_set):
                buffer = module._buffers[name]
                if buffer is not None:
                    name = f"{path}.{name}".lstrip(".").replace(_WRAPPED, "")
                    buffer.copy_(expected[base_name(name)])


def _listed(names: Sequence[str]) -> str:
    further = len(names) - _NUM_LISTED
    return ", ".join(names[:_NUM_LISTED]) + (f" and {further} more" if further > 0 else "")
