"""The process of one rank: joins the process group, then answers calls until it is told to close.

A thread reads the connection, so that a rank stuck in a collective still sees its parent vanish
and ends with it.
"""

import atexit
import faulthandler
import gc
import importlib
import importlib.util
import io
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard._torch import all_groups
from fullshard.errors import ConfigError
from fullshard.resilience import watcher

SHOWN_LOCAL_CHARS = 300
GC_THRESHOLD = 5000  # new objects; at 700, Python's own, collection takes a twentieth of the time

# Not multiprocessing's pickler, which would move tensors into shared memory: that outlives neither
# the rank nor its file descriptors.
pack = pickle.dumps
unpack = pickle.loads


class Rank:
    """This process's rank in the process group, its device, and the meshes it has made.

    Lives as long as the process group. `mesh` is collective: all ranks call it with the same
    arguments.
    """

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self._meshes: dict[tuple[tuple[int, ...], tuple[str, ...] | None], DeviceMesh] = {}

    def mesh(
        self, shape: int | tuple[int, ...] | None = None, names: tuple[str, ...] | None = None
    ) -> DeviceMesh:
        """The mesh of this shape (default: one axis over all ranks) and these axis names.

        Created on first use and kept, because every mesh opens process groups.
        """
        if shape is None:
            shape = (self.size,)
        elif isinstance(shape, int):
            shape = (shape,)
        key = (tuple(shape), names)
        if key not in self._meshes:
            self._meshes[key] = init_device_mesh(self.device.type, key[0], mesh_dim_names=names)
        return self._meshes[key]

    def __repr__(self) -> str:
        return f"Rank({self.rank} of {self.size} on {self.device})"


@dataclass(frozen=True, slots=True)
class FunctionReference:
    """A module-level function, by the file it was defined in."""

    path: str
    module: str
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "FunctionReference":
        qualname = getattr(function, "__qualname__", "")
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        path = getattr(module, "__file__", None)
        if not qualname or "<" in qualname or module is None or path is None:
            raise ConfigError(
                f"{function!r} ({qualname or type(function).__name__!r}) is not defined at "
                "module level in a file, so ranks cannot run it; move it there and pass what it "
                "closed over as arguments."
            )
        # `__main__` is another module in the rank, so a script is loaded under this name.
        name = "fullshard_ranks_main" if module.__name__ == "__main__" else module.__name__
        return cls(os.path.abspath(path), name, qualname)

    def load(self) -> Callable[..., Any]:
        found: Any = self._load_module()
        for part in self.qualname.split("."):
            found = getattr(found, part)
        # `on_ranks` replaces a test's body by the test that pytest calls.
        body: Callable[..., Any] = getattr(found, "rank_body", found)
        return body

    def _load_module(self) -> ModuleType:
        known = sys.modules.get(self.module)
        if known is not None:
            return known
        # By name if that leads to the same file, so that relative imports work; else by path.
        spec = None
        try:
            spec = importlib.util.find_spec(self.module)
        except (ImportError, ValueError):
            pass
        if spec is not None and spec.origin and os.path.abspath(spec.origin) == self.path:
            return importlib.import_module(self.module)
        spec = importlib.util.spec_from_file_location(self.module, self.path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.path} is not a Python source file.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[self.module]
            raise
        return module


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What a rank's process needs to know to join the process group."""

    rank: int
    size: int
    backend: str
    store_port: int
    timeout_s: float
    connection_fd: int
    stacks_path: str
    sys_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """A request to run a function. Its arguments are packed because they may need its module.

    None instead of a call is the request to leave the process group and exit.
    """

    function: FunctionReference
    arguments: bytes
    warning_filters: bytes
    sys_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Returned:
    """The answer of a rank whose function returned; `result` is packed."""

    result: bytes
    num_groups: int


@dataclass(frozen=True, slots=True)
class Raised:
    """The answer of a rank whose function raised; `exception` is packed, None if it cannot be."""

    type_name: str
    message: str
    traceback: str
    exception: bytes | None


Answer = Returned | Raised


def main(spec: RankSpec) -> None:
    """Run as rank `spec.rank` until the parent asks it to exit or is gone."""
    # Ctrl-C in a terminal reaches every process of the group, but only the parent reacts to it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stacks = open(spec.stacks_path, "w")  # noqa: SIM115 - faulthandler writes to it until exit
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks, all_threads=True)

    connection: Connection = Connection(spec.connection_fd)
    calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
    threading.Thread(target=_read_calls, args=(connection, calls), daemon=True).start()
    try:
        rank = _join(spec)
    except BaseException as error:
        connection.send_bytes(pack(_raised(error)))
        raise
    connection.send_bytes(pack(_returned(None)))

    while (call := calls.get()) is not None:
        connection.send_bytes(pack(_answer(rank, call)))
    gc.collect()  # process groups that unused models hold are destroyed before the default group
    if dist.is_initialized():  # a function may have destroyed it
        dist.destroy_process_group()
    # Skip the interpreter's shutdown, which spends a second freeing torch's modules.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _read_calls(connection: Connection, calls: "queue.SimpleQueue[Call | None]") -> None:
    while True:
        try:
            call = unpack(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(1)
        calls.put(call)
        if call is None:
            return


def _join(spec: RankSpec) -> Rank:
    torch.set_num_threads(1)
    device = torch.device("cpu")
    os.environ["LOCAL_RANK"] = str(spec.rank)
    if "nccl" in spec.backend:
        # NCCL refuses two ranks on one GPU of one host, so every rank pretends to be a host.
        os.environ["NCCL_HOSTID"] = str(spec.rank)
        os.environ["NCCL_SOCKET_IFNAME"] = "lo"
        device = torch.device("cuda", spec.rank % torch.cuda.device_count())
        os.environ["LOCAL_RANK"] = str(device.index)
        torch.cuda.set_device(device)
        torch.zeros((), device=device)  # DeviceMesh keeps the device once CUDA is initialized
    if not torch.accelerator.is_available():
        # torch's own records a stack trace for each kind of accelerator that might come later.
        torch.manual_seed = torch.default_generator.manual_seed
    gc.set_threshold(GC_THRESHOLD)
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ.setdefault(watcher.SWITCH, "0")  # a test may let one rank fail and go on
    os.environ["RANK"] = str(spec.rank)
    os.environ["WORLD_SIZE"] = str(spec.size)
    # The parent's timeout comes first and shows stacks; the backend's is a safety net.
    timeout = timedelta(seconds=spec.timeout_s + 60)
    store = TCPStore("127.0.0.1", spec.store_port, is_master=False, timeout=timeout)
    dist.init_process_group(
        spec.backend,
        store=store,
        rank=spec.rank,
        world_size=spec.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    return Rank(spec.rank, spec.size, device)


def _answer(rank: Rank, call: Call) -> Answer:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    sys.path[:] = call.sys_path
    try:
        with warnings.catch_warnings():
            # Modules are loaded with the rank's warning filters, functions run with the caller's.
            function = call.function.load()
            warnings.filters[:] = unpack(call.warning_filters)  # type: ignore[index]
            warnings._filters_mutated()  # type: ignore[attr-defined]
            args, kwargs = unpack(call.arguments)
            result = function(rank, *args, **kwargs)
            if rank.device.type == "cuda":
                torch.cuda.synchronize()  # so that a kernel's error is raised by this call
            return _returned(result)
    except BaseException as error:
        return _raised(error)


def _returned(result: object) -> Returned:
    return Returned(pack(result), num_groups=len(all_groups()))


def _raised(error: BaseException) -> Raised:
    try:
        packed = pack(error)
        unpack(packed)  # many exceptions can be pickled but not unpickled
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
