"""The store, for those who must not hang in it."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")

_CONNECT_S = 5.0


class StoreThread:
    """Makes the calls of other threads to a store.

    When the host of a `TCPStore` does not answer, a call does not return for minutes, whatever the
    timeout of the store. When its process has ended, each call prints a long stack trace. So a
    second connection, on which nothing is sent, is looked at first: it ends with that process.
    """

    def __init__(self, store: Any, address: tuple[str, int]) -> None:
        self._asked: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any]] | None]
        self._asked = queue.SimpleQueue()
        self._hangs = False
        self._ends_with_store: socket.socket | None = None
        with suppress(OSError):
            self._ends_with_store = socket.create_connection(address, _CONNECT_S)
            self._ends_with_store.setblocking(False)
        threading.Thread(target=self._run, args=(store,), name="watcher-store", daemon=True).start()

    def call(self, ask: Callable[[Any], _T], timeout_s: float) -> _T:
        """What a function of the store returns.

        Raises TimeoutError, at once if an earlier call hangs, or ConnectionError.
        """
        self._require_process()
        future: Future[_T] = Future()
        if not self._hangs:
            self._asked.put((future, ask))
            try:
                return future.result(timeout_s)
            except FutureTimeoutError:
                self._hangs = not future.cancel()
            except dist.DistNetworkError as error:
                raise ConnectionError(str(error)) from error
        raise TimeoutError("the store does not answer")

    def close(self) -> None:
        """End the connection, once the calls before it have ended."""
        self._asked.put(None)

    def _require_process(self) -> None:
        if self._ends_with_store is not None:
            with suppress(BlockingIOError):
                if not self._ends_with_store.recv(1, socket.MSG_PEEK):
                    raise ConnectionError("the process with the store has ended")

    def _run(self, store: Any) -> None:
        while (asked := self._asked.get()) is not None:
            future, ask = asked
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(ask(store))
                except BaseException as error:
                    future.set_exception(error)
            self._hangs = False
            del asked, future, ask  # and what they hold, while waiting for the next
        if self._ends_with_store is not None:
            self._ends_with_store.close()
