"""Steps of `fullshard train` on hosts with different networks, and what it has predicted for them.

    python benchmarks/bench_host_plan.py

A run measures the network between its hosts when it starts, and predicts its steps. Hosts are
network namespaces of this machine (tests/support/hosts.py), so it needs root on Linux, `ip` and
`tc` of iproute2. They share its cores, so sequences are short: steps are mostly communication. The
median step of each run counts, without the first ones.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from measuring import Result, Table, parser_for, result_for

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fullshard_train.report.record import RunRecord, read_record
from tests.support.hosts import DEVICE, Hosts
from tests.support.tiny_run import TEXT

NUM_HOSTS, WARM_STEPS, TIMEOUT_S = 2, 2, 900.0
RATES = ("50mbit", "100mbit", "1gbit")
DELAYED, DELAY_MS = "100mbit", 5


def trained(folder: Path, model: str, num_ranks: int, num_steps: int, hosts: Hosts) -> RunRecord:
    """A run on hosts of so many ranks."""
    (folder / "text.txt").write_text(TEXT)
    launch = ["-m", "torch.distributed.run", "--nnodes", str(NUM_HOSTS), "--nproc-per-node"]
    launch += [str(num_ranks), "--master-addr", "host0", "--master-port", "29500"]
    asked = ["--model", model, "--sequence", "8", "--batch", "1", "--steps", str(num_steps)]
    asked += ["--device", DEVICE, "--sample-tokens", "0", "--save-every", "0"]
    asked += ["--data", str(folder / "text.txt"), "--out", str(folder / "run")]
    env = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": 1}
    logs = [folder / f"{host}.log" for host in range(NUM_HOSTS)]
    processes = [
        hosts.run(
            host,
            [*launch, "--node-rank", str(host), "-m", "fullshard", "train", *asked],
            log=logs[host],
            env=env,
        )
        for host in range(NUM_HOSTS)
    ]
    statuses = [process.wait(TIMEOUT_S) for process in processes]
    if any(statuses):
        raise RuntimeError("\n".join(log.read_text() for log in logs))
    return read_record(folder / "run")


def row(network: str, num_ranks: int, record: RunRecord) -> list[str | float | None]:
    steps_s = [each.step_s for each in record.metrics[WARM_STEPS:]]
    measured_s, predicted_s = statistics.median(steps_s), record.predicted["step_s"]
    shares = [f"{each / measured_s - 1:+.0%}" for each in (predicted_s, min(steps_s), max(steps_s))]
    return [f"{network}, {num_ranks}", measured_s, predicted_s, *shares]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--model", default="10m")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="on each host")
    parser.add_argument("--rates", nargs="*", default=RATES, help="as `tc` has them")
    parser.add_argument("--steps", type=int, default=7)
    options = parser.parse_args(arguments)
    result: Result = result_for("host_plan", arguments, DEVICE)
    networks = [(rate, Hosts(NUM_HOSTS, rate)) for rate in options.rates]
    delayed = Hosts(NUM_HOSTS, DELAYED, delay_ms=DELAY_MS)
    networks.append((f"{DELAYED} and {DELAY_MS} ms", delayed))
    rows = []
    for num_ranks in options.ranks:
        for name, network in networks:
            with tempfile.TemporaryDirectory() as folder, network as hosts:
                given = Path(folder), options.model, num_ranks, options.steps
                rows.append(row(name, num_ranks, trained(*given, hosts)))
                print(*rows[-1], flush=True)
    columns = ["links, ranks on each host", "step, s", "predicted, s", "error"]
    columns += ["fastest step", "slowest step"]
    result.add(Table(f"Steps of {options.model} on {NUM_HOSTS} hosts", columns, rows))
    result.write(options.json)


if __name__ == "__main__":
    main()
