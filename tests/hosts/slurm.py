"""A Slurm cluster with one node on each host."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.hosts import slurm_node
from tests.support.hosts import Hosts

_DAEMONS = ("munged", "slurmctld", "slurmd")
_POLL_S, _TIMEOUT_S = 0.05, 240.0

# A node has eight processors, whatever this machine has. A job of the partition `urgent` preempts
# those of the other one, which have a minute to save, and start again as soon as they may.
_CONFIG = """
ClusterName=test
SlurmctldHost=host0
SlurmUser=root
AuthInfo=socket=/run/munge/munge.socket.2,cred_expire=5
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
StateSaveLocation={folder}/state
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_min_interval=100000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
NodeName=host[0-{last}] CPUs=8 Gres=gpu:1
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 OverSubscribe=EXCLUSIVE
PartitionName=urgent Nodes=ALL PriorityTier=2 OverSubscribe=EXCLUSIVE
"""


def reason_not_here() -> str:
    """Why this machine cannot run Slurm; empty if it can."""
    missing = [name for name in _DAEMONS if shutil.which(name) is None]
    return f"there is no {' and no '.join(missing)}" if missing else ""


class Slurm:
    """The cluster, for as long as its hosts exist."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self._folder = folder
        (folder / "state").mkdir(parents=True)
        (folder / "munge.key").write_bytes(secrets.token_bytes(128))
        (folder / "slurm.conf").write_text(_CONFIG.format(folder=folder, last=hosts.num - 1))
        (folder / "gres.conf").write_text("Name=gpu File=/dev/null\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        path = [str(Path(sys.executable).parent), os.environ["PATH"]]
        env = {"PATH": os.pathsep.join(path), "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        for host in range(hosts.num):
            own = folder / f"host{host}"
            own.mkdir()
            hosts.run(
                host,
                [str(Path(slurm_node.__file__)), str(folder)],
                log=own / "log",
                setup="mount -t tmpfs none /run",
                env=env,
            )
        self.wait_for(lambda: "idle" in self.ask("sinfo --noheader --format %T 2>&1 || true"))

    def ask(self, command: str) -> str:
        """Run a command on the first node, and return what it says."""
        own = self._folder / "host0"
        (own / ".do").write_text(command)
        (own / ".do").replace(own / "do")
        self.wait_for((own / "said").exists)
        status, _, said = (own / "said").read_text().partition("\n")
        (own / "said").unlink()
        assert status == "0", said + self.logs()
        return said

    def state_of(self, job: str) -> str:
        return self.ask(f"scontrol --oneliner show job {job}")

    def wait_for(self, is_done: Callable[[], object]) -> None:
        deadline = time.monotonic() + _TIMEOUT_S
        while not is_done():
            if time.monotonic() > deadline:
                raise TimeoutError(self.logs())
            time.sleep(_POLL_S)

    def logs(self) -> str:
        names = ("log", "slurmctld", "slurmd")
        paths = [self._folder / f"host{host}" / name for host in (0, 1) for name in names]
        return "\n".join(path.read_text()[-3000:] for path in paths if path.exists())
