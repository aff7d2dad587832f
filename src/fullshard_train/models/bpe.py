"""Trains a byte-level BPE: a tokenizer that has as many tokens as asked for, and knows any text."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard_train.models.optional import optional
from fullshard_train.models.tokenizers import END, JsonTokenizer

# How a text is split before merges: words with the space before them, up to three digits, signs,
# and white space with its line ends. No token crosses a split.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def trained_bpe(
    texts: Iterable[str], vocabulary: int, fingerprint: str, cache: Path, *, is_shown: bool
) -> JsonTokenizer:
    """Return a byte-level BPE of the texts from the cache, trained if it is not there.

    The same texts give the same tokenizer. It has fewer tokens than `vocabulary` if the texts do
    not repeat enough.

    Args:
        texts: What to train on.
        vocabulary: The number of tokens, with the 256 bytes and the one that ends a text.
        fingerprint: Stands for the texts.
        cache: The folder of trained tokenizers.
        is_shown: Whether to show the progress on the terminal.
    """
    library: Any = optional("tokenizers", f"the tokenizer bpe:{vocabulary}", "train")
    key = json.dumps([fingerprint, vocabulary, _PATTERN, library.__version__])
    folder = cache / f"bpe-{vocabulary}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    path = folder / "tokenizer.json"
    with suppress(ConfigError):  # damaged, or not there: it is trained again
        return JsonTokenizer(path)
    own = library.Tokenizer(library.models.BPE())
    split = library.pre_tokenizers.Split(library.Regex(_PATTERN), "isolated")
    to_bytes = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.pre_tokenizer = library.pre_tokenizers.Sequence([split, to_bytes])
    own.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=is_shown,
    )
    own.train_from_iterator(iter(texts), trainer)
    incoming = cache / f".incoming-{uuid.uuid4().hex}"
    try:
        incoming.mkdir(parents=True)
        own.save(str(incoming / "tokenizer.json"))
        JsonTokenizer(incoming / "tokenizer.json").save(incoming)
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # another run has trained the same one meanwhile
            os.rename(incoming, folder)
    except OSError as error:
        raise ConfigError(
            f"{cache}: the tokenizer cannot be written: {error.strerror}; choose another folder "
            "with --cache."
        ) from error
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return JsonTokenizer(path)
