"""The examples for clusters train: their own commands, with all nodes and pods on this machine."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from fullshard.testing import Rank, pool
from fullshard_train.config import TrainConfig, validate
from fullshard_train.config_file import config_as_toml, config_of
from fullshard_train.control import StopRequest
from fullshard_train.run import Run
from fullshard_train.world import World
from tests.support.programs import free_port
from tests.support.tiny_run import TEXT, configured, losses

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
TIMEOUT_S = 240

# Starts a command once for each node. When a step is trained, it signals all processes of the
# command, as Slurm does before it preempts a job; torchrun then signals its ranks once more.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys, time
from pathlib import Path

nodes = [subprocess.Popen(sys.argv[1:]) for _ in range(int(os.environ["SLURM_JOB_NUM_NODES"]))]
metrics = Path(os.environ["OUT"], "metrics.jsonl")
while not (metrics.exists() and metrics.stat().st_size) and nodes[0].poll() is None:
    time.sleep(0.05)
for node in nodes:
    children = Path(f"/proc/{{node.pid}}/task/{{node.pid}}/children").read_text().split()
    for pid in [*map(int, children), node.pid]:
        os.kill(pid, signal.SIGTERM)
sys.exit(max(abs(node.wait()) for node in nodes))
"""
FAILING_SRUN = '#!/bin/bash\necho "srun $*"\nexit 1\n'
SCONTROL = """#!/bin/bash
[ "$1 $2" = "show hostnames" ] && echo localhost && echo localhost && exit
echo "scontrol $*"
"""


def start(command: list[str], **variables: str) -> subprocess.Popen[str]:
    path = [variables.pop("PATH", ""), str(Path(sys.executable).parent), os.environ["PATH"]]
    ours = {"PATH": ":".join(path), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    env = {**os.environ, **ours, **variables}
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=env, text=True, **output)


def printed(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=TIMEOUT_S)[0]
    finally:
        process.kill()


def slurm_job(folder: Path, srun: str, **variables: str) -> subprocess.Popen[str]:
    """Start the batch script on two nodes."""
    folder.mkdir(exist_ok=True)
    for name, text in {"srun": srun, "scontrol": SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    script = ["bash", str(CLUSTER / "slurm.sbatch")]
    return start(script, PATH=str(folder), PORT=str(free_port()), **job, **variables)


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    """The ConfigMap and the PyTorchJob."""
    config, job = yaml.safe_load_all((CLUSTER / "pytorchjob.yaml").read_text())
    return config, job


def pod(job: dict[str, Any], endpoint: str, **variables: str) -> subprocess.Popen[str]:
    """Start the container of a worker, with the variables that the operator sets."""
    elastic, worker = job["spec"]["elasticPolicy"], job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    operator = {
        "PYTHONUNBUFFERED": "1",
        "PET_RDZV_ENDPOINT": endpoint,
        "PET_RDZV_BACKEND": elastic["rdzvBackend"],
        "PET_RDZV_ID": elastic["rdzvId"],
        "PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
        "PET_NPROC_PER_NODE": job["spec"]["nprocPerNode"],
        "PET_MAX_RESTARTS": str(elastic["maxRestarts"]),
    }
    own = {each["name"]: each["value"] for each in container["env"]}
    return start([*container["command"], *container["args"]], **{**operator, **own, **variables})


def written(config: TrainConfig, folder: Path, steps: int) -> str:
    """Write a config file without the folder of the run, which the commands give."""
    config = replace(config, optimizer=replace(config.optimizer, steps=steps))
    file = folder / f"{steps}.toml"
    file.write_text(config_as_toml(replace(config, run=replace(config.run, out=""))))
    return str(file)


def train(rank: Rank, config: TrainConfig) -> None:
    world = World(rank.rank, rank.size, rank.rank, rank.size, rank.device)
    assert Run(config, world).run(StopRequest()) is True
    dist.barrier()  # the first rank writes when the others are done


@pytest.mark.soak
@pytest.mark.long
def test_a_run_that_slurm_preempts_is_saved_and_requeued_and_a_pod_finishes_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    steady = {"lr": 1e-3, "lr_end": 1.0, "warmup": 0}
    config, out = configured(tmp_path, "run", optimizer=steady), tmp_path / "run"

    job = slurm_job(tmp_path / "bin", SRUN, CONFIG=written(config, tmp_path, 100_000), OUT=str(out))
    log = printed(job)
    (saved,) = (out / "checkpoints").glob("step_*")
    step = int(saved.name.removeprefix("step_"))
    assert (job.returncode, log.splitlines()[-1]) == (1, "scontrol requeue 17"), log
    assert f"saving step {step} ..." in log
    assert len(losses(out)) == step
    assert log.count("step      1/100000") == 1, log  # one display, on the first node

    _, kubernetes = documents()
    kubernetes["spec"]["nprocPerNode"] = "2"
    kubernetes["spec"]["elasticPolicy"]["maxReplicas"] = 1
    only = pod(
        kubernetes,
        f"localhost:{free_port()}",
        CONFIG=written(config, tmp_path, step + 2),
        OUT=str(out),
    )
    log = printed(only)
    assert only.returncode == 0, log
    assert f"on 2 CPU ranks, resuming from step {step}" in log
    undisturbed = configured(tmp_path, "other", optimizer=steady | {"steps": step + 2})
    pool(2).run(train, undisturbed)
    assert losses(out) == losses(tmp_path / "other")


def test_a_job_resumes_where_there_is_a_checkpoint_and_is_not_requeued_in_vain(
    tmp_path: Path,
) -> None:
    first = printed(slurm_job(tmp_path / "bin", FAILING_SRUN, OUT=str(tmp_path / "run")))
    assert "--nnodes 2 --nproc-per-node 1 " in first
    assert "--rdzv-id 17 --rdzv-endpoint localhost:" in first
    (tmp_path / "run" / "checkpoints" / "step_9").mkdir(parents=True)
    second = printed(slurm_job(tmp_path / "bin", FAILING_SRUN, OUT=str(tmp_path / "run")))
    assert ("--resume" in first, "--resume" in second) == (False, True)
    assert "requeue" not in first + second


def test_the_pods_have_what_a_run_needs(tmp_path: Path) -> None:
    config, job = documents()
    file = tmp_path / "run.toml"
    file.write_text(config["data"]["run.toml"])
    validate(config_of(file, {}))
    spec = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = spec["containers"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert mounts["shm"] == "/dev/shm"
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    assert volumes["config"]["configMap"]["name"] == config["metadata"]["name"]
    places = {each["name"]: each["value"] for each in container["env"]}
    assert places["OUT"].startswith(mounts["volume"])
    assert places["CONFIG"] == f"{mounts['config']}/run.toml"
    assert container["name"] == "pytorch"  # the operator looks for this name
