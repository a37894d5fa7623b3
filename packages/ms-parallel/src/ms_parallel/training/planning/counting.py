"""Counts what engines hold on a few ranks and layers, where all that there are would take long."""

from typing import Any

import msgspec
import torch
from attrs import evolve

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.planner.layouts.candidate import Candidate, KeptBytes, Split
from ms_parallel.planner.layouts.sizes import ModelSizes
from ms_parallel.planner.rank_memory import RankMemory
from ms_parallel.split.data_axis import ACTIVATIONS, EACH

MANY = 32
"""Shards that are counted one by one."""
LOGITS_BYTES = 1 << 28
"""Size of one chunk of a loss, as `ms_parallel.operators.losses` makes them."""
SHORT = 2
"""Layers of a model whose layers are alike that are counted."""


def divisor_of_shards(candidate: Candidate) -> int:
    """Choose the number by which data ranks are divided before their memory is counted."""
    layout, fewer = candidate.layout, 1
    if candidate.sharding == "replicate" or layout.replicate > 1:
        return fewer
    while layout.data % (2 * fewer) == 0:
        shards = layout.shards // (2 * fewer)
        if shards < MANY or shards % layout.expert:
            break
        fewer *= 2
    return fewer


def of_all_shards(rank: RankMemory, candidate: Candidate, fewer: int) -> RankMemory:
    """Correct the memory of a rank that was counted with so many times fewer shards."""
    whole = 0 if candidate.sharding in EACH else rank.weights - rank.weights // fewer
    return msgspec.structs.replace(
        rank,
        weights=rank.weights // fewer,
        gradients=rank.gradients // fewer,
        moments=rank.moments // fewer,
        activations=0 if candidate.offload in ACTIVATIONS else rank.activations,
        buffers=rank.buffers + whole,
    )


def rows_of_noise(vocabulary: int, length: int) -> dict[str, torch.Tensor]:
    """Draw one row of random tokens (1, S); the global generator is not touched."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, vocabulary, (1, length + 1), generator=generator)
    positions = torch.arange(length)[None]
    return {
        "tokens": text[:, :-1].contiguous(),
        "targets": text[:, 1:].contiguous(),
        "positions": positions,
    }


def without_pipeline(layout: Layout) -> Layout:
    """Keep the axes that decide what a block keeps; of data ranks, those that share out experts."""
    data = layout.expert if layout.expert > layout.context else 1
    if data * layout.context % layout.expert:
        data = layout.expert
    return Layout(tensor=layout.tensor, context=layout.context, expert=layout.expert, data=data)


def working_bytes(split: Split, sizes: ModelSizes, length: int) -> int:
    """Count what the largest operator takes while it runs: the loss, with its logits' gradient.

    It is a chunk of logits, and as much again that their gradient is made in.
    """
    layout = split.layout
    logits = split.rows * length // layout.context * -(-sizes.vocabulary // layout.tensor)
    return 2 * min(logits * 4, LOGITS_BYTES)


def kept_bytes(found: Any) -> KeptBytes:
    """Average over blocks what `row_bytes` found, by kind of recomputation; ends stay as is."""
    kinds = zip(*found.blocks, strict=True)
    return KeptBytes(
        block=tuple(sum(kind) // len(found.blocks) for kind in kinds), ends=found.beside
    )


def short_model(config: Any) -> Any:
    """Return a model of fewer layers like those of this one, or itself where they differ."""
    sizes = ModelSizes.of(config)
    if config.num_hidden_layers <= SHORT or len({*sizes.layers}) > 1:
        return config
    try:
        return evolve(config, num_hidden_layers=SHORT)
    except ConfigError:
        return config
