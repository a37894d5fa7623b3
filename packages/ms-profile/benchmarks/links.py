"""Compare the link that `doctor --measure` fits with messages of other sizes.

torchrun --standalone --nproc-per-node 2 packages/ms-profile/benchmarks/links.py
"""

from statistics import median

import torch
import torch.distributed as dist

from ms_profile.doctor.cluster import LINK_BYTES, link_from_times, message_times, partner
from ms_profile.doctor.examine import connect

TEST_BYTES = (64, 4 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20)


def main() -> None:
    """Print the measured and the predicted time of each size."""
    device = connect(None)
    rank, world = dist.get_rank(), dist.get_world_size()
    peer = partner(rank, world, 1, world)
    fitted = message_times(device, peer, LINK_BYTES)
    tested = message_times(device, peer, TEST_BYTES)
    if rank > 0:
        return
    link = link_from_times(LINK_BYTES, fitted)
    print(f"{torch.__version__}, {world} processes, {dist.get_backend()}")
    print(f"latency {link['latency_us']:g} us, bandwidth {link['bandwidth_gb_per_s']:g} GB/s")
    ratios = []
    for size, time_s in zip(TEST_BYTES, tested, strict=True):
        predicted_s = link["latency_us"] * 1e-6 + size / (link["bandwidth_gb_per_s"] * 1e9)
        ratios.append(predicted_s / time_s)
        print(
            f"{size:>10} bytes  {time_s * 1e6:10.1f} us  predicted {predicted_s * 1e6:10.1f} us "
            f" {ratios[-1]:.2f}"
        )
    print(f"median error {100 * median(abs(ratio - 1) for ratio in ratios):.0f}%")


if __name__ == "__main__":
    main()
