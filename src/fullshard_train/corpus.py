"""The text that a run trains on: documents in files, tokenized once into a file for all ranks."""

from __future__ import annotations

import array
import codecs
import contextlib
import difflib
import hashlib
import json
import os
import sysconfig
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from fullshard.errors import ConfigError
from fullshard_train.models.tokenizers import Tokenizer

# The fingerprint covers all bytes of inputs up to this size, and part of each file of larger ones.
HASHED_BYTES = 256 * 2**20
_PROBE_BYTES = 2**20
_LINES = ".jsonl"
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class TextFile:
    """A text file. `name` starts at the given path, so it is the same on every machine."""

    name: str
    path: Path
    num_bytes: int

    @property
    def has_lines(self) -> bool:
        """Whether each line is a document, instead of the whole file."""
        return self.path.suffix.lower() == _LINES


# A text, the messages of a conversation, or a prompt and its completion.
Document = str | list[Mapping[str, str]] | tuple[str, str]


@dataclass(frozen=True, slots=True)
class Documents:
    """Text files in the order of their names; iterating yields each document.

    A text file is one document, and so is each line of a `.jsonl` file; empty documents are
    skipped. `fingerprint` depends on the names, sizes and contents of the files (for inputs beyond
    `HASHED_BYTES`, on the first and last MiB of each) and on the field, but not on where or when
    they were written. Files in folders that are not UTF-8 text are skipped.
    """

    files: tuple[TextFile, ...]
    text_field: str
    fingerprint: str

    @classmethod
    def of(cls, paths: Sequence[str], text_field: str) -> Documents:
        """Return the documents of files and folders, by default of Python's standard library."""
        found: dict[Path, TextFile] = {}
        for path in (Path(given).expanduser() for given in paths):
            if path.is_dir():
                found = {file.path.resolve(): file for file in _files_in(path)} | found
            else:
                found[path.resolve()] = _single_file(path)
        every = found.values() if paths else _standard_library()
        files = tuple(sorted(every, key=lambda file: (file.name, file.num_bytes)))
        return cls(files, text_field, fingerprint_of(files, text_field))

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    @property
    def has_chats(self) -> bool:
        """Whether a file begins with a conversation, or a prompt and its completion."""
        firsts = (next(_lines(f.path, self.text_field), "") for f in self.files if f.has_lines)
        return any(not isinstance(first, str) for first in firsts)

    def __iter__(self) -> Iterator[Document]:
        for file in self.files:
            found = _lines(file.path, self.text_field) if file.has_lines else [_text(file.path)]
            yield from (each for each in found if each)


# Files


def require_files(paths: Sequence[str]) -> None:
    """Raise unless every path is a folder or a file with contents, even if these are not text."""
    for path in (Path(given).expanduser() for given in paths):
        if not path.is_dir():
            _require_file(path)


def _require_file(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"{path} does not exist; {_hint(path)}")
    if not path.is_file():
        raise ConfigError(f"{path} is neither a file nor a folder; write the text into a file.")
    if path.stat().st_size == 0:
        raise ConfigError(f"{path} is empty; leave it out.")


def _single_file(path: Path) -> TextFile:
    """Return a file that was passed by name; it must exist and be text."""
    _require_file(path)
    if not _is_text(path):
        raise ConfigError(f"{path} is not UTF-8 text; convert it, or pass another file.")
    return TextFile(path.name, path, path.stat().st_size)


def _hint(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"correct the path: there is no folder {folder} either."
    siblings = [each.name for each in folder.iterdir()]
    close = difflib.get_close_matches(path.name, sorted(siblings), n=1)
    return f"did you mean {folder / close[0]}?" if close else "correct the path."


def _files_in(folder: Path) -> list[TextFile]:
    files = _text_files(folder, Path(folder.resolve().name))
    if not files:
        num_others = sum(path.stat().st_size > 0 for path in _walk(folder))
        found = f"only files that are not ({num_others})" if num_others else "no file"
        raise ConfigError(
            f"{folder} should contain UTF-8 text, but contains {found}; pass another folder, or "
            "the files themselves."
        )
    return files


def _standard_library() -> list[TextFile]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = _text_files(folder, Path(), "*.py", _NOT_LIBRARY) if folder.is_dir() else []
    if not files:
        raise ConfigError(
            f"data: {folder} does not contain the source of Python's standard library; pass text "
            "to train on with --data."
        )
    return files


def _text_files(
    folder: Path, base: Path, pattern: str = "*", excluded: frozenset[str] = frozenset()
) -> list[TextFile]:
    """Return the text files below a folder that are not empty; their names start at `base`."""
    return [
        TextFile((base / path.relative_to(folder)).as_posix(), path, num_bytes)
        for path in _walk(folder, excluded)
        if path.match(pattern) and (num_bytes := path.stat().st_size) and _is_text(path)
    ]


def _walk(folder: Path, excluded: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Yield the files below a folder that are not hidden."""

    def on_error(error: OSError) -> None:
        raise ConfigError(
            f"{error.filename} cannot be read: {error.strerror}; change its permissions."
        ) from error

    for parent, folders, names in os.walk(folder, onerror=on_error):
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n not in excluded)
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _is_text(path: Path) -> bool:
    """Return whether the beginning of a file is UTF-8 text."""
    content = _read(path, _PROBE_BYTES)
    if b"\0" in content:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content, final=len(content) < _PROBE_BYTES)
    except UnicodeDecodeError:
        return False
    return True


def fingerprint_of(files: Sequence[TextFile], text_field: str = "") -> str:
    """Return a short string that changes with the names, sizes and contents of files."""
    is_small = sum(file.num_bytes for file in files) <= HASHED_BYTES
    digest = hashlib.sha256(json.dumps(text_field).encode())
    for file in files:
        digest.update(json.dumps([file.name, file.num_bytes]).encode())
        if is_small:
            digest.update(_read(file.path))
        else:
            digest.update(_read(file.path, _PROBE_BYTES))
            digest.update(_read(file.path, _PROBE_BYTES, from_end=True))
    return digest.hexdigest()[:16]


# Contents


def _read(path: Path, num_bytes: int = -1, *, from_end: bool = False) -> bytes:
    with _opened(path) as file:
        if from_end:
            file.seek(-min(num_bytes, path.stat().st_size), os.SEEK_END)
        return file.read(num_bytes)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; change its permissions, or leave it out."
        ) from error


def _text(path: Path) -> str:
    content = _read(path)
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is not UTF-8 text: see the byte at {error.start}; convert it, or leave it out."
        ) from error


def _lines(path: Path, text_field: str) -> Iterator[Document]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _document(f"{path}, line {number}", line, text_field)


def _document(subject: str, line: bytes, text_field: str) -> Document:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # invalid JSON or UTF-8
        raise ConfigError(
            f"{subject}: this line is not valid JSON ({error}); correct it."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{subject}: the line is a {type(value).__name__}, not a JSON object; write it as "
            f'{{"{text_field}": ...}}.'
        )
    if text_field not in value:
        if "messages" in value:
            return _conversation(subject, value["messages"])
        prompt, completion = value.get("prompt"), value.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            return prompt, completion
        fields = ", ".join(map(repr, value)) or "none"
        raise ConfigError(
            f"{subject}: the line has the fields {fields}, but no field {text_field!r}, no "
            "'messages', and no text in 'prompt' and 'completion'; select the field that "
            "contains the text with --text-field."
        )
    text = value[text_field]
    if not isinstance(text, str):
        raise ConfigError(
            f"{subject}: the field {text_field!r} is no text but {type(text).__name__}; select "
            "another field with --text-field."
        )
    return text


def _conversation(subject: str, messages: Any) -> list[Mapping[str, str]]:
    """Return the messages; each must have a role and text, and one must be the assistant's."""
    found = messages if isinstance(messages, list) else []
    roles = [each.get("role") if isinstance(each, dict) else None for each in found]
    is_text = all(role and isinstance(each.get("content"), str)
                  for role, each in zip(roles, found, strict=True))  # fmt: skip
    if not is_text or "assistant" not in roles:
        raise ConfigError(
            f"{subject}: 'messages' must be messages with 'role' and 'content' as text, at least "
            "one of the role 'assistant'; correct the line, or leave it out."
        )
    return found


# Tokens

# In a file with conversations, a token that is not trained is inverted, and the first token of a
# document has this bit.
_BEGINS = 2**30

# The part of a document that is encoded at once: a list of tokens takes much more memory than text.
PIECE_CHARS = 2**20


@dataclass(frozen=True, slots=True)
class _Contents:
    """Describes a token file; stored next to it, and written after it."""

    num_tokens: int
    num_documents: int
    largest_token: int
    itemsize: int
    has_chats: bool = False

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """The tokens of all documents, memory-mapped from a file."""

    fingerprint: str
    tokens: torch.Tensor
    has_chats: bool = False

    @property
    def num_tokens(self) -> int:
        return self.tokens.numel()

    def num_sequences(self, sequence: int) -> int:
        """Return the number of sequences in which every token has a next token."""
        return max(0, self.num_tokens - 1) // sequence

    def row(self, index: int, sequence: int) -> torch.Tensor:
        """Return a sequence and the token after it, `sequence + 1` tokens as int64."""
        start = index * sequence
        return self.tokens[start : start + sequence + 1].to(torch.int64)


def unmarked(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens of rows, whether each is trained, and its position in its document."""
    is_trained = rows >= 0
    rows = rows.where(is_trained, ~rows)
    begins, places = rows >= _BEGINS, torch.arange(rows.shape[1])
    first = places.where(begins, 0).cummax(1).values
    # The first token of a document is not predicted from the document before.
    return rows % _BEGINS, is_trained & ~begins, places - first


def prepare_corpus(
    documents: Documents, tokenizer: Tokenizer, folder: Path, *, sequence: int, vocabulary: int
) -> Corpus:
    """Return the tokens of the documents from their file in `folder`, written if it is missing.

    One rank per machine must call this function first; the others then find the file. A truncated
    or damaged file is written again.

    Args:
        documents: The documents; the tokenizer's `end` token follows each.
        tokenizer: Converts text to tokens.
        folder: The folder of token files, created if it is missing.
        sequence: The length of a sequence; the text must fill at least one.
        vocabulary: The vocabulary of the model, which must contain all tokens.
    """
    both = f"{documents.fingerprint}/{tokenizer.fingerprint}"
    both += f"/{tokenizer.chat_template}" if documents.has_chats else ""
    fingerprint = hashlib.sha256(both.encode()).hexdigest()[:16]
    path = folder / f"{fingerprint}.bin"
    contents = _read_contents(path) or _write_tokens(path, documents, tokenizer)
    if contents.num_tokens <= sequence:
        raise ConfigError(
            f"data: {contents.num_tokens} tokens are too few to fill a sequence of {sequence}; "
            "add text with --data, or pass a smaller --sequence."
        )
    if contents.largest_token >= vocabulary:
        raise ConfigError(
            f"data: the largest token is {contents.largest_token}, but the model's vocabulary "
            f"has only {vocabulary}; choose another --tokenizer, or a model with a larger "
            "vocabulary."
        )
    tokens = torch.from_file(
        str(path), shared=False, size=contents.num_tokens, dtype=_DTYPES[contents.itemsize]
    )
    return Corpus(fingerprint, tokens, contents.has_chats)


_DTYPES = {2: torch.uint16, 4: torch.int32}
_ARRAY_CODES = {2: "H", 4: "i"}


def _read_contents(path: Path) -> _Contents | None:
    """Return the description of a token file, or None if the file is missing or truncated."""
    try:
        contents = _Contents(**json.loads(path.with_suffix(".json").read_bytes()))
        is_complete = path.stat().st_size == contents.num_bytes and contents.itemsize in _DTYPES
    except (OSError, ValueError, TypeError):
        return None
    return contents if is_complete else None


def _write_tokens(path: Path, documents: Documents, tokenizer: Tokenizer) -> _Contents:
    """Write a token file under a temporary name and rename it, then its description."""
    incoming = path.with_suffix(f".incoming-{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        contents = _encode(incoming, documents, tokenizer)
        os.replace(incoming, path)
        incoming.write_text(json.dumps(asdict(contents)))
        os.replace(incoming, path.with_suffix(".json"))
    except OSError as error:
        raise ConfigError(
            f"{path.parent}: the tokens of {documents.num_bytes:,} bytes of text cannot be "
            f"written: {error.strerror}; choose another folder with --out."
        ) from error
    finally:
        with contextlib.suppress(OSError):  # the error above is the one to report
            incoming.unlink(missing_ok=True)
    return contents


def _encode(path: Path, documents: Documents, tokenizer: Tokenizer) -> _Contents:
    has_chats = documents.has_chats
    itemsize = 2 if tokenizer.vocabulary <= 2**16 and not has_chats else 4
    num_tokens = num_documents = 0
    largest = -1
    with path.open("wb") as file:
        for document in documents:
            if not (has_chats or isinstance(document, str)):
                raise ConfigError(
                    "data: a .jsonl file has text before its first conversation; put texts into "
                    "a file of their own."
                )
            begins = _BEGINS if has_chats else 0
            for tokens, is_trained in _encoded(document, tokenizer):
                lowest, highest = min(tokens), max(tokens)
                if lowest < 0 or highest >= tokenizer.vocabulary:
                    raise ConfigError(
                        f"{type(tokenizer).__name__}: tokens are from {lowest} to {highest}, "
                        f"outside of its vocabulary of {tokenizer.vocabulary}; the tokenizer's "
                        "files do not fit together."
                    )
                largest = max(largest, highest)
                num_tokens += len(tokens)
                tokens[0] += begins
                begins = 0
                if has_chats and not is_trained:
                    tokens = [~each for each in tokens]
                file.write(array.array(_ARRAY_CODES[itemsize], tokens).tobytes())
            num_documents += 1
        file.flush()
        os.fsync(file.fileno())
    return _Contents(num_tokens, num_documents, largest, itemsize, has_chats)


def _encoded(document: Document, tokenizer: Tokenizer) -> Iterator[tuple[list[int], bool]]:
    """Yield the tokens of a document in parts, and whether each part has a loss."""
    last = None
    for text, is_trained in _parts(document, tokenizer):
        if tokens := tokenizer.encode(text):
            last = tokens[-1]
            yield tokens, is_trained
    if isinstance(document, str) or last != tokenizer.end:  # a template may have ended it
        yield [tokenizer.end], True


def _parts(document: Document, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
    if isinstance(document, str):
        yield from ((piece, True) for piece in pieces_of(document))
    elif isinstance(document, tuple):
        yield from zip(document, (False, True), strict=True)
    else:
        done = ""
        for place in (i for i, each in enumerate(document) if each["role"] == "assistant"):
            before = tokenizer.render(document[:place], is_prompt=True)
            after = tokenizer.render(document[: place + 1], is_prompt=False)
            if not before.startswith(done) or not after.startswith(before):
                raise ConfigError(
                    "data: the chat template changes what was said before at message "
                    f"{place + 1}; set another in the tokenizer's files."
                )
            yield before[len(done) :], False
            yield after[len(before) :], True
            done = after


def pieces_of(text: str) -> Iterator[str]:
    """Split a text at line ends, so that not all of its tokens are in memory at once."""
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = text.rfind("\n", start, start + PIECE_CHARS) + 1
        end = end if end > start else start + PIECE_CHARS
        yield text[start:end]
        start = end
    yield text[start:]
