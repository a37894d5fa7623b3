"""Modes that save memory: sharding, offloading and activation checkpointing. Needs no torch."""

import re
from typing import TYPE_CHECKING, Any, Literal, get_args

from ms_parallel.errors import ConfigError
from ms_parallel.settings import nearest, short_repr

if TYPE_CHECKING:
    from attrs import Attribute

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
Recompute = str | int
"""One of `RECOMPUTE_MODES`, or a memory budget per rank in bytes or as text such as `"8GiB"`."""
RECOMPUTE_MODES = ("none", "selective", "attention", "full")
"""Activation checkpointing of a block, by increasing recomputation:

- `none`: save what autograd saves.
- `selective`: save the block's input and the results of matrix products and attention; recompute
  norms, rotary embeddings and activation functions.
- `attention`: save the input of attention and recompute attention, including projections.
- `full`: save only the block's input.
"""
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?B|B)\s*")
_UNITS = {"B": 1}
_UNITS |= {f"{letter}B": 1000 ** (n + 1) for n, letter in enumerate("KMGT")}
_UNITS |= {f"{letter}iB": 1024 ** (n + 1) for n, letter in enumerate("KMGT")}


def budget_bytes(recompute: Recompute) -> int | None:
    """Return the memory budget in bytes, or None if `recompute` is a mode."""
    if isinstance(recompute, int):
        return recompute
    match = _SIZE.fullmatch(recompute)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None


def check_recompute(recompute: Any, name: str = "recompute") -> None:
    """Check that `recompute` is a mode or a positive number of bytes.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(recompute, str) and recompute in RECOMPUTE_MODES:
        return
    may_be_size = isinstance(recompute, str | int) and not isinstance(recompute, bool)
    if may_be_size and (budget_bytes(recompute) or 0) > 0:
        return
    advice = nearest(str(recompute), RECOMPUTE_MODES)
    raise ConfigError(f"{name} is {short_repr(recompute)}; {advice}, or a budget, such as '8GiB'")


def recompute_setting(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    """Validate a `recompute` field of an attrs class."""
    check_recompute(value, attribute.name)
