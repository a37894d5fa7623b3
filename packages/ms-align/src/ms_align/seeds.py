"""Seeds for the parts of a run, made from the run's own."""

from hashlib import sha256

LARGEST_SEED = (1 << 63) - 1
"""Largest seed of a run; every generator of random numbers takes it."""
ROOM = 1 << 32
"""torch's generator for the CPU takes greater seeds, and heeds their lowest 32 bits."""


def position_seed(seed: int, index: int) -> int:
    """Compute the seed of the random numbers that draw token `index` of every response.

    The same rule as `ms_parallel.Engine.generate`, so that a seed draws the same in one process
    and under a layout.
    """
    digest = sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def seed_of(run: int, part: int, *, apart: int) -> int:
    """Compute the 32-bit seed of a part of a run; parts of two runs draw apart from each other.

    Args:
        run: the run's own seed, at least 0.
        part: which part it is, 0 to `apart` - 1.
        apart: between the seeds of two runs; where there is no room for it, seeds are hashed.
    """
    found = run * apart + part
    if found < ROOM:
        return found
    digest = sha256(f"ms-align {run} {part}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
