"""The process of one rank: joins the world, then answers calls until it is told to close.

Started by `crew.Crew`. A thread reads the connection, so that a rank stuck in a collective still
sees its parent vanish and goes with it.
"""

import faulthandler
import gc
import io
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from fullshard.testing.messages import Answer, Birth, Call, Close, Raised, Returned, pack, unpack
from fullshard.testing.rank import Rank

SHOWN_LOCAL_CHARS = 300


def main(birth: Birth) -> None:
    """Be rank `birth.rank` until the parent closes the connection or says `Close`."""
    # Ctrl-C in a terminal reaches every process of the group: the parent decides, not the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stacks = open(birth.stacks_path, "w")  # noqa: SIM115 - faulthandler writes to it until exit
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)

    connection: Connection = Connection(birth.connection_fd)
    calls: queue.SimpleQueue[Call | Close] = queue.SimpleQueue()
    threading.Thread(target=_read_calls, args=(connection, calls), daemon=True).start()
    try:
        rank = _join(birth)
    except BaseException as error:
        connection.send_bytes(pack(_raised(error)))
        raise
    connection.send_bytes(pack(_returned(None)))

    while isinstance(call := calls.get(), Call):
        connection.send_bytes(pack(_answer(rank, call)))
    del call
    gc.collect()  # process groups held by dead models go before the backend does
    if dist.is_initialized():  # a function may have left the world
        dist.destroy_process_group()


def _read_calls(connection: Connection, calls: "queue.SimpleQueue[Call | Close]") -> None:
    while True:
        try:
            call = unpack(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)
        calls.put(call)
        if isinstance(call, Close):
            return


def _join(birth: Birth) -> Rank:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    os.environ["LOCAL_RANK"] = str(birth.rank)
    if "nccl" in birth.backend:
        # NCCL refuses two ranks on one GPU of one host: give every rank a host of its own.
        os.environ["NCCL_HOSTID"] = str(birth.rank)
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        device = torch.device("cuda", birth.rank % torch.cuda.device_count())
        os.environ["LOCAL_RANK"] = str(device.index)
        torch.cuda.set_device(device)
        torch.zeros((), device=device)  # DeviceMesh leaves the device alone once CUDA is awake
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ["RANK"] = str(birth.rank)
    os.environ["WORLD_SIZE"] = str(birth.size)
    # The parent gives up first, with stacks; the backend's own timeout is the safety net.
    timeout = timedelta(seconds=birth.timeout_s + 60)
    store = TCPStore("127.0.0.1", birth.store_port, is_master=False, timeout=timeout)
    dist.init_process_group(
        birth.backend,
        store=store,
        rank=birth.rank,
        world_size=birth.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return Rank(birth.rank, birth.size, device)


def _answer(rank: Rank, call: Call) -> Answer:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    sys.path[:] = call.sys_path
    try:
        with warnings.catch_warnings():
            # Modules are loaded under the rank's own filters, functions run under the caller's.
            function = call.function.load()
            warnings.filters[:] = unpack(call.warning_filters)  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]
            args, kwargs = unpack(call.arguments)
            result = function(rank, *args, **kwargs)
            if rank.device.type == "cuda":
                torch.cuda.synchronize()  # a kernel's error belongs to this call
            return _returned(result)
    except BaseException as error:
        return _raised(error)


def _returned(result: object) -> Returned:
    return Returned(pack(result), len(dist.distributed_c10d._world.pg_map))


def _raised(error: BaseException) -> Raised:
    try:
        packed = pack(error)
        unpack(packed)  # many exceptions pack well and fail to unpack
    except Exception:
        packed = None
    return Raised(
        type_name=f"{type(error).__module__}.{type(error).__qualname__}",
        message=str(error),
        traceback=_text_of(error),
        exception=packed,
    )


def _text_of(error: BaseException) -> str:
    """The traceback from the called function on, with the values at a bare `assert`."""
    text = io.StringIO()
    frames = error.__traceback__
    if frames is not None and frames.tb_frame.f_code is _answer.__code__:
        frames = frames.tb_next or frames
    traceback.print_exception(type(error), error, frames, file=text)
    if isinstance(error, AssertionError) and not str(error) and frames is not None:
        while frames.tb_next is not None:
            frames = frames.tb_next
        text.write("where\n")
        for name, value in frames.tb_frame.f_locals.items():
            shown = repr(value)
            if len(shown) > SHOWN_LOCAL_CHARS:
                shown = shown[:SHOWN_LOCAL_CHARS] + "..."
            text.write(f"    {name} = {shown}\n")
    return text.getvalue()
