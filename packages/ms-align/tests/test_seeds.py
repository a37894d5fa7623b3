"""Seeds: every seed is accepted, and components of a run get independent random numbers."""

from pathlib import Path

import pytest
import torch
from small_models import decoder, vowels

from ms_align import ConfigError, PPOTrainer
from ms_align.run.options import RunOptions
from ms_align.seeds import MAX_SEED, seed_of
from ms_align.tokenizer import ByteTokenizer

RUNS = (0, 1, 7, (1 << 24) - 1, 1 << 24, 1 << 32, MAX_SEED)


def test_components_of_runs_have_different_random_numbers() -> None:
    """Even if seeds differ only in their highest bits, which torch's CPU generator ignores."""
    streams = set()
    for run in RUNS:
        for part in (0, 1, 1 << 33, (1 << 40) - 1):
            generator = torch.Generator().manual_seed(seed_of(run, part, stride=1 << 40))
            streams.add(tuple(torch.rand(4, generator=generator).tolist()))
    assert len(streams) == 4 * len(RUNS)
    assert seed_of(0, 3, stride=1 << 40) == 3


def test_a_run_accepts_every_seed_up_to_the_largest(tmp_path: Path) -> None:
    """A run trains with the largest seed; a larger one is rejected when the trainer is built."""
    trainer = PPOTrainer(
        policy_model=decoder(),
        reward_model=vowels,
        tokenizer=ByteTokenizer(),
        seed=MAX_SEED,
        steps=1,
        batch_size=4,
        max_new_tokens=3,
        output_dir=tmp_path,
        progress=False,
    )
    assert trainer.optimize(["hello", "a"]).finished
    with pytest.raises(ConfigError, match=f"seed must be .* at most {MAX_SEED}, got {1 << 63}"):
        RunOptions(seed=1 << 63)
