"""`fullshard train` on several hosts, with torchrun: from a fault to the next step, and losses.

    python benchmarks/bench_host_restarts.py

Hosts are network namespaces of this machine, so it needs root on Linux, and `ip` of iproute2. All
of them share its cores, so ranks load torch in a multiple of the time of a host of their own: the
first row says how long a start takes here.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from measuring import Result, Table, parser_for, result_for

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.hosts.jobs import Job
from tests.support.hosts import Hosts

AGAIN_S, END_S = 300.0, 900.0
MAX_STEPS = 20  # from one fault to the next
NUM_STEPS = 1_000_000  # of a run that is ended when all has been measured


def row(what: str, seconds: Sequence[float]) -> list[str | float | None]:
    return [what, len(seconds), statistics.median(seconds), max(seconds)]


def faults(result: Result, folder: Path, times: int, patience_s: float) -> None:
    """What a job does without a lost host, and what with one that comes back."""

    def lose(host: int) -> None:
        hosts.lose(host)
        hosts.back(host)
        job.start(host)

    rows = []
    with Hosts(2) as hosts:
        job = Job(hosts, folder / "two", num_ranks=2, num_steps=NUM_STEPS, patience_s=patience_s)
        rows.append(row("(the start of two hosts of two ranks)", [job.begin()]))
        cases: list[tuple[str, Callable[[], object]]] = [
            ("a rank of host1 is killed", lambda: job.kill_rank(1, 0)),
            ("rank 0 is killed, with the store", lambda: job.kill_rank(0, 0)),
            ("host1 is lost, and back at once", lambda: lose(1)),
            ("host0 is lost, with the rendezvous, and back at once", lambda: lose(0)),
        ]
        for what, fault in cases:
            rows.append(row(what, [job.trains_again(fault, AGAIN_S) for _ in range(times)]))
    with Hosts(3) as hosts:
        job = Job(
            hosts,
            folder / "three",
            num_ranks=1,
            num_steps=NUM_STEPS,
            patience_s=patience_s,
            min_hosts=2,
        )
        rows.append(row("(the start of three hosts of one rank)", [job.begin()]))
        rows.append(
            row("a rank is killed", [job.trains_again(lambda: job.kill_rank(2, 0), AGAIN_S)])
        )
        rows.append(
            row("host2 is lost for good", [job.trains_again(lambda: hosts.lose(2), AGAIN_S)])
        )
    columns = ["fault", "runs", "median, s", "longest, s"]
    title = f"From a fault to the next step, with FULLSHARD_PATIENCE_S={patience_s:g}"
    result.add(Table(title, columns, rows))


def soak(result: Result, folder: Path, num_faults: int, num_steps: int, patience_s: float) -> None:
    """Random faults of a job, whose losses must be those without them."""
    given = {"num_ranks": 2, "num_steps": num_steps, "patience_s": patience_s}
    with Hosts(2) as hosts:
        undisturbed = Job(hosts, folder / "undisturbed", **given)
        undisturbed.ends(END_S)
    moments, done = random.Random(0), Counter[str]()
    with Hosts(2) as hosts:
        job = Job(hosts, folder / "disturbed", **given)
        job.begin()

        def lose() -> None:
            hosts.lose(1)
            hosts.back(1)
            job.start(1)

        for _ in range(num_faults):
            what = moments.choice(["ranks killed", "hosts lost"])
            place = moments.randrange(2), moments.randrange(2)
            job.trains_again(
                lose if what == "hosts lost" else lambda at=place: job.kill_rank(*at), AGAIN_S
            )
            done[what] += 1
            job.wait_for_step(len(job.losses()) + moments.randrange(MAX_STEPS))
        statuses = job.ends(END_S)
    assert statuses == {0}, statuses
    assert len(job.losses()) == num_steps
    assert job.losses() == undisturbed.losses(), "a loss differs from that of the undisturbed run"
    rows = [[what, number] for what, number in sorted(done.items())]
    rows += [["steps", num_steps], ["losses that differ", 0]]
    result.add(Table("A run on two hosts with random faults", ["what", "number"], list(rows)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--times", type=int, default=3, help="how often each fault")
    parser.add_argument("--patience", type=float, default=60.0)
    parser.add_argument(
        "--faults", type=int, default=5, help="of the run whose losses are compared"
    )
    parser.add_argument("--steps", type=int, default=200, help="of that run")
    options = parser.parse_args(arguments)
    result = result_for("host_restarts", arguments)
    with tempfile.TemporaryDirectory() as folder:
        soak(result, Path(folder), options.faults, options.steps, options.patience)
        faults(result, Path(folder), options.times, options.patience)
    result.write(options.json)


if __name__ == "__main__":
    main()
