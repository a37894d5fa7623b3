"""What is measured on this process's device; see `test_device.py`."""

import os
from typing import Any

import torch
import torch.distributed as dist

from ms_profile.links.measure import measure_links


def links(backends: list[str]) -> list[dict[str, Any]]:
    """The pairs of ranks that were measured, and what the device held meanwhile, per backend."""
    found = []
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    for backend in backends:
        dist.init_process_group(backend)
        torch.accelerator.reset_peak_memory_stats()
        matrix = measure_links(sizes_bytes=(8, 65_536), repeats=2)
        peak = torch.accelerator.max_memory_allocated()
        found.append({"pairs": len(matrix.pairs), "on device": peak >= 65_536})
        dist.barrier()
        dist.destroy_process_group()
    return found
