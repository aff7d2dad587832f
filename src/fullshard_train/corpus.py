"""The tokens of a run: memory-mapped files of pieces, which appear while the run trains.

Pieces are grouped into windows, in an order of their own. Sequences are shuffled within a window,
so a run needs the tokens of one window at a time. The first one is small: training begins soon.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from subprocess import Popen

import torch

from fullshard.errors import ConfigError
from fullshard_train.models.tokenizers import Tokenizer
from fullshard_train.permutation import Permutation
from fullshard_train.sources import PIECE_BYTES, Documents, Piece
from fullshard_train.tokenization import BEGINS, Contents, TokenFolder, Work

# Texts of this size are one window. Others have windows that grow from the first to the last size.
WHOLE_BYTES = 16 * 2**20
FIRST_BYTES, LAST_BYTES = 8 * 2**20, 64 * 2**20
# Less than this is tokenized by the ranks themselves.
INLINE_BYTES = 2 * 2**20
# How long ranks wait for others to begin a piece that they need.
PATIENCE_S = 2.0
_POLL_S = 0.05
_DTYPES = {2: torch.uint16, 4: torch.int32}


def unmarked(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the tokens of rows, whether each is trained, and its position in its document."""
    is_trained = rows >= 0
    rows = rows.where(is_trained, ~rows)
    begins, places = rows >= BEGINS, torch.arange(rows.shape[1])
    first = places.where(begins, 0).cummax(1).values
    # The first token of a document is not predicted from the document before.
    return rows % BEGINS, is_trained & ~begins, places - first


@dataclass(frozen=True, eq=False)
class Shard:
    """The tokens of a piece."""

    tokens: torch.Tensor

    def num_sequences(self, sequence: int) -> int:
        """Return the number of sequences in which every token has a next token."""
        return max(0, self.tokens.numel() - 1) // sequence

    def row(self, index: int, sequence: int) -> torch.Tensor:
        """Return a sequence and the token after it, `sequence + 1` tokens as int64."""
        start = index * sequence
        return self.tokens[start : start + sequence + 1].to(torch.int64)


@dataclass(eq=False)
class Window:
    """The shards whose sequences are shuffled together."""

    shards: tuple[Shard, ...]
    sequence: int

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(each.num_sequences(self.sequence) for each in self.shards))

    @property
    def num_sequences(self) -> int:
        return self._ends[-1] if self._ends else 0

    def row(self, index: int) -> torch.Tensor:
        place = bisect_right(self._ends, index)
        return self.shards[place].row(
            index - (self._ends[place - 1] if place else 0), self.sequence
        )


@dataclass(eq=False)
class Corpus:
    """The tokens of documents, of which some may not be there yet.

    Waiting for tokens is waiting for files; no rank waits for another one in a collective.

    Args:
        folder: Where the tokens are.
        tokenizer: Makes tokens that no other process makes.
        vocabulary: The vocabulary of the model, which must contain all tokens.
        fingerprint: Stands for the documents and the tokenizer.
        is_strict: Whether a file that cannot be read is an error; otherwise it is skipped.
        say: Is called with a line about files that are skipped.
        worker: A process that tokenizes.
    """

    folder: TokenFolder
    tokenizer: Tokenizer
    vocabulary: int
    fingerprint: str
    is_strict: bool = False
    say: Callable[[str], None] = lambda line: None
    worker: Popen[bytes] | None = None
    _unreadable: set[int] = field(default_factory=set)

    @property
    def has_chats(self) -> bool:
        return self.folder.documents.has_chats

    @cached_property
    def windows(self) -> tuple[tuple[int, ...], ...]:
        """The numbers of the pieces in each window."""
        pieces = self.folder.documents.pieces
        if sum(map(_num_bytes, pieces)) <= WHOLE_BYTES:
            return (tuple(range(len(pieces))),)
        order = Permutation.of(len(pieces), 0, "pieces")
        found: list[tuple[int, ...]] = []
        window: list[int] = []
        size, limit = 0, FIRST_BYTES
        for number in map(order, range(len(pieces))):
            window.append(number)
            size += _num_bytes(pieces[number])
            if size >= limit:
                found.append(tuple(window))
                window, size, limit = [], 0, min(2 * limit, LAST_BYTES)
        return (*found, *([tuple(window)] if window else []))

    def window(self, index: int, sequence: int) -> Window:
        """Return a window, and wait until its tokens are there."""
        found = [self._mapped(number, self.awaited(number)) for number in self.windows[index]]
        return Window(tuple(found), sequence)

    def awaited(self, number: int) -> Contents:
        """Return what is known of a piece as soon as its tokens are there."""
        start = time.monotonic()
        while (contents := self.folder.contents(number)) is None:
            if failure := self.folder.failure(number):
                raise ConfigError(failure)
            is_alone = self.worker is None or self.worker.poll() is not None
            # Processes begin at the first window, but a run that is resumed needs a later one. And
            # they may have been killed: the run goes on without them.
            is_due = is_alone or time.monotonic() - start > PATIENCE_S
            if not (is_due and self.folder.tokenize(number, self.tokenizer)):
                time.sleep(_POLL_S)
        return contents

    def _mapped(self, number: int, contents: Contents) -> Shard:
        if contents.largest_token >= self.vocabulary:
            raise ConfigError(
                f"data: the largest token is {contents.largest_token}, but the model's vocabulary "
                f"has only {self.vocabulary}; choose another --tokenizer, or a model with a larger "
                "vocabulary."
            )
        if contents.unreadable:
            if self.is_strict:
                raise ConfigError(
                    f"data: {contents.unreadable}; repair the file, or leave out --strict-data."
                )
            if number not in self._unreadable:
                self._unreadable.add(number)
                among = f"{len(self._unreadable)} of {len(self.folder.documents.pieces)} pieces"
                self.say(f"data: {among} cannot be read and are skipped ({contents.unreadable})")
        if not contents.num_tokens:
            return Shard(torch.empty(0, dtype=_DTYPES[contents.itemsize]))
        path, number_of = str(self.folder.tokens(number)), contents.num_tokens
        dtype = _DTYPES[contents.itemsize]
        return Shard(torch.from_file(path, shared=False, size=number_of, dtype=dtype))


def _num_bytes(piece: Piece) -> int:
    return sum(part.num_bytes for part in piece)


def prepare_corpus(
    documents: Documents,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    vocabulary: int,
    is_strict: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Corpus:
    """Return the tokens of the documents in a folder of `folder`, which other runs may have begun.

    Args:
        documents: The documents; the tokenizer's `end` token follows each.
        tokenizer: Converts text to tokens.
        folder: The folder of all tokens, created if it is missing.
        vocabulary: The vocabulary of the model, which must contain all tokens.
        is_strict: Whether a file that cannot be read is an error.
        say: Is called with a line about files that are skipped.
    """
    both = f"{documents.fingerprint}/{tokenizer.fingerprint}/{PIECE_BYTES}"
    both += f"/{tokenizer.chat_template}" if documents.has_chats else ""
    fingerprint = hashlib.sha256(both.encode()).hexdigest()[:16]
    own = TokenFolder(folder / fingerprint, documents)
    return Corpus(own, tokenizer, vocabulary, fingerprint, is_strict, say)


def start_worker(
    corpora: Sequence[Corpus], tokenizer: str, num_threads: int, *, niceness: int = 10
) -> None:
    """Start a process that tokenizes what is missing, unless that takes no longer than its start.

    Args:
        corpora: The corpora of a run.
        tokenizer: "bytes", or the path of one.
        num_threads: How many threads the process uses.
        niceness: How far it stands back behind other processes, as those that train.
    """
    windows = [each.windows for each in corpora]
    pieces = [
        (place, number)
        for index in range(max(map(len, windows)))
        for place, own in enumerate(windows)
        if index < len(own)
        for number in own[index]
    ]
    missing = 0
    for place, number in pieces:
        folder = corpora[place].folder
        if folder.contents(number) is None:
            missing += _num_bytes(folder.documents.pieces[number])
        if missing > INLINE_BYTES:
            folders = tuple(each.folder for each in corpora)
            work = Work(folders, tuple(pieces), tokenizer, niceness)
            process = work.start(num_threads=num_threads)
            for each in corpora:
                each.worker = process
            return


def tokenize_all(
    documents: Sequence[Documents],
    tokenizer: Tokenizer,
    path: str,
    folder: Path,
    vocabulary: int,
    report: Callable[[int, int], None],
) -> list[Contents]:
    """Tokenize everything, with a process for each core, and return what there is.

    `path` is "bytes" or that of the tokenizer; `report` hears how many of all pieces are there.
    """
    corpora = [prepare_corpus(each, tokenizer, folder, vocabulary=vocabulary) for each in documents]
    for each in corpora:
        each.folder.clean()
    num_workers = len(os.sched_getaffinity(0))
    workers = []
    try:
        for _ in range(num_workers):
            start_worker(corpora, path, 1, niceness=0)
            workers += [each.worker for each in corpora[:1] if each.worker is not None]
        numbers = [(each, n) for each in corpora for window in each.windows for n in window]
        found = []
        for corpus, number in numbers:
            found.append(corpus.awaited(number))
            report(len(found), len(numbers))
        return found
    finally:
        for worker in workers:
            worker.terminate()
            worker.wait()


def stop_worker(corpora: Sequence[Corpus]) -> None:
    """End the process that tokenizes; another run continues with what it has done."""
    for process in {each.worker for each in corpora if each.worker is not None}:
        process.terminate()
        process.wait()


@dataclass(eq=False)
class Place:
    """Where a window begins among all sequences that a source gives, epoch after epoch."""

    first: int = 0
    epoch: int = 0
    window: int = 0  # in the order of the epoch


class Sequences:
    """The endless sequences of a corpus, in an order that depends on the seed only.

    In each epoch, every sequence occurs once. The share `held_out`, chosen by the seed, is left to
    those with `is_eval`, which have one epoch.
    """

    def __init__(
        self, corpus: Corpus, sequence: int, seed: int, held_out: float, *, is_eval: bool
    ) -> None:
        self.corpus = corpus
        self.place = Place()
        self._sequence, self._seed = sequence, seed
        self._held_out, self._is_eval = held_out, is_eval
        self._loaded: tuple[int, Window] | None = None
        self.total = math.inf  # of an epoch; known at its end

    def row(self, number: int) -> torch.Tensor:
        """Return a sequence and the token after it; zeros after the end of the validation."""
        self.seek(number)
        if number >= self.total:
            return torch.zeros(self._sequence + 1, dtype=torch.int64)
        window = self._window()
        split = self._permutation(window.num_sequences, -1)
        num_held_out = int(window.num_sequences * self._held_out)
        within = number - self.place.first
        if self._is_eval:
            return window.row(split(within))
        order = self._permutation(window.num_sequences - num_held_out, self.place.epoch)
        index = order(within)
        return window.row(split(num_held_out + index) if num_held_out else index)

    def seek(self, number: int) -> None:
        """Go to the window that contains a number, and wait for its tokens."""
        if number < self.place.first:
            self.place = Place()
        num_windows, num_empty = len(self.corpus.windows), 0
        while number >= self.place.first + (size := self._size()):
            place, num_empty = self.place, 0 if size else num_empty + 1
            is_last = place.window == num_windows - 1
            is_over = is_last and self._is_eval
            # Twice: those of an epoch, wherever it began.
            if num_empty == 2 * num_windows or (is_over and not place.first + size):
                raise self._empty()
            if is_over:
                self.total = place.first + size
                return
            after = (place.epoch + 1, 0) if is_last else (place.epoch, place.window + 1)
            self.place = Place(place.first + size, *after)

    def _empty(self) -> ConfigError:
        if self._held_out:
            return ConfigError(
                "--eval-share: this share of the sequences is not even one; pass a larger share, "
                "or text with --eval-data."
            )
        numbers = [number for window in self.corpus.windows for number in window]
        found = [self.corpus.folder.contents(number) for number in numbers]
        num_tokens = sum(each.num_tokens for each in found if each is not None)
        if num_tokens == 0 and any(each and each.unreadable for each in found):
            return ConfigError("data: no file can be read; pass others with --data.")
        return ConfigError(
            f"data: {num_tokens} tokens are too few to fill a sequence of {self._sequence}; "
            "add text with --data, or pass a smaller --sequence."
        )

    def _size(self) -> int:
        """Return how many sequences of the current window are given."""
        number = self._window().num_sequences
        num_held_out = int(number * self._held_out)
        return num_held_out if self._is_eval else number - num_held_out

    def _window(self) -> Window:
        place, number = self.place, len(self.corpus.windows)
        order = Permutation.of(number, self._seed, f"windows {place.epoch}")
        # In the first epoch, windows come in the order in which they are tokenized.
        index = order(place.window) if place.epoch else place.window
        if self._loaded is None or self._loaded[0] != index:
            self._loaded = index, self.corpus.window(index, self._sequence)
        return self._loaded[1]

    def _permutation(self, size: int, epoch: int) -> Permutation:
        index = self._loaded[0] if self._loaded else 0
        return Permutation.of(size, self._seed, f"{epoch}/{index}" if index else epoch)
