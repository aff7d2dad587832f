"""Tokenizers: one of bytes, those of a `tokenizer.json`, and those of Hugging Face folders."""

from __future__ import annotations

import hashlib
import json
import shutil
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
_SETTINGS = (
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    "chat_template.jinja",
)
END = "<|endoftext|>"
# How tokens that end a text are called, where no settings say which one does.
_ENDS = (END, "</s>", "<|end_of_text|>", "<eos>", "<|eot_id|>", "<|im_end|>", "[EOS]")
# What `--tokenizer` may be beside the path of one.
_NAMES = ("auto", "bytes", "model")
_BPE = "bpe:"
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

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of each text; some tokenizers use several threads for that."""
        return [self.encode(text) for text in texts]

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; special tokens are skipped."""

    def render(self, messages: Messages, *, is_prompt: bool) -> str:
        """Return a conversation as text; a prompt ends where the assistant begins to speak."""
        text = "".join(f"<|{each['role']}|>\n{each['content']}\n" for each in messages)
        return text + "<|assistant|>\n" * is_prompt

    def encode_prompt(self, text: str) -> list[int]:
        """Return the tokens of a text that goes on.

        Words have the space before them in their first token, so a model has rarely seen a word
        after a token that is a space. It is left to the model, which repeats it.
        """
        return self.encode(text.rstrip(" ") or text)

    def decode_after(self, prompt: str, tokens: Sequence[int]) -> str:
        """Return the text that tokens add to a prompt."""
        text, left_out = self.decode(tokens), len(prompt) - len(prompt.rstrip(" ") or prompt)
        while left_out and text.startswith(" "):
            text, left_out = text[1:], left_out - 1
        return text

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

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def decode_after(self, prompt: str, tokens: Sequence[int]) -> str:
        return self.decode(tokens)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < self.end).decode(errors="replace")

    def save(self, folder: Path) -> None:
        # Without merges, and with no character in the vocabulary, all text falls back to bytes.
        vocabulary = {**{f"<0x{byte:02X}>": byte for byte in range(256)}, END: self.end}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        decoders = [{"type": "ByteFallback"}, {"type": "Fuse"}]
        content = {
            "version": "1.0",
            "added_tokens": [{"id": self.end, "content": END, "special": True, **flags}],
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": {"type": "BPE", "byte_fallback": True, "vocab": vocabulary, "merges": []},
        }
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), END)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
        settings["chat_template"] = self.chat_template
        (folder / "tokenizer.json").write_text(json.dumps(content))
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


class JsonTokenizer(Tokenizer):
    """The tokenizer of a file `tokenizer.json`, read by the library `tokenizers`.

    The settings beside the file name the token that ends a text; without them it is known by its
    usual names. Text that looks like a special token is text.
    """

    def __init__(self, path: Path) -> None:
        library: Any = optional("tokenizers", f"the tokenizer {path}", "train")
        try:
            self.own: Any = library.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing more specific
            raise ConfigError(
                f"{path} is not a tokenizer that the library tokenizers can read: "
                f"{first_line(error)}; pass the tokenizer.json of a model, or a folder."
            ) from error
        vocabulary = self.own.get_vocab(with_added_tokens=True)
        ends = [each for each in (_named_end(path.parent), *_ENDS) if each in vocabulary]
        if not ends:
            raise ConfigError(
                f"{path}: the tokenizer has no token that ends a text; name it as eos_token in "
                "tokenizer_config.json beside the file."
            )
        self._own_end, self.end = ends[0], int(vocabulary[ends[0]])
        self.vocabulary = max(vocabulary.values()) + 1
        content = f"{self.own.to_str()} {self.end}"
        self.fingerprint = hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
        self.own.encode_special_tokens = True

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self.own.encode_batch_fast([*map(_unicode, texts)], add_special_tokens=False)
        return [each.ids for each in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self.own.decode(list(tokens), skip_special_tokens=True)
        return text

    def save(self, folder: Path) -> None:
        special = dict.fromkeys(("bos_token", "eos_token", "pad_token"), self._own_end)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
        settings["chat_template"] = self.chat_template
        self.own.encode_special_tokens = False
        self.own.save(str(folder / "tokenizer.json"))
        self.own.encode_special_tokens = True
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


def _named_end(folder: Path) -> str:
    """Return the token that the settings in a folder name as the end of a text, if they do."""
    try:
        settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        named = settings["eos_token"]
        return str(named["content"] if isinstance(named, dict) else named)
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _unicode(text: str) -> str:
    """Replace lone surrogates, which JSON may contain and no tokenizer can encode."""
    return text if text.isascii() else text.encode(errors="replace").decode()


class FolderTokenizer(Tokenizer):
    """The tokenizer of a folder in Hugging Face's layout."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
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

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        found = self._own(list(texts), add_special_tokens=False, verbose=False) if texts else {}
        return list(found.get("input_ids", []))

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

    def copy_to(self, folder: Path) -> None:
        """Copy the files as they are, so that the fingerprint stays."""
        for name in (*_VOCABULARIES, *_SETTINGS):
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, folder / name)


def bpe_vocabulary(kind: str) -> int | None:
    """Return the N of "bpe:N", or None for other kinds of tokenizers."""
    return int(kind.removeprefix(_BPE)) if kind.startswith(_BPE) else None


def is_path(kind: str) -> bool:
    """Return whether a kind of tokenizer is the path of one."""
    return kind not in _NAMES and not kind.startswith(_BPE)


def tokenizer_at(path: Path) -> Tokenizer:
    """Return the tokenizer of a file `tokenizer.json`, or of a folder in Hugging Face's layout."""
    path = path.expanduser()
    if path.is_file():
        return JsonTokenizer(path)
    if not path.is_dir():
        raise ConfigError(
            f"--tokenizer: {path} does not exist; pass a tokenizer.json, the folder of a "
            f"tokenizer, bpe:N, or one of {', '.join(_NAMES)}."
        )
    if not has_tokenizer(path):
        raise ConfigError(
            f"--tokenizer: the folder {path} has no tokenizer files; pass another one."
        )
    return FolderTokenizer(path)


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
