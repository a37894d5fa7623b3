"""Reduces layouts and models before their memory is counted, as large ones take long to build."""

from typing import Any

import msgspec
import torch
from attrs import evolve

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.memory.modes import ACTIVATIONS, REDUCE_EACH_MICROBATCH
from ms_parallel.planner.layouts.candidate import Candidate, SavedBytes, Split
from ms_parallel.planner.layouts.sizes import ModelSizes
from ms_parallel.planner.rank_memory import RankMemory

MAX_SHARDS = 32
"""Shard count below which all shards are counted."""
LOGITS_BYTES = 1 << 28
"""Size of a logits chunk of the loss, as in `ms_parallel.operators.losses`."""
SHORT_LAYERS = 2
"""Layers that are counted of a model with identical layers."""


def divisor_of_shards(candidate: Candidate) -> int:
    """Return the factor by which to reduce the data ranks before counting memory."""
    layout, divisor = candidate.layout, 1
    if candidate.sharding == "replicate" or layout.replicate > 1:
        return divisor
    # Halve the data ranks while enough shards remain and the expert axis divides them.
    while layout.data % (2 * divisor) == 0:
        shards = layout.shards // (2 * divisor)
        if shards < MAX_SHARDS or shards % layout.expert:
            break
        divisor *= 2
    return divisor


def scale_to_all_shards(rank: RankMemory, candidate: Candidate, factor: int) -> RankMemory:
    """Scale the memory of a rank, counted with fewer shards by a `factor`, to all shards."""
    whole_weights = (
        0 if candidate.sharding in REDUCE_EACH_MICROBATCH else rank.weights - rank.weights // factor
    )
    return msgspec.structs.replace(
        rank,
        weights=rank.weights // factor,
        gradients=rank.gradients // factor,
        moments=rank.moments // factor,
        activations=0 if candidate.offload in ACTIVATIONS else rank.activations,
        buffers=rank.buffers + whole_weights,
    )


def random_row(vocabulary: int, length: int) -> dict[str, torch.Tensor]:
    """Random tokens of one row (1, S); leaves the global generator alone."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, vocabulary, (1, length + 1), generator=generator)
    positions = torch.arange(length)[None]
    return {
        "tokens": text[:, :-1].contiguous(),
        "targets": text[:, 1:].contiguous(),
        "positions": positions,
    }


def without_pipeline(layout: Layout) -> Layout:
    """Drop the pipeline axis, and of the data axis all but the ranks that experts are split over.

    The remaining axes determine the activations that a block saves.
    """
    data = layout.expert if layout.expert > layout.context else 1
    if data * layout.context % layout.expert:
        data = layout.expert
    return Layout(tensor=layout.tensor, context=layout.context, expert=layout.expert, data=data)


def working_bytes(split: Split, sizes: ModelSizes, length: int) -> int:
    """Bytes of the largest temporary: one logits chunk of the loss, and its gradient."""
    layout = split.layout
    # A rank's logits: its context part of each row, its tensor part of the vocabulary.
    logits = split.rows * length // layout.context * -(-sizes.vocabulary // layout.tensor)
    # Float32 logits and their gradient, at most one chunk each.
    return 2 * min(logits * 4, LOGITS_BYTES)


def kept_bytes(counted: Any) -> SavedBytes:
    """Average the saved bytes of `row_bytes` over blocks, for each recomputation mode."""
    kinds = zip(*counted.blocks, strict=True)
    return SavedBytes(
        block=tuple(sum(kind) // len(counted.blocks) for kind in kinds), ends=counted.ends
    )


def short_model(config: Any) -> Any:
    """Return the model with fewer layers if its layers are identical, else unchanged."""
    sizes = ModelSizes.of(config)
    if config.num_hidden_layers <= SHORT_LAYERS or len({*sizes.layers}) > 1:
        return config
    try:
        return evolve(config, num_hidden_layers=SHORT_LAYERS)
    except ConfigError:
        return config
