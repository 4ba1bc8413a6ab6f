"""How ranks on CPUs of several hosts reduce and gather."""

from __future__ import annotations

import socket

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator


class HostsCommunicator(CpuCommunicator):
    """Shared memory among ranks of one host, torch.distributed otherwise.

    vLLM's own takes ranks for neighbours when they meet at the same port, as all of Ray's do.
    """

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        names: list[str] = [""] * self.world_size
        torch.distributed.all_gather_object(names, socket.gethostname(), group=self.device_group)
        return len(set(names)) == 1 and super()._all_group_ranks_share_shm_group_name()
