"""The texts that a run learns from: which files they are in, and one document after another."""

from __future__ import annotations

import codecs
import difflib
import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from fullshard.errors import ConfigError

# Inputs up to this size are told apart by all they contain, larger ones by a part of each file.
HASHED_BYTES = 256 * 2**20
_PROBE_BYTES = 2**20
_LINES = ".jsonl"
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file of text. `name` is the same on every machine: it begins at the path that was given."""

    name: str
    path: Path
    num_bytes: int

    @property
    def has_lines(self) -> bool:
        """Whether each line is a document, rather than the file."""
        return self.path.suffix.lower() == _LINES


@dataclass(frozen=True, slots=True)
class Documents:
    """Files of text in the order of their names; iterating yields the texts of their documents.

    A text file is one document, each line of a `.jsonl` file is one; empty ones are left out.
    `fingerprint` depends on the files' names, sizes and content (of inputs beyond `HASHED_BYTES`,
    the first and the last MiB of each file) and on the field, not on where or when they were
    written. `num_skipped` counts files in folders that are not UTF-8 text.
    """

    files: tuple[TextFile, ...]
    text_field: str
    num_skipped: int
    fingerprint: str

    @classmethod
    def of(cls, paths: Sequence[str], text_field: str) -> Documents:
        """The documents of files and folders, or of Python's standard library if none are given."""
        found: dict[Path, TextFile] = {}
        num_skipped = 0
        for given in paths:
            path = Path(given).expanduser()
            if path.is_dir():
                inside, skipped = _of_folder(path, found)
                num_skipped += skipped
            else:
                inside = [_named(path)]
            found.update((file.path.resolve(), file) for file in inside)
        if not paths:
            found = {file.path: file for file in _of_standard_library()}
        files = tuple(sorted(found.values(), key=lambda file: (file.name, file.num_bytes)))
        return cls(files, text_field, num_skipped, _fingerprint(files, text_field))

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def __iter__(self) -> Iterator[str]:
        for file in self.files:
            texts = _lines(file.path, self.text_field) if file.has_lines else [_text(file.path)]
            yield from (text for text in texts if text)


# Which files


def _named(path: Path) -> TextFile:
    """A file that was asked for by its name: it has to be there, and to be text."""
    if not path.exists():
        raise ConfigError(
            f"{path}: a file or folder of text is expected, found nothing there; {_advice(path)}."
        )
    if not path.is_file():
        raise ConfigError(
            f"{path}: a file or folder of text is expected, found neither a file nor a folder; "
            "write the text into a file."
        )
    num_bytes = path.stat().st_size
    if num_bytes == 0:
        raise ConfigError(f"{path}: text is expected, found an empty file; leave it out.")
    if not _is_text(path):
        raise ConfigError(
            f"{path}: UTF-8 text is expected, found other bytes; convert it, or name another."
        )
    return TextFile(path.name, path, num_bytes)


def _advice(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder} either: correct the path"
    siblings = [each.name for each in folder.iterdir()]
    close = difflib.get_close_matches(path.name, sorted(siblings), n=1)
    return f"the nearest there is {folder / close[0]}" if close else "correct the path"


def _of_folder(folder: Path, known: dict[Path, TextFile]) -> tuple[list[TextFile], int]:
    """The text files below a folder, and the number of files that are none."""
    files, num_skipped, num_known = [], 0, 0
    base = folder.resolve().name
    for path in _walk(folder):
        if path.resolve() in known:
            num_known += 1
            continue
        num_bytes = path.stat().st_size
        if num_bytes == 0:
            continue
        if _is_text(path):
            name = (Path(base) / path.relative_to(folder)).as_posix()
            files.append(TextFile(name, path, num_bytes))
        else:
            num_skipped += 1
    if not files and not num_known:
        found = f"{num_skipped} files that are none" if num_skipped else "no file"
        raise ConfigError(
            f"{folder}: a folder with UTF-8 text in it is expected, found {found}; name another "
            "folder, or the files themselves."
        )
    return files, num_skipped


def _of_standard_library() -> list[TextFile]:
    folder = Path(sysconfig.get_path("stdlib"))
    files = [
        TextFile(path.relative_to(folder).as_posix(), path, path.stat().st_size)
        for path in (_walk(folder, _NOT_LIBRARY) if folder.is_dir() else ())
        if path.suffix == ".py" and path.stat().st_size and _is_text(path)
    ]
    if not files:
        raise ConfigError(
            f"data: the source of Python's standard library is expected in {folder}, found none; "
            "name text to train on with --data."
        )
    return files


def _walk(folder: Path, left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The files below a folder that are not hidden."""

    def refuse(error: OSError) -> None:
        raise ConfigError(
            f"{error.filename}: a folder that can be read is expected, found: {error.strerror}; "
            "change its permissions."
        ) from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = sorted(n for n in folders if not n.startswith(".") and n not in left_out)
        for name in sorted(names):
            path = Path(parent, name)
            if not name.startswith(".") and path.is_file():
                yield path


def _is_text(path: Path) -> bool:
    """Whether a file begins like UTF-8 text."""
    content = _read(path, _PROBE_BYTES)
    if b"\0" in content:
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(content, final=len(content) < _PROBE_BYTES)
    except UnicodeDecodeError:
        return False
    return True


def _fingerprint(files: Sequence[TextFile], text_field: str) -> str:
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


# What is in them


def _read(path: Path, num_bytes: int = -1, *, from_end: bool = False) -> bytes:
    with _opened(path) as file:
        if from_end:
            file.seek(-min(num_bytes, path.stat().st_size), os.SEEK_END)
        return file.read(num_bytes)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise ConfigError(
            f"{path}: a file that can be read is expected, found: {error.strerror}; change its "
            "permissions, or leave it out."
        ) from error


def _text(path: Path) -> str:
    content = _read(path)
    try:
        return content.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: UTF-8 text is expected, found other bytes at {error.start}; convert it, or "
            "leave it out."
        ) from error


def _lines(path: Path, text_field: str) -> Iterator[str]:
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _text_of_line(f"{path}, line {number}", line, text_field)


def _text_of_line(subject: str, line: bytes, text_field: str) -> str:
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except ValueError as error:  # of JSON, or of UTF-8
        raise ConfigError(
            f"{subject}: a JSON object is expected, found what cannot be read ({error}); correct "
            "the line."
        ) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{subject}: a JSON object is expected, found a {type(value).__name__}; write it as "
            f'{{"{text_field}": ...}}.'
        )
    if text_field not in value:
        fields = ", ".join(map(repr, value)) or "none"
        raise ConfigError(
            f"{subject}: a field {text_field!r} is expected, found the fields {fields}; name the "
            "one that is the text with --text-field."
        )
    text = value[text_field]
    if not isinstance(text, str):
        raise ConfigError(
            f"{subject}: the field {text_field!r} must be text, found {type(text).__name__}; name "
            "another field with --text-field."
        )
    return text
