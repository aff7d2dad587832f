"""Data in every format and in mixtures, tokenized by processes that may be killed."""

import gzip
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import ConfigError, FullshardError
from fullshard.testing import Rank, on_ranks
from fullshard_train import corpus as corpus_module
from fullshard_train import sources as sources_module
from fullshard_train.batches import Batches
from fullshard_train.control import StopRequest
from fullshard_train.corpus import Corpus, prepare_corpus, start_worker, stop_worker
from fullshard_train.models.tokenizers import ByteTokenizer
from fullshard_train.run import Run
from fullshard_train.sources import Documents, documents_in, sources_of
from fullshard_train.tokenization import TokenFolder
from fullshard_train.world import World
from tests.support.tiny_run import TEXT, configured, losses

ROWS = [{"text": f"text {number}"} for number in range(5)]
LINES = "".join(f"{json.dumps(row)}\n" for row in ROWS)


def write_as(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows in the format that the name of a file says."""
    lines = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    table = pa.Table.from_pylist(rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".zst":
        with pa.output_stream(str(path), compression="zstd") as stream:
            stream.write(lines)
    elif path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
    elif path.name == "stream.arrow":  # as datasets writes them
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table)
    elif path.suffix == ".arrow":
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        path.write_bytes(lines)
    return path


NAMES = ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow", "stream.arrow"]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_has_the_same_documents(tmp_path: Path, name: str) -> None:
    path = write_as(tmp_path / name, ROWS)
    assert list(Documents.of([str(path)], "text")) == [row["text"] for row in ROWS]
    # A folder of shards is all of its files, and what was said is a conversation.
    (tmp_path / "folder").mkdir()
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    write_as(tmp_path / "folder" / name, [{"messages": said}, {"messages": said}])
    chats = Documents.of([str(tmp_path / "folder")], "text")
    assert chats.has_chats
    assert list(chats) == [said, said]
    with pytest.raises(ConfigError, match=r"the line has the fields 'text', but no field 'body'"):
        list(Documents.of([str(path)], "body"))


@settings(max_examples=40)
@given(
    lines=st.lists(st.text(st.sampled_from("ab\u00e9"), max_size=12), min_size=1),
    num_bytes=st.integers(1, 40),
)
def test_pieces_have_every_line_once(tmp_path_factory, lines: list[str], num_bytes: int) -> None:
    path = tmp_path_factory.mktemp("pieces") / "a.txt"
    text = "\n".join(lines) + "."
    path.write_text(text, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sources_module, "PIECE_BYTES", num_bytes)
        documents = Documents.of([str(path)], "text")
        assert len(documents.pieces) == -(-len(text.encode()) // num_bytes)
        found = [each for piece in documents.pieces for each in documents_in(piece, "text")]
    assert "".join(found) == text


def test_a_broken_line_of_a_later_piece_is_counted_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_module, "PIECE_BYTES", 30)
    path = tmp_path / "a.jsonl"
    path.write_text(LINES + '{"text": 3}\n')
    documents = Documents.of([str(path)], "text")
    assert len(documents.pieces) > 3
    with pytest.raises(ConfigError, match="line 6: the field 'text' is not text but int"):
        list(documents)


# Mixtures


def corpora_of(paths: list[str], folder: Path, **options: Any) -> tuple[Corpus, ...]:
    found = []
    for source in sources_of(paths, "text"):
        corpus = prepare_corpus(
            source.documents, ByteTokenizer(), folder, vocabulary=257, **options
        )
        corpus.folder.clean()
        found.append(corpus)
    return tuple(found)


def test_a_mixture_takes_sources_by_weight_in_any_world(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_text(name * 1000)
    paths = [f"one=3:{tmp_path / 'a'}", f"other=1:{tmp_path / 'b'}"]
    weights = tuple(each.weight for each in sources_of(paths, "text"))
    corpora = corpora_of(paths, tmp_path / "tokens")

    def batches(rank: int, num_ranks: int, batch: int) -> Batches:
        whole = {"sequence": 9, "seed": 0, "weights": weights}
        return Batches(corpora, rank=rank, num_ranks=num_ranks, batch=batch, **whole)

    alone, several = batches(0, 1, 8), [batches(rank, 4, 2) for rank in range(4)]
    for _ in range(5):
        expected = alone.next()[0]
        counts = Counter(expected[:, 0].tolist())
        assert counts[ord("a")] == 3 * counts[ord("b")] == 6
        assert torch.equal(torch.cat([each.next()[0] for each in several]), expected)
    resumed = batches(0, 1, 8)
    resumed.load_state_dict(several[3].state_dict())
    assert torch.equal(resumed.next()[0], alone.next()[0])


@pytest.mark.parametrize(
    "paths, said",
    [
        (["a=1:x", "b"], "b has no weight but others have"),
        (["a=1:x", "a=2:y"], "'a' has two weights"),
        (["a=0:x", "b=0.0:y"], "the mixture is empty: all weights are 0"),
        (["a=1:nowhere/x"], "nowhere/x does not exist"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(paths: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sources_of(paths, "text")


# Damaged files


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
def test_a_damaged_file_is_skipped_with_a_count_or_refused(tmp_path: Path, name: str) -> None:
    noise = random.Random(0)
    rows = [{"text": f"{noise.getrandbits(4000):x}"} for _ in range(50)]
    path = write_as(tmp_path / name, rows)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (tmp_path / "good.txt").write_text("good")
    said: list[str] = []
    paths = [str(path), str(tmp_path / "good.txt")]
    (corpus,) = corpora_of(paths, tmp_path / "tokens", say=said.append)
    first = list(corpus.window(0, 1).shards[-1].tokens)
    assert bytes(first[-5:-1]) == b"good"
    assert len(said) == 1
    assert said[0].startswith(f"data: 1 of {len(corpus.windows[0])} pieces cannot be read")
    assert str(path) in said[0]
    (strict,) = corpora_of(paths, tmp_path / "tokens", is_strict=True)
    with pytest.raises(ConfigError, match="repair the file, or leave out --strict-data"):
        strict.window(0, 1)
    (nothing,) = corpora_of([str(path)], tmp_path / "tokens")
    with pytest.raises(ConfigError, match=r"no file can be read; pass others"):
        Batches((nothing,), sequence=2, batch=1, rank=0, num_ranks=1, seed=0).begin()


# Processes


@pytest.fixture
def in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A text of twenty pieces, in windows that grow from two of them to eight."""
    monkeypatch.setattr(sources_module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(corpus_module, "PIECE_BYTES", 1000)
    for name, pieces in {"FIRST": 2, "LAST": 8, "WHOLE": 3}.items():
        monkeypatch.setattr(corpus_module, f"{name}_BYTES", 1000 * pieces)
    monkeypatch.setattr(corpus_module, "INLINE_BYTES", 3000)
    path = tmp_path / "text.txt"
    path.write_text(TEXT[:20_000])
    return path


def test_a_process_tokenizes_in_the_background_what_the_rank_would(
    in_pieces: Path, tmp_path: Path
) -> None:
    (alone,) = corpora_of([str(in_pieces)], tmp_path / "alone")
    (corpus,) = corpora_of([str(in_pieces)], tmp_path / "tokens")
    assert [len(window) for window in corpus.windows] == [2, 4, 8, 6]
    start_worker([corpus], "bytes", 1)
    assert corpus.worker is not None
    try:
        assert corpus.worker.wait(120) == 0
        for index in range(len(corpus.windows)):
            expected, found = alone.window(index, 10), corpus.window(index, 10)
            for one, other in zip(expected.shards, found.shards, strict=True):
                assert torch.equal(one.tokens, other.tokens)
    finally:
        stop_worker([corpus])
    assert not list(corpus.folder.path.glob("*.claim"))
    start_worker([again := corpora_of([str(in_pieces)], tmp_path / "tokens")[0]], "bytes", 1)
    assert again.worker is None  # all of it is there


def test_what_a_killed_process_has_begun_is_done_by_another(
    in_pieces: Path, tmp_path: Path
) -> None:
    (corpus,) = corpora_of([str(in_pieces)], tmp_path / "tokens")
    number = corpus.windows[0][0]
    claim = corpus.folder.tokens(number).with_suffix(".claim")
    code = (
        "import pickle, sys, time, fullshard_train.tokenization as t\n"
        "folder = pickle.load(sys.stdin.buffer)\n"
        "t._encode = lambda *_: (print(flush=True), time.sleep(600))\n"
        f"folder.tokenize({number}, t.ByteTokenizer())\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", code], **pipes)
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdin:
        pickle.dump(corpus.folder, process.stdin)
    assert process.stdout.readline()
    assert str(process.pid) in claim.read_text()
    # As long as it lives, nobody else does it.
    assert corpus.folder.tokenize(number, ByteTokenizer()) is False
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert corpus.folder.tokenize(number, ByteTokenizer()) is True
    contents = corpus.folder.contents(number)
    assert contents is not None
    assert contents.num_tokens > 900


def test_a_run_goes_on_without_a_process_that_was_killed(in_pieces: Path, tmp_path: Path) -> None:
    (corpus,) = corpora_of([str(in_pieces)], tmp_path / "tokens")
    start_worker([corpus], "bytes", 1)
    assert corpus.worker is not None
    os.kill(corpus.worker.pid, signal.SIGKILL)
    corpus.worker.wait()
    assert sum(corpus.window(i, 10).num_sequences for i in range(4)) > 1900


def test_a_rank_does_what_other_processes_have_not_come_to(
    in_pieces: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_module, "PATIENCE_S", 0.0)
    (corpus,) = corpora_of([str(in_pieces)], tmp_path / "tokens")
    corpus.worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        assert corpus.window(3, 10).num_sequences > 500
        assert corpus.worker.poll() is None
    finally:
        corpus.worker.communicate(b"\n")


def test_an_error_of_a_process_reaches_the_rank(in_pieces: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(LINES * 200 + '{"text": 3}\n')
    (corpus,) = corpora_of([str(path)], tmp_path / "tokens")
    start_worker([corpus], "bytes", 1)
    assert corpus.worker is not None
    try:
        last = next(
            n
            for n, each in enumerate(corpus.windows)
            if len(corpus.folder.documents.pieces) - 1 in each
        )
        with pytest.raises(ConfigError, match="line 1001: the field 'text' is not text"):
            corpus.window(last, 10)
    finally:
        stop_worker([corpus])


def test_a_claim_of_a_host_that_says_nothing_counts_for_a_while_only(
    in_pieces: Path, tmp_path: Path
) -> None:
    (corpus,) = corpora_of([str(in_pieces)], tmp_path / "tokens")
    folder: TokenFolder = corpus.folder
    claim = folder.tokens(0).with_suffix(".claim")
    claim.write_text(json.dumps(["another machine", 1, "0"]))
    assert not folder.tokenize(0, ByteTokenizer())
    os.utime(claim, (time.time() - 60, time.time() - 60))
    assert folder.tokenize(0, ByteTokenizer())


# Runs


def trains(rank: Rank, folder: Path, out: str, **changes: Any) -> None:
    world = World(rank.rank, rank.size, rank.rank, rank.size, rank.device)
    with StopRequest() as stop:
        Run(configured(folder, out, **changes), world).run(stop)


@pytest.mark.exhaustive
@on_ranks(2)
def test_a_run_over_windows_of_a_mixture_is_resumed_to_the_last_bit(
    rank: Rank, tmp_path: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module, name, size in SMALL:
            patch.setattr(module, name, size)
        trains_on_a_mixture(rank, tmp_path)


SMALL = [
    (sources_module, "PIECE_BYTES", 2000),
    (corpus_module, "FIRST_BYTES", 4000),
    (corpus_module, "LAST_BYTES", 8000),
    (corpus_module, "WHOLE_BYTES", 4000),
    (corpus_module, "INLINE_BYTES", 10**9),
]


def trains_on_a_mixture(rank: Rank, tmp_path: Path) -> None:
    if rank.rank == 0:
        (tmp_path / "a.txt").write_text(TEXT[:30_000])
        (tmp_path / "b.jsonl").write_text(LINES * 200)
    paths = (f"text=0.7:{tmp_path / 'a.txt'}", f"lines=0.3:{tmp_path / 'b.jsonl'}")
    data = {"paths": paths, "cache": str(tmp_path / "cache"), "eval_share": 0.05}
    run = {"eval_every": 20, "eval_batches": 2, "save_every": 7}
    steady = {"schedule": "constant", "batch": 8}
    trains(rank, tmp_path, "whole", data=data, run=run, optimizer={"steps": 40, **steady})
    trains(rank, tmp_path, "parts", data=data, run=run, optimizer={"steps": 21, **steady})
    more = {"optimizer": {"steps": 40, **steady}, "run": {**run, "resume": True}}
    trains(rank, tmp_path, "parts", data=data, **more)
    if rank.rank == 0:
        assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    data["paths"] = (paths[0].replace("0.7", "0.6"), paths[1])
    with pytest.raises(FullshardError, match="pass the same --data"):
        trains(rank, tmp_path, "parts", data=data, **more)
