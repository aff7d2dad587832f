"""Which replicas the coordinator has run where; launchers of several hosts connect to it."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore

from fullshard.errors import ConfigError, TopologyError
from fullshard_train.config import TrainConfig, validate
from fullshard_train.coordinator import Coordinator
from fullshard_train.output import RunFolder
from fullshard_train.rendezvous import Connection, LostError, is_first_host
from tests.support.tiny_run import configured

WITHIN_S = 30.0


class Launcher:
    """The launcher of a host, as the coordinator sees it."""

    def __init__(self, port: int, name: str, room: int = 1) -> None:
        self.connection = Connection(socket.create_connection(("localhost", port)))
        self.connection.send(hello=name, room=room)
        self._messages: list[dict[str, Any]] = []
        assert "lock" in self.next()

    def next(self) -> dict[str, Any]:
        deadline = time.monotonic() + WITHIN_S
        while not self._messages:
            assert time.monotonic() < deadline
            self._messages += self.connection.receive(0.1)
        return self._messages.pop(0)

    def runs(self) -> tuple[int, int, int]:
        """The next replica that it has to run: its number, start and attempt."""
        place = self.place = self.next()["run"]
        return place["replica"], place["start"], place["attempt"]

    def says_ended(self, how: str) -> None:
        self.connection.send(ended=self.place, how=how)

    def is_waiting(self) -> bool:
        return not self._messages and not self.connection.receive()

    def store(self) -> Any:
        place = self.place
        store = TCPStore("localhost", place["port"], is_master=False)
        return PrefixStore(f"attempt{place['attempt']}", store)


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    sharding = {"mesh": "2x1", "elastic_replicas": True}
    run = {"rendezvous": f"localhost:{free_port()}", "max_restarts": 1}
    return configured(tmp_path, "run", sharding=sharding, run=run)


@pytest.fixture
def coordinator(config: TrainConfig) -> Iterator[Coordinator]:
    RunFolder.of(config).path.mkdir()
    found = Coordinator(config)
    yield found
    found.end()


@pytest.fixture
def join(coordinator: Coordinator) -> Iterator[Callable[[str], Launcher]]:
    launchers = []

    def joined(name: str) -> Launcher:
        launchers.append(Launcher(coordinator.port, name))
        return launchers[-1]

    yield joined
    for each in launchers:
        each.connection.close()


def free_port() -> int:
    with closing(socket.create_server(("", 0))) as server:
        return int(server.getsockname()[1])


def wait(is_done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def dead_start(store: Any, replica: int) -> int:
    key = f"fullshard/replicas/dead/{replica}"
    return int(store.get(key)) if store.check([key]) else -1


def test_a_launcher_that_comes_gets_the_replica_of_one_that_is_lost(
    join: Callable[[str], Launcher],
) -> None:
    first, second = join("host0"), join("host1")
    assert [first.runs(), second.runs()] == [(0, 0, 0), (1, 0, 0)]
    spare = join("host2")
    assert spare.is_waiting()
    second.connection.close()
    assert spare.runs() == (1, 1, 0)
    assert dead_start(first.store(), 1) == 0
    assert first.is_waiting()


def test_a_failed_replica_is_started_again_as_often_as_is_allowed(
    join: Callable[[str], Launcher],
) -> None:
    first, second = join("host0"), join("host1")
    first.runs()
    second.runs()
    second.says_ended("signal 9")
    assert second.runs() == (1, 1, 0)
    second.says_ended("signal 9")
    wait(lambda: dead_start(first.store(), 1) == 1)
    assert second.is_waiting()
    assert first.is_waiting()
    first.says_ended("")  # the last step is done
    over = {"error": "", "lost": ["", ""]}
    assert [each.next()["over"] for each in (first, second)] == [over, over]


def test_all_begin_again_when_none_has_the_state_and_lost_ones_are_not_waited_for(
    join: Callable[[str], Launcher],
) -> None:
    first, second = join("host0"), join("host1")
    first.runs()
    second.runs()
    second.connection.close()
    wait(lambda: dead_start(first.store(), 1) == 0)
    first.says_ended("signal 9")
    assert first.runs() == (0, 1, 0)
    assert first.runs() == (0, 0, 1)  # in the next attempt
    assert dead_start(first.store(), 1) == 0
    back = join("host1")
    assert back.runs() == (1, 1, 1)


def test_a_run_that_cannot_be_ends_everywhere_and_a_host_that_cannot_join_alone(
    join: Callable[[str], Launcher],
) -> None:
    first, second = join("host0"), join("host1")
    first.runs()
    second.runs()
    second.connection.close()
    late = join("host1")
    late.runs()
    late.connection.send(error="lr differs")
    assert late.next()["over"]["error"] == "lr differs"
    late.connection.close()
    wait(lambda: dead_start(first.store(), 1) == 1)
    assert first.is_waiting()
    first.connection.send(error="the disk is full")
    assert first.next()["over"]["error"] == "host0: the disk is full"


def test_launchers_learn_that_the_coordinator_has_ended(
    coordinator: Coordinator, join: Callable[[str], Launcher]
) -> None:
    launcher = join("host0")
    launcher.runs()
    coordinator.end()
    assert "over" in launcher.next()
    with pytest.raises(LostError, match="it has ended"):
        launcher.next()


def test_the_first_host_is_the_one_that_has_the_address() -> None:
    assert is_first_host("")
    assert is_first_host("localhost:29500")
    assert is_first_host("127.0.0.1:29500")
    assert not is_first_host("192.0.2.1:29500")


def test_a_port_that_is_in_use_is_refused(config: TrainConfig, coordinator: Coordinator) -> None:
    with pytest.raises(TopologyError, match=r"--rendezvous: port \d+ cannot be used"):
        Coordinator(config)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"run": {"rendezvous": "host1"}}, "must be an address and a port, as in host1:29500"),
        ({"run": {"out": ""}}, "needs a folder that all hosts share; pass --out"),
        ({"run": {"ranks": 3}, "sharding": {"mesh": "3x2"}}, "3x2 has 2 ranks, which are on one"),
        ({"sharding": {"elastic_replicas": False}}, "is for sharding.elastic_replicas"),
    ],
)
def test_what_does_not_fit_a_rendezvous_is_refused(
    tmp_path: Path, changes: dict[str, dict[str, Any]], said: str
) -> None:
    sharding = {"mesh": "2x2", "elastic_replicas": True, **changes.get("sharding", {})}
    run = {"rendezvous": "host1:29500", **changes.get("run", {})}
    config = configured(tmp_path, "run", sharding=sharding, run=run)
    with pytest.raises(ConfigError, match=said):
        validate(config)
