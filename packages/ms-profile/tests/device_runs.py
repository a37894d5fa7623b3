"""Link measurements on this process's device; run by `test_device.py`."""

import os
from typing import Any

import torch
import torch.distributed as dist

from ms_profile.links.measure import measure_links


def links(backends: list[str]) -> list[dict[str, Any]]:
    """Return per backend the number of measured pairs and whether device memory was used."""
    results = []
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    for index, backend in enumerate(backends):
        # A group with the same name would find the addresses of the previous one.
        group_store = dist.PrefixStore(str(index), store)
        dist.init_process_group(backend, store=group_store, rank=rank, world_size=size)
        torch.accelerator.reset_peak_memory_stats()
        matrix = measure_links(sizes_bytes=(8, 65_536), repeats=2)
        peak = torch.accelerator.max_memory_allocated()
        results.append({"pairs": len(matrix.pairs), "on device": peak >= 65_536})
        dist.barrier()
        dist.destroy_process_group()
    return results
