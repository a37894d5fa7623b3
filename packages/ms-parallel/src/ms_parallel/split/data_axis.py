"""Names of the sharding and offloading modes."""

from typing import Literal, get_args

Sharding = Literal["auto", "replicate", "zero1", "zero2", "zero3"]
"""State that data-parallel processes shard:

- `replicate`: nothing; gradients are all-reduced once per update (DDP).
- `zero1`: moments, and weights between updates. Weights are gathered once per update, and gradients
  are reduced after the last microbatch (ZeRO, arXiv:1910.02054).
- `zero2`: also gradients, reduce-scattered after each microbatch.
- `zero3`: also weights, gathered block by block and freed after use.
- `auto`: `zero1` with pipeline parallelism; otherwise `zero3` with the gradients of `zero1`.
"""
SHARDINGS = get_args(Sharding)
Offload = Literal["none", "moments", "activations", "all"]
"""State offloaded from device memory to host memory."""
OFFLOADS = get_args(Offload)
MOMENTS, ACTIVATIONS = ("moments", "all"), ("activations", "all")
"""Modes that offload moments, and modes that offload activations."""
REDUCE_EACH_MICROBATCH = ("zero2", "zero3")
"""Modes that reduce gradients after each microbatch."""
