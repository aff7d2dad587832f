"""The tokenizer of a run: given, or trained on its data, and kept in its folder."""

from __future__ import annotations

import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from fullshard.errors import CheckpointError, ConfigError
from fullshard.formatting import readable
from fullshard_train.config import TrainConfig
from fullshard_train.models.architecture import Architecture
from fullshard_train.models.bpe import trained_bpe
from fullshard_train.models.tokenizers import (
    FolderTokenizer,
    Tokenizer,
    bpe_vocabulary,
    is_path,
)
from fullshard_train.output import TOKENIZER, RunFolder
from fullshard_train.sources import Document, Documents, Source, UnreadableError, documents_in
from fullshard_train.tokenization import pieces_of

# A BPE is trained on this much text, spread over the data: more would change it little.
TRAINING_BYTES = 64 * 2**20


def cache_folder(config: TrainConfig) -> Path:
    """Return the folder of what runs of this machine share."""
    if config.data.cache:
        return Path(config.data.cache).expanduser()
    if named := os.environ.get("FULLSHARD_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fullshard"


def tokenizer_for(
    kind: str,
    given: Tokenizer | None,
    sources: Sequence[Source],
    cache: Path,
    say: Callable[[str], None],
) -> Tokenizer:
    """Return the tokenizer that is given, or a BPE trained on the documents, once."""
    vocabulary = bpe_vocabulary(kind)
    if given is not None or vocabulary is None:
        assert given is not None
        return given
    num_bytes = sum(each.documents.num_bytes for each in sources)
    size = readable(min(num_bytes, TRAINING_BYTES))
    say(f"tokenizer: a BPE of {vocabulary:,} tokens, trained on {size} of text")
    own = trained_bpe(
        _sample([each.documents for each in sources]),
        vocabulary,
        " ".join(each.documents.fingerprint for each in sources),
        cache / "tokenizers",
        is_shown=sys.stderr.isatty(),
    )
    if own.vocabulary < vocabulary:
        say(
            f"tokenizer: this text has enough repetition for {own.vocabulary:,} tokens only; the "
            "rest of the vocabulary is not used"
        )
    return own


def _sample(every: Sequence[Documents]) -> Iterator[str]:
    """Yield text from all documents, so much that a BPE is trained in seconds."""
    pieces = [(documents, piece) for documents in every for piece in documents.pieces]
    num_bytes = sum(part.num_bytes for _, piece in pieces for part in piece)
    stride = -(-num_bytes // TRAINING_BYTES)
    for documents, piece in pieces[::stride]:
        with suppress(UnreadableError):
            for document in documents_in(piece, documents.text_field):
                for text in pieces_of(_plain(document)):
                    yield text if text.isascii() else text.encode(errors="replace").decode()


def _plain(document: Document) -> str:
    if isinstance(document, str):
        return document
    said = document if isinstance(document, tuple) else [each["content"] for each in document]
    return "\n".join(said)


# In the folder of a run


def keep_tokenizer(tokenizer: Tokenizer, kind: str, folder: RunFolder) -> None:
    """Write the tokenizer into the folder of its run, or raise if the run has another one."""
    found = folder.about_tokenizer
    if found.get("fingerprint", tokenizer.fingerprint) != tokenizer.fingerprint:
        if folder.complete():
            raise ConfigError(
                f"--tokenizer: the run in {folder.path} was trained with another tokenizer "
                f"({found.get('kind')}, fingerprint {found['fingerprint']}) than this one ({kind}, "
                f"{tokenizer.fingerprint}); pass the same --tokenizer and --data, or another --out."
            )
        found = {}
    if found:
        return
    write_tokenizer(tokenizer, kind, folder.tokenizer)


def write_tokenizer(tokenizer: Tokenizer, kind: str, folder: Path) -> None:
    """Write the files of a tokenizer into a folder, completely or not at all."""
    incoming = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    about = {"kind": kind, "fingerprint": tokenizer.fingerprint, "is_folder": False}
    try:
        incoming.mkdir(parents=True)
        if isinstance(tokenizer, FolderTokenizer):
            tokenizer.copy_to(incoming)
            about["is_folder"] = True
        else:
            tokenizer.save(incoming)
        (incoming / TOKENIZER).write_text(json.dumps(about))
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # another replica has written the same one meanwhile
            incoming.rename(folder)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)


def tokenizer_of_run(
    architecture: Architecture, config: TrainConfig, folder: Path, trained_with: str = ""
) -> Tokenizer:
    """Return the tokenizer with which the run in a folder was trained.

    Args:
        architecture: The model.
        config: The configuration of the run.
        folder: The folder of the run.
        trained_with: The fingerprint in a checkpoint, with which the tokenizer is compared.
    """
    kind, kept = architecture.tokenizer_kind(config.data.tokenizer), RunFolder(folder)
    is_kept = bpe_vocabulary(kind) is not None or is_path(kind)
    tokenizer = architecture.tokenizer(kind, kept.kept_tokenizer if is_kept else None)
    if trained_with not in ("", tokenizer.fingerprint):
        raise CheckpointError(
            f"{folder}: the tokenizer ({kind}, fingerprint {tokenizer.fingerprint}) is not the one "
            f"that the checkpoint was trained with ({trained_with}); restore {kept.tokenizer}."
        )
    return tokenizer
