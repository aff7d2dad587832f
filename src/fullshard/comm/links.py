"""The ranks of one process group on one host, as each of them sees the others."""

from __future__ import annotations

import select
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch.distributed as dist

from fullshard.comm.mailboxes import Announced, Laid, Mailbox, Terms, announcement, closing, opening
from fullshard.comm.regions import Region, Regions
from fullshard.errors import DisagreementError

# From here on it is worth a system call to have the memory back before the next collective.
_PROMPT_BYTES = 1 << 20
_LONGEST_SLEEP_S = 3600.0  # `poll` counts milliseconds in 32 bits


class Link:
    """A socket to every other rank of a group, and what is under way over them.

    Collectives are matched by their number: the n-th that a rank starts is the n-th of all others,
    in whatever order they are waited for. Starting waits for nobody. Use it under `lock`; only
    `drop` and `close` may be called in the middle of anything.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        doors: Mapping[int, socket.socket],
        timeout_s: float,
        regions: Regions,
    ) -> None:
        self.rank = rank
        self.size = len(ranks)
        self.regions = regions
        self.lock = threading.RLock()
        self._ranks = list(ranks)
        self._timeout_s = timeout_s
        self._mailboxes = {
            other: Mailbox(ranks[other], door, partial(self._on_read, other))
            for other, door in sorted(doors.items())
        }
        self._unread: dict[int, dict[int, tuple[Region, ...]]] = {o: {} for o in doors}
        self._told: dict[int, weakref.ref[Region]] = {}
        self._num_retired = regions.num_retired
        self._sequence = 0
        self._dropped: deque[tuple[int, tuple[int, ...]]] = deque()

    @property
    def others(self) -> list[int]:
        """The other ranks, by their number in the group."""
        return list(self._mailboxes)

    def take(self, num_bytes: int) -> Region:
        """A region to lay messages into; never waits for one."""
        return self.regions.take(num_bytes, self._look_for_free)

    def announce(self, terms: Terms, messages: list[Laid]) -> int:
        """Tell all others that a collective has begun; its number."""
        self._settle()
        self._sequence += 1
        used = tuple({laid.region.number: laid.region for laid in messages}.values())
        self.regions.hold(used, len(self._mailboxes))
        for region in used:
            if region.number not in self._told:
                self._told[region.number] = weakref.ref(region)
                for mailbox in self._mailboxes.values():
                    mailbox.send(opening(region), region.descriptor)
        records = announcement(self._sequence, terms, messages)
        for other, mailbox in self._mailboxes.items():
            self._unread[other][self._sequence] = used
            mailbox.send(records)
        return self._sequence

    def receive(
        self, sequence: int, terms: Terms, others: Sequence[int]
    ) -> Iterator[tuple[int, Announced]]:
        """A collective as the others announce it, in the order in which they come."""
        missing = {other: self._mailboxes[other] for other in others}
        deadline = time.monotonic() + self._timeout_s
        while missing:
            for other, mailbox in list(missing.items()):
                if sequence not in mailbox.announced:
                    mailbox.drain()
                announced = mailbox.announced.get(sequence)
                if announced is not None:
                    self._require_same(terms, announced.terms, mailbox.rank)
                    del missing[other]
                    yield other, announced
            if missing:
                self._await(list(missing.values()), terms, deadline)
        # Others may need what they were not sent yet, and this rank may not be back for long.
        while backlogged := self._backlogged():
            self._await(backlogged, terms, deadline)

    def acknowledge(self, sequence: int, other: int, num_bytes: int) -> None:
        """This rank has read the messages of another one."""
        self._mailboxes[other].acknowledge(sequence, at_once=num_bytes >= _PROMPT_BYTES)

    def drop(self, sequence: int, others: Sequence[int]) -> None:
        """This rank will not read the messages of these."""
        self._dropped.append((sequence, tuple(others)))

    def close(self) -> None:
        """Let go of sockets and of all memory of others. Regions that were not read stay theirs."""
        for other, mailbox in self._mailboxes.items():
            mailbox.close()
            for used in self._unread[other].values():
                self.regions.discard(used)
            self._unread[other].clear()

    def close_sockets(self) -> None:
        """In a process that was forked: not its sockets, and nobody must wait for them."""
        for mailbox in self._mailboxes.values():
            mailbox.close()

    def _on_read(self, other: int, sequence: int) -> None:
        self.regions.release(self._unread[other].pop(sequence))

    def _look_for_free(self) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.drain()

    def _settle(self) -> None:
        """What callbacks could not do, and what has been waiting since the last collective."""
        while self._dropped:
            sequence, others = self._dropped.popleft()
            for other in others:
                self._mailboxes[other].refuse(sequence)
        if self._num_retired != self.regions.num_retired:
            self._num_retired = self.regions.num_retired
            self._close_retired()
        for mailbox in self._backlogged():
            mailbox.flush()

    def _close_retired(self) -> None:
        for number, known in list(self._told.items()):
            region = known()
            if region is None or region.is_retired:
                del self._told[number]
                for mailbox in self._mailboxes.values():
                    mailbox.send(closing(number))

    def _await(self, missing: Sequence[Mailbox], terms: Terms, deadline: float) -> None:
        """Sleep until someone has said something, or there is room for what it is to hear.

        Whatever arrives is taken in, so that nobody finds a socket full because of this rank.
        """
        for mailbox in missing:
            if mailbox.is_gone:
                raise dist.DistNetworkError(
                    f"{self._subject(terms)}: all ranks must take part, found that rank "
                    f"{mailbox.rank} is gone (Connection closed by peer); look at what it said "
                    "last, and start the ranks again."
                )
        poll = select.poll()
        here = {each.fileno(): each for each in self._mailboxes.values() if not each.is_gone}
        for number, mailbox in here.items():
            poll.register(number, select.POLLIN | (mailbox.is_backlogged and select.POLLOUT))
        left_s = max(deadline - time.monotonic(), 0.0)
        ready = poll.poll(min(left_s, _LONGEST_SLEEP_S) * 1e3)
        if not ready and time.monotonic() >= deadline:
            names = ", ".join(f"rank {mailbox.rank}" for mailbox in missing)
            raise dist.DistNetworkError(
                f"{self._subject(terms)}: all ranks must come within the {self._timeout_s:g} s of "
                f"the process group, found nothing of {names}; look where they are (py-spy dump), "
                "or give init_process_group a longer timeout."
            )
        for number, _ in ready:
            here[number].drain()
            here[number].flush()

    def _backlogged(self) -> list[Mailbox]:
        return [each for each in self._mailboxes.values() if each.is_backlogged]

    def _subject(self, terms: Terms) -> str:
        return f"{terms.kind.name.lower()} over ranks {self._ranks}"

    def _require_same(self, own: Terms, theirs: Terms, rank: int) -> None:
        if own == theirs:
            return
        here = self._ranks[self.rank]
        detail = ""
        if str(own) == str(theirs):
            detail = " of other sizes or dtypes"
        raise DisagreementError(
            f"{self._subject(own)}: all ranks must run the same collectives in the same order, "
            f"found {own} on rank {here} and {theirs}{detail} on rank {rank}; make the model take "
            "the same path on every rank."
        )
