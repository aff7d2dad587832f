"""The example for Ray Train runs on a cluster of two nodes, and resumes after a worker dies."""

import json
import os
import runpy
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support.hosts import Hosts

ROOT = Path(__file__).parent.parent.parent
EXAMPLE = ROOT / "examples" / "cluster" / "ray_train.py"
TIMEOUT_S = 600.0
# Each node has a network, processes, shared memory and files of Ray of its own, and one processor,
# so that each worker is on another one.
SETUP = "mount -t tmpfs none /dev/shm && mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray"
RAY = ["-m", "ray.scripts.scripts"]
NODE = [*RAY, "start", "--block", "--num-cpus", "1", "--disable-usage-stats"]
DRIVER = """
import json, runpy, subprocess, sys, time
import ray
from tests.clients.test_ray import killed_once

head = [sys.executable, *json.loads(sys.argv[2])]
with subprocess.Popen(head) as node:
    while True:
        try:
            ray.init(address="host0:6379")
            break
        except ConnectionError:
            time.sleep(0.5)
    while len(ray.nodes()) < 2:
        time.sleep(0.5)
    common = {"example": sys.argv[3], "steps": 16, "save_every": 4}
    found = {}
    for name, loop in (("whole", []), ("killed", [killed_once])):
        config = {**common, "folder": f"{sys.argv[1]}/{name}"}
        found[name] = runpy.run_path(sys.argv[3])["fit"](config, 2, *loop).return_value
    with open(f"{sys.argv[1]}/found.json", "w") as file:
        json.dump(found, file)
    ray.shutdown()
    node.terminate()
"""


def killed_once(config: dict[str, Any]) -> dict[str, float]:
    """The loop of the example; after the second save of the first attempt, rank 1 is killed."""
    import torch.distributed as dist

    example = runpy.run_path(config["example"])
    save, marker = example["save"], Path(config["folder"]) / "killed"

    def save_and_die(path: Path, *args: Any, **kwargs: Any) -> None:
        save(path, *args, **kwargs)
        if kwargs["step"] == 2 * config["save_every"] and not marker.exists():
            dist.barrier()
            if dist.get_rank() == 1:
                marker.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    example["train"].__globals__["save"] = save_and_die
    metrics: dict[str, float] = example["train"](config)
    return metrics


def test_a_run_on_two_nodes_resumes_after_a_worker_is_killed_with_the_same_loss(
    tmp_path: Path,
) -> None:
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    env = {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "RAY_TRAIN_V2_ENABLED": "1"}
    head = [*NODE, "--head", "--node-ip-address", "10.78.0.1", "--include-dashboard", "false"]
    driver = ["-c", DRIVER, str(tmp_path), json.dumps([*head, "--port", "6379"]), str(EXAMPLE)]
    second = [*NODE, "--node-ip-address", "10.78.0.2", "--address", "10.78.0.1:6379"]
    logs = [tmp_path / "host0.log", tmp_path / "host1.log"]
    with Hosts(2) as hosts:
        done = hosts.run(0, driver, log=logs[0], setup=SETUP, env=env)
        hosts.run(1, second, log=logs[1], setup=SETUP, env=env)
        with suppress(subprocess.TimeoutExpired):
            done.wait(TIMEOUT_S)
    found = tmp_path / "found.json"
    assert found.exists(), "\n".join(log.read_text()[-8000:] for log in logs)
    ran = json.loads(found.read_text())
    whole, killed = ran["whole"], ran["killed"]

    assert (tmp_path / "killed" / "killed").exists()
    assert killed == {**whole, "resumed_at": 8}
    assert whole["step"] == 16
    assert sorted(path.name for path in (tmp_path / "killed" / "checkpoints").glob("step_*")) == [
        "step_12",
        "step_16",
    ]
