"""What a function that runs on a rank is told about its place in the world."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Rank:
    """This process's place in a world of ranks, and the meshes it has made so far.

    Lives as long as the process group. `mesh` is collective: all ranks call it alike.
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

        Made on first use and kept, because each mesh opens process groups.
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
