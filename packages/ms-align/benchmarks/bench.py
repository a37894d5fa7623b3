"""What the formulas cost beside the updates that they serve; the best of several rounds.

python packages/ms-align/benchmarks/bench.py
"""

from time import process_time

import torch

from ms_align import gae

ROUNDS = 20


def main() -> None:
    """Print processor time of one call, in ms."""
    torch.set_num_threads(1)
    rewards, values = torch.randn(2, 256, 1024).unbind()
    mask = torch.rand(256, 1024) < 0.7
    times = []
    for _ in range(ROUNDS):
        began = process_time()
        gae(rewards, values, mask)
        times.append(process_time() - began)
    print(f"gae of 256 x 1024: {min(times) * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
