"""What processes that hold different tokens share out beside their tokens, by name."""

from typing import Literal, get_args

Sharding = Literal["auto", "replicate", "zero1", "zero2", "zero3"]
"""What processes that hold different tokens share out, beside their tokens:

- `replicate`: nothing; gradients are summed once an update (DDP).
- `zero1`: moments, and the weights between updates. Weights are gathered once an update, and
  gradients stay whole until its last microbatch (ZeRO, arXiv:1910.02054).
- `zero2`: gradients too, which are summed and scattered after each microbatch.
- `zero3`: weights too, which are gathered a block at a time, and freed behind it.
- `auto`: as `zero1` under a pipeline; else as `zero3`, but gradients as in `zero1`.
"""
SHARDINGS = get_args(Sharding)
Offload = Literal["none", "moments", "activations", "all"]
"""What lies in the machine's memory, and not in that of its device."""
OFFLOADS = get_args(Offload)
MOMENTS, ACTIVATIONS = ("moments", "all"), ("activations", "all")
"""Modes that offload each."""
EACH = ("zero2", "zero3")
"""Modes that sum gradients after each microbatch."""
