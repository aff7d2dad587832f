"""Tokenizing a corpus: all of it, and as much as the first step of a run needs.

The corpus is made of Python's standard library: its files, in another order and with other numbers
in each repetition, as lines of a `.jsonl` file. The library `tokenizers` alone encodes the texts,
which it has in memory, with as many threads as there are cores. fullshard reads the file, encodes
with a process on each core and writes the tokens. Both are measured in every round. The first step
is that of `fullshard train` with the model `tiny`, from the start of the command to the line that
shows the step, with an empty cache.

    python benchmarks/bench_tokenize.py [--mb 100] [--first-step-mb 4000] [--rounds 3]
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from fullshard_train.corpus import tokenize_all
from fullshard_train.models.bpe import trained_bpe
from fullshard_train.models.tokenizers import JsonTokenizer
from fullshard_train.sources import Documents
from measuring import Table, parser_for, result_for

_ALONE = """
import json, sys, time
from tokenizers import Tokenizer
own = Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2], "rb")]
start = time.perf_counter()
number = 0
for first in range(0, len(texts), 64):
    batch = own.encode_batch_fast(texts[first : first + 64], add_special_tokens=False)
    number += sum(map(len, batch))
print(json.dumps([time.perf_counter() - start, number + len(texts)]))
"""


def documents() -> Iterator[str]:
    """Source files, endlessly, of which no two are the same."""
    texts = [text for text in Documents.of([], "text") if isinstance(text, str)]
    source = random.Random(0)
    while True:
        source.shuffle(texts)
        for text in texts:
            yield text.replace("0", str(source.randrange(10**6)))


def write_corpus(path: Path, num_bytes: int) -> None:
    written = 0
    with path.open("wb") as file:
        for text in documents():
            written += file.write(json.dumps({"text": text}).encode() + b"\n")
            if written >= num_bytes:
                return


def alone(tokenizer: Path, corpus: Path, num_cores: int) -> tuple[float, int]:
    environment = {**os.environ, "RAYON_NUM_THREADS": str(num_cores)}
    command = [sys.executable, "-c", _ALONE, str(tokenizer), str(corpus)]
    found = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE).stdout
    seconds, number = json.loads(found)
    return seconds, number


def ours(tokenizer: Path, corpus: Path, folder: Path) -> tuple[float, int]:
    own, start = JsonTokenizer(tokenizer), time.perf_counter()
    found = tokenize_all(
        [Documents.of([str(corpus)], "text")],
        own,
        str(tokenizer),
        folder,
        own.vocabulary,
        lambda done, total: None,
    )
    return time.perf_counter() - start, sum(each.num_tokens for each in found)


def first_step(tokenizer: Path, corpus: Path, folder: Path) -> float:
    """Return the seconds from the start of a command to its first step."""
    command = "-m fullshard train --model tiny --sequence 128 --device cpu --ranks 2 --steps 2 "
    command += f"--data {corpus} --tokenizer {tokenizer} --cache {folder / 'cache'} --no-report "
    command += f"--sample-tokens 0 --save-every 0 --out {folder / 'run'}"
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-u", *command.split()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    lines = []
    with process.stdout as output:
        for line in output:
            lines.append(line.decode())
            if line.startswith(b"step 1/"):
                seconds = time.perf_counter() - start
                output.read()
                process.wait()
                return seconds
    raise RuntimeError("".join(lines))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--mb", type=float, default=100, help="size of the corpus")
    parser.add_argument("--first-step-mb", type=float, default=4000, help="that of a run")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(arguments)
    result = result_for("tokenize", arguments)
    num_cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="fullshard-") as scratch:
        folder = Path(scratch)
        corpus = folder / "corpus.jsonl"
        write_corpus(corpus, int(args.mb * 1e6))
        texts = [text for text in Documents.of([], "text") if isinstance(text, str)]
        own = trained_bpe(texts, args.vocabulary, "benchmark", folder, is_shown=False)
        own.save(folder)
        tokenizer = folder / "tokenizer.json"
        found: dict[str, list[float]] = {"alone": [], "ours": []}
        for number in range(args.rounds):
            seconds, expected = alone(tokenizer, corpus, num_cores)
            found["alone"].append(seconds)
            seconds, num_tokens = ours(tokenizer, corpus, folder / f"tokens{number}")
            found["ours"].append(seconds)
            if num_tokens != expected:
                raise AssertionError(f"{num_tokens} tokens instead of {expected}")
        base = statistics.median(found["alone"])
        names = {"alone": "the library tokenizers alone", "ours": "fullshard"}
        rows = [
            [names[name], median := statistics.median(each), args.mb / median, median / base]
            for name, each in found.items()
        ]
        title = f"{args.mb:g} MB of text on {num_cores} cores, vocabulary {own.vocabulary:,}"
        result.add(Table(title, ["variant", "seconds", "MB/s", "ratio"], rows))
        write_corpus(corpus, int(args.first_step_mb * 1e6))
        seconds = first_step(tokenizer, corpus, folder)
        title = f"`fullshard train` on {args.first_step_mb:g} MB of text, {num_cores} cores"
        result.add(Table(title, ["", "seconds"], [["until the first step", seconds]]))
        result.details = dict(found)
    result.write(args.json)


if __name__ == "__main__":
    main()
