"""The example for Ray Train runs on real workers, and resumes after one of them is killed."""

import os
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "cluster" / "ray_train.py"
pytestmark = pytest.mark.filterwarnings("default")  # Ray uses its own deprecated APIs


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    # Workers import what this process can import.
    variables = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": variables})
    yield
    ray.shutdown()


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


def test_a_run_resumes_after_a_worker_is_killed_with_the_same_loss(
    cluster: None, tmp_path: Path
) -> None:
    fit = runpy.run_path(str(EXAMPLE))["fit"]
    common = {"example": str(EXAMPLE), "steps": 16, "save_every": 4}

    whole = fit({**common, "folder": str(tmp_path / "whole")}, 2).return_value
    killed = fit({**common, "folder": str(tmp_path / "killed")}, 2, killed_once).return_value

    assert (tmp_path / "killed" / "killed").exists()
    assert killed == {**whole, "resumed_at": 8}
    assert whole["step"] == 16
    assert sorted(path.name for path in (tmp_path / "killed" / "checkpoints").glob("step_*")) == [
        "step_12",
        "step_16",
    ]
