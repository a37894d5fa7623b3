"""Holds the link that the doctor fits against messages of sizes that it was not fitted to.

torchrun --standalone --nproc-per-node 2 packages/ms-parallel/benchmarks/links.py
"""

from statistics import median

import torch
import torch.distributed as dist

from ms_parallel.cluster.connection import join
from ms_parallel.cluster.device import pick_device
from ms_parallel.cluster.layout import Layout
from ms_parallel.cluster.process import world_size
from ms_parallel.planner.measuring.fit import fit_link
from ms_parallel.planner.measuring.machines import SIZES_BYTES, message_times, partner

OTHERS_BYTES = (64, 4 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20)


def main() -> None:
    """Print each size's time beside what the link says."""
    join(Layout(data=world_size()))
    device = pick_device()
    world = dist.get_world_size()
    own = partner(dist.get_rank(), world, 1, world)
    fitted = message_times(device, own, SIZES_BYTES)
    others = message_times(device, own, OTHERS_BYTES)
    if dist.get_rank() > 0:
        return
    link = fit_link(SIZES_BYTES, fitted)
    print(f"{torch.__version__}, {world} processes, {dist.get_backend()}")
    print(f"latency {link.latency_us:g} us, bandwidth {link.bandwidth_gb_per_s:g} GB/s")
    ratios = []
    for size, took in zip(OTHERS_BYTES, others, strict=True):
        said = link.latency_us * 1e-6 + size / (link.bandwidth_gb_per_s * 1e9)
        ratios.append(said / took)
        print(
            f"{size:>10} bytes  {took * 1e6:10.1f} us  said {said * 1e6:10.1f}  {said / took:.2f}"
        )
    print(f"median error {100 * median(abs(ratio - 1) for ratio in ratios):.0f}%")


if __name__ == "__main__":
    main()
