"""Documents as tokens: written once into a file, and read from there by all ranks."""

from __future__ import annotations

import array
import contextlib
import hashlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fullshard.errors import ConfigError
from fullshard.models.tokenizers import Tokenizer
from fullshard.training.documents import Documents

# Of a document that is encoded at a time: a token in a list takes many times its own size.
PIECE_CHARS = 2**20


@dataclass(frozen=True, slots=True)
class _Contents:
    """What the file of tokens must hold: kept beside it, written after it."""

    num_tokens: int
    num_documents: int
    largest_token: int
    itemsize: int

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """All tokens, one document after another, in memory that is mapped from a file."""

    fingerprint: str
    tokens: torch.Tensor
    num_documents: int

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    def num_sequences(self, sequence: int) -> int:
        """How many sequences there are whose every token has a next one."""
        return max(0, self.num_tokens - 1) // sequence

    def row(self, index: int, sequence: int) -> torch.Tensor:
        """A sequence and the token after it, as int64: `sequence + 1` tokens."""
        start = index * sequence
        return self.tokens[start : start + sequence + 1].to(torch.int64)


def prepare_corpus(
    documents: Documents, tokenizer: Tokenizer, folder: Path, *, sequence: int, vocabulary: int
) -> Corpus:
    """The tokens of the documents, from the file in `folder` that holds them; written if missing.

    Let one rank of a machine call it first, and the others when it is done: they find the file.
    One that is cut short or damaged is written anew.

    Args:
        documents: What is encoded; each document is followed by the token that ends one.
        tokenizer: Turns text into tokens.
        folder: Where files of tokens are; made if missing.
        sequence: There must be at least one sequence of this length.
        vocabulary: The model's; there must be no token beyond it.
    """
    both = f"{documents.fingerprint}/{tokenizer.fingerprint}"
    fingerprint = hashlib.sha256(both.encode()).hexdigest()[:16]
    path = folder / f"{fingerprint}.bin"
    contents = _whole(path)
    if contents is None:
        contents = _written(path, documents, tokenizer)
    if contents.num_tokens <= sequence:
        raise ConfigError(
            f"data: text of more than {sequence} tokens is expected, to fill a sequence, found "
            f"{contents.num_tokens}; add text with --data, or pass a smaller --sequence."
        )
    if contents.largest_token >= vocabulary:
        raise ConfigError(
            f"data: tokens below the model's vocabulary of {vocabulary} are expected, found "
            f"{contents.largest_token}; choose another --tokenizer, or a model with a larger "
            "vocabulary."
        )
    tokens = torch.from_file(
        str(path), shared=False, size=contents.num_tokens, dtype=_DTYPES[contents.itemsize]
    )
    return Corpus(fingerprint, tokens, contents.num_documents)


_DTYPES = {2: torch.uint16, 4: torch.int32}
_ARRAY_CODES = {2: "H", 4: "i"}


def _beside(path: Path) -> Path:
    return path.with_suffix(".json")


def _whole(path: Path) -> _Contents | None:
    """What a file of tokens holds, if it is there and as long as it must be."""
    try:
        contents = _Contents(**json.loads(_beside(path).read_bytes()))
        is_whole = path.stat().st_size == contents.num_bytes and contents.itemsize in _DTYPES
    except (OSError, ValueError, TypeError):
        return None
    return contents if is_whole else None


def _written(path: Path, documents: Documents, tokenizer: Tokenizer) -> _Contents:
    """Write a file of tokens beside its place and rename it, then what it must hold."""
    incoming = path.with_suffix(f".incoming-{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        contents = _encode(incoming, documents, tokenizer)
        os.replace(incoming, path)
        incoming.write_text(json.dumps(asdict(contents)))
        os.replace(incoming, _beside(path))
    except OSError as error:
        raise ConfigError(
            f"{path.parent}: room for the tokens of {documents.num_bytes:,} bytes of text is "
            f"expected, found: {error.strerror}; choose another folder with --out."
        ) from error
    finally:
        with contextlib.suppress(OSError):  # what went wrong has been said
            incoming.unlink(missing_ok=True)
    return contents


def _encode(path: Path, documents: Iterable[str], tokenizer: Tokenizer) -> _Contents:
    itemsize = 2 if tokenizer.vocabulary <= 2**16 else 4
    num_tokens = num_documents = 0
    largest = -1
    with path.open("wb") as file:
        for text in documents:
            for tokens in (*map(tokenizer.encode, _pieces(text)), [tokenizer.end]):
                if not tokens:
                    continue
                lowest, highest = min(tokens), max(tokens)
                if lowest < 0 or highest >= tokenizer.vocabulary:
                    raise ConfigError(
                        f"{type(tokenizer).__name__}: tokens from 0 to {tokenizer.vocabulary - 1} "
                        f"are expected, found {lowest} to {highest}; the tokenizer's files do not "
                        "fit together."
                    )
                largest = max(largest, highest)
                num_tokens += len(tokens)
                file.write(array.array(_ARRAY_CODES[itemsize], tokens).tobytes())
            num_documents += 1
        file.flush()
        os.fsync(file.fileno())
    return _Contents(num_tokens, num_documents, largest, itemsize)


def _pieces(text: str) -> Iterator[str]:
    """A text cut after ends of lines, so that its tokens need not be in memory all at once."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = text.rfind("\n", start, start + PIECE_CHARS) + 1
        end = end if end > start else start + PIECE_CHARS
        yield text[start:end]
        start = end
    yield text[start:]
