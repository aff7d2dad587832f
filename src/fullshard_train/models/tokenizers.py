"""Tokenizers: one of bytes, and those of Hugging Face folders."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard_train.models.optional import first_line, optional

# One of the vocabularies is enough for a tokenizer; the settings change its tokens. The order is
# part of the fingerprint.
_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt")
_END = "<|endoftext|>"
# For tokenizers without a template of their own.
CHAT_TEMPLATE = (
    "{% for each in messages %}<|{{ each.role }}|>\n{{ each.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
Messages = Sequence[Mapping[str, str]]


class Tokenizer(ABC):
    """Converts text to tokens and back; `end` is the token that ends a document.

    `fingerprint` is a short string that differs between tokenizers that encode differently.
    """

    vocabulary: int
    end: int
    fingerprint: str
    chat_template = CHAT_TEMPLATE

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without `end`."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; special tokens are skipped."""

    def render(self, messages: Messages, *, is_prompt: bool) -> str:
        """Return a conversation as text; a prompt ends where the assistant begins to speak."""
        text = "".join(f"<|{each['role']}|>\n{each['content']}\n" for each in messages)
        return text + "<|assistant|>\n" * is_prompt

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the files from which AutoTokenizer of transformers makes the same tokenizer."""


class ByteTokenizer(Tokenizer):
    """One token per byte of UTF-8."""

    vocabulary = 257
    end = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> list[int]:
        # A lone surrogate, which files may contain, cannot be encoded.
        return list(text.encode(errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < self.end).decode(errors="replace")

    def save(self, folder: Path) -> None:
        # Without merges, and with no character in the vocabulary, all text falls back to bytes.
        vocabulary = {**{f"<0x{byte:02X}>": byte for byte in range(256)}, _END: self.end}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        decoders = [{"type": "ByteFallback"}, {"type": "Fuse"}]
        content = {
            "version": "1.0",
            "added_tokens": [{"id": self.end, "content": _END, "special": True, **flags}],
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {"type": "BPE", "byte_fallback": True, "vocab": vocabulary, "merges": []},
        }
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), _END)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
        settings["chat_template"] = self.chat_template
        (folder / "tokenizer.json").write_text(json.dumps(content))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


class FolderTokenizer(Tokenizer):
    """The tokenizer of a folder in Hugging Face's layout."""

    def __init__(self, folder: Path) -> None:
        transformers = optional("transformers", f"the tokenizer of {folder}", "huggingface")
        try:
            self._own: Any = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the type depends on the files and on the version
            raise ConfigError(
                f"{folder}: transformers cannot read the tokenizer files: {first_line(error)}; "
                "choose the tokenizer 'bytes', or repair the folder."
            ) from error
        if self._own.eos_token_id is None:
            raise ConfigError(
                f"{folder}: the tokenizer has no token that ends a text (eos_token); set it in "
                "tokenizer_config.json, or choose the tokenizer 'bytes'."
            )
        self.end: int = self._own.eos_token_id
        # Added tokens may leave gaps, so the largest token counts, not their number.
        self.vocabulary: int = max(self._own.get_vocab().values()) + 1
        self.fingerprint = _fingerprint(folder)
        self._own.chat_template = self._own.chat_template or CHAT_TEMPLATE
        self.chat_template = str(self._own.chat_template)

    def encode(self, text: str) -> list[int]:
        # verbose=False: the tokenizer warns of texts that are longer than a sequence.
        tokens: list[int] = self._own.encode(text, add_special_tokens=False, verbose=False)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._own.decode(list(tokens), skip_special_tokens=True)
        return text

    def render(self, messages: Messages, *, is_prompt: bool) -> str:
        try:
            text: str = self._own.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=is_prompt
            )
        except Exception as error:  # from Jinja, or raised by the template
            text = f"{first_line(error)}; change the conversation or the template."
            raise ConfigError(
                f"data: the chat template does not accept a conversation: {text}"
            ) from error
        return text

    def save(self, folder: Path) -> None:
        self._own.save_pretrained(folder)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder contains the files of a tokenizer."""
    return any((folder / name).is_file() for name in _VOCABULARIES)


def _fingerprint(folder: Path) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for name in (*_VOCABULARIES, *_SETTINGS):
        path = folder / name
        if path.is_file():
            digest.update(f"{name} {path.stat().st_size} ".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()
