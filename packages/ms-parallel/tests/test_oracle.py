"""Random layouts and settings over all combinations, compared with one process.

In float64, every gradient equals one process's within 1e-12 of its maximum, on rows of packed
documents with one or more tokens.
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
from ms_parallel.memory.modes import RECOMPUTE_MODES, SHARDINGS
from ms_parallel.proof.draw import CONTEXT_KINDS

ROWS = 4
PARTS = 10
AXES = ("data", "tensor", "pipeline", "context")
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


def random_layout(rng: random.Random, max_processes: int) -> Layout:
    """Random layout of 2 to `max_processes` processes, with experts and replicas that fit."""
    sizes = [
        size for size in product((1, 2, 4), repeat=len(AXES)) if 2 <= prod(size) <= max_processes
    ]
    data, tensor, pipeline, context = rng.choice(sizes)
    tokens = data * context
    replicate = rng.choice([count for count in (1, 2, 4) if tokens % count == 0])
    shards = tokens // replicate
    expert = rng.choice([count for count in (1, 2, 4) if shards % count == 0])
    return Layout(
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        replicate=replicate,
        expert=expert,
    )


def _divides(layout: Layout, settings: dict[str, Any]) -> bool:
    """Whether the tensor axis divides the key-value heads."""
    return bool(settings.get("num_key_value_heads", 2) % layout.tensor == 0)


def _shardings(layout: Layout) -> list[str]:
    """Valid shardings: experts need sharded weights; replicas hold shards or full weights."""
    if layout.replicate > 1 and layout.shards == 1:
        return ["auto", "replicate"]
    unsharded_allowed = layout.expert == 1 and layout.replicate == 1
    return [name for name in SHARDINGS if unsharded_allowed or name != "replicate"]


def _context_kinds(layout: Layout) -> list[str]:
    """Kinds of context attention that can split the four heads of the models."""
    heads = 4 // layout.tensor
    kinds = [name for name in CONTEXT_KINDS if name != "ulysses" or heads % layout.context == 0]
    return [*kinds, *(("ulysses_ring",) if layout.context == 4 and heads > 1 else ()), "auto"]


def random_job(rng: random.Random, max_processes: int = 8) -> dict[str, Any]:
    """Random model, layout and engine options."""
    layout = random_layout(rng, max_processes)
    mixture = layout.expert > 1 or rng.random() < 0.4
    fitting = [model for model in (MIXTURES if mixture else DENSE) if _divides(layout, model)]
    settings = rng.choice(fitting)
    options: dict[str, Any] = {
        "sharding": rng.choice(_shardings(layout)),
        "recompute": rng.choice(RECOMPUTE_MODES),
        "microbatch_size": rng.choice(range(1, ROWS // layout.data + 1)),
        **(SEQUENCE if mixture and rng.random() < 0.5 else {}),
    }
    if layout.pipeline > 1:
        schedules = ["1f1b", "gpipe", "zb-h1"]
        if layout.pipeline == 2:  # each rank has two of four stages
            schedules += ["interleaved-1f1b", "zb-v"]
        options["schedule"] = rng.choice(schedules)
        settings = {**settings, "num_hidden_layers": 4}
        # Looped schedules need enough microbatches.
        options["microbatch_size"] = 1
    if layout.context > 1:
        options["context_attention"] = rng.choice(_context_kinds(layout))
        options["context_balance"] = rng.choice(("balanced", "zig-zag"))
    length = layout.row_parts * max(2, rng.choice((8, 12, 16, 24)) // layout.row_parts)
    lengths = [rng.randint(1, length) for _ in range(rng.randint(1, 5))]
    return job(
        str(layout),
        settings,
        options=options,
        length=length,
        lengths=lengths,
        seed=rng.randrange(3),
    )


def random_jobs(part: int) -> list[dict[str, Any]]:
    """A tenth of the random jobs."""
    rng = random.Random(1000 + part)
    return [random_job(rng) for _ in range(30)]


def test_a_sample_of_layouts_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    """A few jobs of the test below, on two processes."""
    rng = random.Random(19)
    check([random_job(rng, max_processes=2) for _ in range(4)], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_random_layouts_have_the_gradients_of_one_process(tmp_path: Path, part: int) -> None:
    """30 of 300 jobs on up to eight processes, with all axes, schedules, kinds and families."""
    jobs = random_jobs(part)
    world_sizes = Counter(Layout.parse(job["layout"]).world_size for job in jobs)
    assert world_sizes[8] >= 3
    check(jobs, tmp_path)
