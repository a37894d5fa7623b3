"""Derives the seeds of a run's components from the run's seed."""

from hashlib import sha256

MAX_SEED = (1 << 63) - 1
"""Largest seed of a run; every random number generator accepts it."""
CPU_SEED_LIMIT = 1 << 32
"""torch's CPU generator uses only the lowest 32 bits of a seed."""


def position_seed(seed: int, index: int) -> int:
    """Return the 32-bit seed for sampling token `index` of every response.

    `ms_parallel.Engine.generate` uses the same rule, so a seed gives the same responses in one
    process and under a layout.
    """
    digest = sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:4], "little")


def seed_of(seed: int, index: int, *, stride: int) -> int:
    """Return the 32-bit seed of component `index` of a run.

    Args:
        seed: seed of the run, at least 0.
        index: component, 0 to `stride` - 1.
        stride: distance between the component seeds of consecutive run seeds. Results beyond 32
            bits are hashed.
    """
    component_seed = seed * stride + index
    if component_seed < CPU_SEED_LIMIT:
        return component_seed
    digest = sha256(f"ms-align {seed} {index}".encode()).digest()
    return int.from_bytes(digest[:4], "big")
