"""The text that a run trains on: documents in files, and the pieces in which they are read."""

from __future__ import annotations

import codecs
import contextlib
import difflib
import gzip
import hashlib
import io
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from fullshard.errors import ConfigError
from fullshard_train.models.optional import optional

# The fingerprint covers all bytes of inputs up to this size, and part of each file of larger ones.
HASHED_BYTES = 256 * 2**20
_PROBE_BYTES = 2**20
_NUM_ROWS = 256
# A piece is what one process reads and tokenizes at once: parts of files of about this size. The
# second number is for the whole of a compressed file, which cannot be entered in the middle.
PIECE_BYTES = 4 * 2**20
_EXPANSION = 4
_LINES, _COMPRESSED, _TABLES = ".jsonl", (".gz", ".zst"), (".parquet", ".arrow")
_WEIGHTED = re.compile(r"([\w.-]+)=(\d+(?:\.\d+)?|\.\d+):(.+)", re.DOTALL)
# Also without the tables of characters and the texts of the manual.
_NOT_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)


@dataclass(frozen=True, slots=True)
class TextFile:
    """A text file. `name` starts at the given path, so it is the same on every machine."""

    name: str
    path: Path
    num_bytes: int

    @property
    def compression(self) -> str:
        suffix = self.path.suffix.lower()
        return suffix if suffix in _COMPRESSED else ""

    @property
    def is_table(self) -> bool:
        return self.path.suffix.lower() in _TABLES

    @property
    def may_be_damaged(self) -> bool:
        return self.is_table or bool(self.compression)

    @property
    def has_lines(self) -> bool:
        """Whether each line is a document, instead of the whole file."""
        name = self.path.with_suffix("") if self.compression else self.path
        return name.suffix.lower() == _LINES


@dataclass(frozen=True, slots=True)
class Part:
    """What begins in a range of a file: of its bytes, or of the row groups of a table."""

    file: TextFile
    start: int
    stop: int
    num_bytes: int  # of text, roughly


# Neighboring parts of files, which are read one after another.
Piece = tuple[Part, ...]


class UnreadableError(Exception):
    """A file is damaged, or cannot be decompressed."""


# A text, the messages of a conversation, or a prompt and its completion.
Document = str | list[Mapping[str, str]] | tuple[str, str]


@dataclass(frozen=True)
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

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The pieces of all files, in their order."""
        found: list[Piece] = []
        piece: list[Part] = []
        size = 0
        for file in self.files:
            for part in _parts_of(file):
                # What may turn out to be damaged takes no other file with it.
                is_apart = file.may_be_damaged or (piece and piece[-1].file.may_be_damaged)
                is_other = bool(piece) and piece[-1].file is not file
                if piece and (size + part.num_bytes > PIECE_BYTES or (is_apart and is_other)):
                    found.append(tuple(piece))
                    piece, size = [], 0
                piece.append(part)
                size += part.num_bytes
        return (*found, *([tuple(piece)] if piece else []))

    @cached_property
    def has_chats(self) -> bool:
        """Whether a file begins with a conversation, or a prompt and its completion."""
        return any(
            not isinstance(first, str)
            for file in self.files
            if file.has_lines or file.is_table
            for first in [_first(file, self.text_field)]
        )

    def __iter__(self) -> Iterator[Document]:
        for piece in self.pieces:
            yield from documents_in(piece, self.text_field)


def _first(file: TextFile, text_field: str) -> Document:
    try:
        return next(_documents(Part(file, 0, 1, 1), text_field), "")
    except UnreadableError:
        return ""


def _parts_of(file: TextFile) -> Iterator[Part]:
    if file.compression:
        yield Part(file, 0, file.num_bytes, file.num_bytes * _EXPANSION)
    elif file.is_table:
        sizes = _row_groups(file)
        yield from (Part(file, at, at + 1, size) for at, size in enumerate(sizes))
    else:
        for start in range(0, file.num_bytes, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, file.num_bytes)
            yield Part(file, start, stop, stop - start)


# Mixtures


@dataclass(frozen=True, slots=True)
class Source:
    """Documents that take a share of the training sequences in proportion to a weight."""

    name: str
    weight: float
    documents: Documents


def sources_of(paths: Sequence[str], text_field: str) -> tuple[Source, ...]:
    """Return the sources of paths, which are plain or `name=weight:path`."""
    if not any(_WEIGHTED.fullmatch(path) for path in paths):
        return (Source("", 1.0, Documents.of(paths, text_field)),)
    grouped: dict[str, tuple[float, list[str]]] = {}
    for given in paths:
        match = _WEIGHTED.fullmatch(given)
        if match is None:
            raise ConfigError(
                f"--data: {given} has no weight but others have; write name=weight:path for "
                "every one of them."
            )
        name, weight, path = match[1], float(match[2]), match[3]
        if grouped.setdefault(name, (weight, []))[0] != weight:
            raise ConfigError(f"--data: {name!r} has two weights; give all of its paths one.")
        grouped[name][1].append(path)
    found = {name: each for name, each in grouped.items() if each[0] > 0}
    if not found:
        raise ConfigError("--data: the mixture is empty: all weights are 0; raise one.")
    return tuple(
        Source(name, weight, Documents.of(of_name, text_field))
        for name, (weight, of_name) in found.items()
    )


def path_in(given: str) -> str:
    """Return the path of a `--data`, without its name and weight."""
    match = _WEIGHTED.fullmatch(given)
    return given if match is None else match[3]


# Files


def require_files(paths: Sequence[str]) -> None:
    """Raise unless every path is a folder or a file with contents, even if these are not text."""
    for path in (Path(path_in(given)).expanduser() for given in paths):
        if not path.is_dir():
            _require_file(path)


def _require_file(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"data: {path} does not exist; {_hint(path)}")
    if not path.is_file():
        raise ConfigError(
            f"data: {path} is neither a file nor a folder; write the text into a file."
        )
    if path.stat().st_size == 0:
        raise ConfigError(f"data: {path} is empty; leave it out.")


def _single_file(path: Path) -> TextFile:
    """Return a file that was passed by name; it must exist and be text."""
    _require_file(path)
    if not _is_data(path):
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
        if path.match(pattern) and (num_bytes := path.stat().st_size) and _is_data(path)
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


def _is_data(path: Path) -> bool:
    """Return whether a file is a table, compressed, or begins with UTF-8 text."""
    if path.suffix.lower() in (*_COMPRESSED, *_TABLES):
        return True
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


def documents_in(piece: Piece, text_field: str) -> Iterator[Document]:
    """Yield the documents of a piece that are not empty; raise UnreadableError for damaged files.

    A text file is a document in each of its parts.
    """
    for part in piece:
        yield from (each for each in _documents(part, text_field) if each)


def _documents(part: Part, text_field: str) -> Iterator[Document]:
    file = part.file
    with _as_unreadable(file) if file.may_be_damaged else contextlib.nullcontext():
        if file.is_table:
            for number, row in enumerate(_rows(part), 1):
                where = f"{file.path}, row {number} of group {part.start + 1}"
                yield _of_fields(where, row, text_field)
        elif file.has_lines:
            with _opened_part(part) as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _document(part, number, line, text_field)
        else:
            with _opened_part(part) as lines:
                yield _decoded(part, b"".join(lines))


@contextlib.contextmanager
def _as_unreadable(file: TextFile) -> Iterator[None]:
    """Raise UnreadableError for what libraries raise when data are damaged."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, EOFError, ValueError, zlib.error) as error:  # pyarrow's are ValueErrors
        lines = str(error).splitlines() or [type(error).__name__]
        raise UnreadableError(f"{file.path}: {lines[0]}") from error


@contextlib.contextmanager
def _opened_part(part: Part) -> Iterator[Iterator[bytes]]:
    """Open a file; what it yields are the lines that begin in the part."""
    path = part.file.path
    if part.file.compression == ".gz":
        with gzip.open(path) as unpacked:
            yield iter(unpacked)
    elif part.file.compression == ".zst":
        pyarrow: Any = optional("pyarrow", str(path), "data")
        with pyarrow.input_stream(str(path), compression="zstd") as stream:
            yield iter(io.BufferedReader(stream))
    else:
        with _opened(path) as file:
            yield _lines_of(file, part)


def _lines_of(file: BinaryIO, part: Part) -> Iterator[bytes]:
    if part.start:
        file.seek(part.start - 1)
        file.readline()  # it begins in the part before
    place = file.tell()
    while place < part.stop and (line := file.readline()):
        place += len(line)
        yield line


def _decoded(part: Part, content: bytes) -> str:
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        near = "after" if part.start else "at"  # a part begins with its first whole line
        raise ConfigError(
            f"{part.file.path} is not UTF-8 text: see the byte {near} {part.start + error.start}; "
            "convert it, or leave it out."
        ) from error


def _row_groups(file: TextFile) -> list[int]:
    """Return about how much text each row group of a table has; there is one in an Arrow file."""
    if file.path.suffix.lower() == ".arrow":
        return [file.num_bytes]
    parquet: Any = optional("pyarrow.parquet", str(file.path), "data")
    try:
        about = parquet.read_metadata(file.path)
        return [about.row_group(at).total_byte_size for at in range(about.num_row_groups)]
    except (OSError, ValueError):
        return [file.num_bytes]  # damaged, as whoever reads it will find


def _rows(part: Part) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a part of a table, a few at a time in memory."""
    if part.file.path.suffix.lower() == ".parquet":
        parquet: Any = optional("pyarrow.parquet", str(part.file.path), "data")
        with parquet.ParquetFile(part.file.path) as opened:
            for batch in opened.iter_batches(_NUM_ROWS, row_groups=[part.start]):
                yield from batch.to_pylist()
        return
    pyarrow: Any = optional("pyarrow", str(part.file.path), "data")
    ipc = pyarrow.ipc
    with pyarrow.memory_map(str(part.file.path)) as mapped:
        try:
            opened = ipc.open_file(mapped)
            batches = (opened.get_batch(at) for at in range(opened.num_record_batches))
        except pyarrow.ArrowInvalid:
            mapped.seek(0)
            batches = iter(ipc.open_stream(mapped))  # as datasets writes them
        for batch in batches:
            for start in range(0, batch.num_rows, _NUM_ROWS):
                yield from batch.slice(start, _NUM_ROWS).to_pylist()


def _document(part: Part, number: int, line: bytes, text_field: str) -> Document:
    """Return the document of a line, which is counted from the beginning of the part."""

    def subject() -> str:  # counted only for an error
        above = 0
        if part.start:
            with _opened(part.file.path) as file:
                before = part.start - 1  # the line there, or its end, is not of this part
                for block in iter(lambda: file.read(min(2**20, before - file.tell())), b""):
                    above += block.count(b"\n")
                above += 1
        return f"{part.file.path}, line {above + number}"

    try:
        value = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # invalid JSON or UTF-8
        raise ConfigError(
            f"{subject()}: this line is not valid JSON ({error}); correct it."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{subject()}: the line is a {type(value).__name__}, not a JSON object; write it as "
            f'{{"{text_field}": ...}}.'
        )
    try:
        return _of_fields("", value, text_field)
    except ConfigError as error:
        raise ConfigError(f"{subject()}{error}") from None


def _of_fields(subject: str, value: Mapping[str, Any], text_field: str) -> Document:
    """Return the document of a line or a row by its fields."""
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
            f"{subject}: the field {text_field!r} is not text but {type(text).__name__}; select "
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
