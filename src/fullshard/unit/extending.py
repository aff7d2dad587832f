"""The gather of the parameters whose tensors bring their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fullshard.api import MixedPrecisionPolicy
from fullshard.comm.agreement import Agreement
from fullshard.comm.collectives import Collectives
from fullshard.comm.topology import Axis, Topology
from fullshard.errors import ConfigError
from fullshard.layout import Split
from fullshard.unit.flow import Flow
from fullshard.unit.gathering import Gathering
from fullshard.unit.member import Member


class ExtensionGatherer:
    """Gathers the members of a unit that have an `Extension`, all in one call."""

    def __init__(
        self, members: Sequence[Member], topology: Topology, policy: MixedPrecisionPolicy
    ) -> None:
        self._members = members
        self._topology = topology
        self._policy = policy
        self._is_compared = False

    @torch.no_grad()
    def start(self, collectives: Collectives, flow: Flow) -> Gathering:
        """Issue the gather; the gather stream is current."""
        axis = self._topology.shard
        outs: list[torch.Tensor] = []
        ins: list[torch.Tensor] = []
        num_bytes: list[int] = []
        flow.await_all_releases()  # what extensions make is allocated here, too (rule 2)
        mesh = self._topology.mesh
        shard_mesh = mesh if mesh.ndim == 1 else mesh[(mesh.mesh_dim_names or ())[-1]]
        for member in self._members:
            extension = member.extension
            assert extension is not None
            local = member.current_local
            if local.device != flow.device.torch_device:
                local = local.to(flow.device.torch_device, non_blocking=True)
            outer = torch.Size(member.split.shape)
            module = member.locations[0].module
            sent = extension.inputs(local, shard_mesh, module, self._policy, outer)
            num_bytes.append(sum(tensor.numel() * tensor.element_size() for tensor in sent))
            ins += sent
            outs += extension.outputs(sent, axis.size)
        transfers = []
        if not self._is_compared:
            self._compare(num_bytes, axis, flow.device.torch_device)
        if axis.group is None or axis.is_single:
            torch._foreach_copy_(outs, ins)
        else:
            # As bytes: the tensors of one parameter may have several dtypes.
            in_bytes = [tensor.view(torch.uint8) for tensor in ins]
            out_bytes = [tensor.view(torch.uint8) for tensor in outs]
            transfers.append(collectives.gather(out_bytes, in_bytes, axis.group))
        gathering = Gathering(transfers, None, ins, is_landed=True)
        if flow.device.is_ordered:
            for transfer in transfers:
                transfer.wait()
            gathering.event = flow.device.record()
        return gathering

    def _compare(self, num_bytes: list[int], axis: Axis, device: torch.device) -> None:
        """Raise on all ranks alike if they would send different amounts."""
        everyone = Agreement.exchanged(num_bytes, axis, device)
        for member, by_rank in zip(self._members, zip(*everyone, strict=True), strict=True):
            if len(set(by_rank)) > 1:
                raise ConfigError(
                    f"{member.name}: fsdp_pre_all_gather must return as many bytes on every rank, "
                    f"found {list(by_rank)} on the ranks of the shard axis; pad an uneven shard."
                )
        self._is_compared = True

    @torch.no_grad()
    def finish(self, gathering: Gathering, flow: Flow) -> None:
        """Make the full parameters; runs on the stream that computes."""
        flow.device.wait(gathering.event)
        for transfer in gathering.transfers:
            transfer.wait()
        for member in self._members:
            assert member.extension is not None
            dtype = member.stages(self._policy).computed
            split = member.split
            assert isinstance(split, Split)
            made = member.extension.finish(member.current_local, dtype, member.full, split)
            if made is not None:
                member.make_full(made)

    def release(self) -> list[tuple[int, int]]:
        ranges: list[tuple[int, int]] = []
        for member in self._members:
            assert member.extension is not None
            ranges += member.extension.address_ranges
            member.extension.release()
        return ranges
