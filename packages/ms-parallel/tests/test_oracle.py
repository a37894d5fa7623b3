"""The oracle: drawn layouts over everything that combines, each held against one process.

Every gradient is one process's within 1e-12 of the largest of its weight, in float64, on rows of
packed documents from one token on.
"""

import random
from collections import Counter
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
from oracle import check, job
from runs import FAMILIES, VARIANTS

from ms_parallel.cluster.layout import Layout
from ms_parallel.proof.draw import CONTEXT_KINDS
from ms_parallel.split.data_axis import SHARDINGS
from ms_parallel.split.memory.recompute_choice import RECOMPUTE_MODES

ROWS = 4
PARTS = 10
OWN = ("data", "tensor", "pipeline", "context")
DENSE: tuple[dict[str, Any], ...] = (
    *VARIANTS.values(),
    {"model_type": "mistral", "sliding_window": 5},
    {"model_type": "gemma2", "sliding_window": 5, "num_key_value_heads": 2},
    {"model_type": "qwen3", "tie_word_embeddings": True, "num_key_value_heads": 2},
)
MIXTURES: tuple[dict[str, Any], ...] = (
    {**FAMILIES["mixtral"], "num_local_experts": 4, "tie_word_embeddings": True},
    {**FAMILIES["qwen3_moe"], "num_experts": 8},
    {**FAMILIES["deepseek_v3"], "num_nextn_predict_layers": 1},
    {**FAMILIES["glm4_moe"], "n_routed_experts": 4},
    {**FAMILIES["gpt_oss"], "num_local_experts": 4},
)
SEQUENCE: dict[str, Any] = {"balance": "sequence", "balance_coefficient": 0.1}


def drawn_layout(chance: random.Random, most: int) -> Layout:
    """Up to so many processes, two or more, of any axes; experts and copies where they fit."""
    sizes = [size for size in product((1, 2, 4), repeat=len(OWN)) if 2 <= prod(size) <= most]
    data, tensor, pipeline, context = chance.choice(sizes)
    tokens = data * context
    replicate = chance.choice([count for count in (1, 2, 4) if tokens % count == 0])
    shards = tokens // replicate
    expert = chance.choice([count for count in (1, 2, 4) if shards % count == 0])
    return Layout(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        replicate=replicate,
        expert=expert,
    )


def _divides(layout: Layout, settings: dict[str, Any]) -> bool:
    """Whether the tensor axis divides the heads of keys."""
    return bool(settings.get("num_key_value_heads", 2) % layout.tensor == 0)


def _shardings(layout: Layout) -> list[str]:
    """Experts are shared out over ranks that shard weights, and copies are of shards or of all."""
    if layout.replicate > 1 and layout.shards == 1:
        return ["auto", "replicate"]
    whole = layout.expert == 1 and layout.replicate == 1
    return [name for name in SHARDINGS if whole or name != "replicate"]


def _context_kinds(layout: Layout) -> list[str]:
    """Those whose traders divide the four heads of the models."""
    heads = 4 // layout.tensor
    kinds = [name for name in CONTEXT_KINDS if name != "ulysses" or heads % layout.context == 0]
    return [*kinds, *(("ulysses_ring",) if layout.context == 4 and heads > 1 else ()), "auto"]


def drawn_job(chance: random.Random, most: int = 8) -> dict[str, Any]:
    """A model, a layout, and how the one is trained under the other."""
    layout = drawn_layout(chance, most)
    mixture = layout.expert > 1 or chance.random() < 0.4
    fitting = [each for each in (MIXTURES if mixture else DENSE) if _divides(layout, each)]
    settings = chance.choice(fitting)
    options: dict[str, Any] = {
        "sharding": chance.choice(_shardings(layout)),
        "recompute": chance.choice(RECOMPUTE_MODES),
        "microbatch_size": chance.choice(range(1, ROWS // layout.data + 1)),
        **(SEQUENCE if mixture and chance.random() < 0.5 else {}),
    }
    if layout.pipeline > 1:
        schedules = ["1f1b", "gpipe", "zb-h1"]
        if layout.pipeline == 2:  # each rank has two of four stages, and the models three layers
            schedules += ["interleaved-1f1b", "zb-v"]
        options["schedule"] = chance.choice(schedules)
        settings = {**settings, "num_hidden_layers": 4}
        # The looped ones fill their rounds.
        options["microbatch_size"] = 1
    if layout.context > 1:
        options["context_attention"] = chance.choice(_context_kinds(layout))
        options["context_balance"] = chance.choice(("balanced", "zig-zag"))
    length = layout.row_parts * max(2, chance.choice((8, 12, 16, 24)) // layout.row_parts)
    lengths = [chance.randint(1, length) for _ in range(chance.randint(1, 5))]
    return job(
        str(layout),
        settings,
        options=options,
        length=length,
        lengths=lengths,
        seed=chance.randrange(3),
    )


def drawn_jobs(part: int) -> list[dict[str, Any]]:
    """A tenth of what the proof draws."""
    chance = random.Random(1000 + part)
    return [drawn_job(chance) for _ in range(30)]


def test_a_sample_of_layouts_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    """The first of those that the proof below draws, of two processes."""
    chance = random.Random(19)
    check([drawn_job(chance, most=2) for _ in range(4)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_drawn_layouts_have_the_gradients_of_one_process(tmp_path: Path, part: int) -> None:
    """30 of 300: up to eight processes, all axes, schedules, kinds and families."""
    jobs = drawn_jobs(part)
    worlds = Counter(Layout.parse(each["layout"]).world_size for each in jobs)
    assert worlds[8] >= 3
    check(jobs, tmp_path)
