"""Ranks of a program that `fullshard.dropin` runs tell each other so.

A rank that was started in another way trains on torch's FSDP, and its collectives never match.
The others name it when they first wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress

import torch.distributed as dist

from fullshard._torch import default_store
from fullshard.comm import guard
from fullshard.errors import DisagreementError

_is_redirected = False


def _key(rank: int) -> str:
    return f"fullshard/dropin/{rank}"


def tell() -> None:
    """Say that this rank runs on fullshard, now or when there is a process group."""
    global _is_redirected
    _is_redirected = True
    if dist.is_initialized():
        default_store().set(_key(dist.get_rank()), "")


def take_back() -> None:
    """Say that this rank runs on torch's FSDP again."""
    global _is_redirected
    _is_redirected = False
    if dist.is_initialized():
        with suppress(NotImplementedError, RuntimeError):  # not every store can delete
            default_store().delete_key(_key(dist.get_rank()))


def require_all(ranks: Sequence[int], since: float) -> None:
    """Raise if some ranks have not said so, and are waited for longer than ranks may be."""
    waited_s = time.monotonic() - since
    if not _is_redirected or waited_s < guard.patience_s():
        return
    silent = [rank for rank in ranks if not default_store().check([_key(rank)])]
    if silent:
        raise DisagreementError(
            f"fullshard.dropin: ranks {silent} have not said that they run on fullshard, and have "
            f"not come to the first step for {waited_s:.0f} s; start them with -m "
            "fullshard.dropin, too, or let them inherit the environment of the process that "
            "starts them."
        )
