"""Faults between hosts: when every rank knows which rank or host it was, and when it has ended.

    python benchmarks/bench_host_faults.py
    DEVICE=cuda python benchmarks/bench_host_faults.py      NCCL; all ranks share the first GPU

Two hosts are network namespaces of this machine, so it needs root on Linux, and `ip` of iproute2.
"""

from __future__ import annotations

import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from measuring import Result, Table, parser_for, result_for

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.hosts.faults import Ending, Round, Rounds
from tests.support.hosts import DEVICE, Hosts

BACKEND = "NCCL" if DEVICE == "cuda" else "gloo"
NUM_HOSTS, NUM_RANKS = 2, 4
LOST_S, END_S = 30.0, 300.0  # after the patience; of a round
DELAY_MS, LOSS = 5, 0.01
NUM_STEPS = 80  # of a round that a cut interrupts


@contextmanager
def rounds_on_hosts(patience_s: float, **network: float) -> Iterator[Rounds]:
    with tempfile.TemporaryDirectory() as folder, Hosts(NUM_HOSTS, **network) as hosts:
        per_host = NUM_RANKS // NUM_HOSTS
        yield Rounds(hosts, Path(folder), num_ranks=per_host, patience_s=patience_s)


def summary(found: Sequence[dict[int, Ending]], name: str) -> list[str]:
    """Of all ranks in all runs: when the last one raised, and ended; how many named the cause."""
    endings = [ending for each in found for ending in each.values()]
    told = [ending for ending in endings if ending.text.startswith(name)]
    if not told:
        return ["-", "-", f"0 of {len(endings)}"]
    raised_s = max(ending.raised_s for ending in told)
    ended_s = max(ending.ended_s - ending.raised_s for ending in told)
    return [f"{raised_s:.1f}", f"{ended_s:.1f}", f"{len(told)} of {len(endings)}"]


def signals(result: Result, rounds: Rounds, times: int) -> None:
    rows: list[list[str | float | None]] = []
    cases = [("killed", signal.SIGKILL, 3), ("killed, with the store", signal.SIGKILL, 0)]
    cases += [("stopped", signal.SIGSTOP, 3)]
    for what, number, rank in cases:
        found = []
        for run in range(times):
            with rounds.round(own=run % 2 == 1) as trained:
                trained.send(rank, number)
                others = [each for each in range(NUM_RANKS) if each != rank]
                found.append(trained.ends(others, LOST_S))
        name = f"rank {rank} (host{rank // 2}): "
        rows.append([f"rank {rank} is {what}", str(times), *summary(found, name)])
    columns = ["fault", "runs", "all raise after, s", "end after that, s", "name it"]
    result.add(Table(f"A rank of two hosts with two ranks each, {BACKEND}", columns, rows))


def losses(result: Result, patience_s: float) -> None:
    cases: list[tuple[str, int, Callable[[Rounds], None]]] = [
        ("the link of host1 is cut", 1, lambda rounds: rounds.hosts.cut(1)),
        ("host1 is lost", 1, lambda rounds: rounds.hosts.lose(1)),
        ("host0 is lost, with the store", 0, lambda rounds: rounds.hosts.lose(0)),
    ]
    rows: list[list[str | float | None]] = []
    for what, host, fault in cases:
        left = [2, 3] if host == 0 else [0, 1]
        with rounds_on_hosts(patience_s) as rounds, rounds.round(own=True) as trained:
            fault(rounds)
            said_s = logged_s(trained, f"fullshard: host{host} (", left[0])
            found = trained.ends(left, patience_s + LOST_S)
            rows.append([what, said_s, *summary([found], f"host{host} (")])
    columns = ["fault", "logged after, s", "all raise after, s", "end after that, s", "name it"]
    title = f"A host that does not come back, {BACKEND}, with FULLSHARD_PATIENCE_S={patience_s:g}"
    result.add(Table(title, columns, rows))


def logged_s(trained: Round, text: str, rank: int) -> float:
    return trained.wait_until(lambda: text in trained.log(rank), LOST_S)


def goes_on_s(trained: Round, timeout_s: float) -> float:
    at = trained.step(0)
    return trained.wait_until(lambda: trained.step(0) > at + 1, timeout_s)


def cuts(result: Result, rounds: Rounds, seconds: Sequence[float], network: str = "") -> None:
    with rounds.round(num_steps=NUM_STEPS) as trained:
        trained.ends(range(NUM_RANKS), END_S)
        expected = trained.loss(0)
    rows: list[list[str | float | None]] = []
    for cut_s in seconds:
        with rounds.round(num_steps=NUM_STEPS) as trained:
            rounds.hosts.cut(1)
            trained.wait_for(cut_s)
            rounds.hosts.mend(1)
            on_s = goes_on_s(trained, 2 * cut_s + END_S)
            found = trained.ends(range(NUM_RANKS), END_S)
            statuses = {ending.status for ending in found.values()}
            is_same = trained.loss(0) == expected
        ended = "all ranks end with status 0" if statuses == {0} else f"status {statuses}"
        rows.append([f"{cut_s:g} s", on_s - cut_s, ended, "same" if is_same else "other"])
    columns = ["cut for", "steps after the cut, s", "what happens", "losses"]
    result.add(Table(f"A link that comes back, {BACKEND}{network}", columns, rows))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--times", type=int, default=20, help="how often a rank fails")
    parser.add_argument("--patience", type=float, default=60.0)
    parser.add_argument("--cuts", type=float, nargs="*", default=[3.0, 20.0, 50.0])
    options = parser.parse_args(arguments)
    result = result_for("host_faults", arguments, DEVICE)
    with rounds_on_hosts(options.patience) as rounds:
        signals(result, rounds, options.times)
        if options.cuts:
            cuts(result, rounds, options.cuts)
    if options.cuts:
        with rounds_on_hosts(options.patience, delay_ms=DELAY_MS, loss=LOSS) as rounds:
            network = f", with a delay of {DELAY_MS} ms and {LOSS:.0%} of all frames lost"
            cuts(result, rounds, options.cuts, network)
    losses(result, options.patience)
    result.write(options.json)


if __name__ == "__main__":
    main()
