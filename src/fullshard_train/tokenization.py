"""Tokenizes pieces of text into files, by any number of processes, of which any may be killed.

A piece has a file of tokens and, written after it, one that describes it. Both appear by a rename,
so a piece is there as a whole or not at all. A process claims a piece before it begins. A claim
only saves work, because two processes that tokenize one piece write the same. Ranks start this
module as processes that tokenize while they train.
"""

from __future__ import annotations

import array
import json
import os
import pickle
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from fullshard.errors import ConfigError
from fullshard.processes import end_with_parent, machine_id, start_of
from fullshard_train.models.tokenizers import ByteTokenizer, Tokenizer, tokenizer_at
from fullshard_train.sources import Document, Documents, Piece, UnreadableError, documents_in

# In a file with conversations, a token that is not trained is inverted, and the first token of a
# document has this bit.
BEGINS = 2**30
# The part of a document that is encoded at once: a list of tokens takes much more memory than text.
PIECE_CHARS = 2**20
# Texts that are encoded together, so that a library may use several threads.
_BATCH_CHARS = 2**20

_ARRAY_CODES = {2: "H", 4: "i"}
ITEMSIZES = tuple(_ARRAY_CODES)
# A claim of a process of another host counts for so long after it was last touched.
_CLAIMED_S = 30.0
_TOUCHED_S = 5.0


@dataclass(frozen=True, slots=True)
class Contents:
    """Describes the tokens of a piece; `unreadable` says why it has none."""

    num_tokens: int
    num_documents: int
    largest_token: int
    itemsize: int
    has_chats: bool = False
    unreadable: str = ""

    @property
    def num_bytes(self) -> int:
        return self.num_tokens * self.itemsize


@dataclass(frozen=True)
class TokenFolder:
    """The folder with the tokens of documents, made by one tokenizer."""

    path: Path
    documents: Documents

    def tokens(self, number: int) -> Path:
        return self.path / f"{number:06}.bin"

    def contents(self, number: int) -> Contents | None:
        """Return what is known of a piece, or None if it is missing, truncated or damaged."""
        path = self.tokens(number)
        try:
            contents = Contents(**json.loads(path.with_suffix(".json").read_bytes()))
            is_whole = contents.itemsize in ITEMSIZES and (
                not contents.num_bytes or path.stat().st_size == contents.num_bytes
            )
        except (OSError, ValueError, TypeError):
            return None
        return contents if is_whole else None

    def failure(self, number: int) -> str:
        """Return why a process could not tokenize a piece, if it could not."""
        with suppress(OSError):
            return self._error(number).read_text(encoding="utf-8")
        return ""

    def clean(self) -> None:
        """Create the folder, and remove what processes that failed or were killed have left."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self.not_written(error) from error
        old = time.time() - 3600
        for path in self.path.iterdir():
            with suppress(OSError):
                is_left = path.suffix == ".error" or ".incoming-" in path.name
                if is_left and (path.suffix == ".error" or path.stat().st_mtime < old):
                    path.unlink()

    def tokenize(self, number: int, tokenizer: Tokenizer) -> bool:
        """Tokenize a piece unless it is there or another process does; return whether it is."""
        if self.contents(number) is not None:
            return True
        if not self._claim(number):
            return False
        try:
            self._write(number, tokenizer)
        except ConfigError as error:
            with suppress(OSError):
                self._error(number).write_text(str(error), encoding="utf-8")
            raise
        finally:
            self._claim_of(number).unlink(missing_ok=True)
        return True

    def not_written(self, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self.path}: the tokens of {self.documents.num_bytes:,} bytes of text cannot be "
            f"written: {error.strerror}; choose another folder with --cache."
        )

    def _error(self, number: int) -> Path:
        return self.tokens(number).with_suffix(".error")

    def _claim_of(self, number: int) -> Path:
        return self.tokens(number).with_suffix(".claim")

    def _claim(self, number: int) -> bool:
        path, own = self._claim_of(number), os.getpid()
        for _ in range(2):
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(json.dumps([machine_id(), own, start_of(own)]))
                return True
            except FileExistsError:
                if not _is_stale(path):
                    return False
                path.unlink(missing_ok=True)
            except OSError as error:
                raise self.not_written(error) from error
        return False

    def _write(self, number: int, tokenizer: Tokenizer) -> None:
        path = self.tokens(number)
        incoming = path.with_name(f"{path.stem}.incoming-{uuid.uuid4().hex}")
        documents, claim = self.documents, self._claim_of(number)
        try:
            try:
                piece = documents.pieces[number]
                contents = _encode(incoming, piece, documents, tokenizer, _toucher(claim))
                os.replace(incoming, path)
            except UnreadableError as error:
                contents = Contents(0, 0, -1, 2, unreadable=str(error))
            incoming.write_text(json.dumps(asdict(contents)))
            os.replace(incoming, path.with_suffix(".json"))
        except OSError as error:
            raise self.not_written(error) from error
        finally:
            with suppress(OSError):  # the error above is the one to report
                incoming.unlink(missing_ok=True)


def _is_stale(claim: Path) -> bool:
    """Return whether the process of a claim has ended, or is on a host that has said nothing."""
    try:
        machine, pid, start = json.loads(claim.read_text())
    except (OSError, ValueError):
        machine, pid, start = "", 0, None  # it is being written, or its writer was killed
    if machine == machine_id():
        return bool(start_of(pid) != start)
    with suppress(OSError):
        return time.time() - claim.stat().st_mtime > _CLAIMED_S
    return True


def _toucher(claim: Path) -> Callable[[], None]:
    """Return a function that says from time to time that the process of a claim is there."""
    last = time.monotonic()

    def touch() -> None:
        nonlocal last
        if time.monotonic() - last > _TOUCHED_S:
            last = time.monotonic()
            with suppress(OSError):
                os.utime(claim)

    return touch


# Tokens


def _encode(
    path: Path,
    piece: Piece,
    documents: Documents,
    tokenizer: Tokenizer,
    touch: Callable[[], None],
) -> Contents:
    has_chats = documents.has_chats
    itemsize = 2 if tokenizer.vocabulary <= 2**16 and not has_chats else 4
    num_tokens = num_documents = 0
    largest = -1
    with path.open("wb") as file:
        for begins, tokens, is_trained in _encoded(piece, documents, tokenizer):
            lowest, highest = min(tokens), max(tokens)
            if lowest < 0 or highest >= tokenizer.vocabulary:
                raise ConfigError(
                    f"{type(tokenizer).__name__}: tokens are from {lowest} to {highest}, "
                    f"outside of its vocabulary of {tokenizer.vocabulary}; the tokenizer's "
                    "files do not fit together."
                )
            largest = max(largest, highest)
            num_tokens += len(tokens)
            num_documents += begins
            if has_chats:
                tokens[0] += BEGINS if begins else 0
                tokens = tokens if is_trained else [~each for each in tokens]
            array.array(_ARRAY_CODES[itemsize], tokens).tofile(file)
            touch()
        file.flush()
        os.fsync(file.fileno())
    return Contents(num_tokens, num_documents, largest, itemsize, has_chats)


def _encoded(
    piece: Piece, documents: Documents, tokenizer: Tokenizer
) -> Iterator[tuple[bool, list[int], bool]]:
    """Yield whether a document begins, tokens of it, and whether they have a loss."""
    is_new = False
    for batch in _batches(_parts(piece, documents, tokenizer)):
        encoded = iter(tokenizer.encode_batch([text for _, text, _, _ in batch if text]))
        for begins, text, is_trained, last in batch:
            is_new = is_new or begins
            tokens = next(encoded) if text else []
            # A template may have ended the document.
            if last == _TEXT or (last == _CHAT and tokens[-1:] != [tokenizer.end]):
                tokens = [*tokens, tokenizer.end]
            if tokens:
                yield is_new, tokens, is_trained
                is_new = False


# What comes last in a document: of a text, and of a conversation.
_TEXT, _CHAT, _NOTHING = 1, 2, 0
# Whether a document begins, a part of its text, whether that has a loss, and what ends with it.
_Part = tuple[bool, str, bool, int]


def _batches(parts: Iterable[_Part]) -> Iterator[list[_Part]]:
    batch: list[_Part] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part[1])
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _parts(piece: Piece, documents: Documents, tokenizer: Tokenizer) -> Iterator[_Part]:
    for document in documents_in(piece, documents.text_field):
        if not (documents.has_chats or isinstance(document, str)):
            raise ConfigError(
                "data: a .jsonl file has text before its first conversation; put texts into a "
                "file of their own."
            )
        texts = list(_texts(document, tokenizer))
        kind = _TEXT if isinstance(document, str) else _CHAT
        for number, (text, is_trained) in enumerate(texts):
            is_last = number == len(texts) - 1
            yield number == 0, text, is_trained, kind if is_last else _NOTHING


def _texts(document: Document, tokenizer: Tokenizer) -> Iterator[tuple[str, bool]]:
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


# Processes


@dataclass(frozen=True)
class Work:
    """Pieces to tokenize, each of a folder, in the order in which they are needed."""

    folders: tuple[TokenFolder, ...]
    pieces: tuple[tuple[int, int], ...]  # the place of a folder, and the number of a piece
    tokenizer: str  # "bytes", or the path of one
    niceness: int = 10

    def do(self) -> None:
        """Tokenize what no other process does; those that were killed leave theirs to others."""
        path = Path(self.tokenizer)
        tokenizer = ByteTokenizer() if self.tokenizer == "bytes" else tokenizer_at(path)
        left = list(self.pieces)
        while left:
            left = [each for each in left if not self.folders[each[0]].tokenize(each[1], tokenizer)]
            if left:
                time.sleep(1.0)

    def start(self, *, num_threads: int = 1) -> subprocess.Popen[bytes]:
        """Do the work in a process of its own, which ends with this one."""
        environment = {**os.environ, "RAYON_NUM_THREADS": str(num_threads)}
        environment["TOKENIZERS_PARALLELISM"] = "true" if num_threads > 1 else "false"
        command = [sys.executable, "-m", __name__]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment)
        assert process.stdin is not None
        with process.stdin as pipe, suppress(BrokenPipeError):  # whoever waits for it finds out
            pickle.dump(self, pipe)
        return process


def main() -> None:
    end_with_parent()
    work = pickle.load(sys.stdin.buffer)
    with suppress(OSError):
        os.nice(work.niceness)
    with suppress(ConfigError):  # written beside the piece, where ranks look for it
        work.do()


if __name__ == "__main__":
    main()
