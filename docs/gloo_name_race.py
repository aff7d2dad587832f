"""Reproduces a data race in torch's gloo process group; needs torch only.

A gloo process group has two worker threads. Both assign the name of the operation they have
finished to one std::string without a lock. Up to 15 characters are stored in the string itself. A
longer name, such as ALLGATHER_COALESCED, is stored on the heap, and both threads free the same
buffer.

    python docs/gloo_name_race.py                   long names: crashes with torch 2.13 in most runs
    python docs/gloo_name_race.py --names short     short names: finishes
    python docs/gloo_name_race.py --threads 1       long names and one worker thread: finishes

A crash reads "malloc(): unaligned tcache chunk detected" or is a segmentation fault.
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

NUM_IN_FLIGHT = 64


def group_of_one(num_threads: int) -> dist.ProcessGroup:
    """A gloo process group with one rank and this many worker threads (0: the default, two)."""
    store = dist.HashStore()
    if not num_threads:
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        return dist.group.WORLD
    # torch has no public way to choose the number of threads.
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._threads = num_threads
    backend = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), 0, 1, options)
    group = dist.ProcessGroup(dist.PrefixStore("group", store), 0, 1)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    return group


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", choices=("long", "short"), default="long")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()

    torch.set_num_threads(1)
    group = group_of_one(options.threads)
    value, outputs = torch.ones(4), [torch.empty(4) for _ in range(NUM_IN_FLIGHT)]
    start: dict[str, Callable[[torch.Tensor], Any]] = {
        "long": lambda out: group.allgather_into_tensor_coalesced([out], [value]),
        "short": lambda out: group.allgather([[out]], [value]),
    }
    num_operations, end = 0, time.monotonic() + options.seconds
    while time.monotonic() < end:
        works = [start[options.names](out) for out in outputs]
        for work in works:
            work.wait()
        num_operations += len(works)
    print(
        f"torch {torch.__version__}: no crash in {num_operations:,} operations, {options}",
        flush=True,
    )
    os._exit(0)  # without the destructors of groups and threads


if __name__ == "__main__":
    main()
