"""vLLM's CPU platform with what it lacks for workers that Ray has put on several hosts.

vLLM 0.32 refuses Ray on a CPU ("current platform cpu does not support ray"). Two things are
missing: the kind of resource that a worker asks Ray for, which here is a GPU, because Ray numbers
those; and the knowledge that ranks on different hosts share no memory. Nothing else is changed.

vLLM finds the platform by the entry point in `path`, a folder that only engines and workers on Ray
have on their PYTHONPATH. It imports this module before it knows its platform; the communicator,
which needs it known, is in a module of its own.
"""

from __future__ import annotations

from vllm.platforms.cpu import CpuPlatform


class CpuOnRay(CpuPlatform):
    """A host's CPU is one device to Ray."""

    ray_device_key = "GPU"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "lab.hosts.communicator.HostsCommunicator"
