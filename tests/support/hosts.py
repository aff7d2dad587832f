"""Several hosts on this machine: network, process and mount namespaces on one bridge.

    with Hosts(2) as hosts:
        ranks = [hosts.start(host, ["train.py"], log=folder / f"{host}.log") for host in (0, 1)]
        hosts.cut(1)
        hosts.mend(1)
        hosts.lose(1)

Each host has a network, processes, a name ("host0", "host1", ...) and mounts of its own. It needs
root on Linux, and `ip` of iproute2.
"""

from __future__ import annotations

import functools
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.support import switch

DEVICE = os.environ.get("DEVICE", "cpu")  # of the ranks of all hosts

_PORT = 29500
_INTERFACES = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
_NAMESPACES = ["--uts", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child"]


@functools.cache
def reason_not_here() -> str:
    """Why this machine cannot make hosts; empty if it can."""
    if missing := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        return f"there is no {' and no '.join(missing)}"
    if os.geteuid() != 0:
        return "namespaces need root"
    tried = subprocess.run(
        ["unshare", "--net", *_NAMESPACES, "ip", "link", "add", "type", "veth"],
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr.strip()


def _run(*command: str, check: bool = True) -> None:
    subprocess.run(command, check=check, capture_output=True, text=True)


def _ip(*command: str, check: bool = True) -> None:
    _run("ip", *command, check=check)


class Hosts:
    """A number of hosts, which can reach each other, for as long as the block lasts.

    `rate` is that of each link, in each direction, as `tc` of iproute2 writes it: "1gbit". With a
    delay or a loss (a part of all frames), all frames go through a process, and no host comes back.
    """

    def __init__(self, num: int, rate: str = "", *, delay_ms: float = 0, loss: float = 0) -> None:
        self.num, self._rate = num, rate
        self._delay_ms, self._loss = delay_ms, loss
        self._user_switch: subprocess.Popen[str] | None = None
        self._tag = f"fs{os.getpid()}"
        self._processes: list[list[subprocess.Popen[bytes]]] = [[] for _ in range(num)]

    def __enter__(self) -> Hosts:
        self._folder = tempfile.TemporaryDirectory(prefix="fullshard-hosts-")
        names = [f"{self._address(host)} host{host}" for host in range(self.num)]
        self._names = Path(self._folder.name, "hosts")
        self._names.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", self._switch, "link", "set", "br0", "up")
            for host in range(self.num):
                _ip("netns", "add", self._namespace(host))
            if self._delay_ms or self._loss:
                self._start_user_switch()
            for host in range(self.num):
                self._connect(host)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for host in range(self.num):
            self._kill(host)
            _ip("netns", "del", self._namespace(host), check=False)
        _ip("netns", "del", self._switch, check=False)
        if self._user_switch is not None:
            self._user_switch.communicate()
        self._folder.cleanup()

    def start(
        self, host: int, program: list[str], *, log: Path, setup: str = ":"
    ) -> subprocess.Popen[bytes]:
        """Start the only rank of a host; `setup` is a shell command that may mount folders."""
        world = {"RANK": host, "WORLD_SIZE": self.num, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        world |= {"MASTER_ADDR": "host0", "MASTER_PORT": _PORT}
        return self.run(host, program, log=log, setup=setup, env=world)

    def run(
        self,
        host: int,
        program: list[str],
        *,
        log: Path,
        setup: str = ":",
        env: Mapping[str, object],
    ) -> subprocess.Popen[bytes]:
        """Start a Python program as the first process of a host, with more variables."""
        mount = f"mount --bind {self._names} /etc/hosts"
        command = shlex.join([sys.executable, *program])
        script = f"hostname host{host} && {mount} && {setup} && exec {command}"
        enter = ["ip", "netns", "exec", self._namespace(host), "unshare", *_NAMESPACES]
        more = {name: str(value) for name, value in env.items()}
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*enter, "sh", "-c", script],
                env={**os.environ, **_INTERFACES, **more},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self._processes[host].append(process)
        return process

    def cut(self, host: int) -> None:
        """Cut the link of a host: what it sends is lost, and nothing says so."""
        self._set(host, "cut", "down")

    def mend(self, host: int) -> None:
        self._set(host, "mend", "up")

    def set_rate(self, host: int, rate: str) -> None:
        """Give the link of a host a rate of its own, in each direction."""
        bucket = ["root", "tbf", "rate", rate, "burst", "512k", "latency", "100ms"]
        places = [(self._namespace(host), "eth0")]
        if self._user_switch is None:  # otherwise what hosts send is what others receive
            places.append((self._switch, f"p{host}"))
        for namespace, device in places:
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, *bucket)

    def lose(self, host: int) -> None:
        """End a host as a power failure does: no process says goodbye, and no kernel answers."""
        self.cut(host)
        self._kill(host)
        _ip("-n", self._switch, "link", "del", f"p{host}", check=False)
        _ip("netns", "del", self._namespace(host), check=False)

    def back(self, host: int) -> None:
        """Bring back a host that was lost: its kernel answers, and nothing runs on it."""
        _ip("netns", "add", self._namespace(host))
        self._connect(host)

    def _set(self, host: int, command: str, state: str) -> None:
        if self._user_switch is None:
            _ip("-n", self._switch, "link", "set", f"p{host}", state)
        else:
            assert self._user_switch.stdin is not None
            print(command, host, file=self._user_switch.stdin, flush=True)

    def _start_user_switch(self) -> None:
        given = [str(self._delay_ms), str(self._loss), *map(self._namespace, range(self.num))]
        self._user_switch = subprocess.Popen(
            [sys.executable, str(Path(switch.__file__)), *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._user_switch.stdout is not None
        assert self._user_switch.stdout.readline() == "ready\n"

    def _connect(self, host: int) -> None:
        name, port, switch = self._namespace(host), f"p{host}", self._switch
        if self._user_switch is None:
            link = ["link", "add", "eth0", "netns", name, "type", "veth"]
            _ip(*link, "peer", "name", port, "netns", switch)
            _ip("-n", switch, "link", "set", port, "master", "br0", "up")
        _ip("-n", name, "addr", "add", f"{self._address(host)}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", name, "link", "set", device, "up")
        if self._rate:
            self.set_rate(host, self._rate)

    def _kill(self, host: int) -> None:
        for process in self._processes[host]:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._processes[host].clear()

    @property
    def _switch(self) -> str:
        return f"{self._tag}s"

    def _namespace(self, host: int) -> str:
        return f"{self._tag}h{host}"

    @staticmethod
    def _address(host: int) -> str:
        return f"10.78.0.{host + 1}"
