"""The live page of ms-profile shows the parts of a reinforcement learning run."""

from pathlib import Path

import pytest

from ms_align import GRPOTrainer
from ms_profile.live.series import RunIndex
from ms_profile.live.server import describe

from .test_online import PROMPTS, settings


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_live_page_shows_spans_and_queue_depth(tmp_path: Path, staleness: int) -> None:
    """Two updates have spans of generator, rewards, learner and weight updates."""
    options = settings(tmp_path, num_generations=4, max_staleness=staleness)
    GRPOTrainer(**options).optimize(PROMPTS)
    data = describe(RunIndex(tmp_path), points=100, known_events=-1)
    lanes = {lane["name"]: lane["spans"] for lane in data["lanes"]}
    for name in ("generate 0", "reward", "learn", "update_weights"):
        assert len(lanes[name]) >= 2, name
    starts = {name: spans[0][0] for name, spans in lanes.items()}
    ends = {name: spans[0][0] + spans[0][1] for name, spans in lanes.items()}
    # Times of events are rounded to milliseconds.
    assert ends["generate 0"] <= starts["reward"] + 2e-3
    assert ends["reward"] <= starts["learn"] + 2e-3
    depth = [line for line in data["series"] if line["field"] == "queue_depth"]
    assert [line["last"][1] for line in depth] == [staleness]
    fields = {line["field"] for line in data["series"]}
    assert fields >= {"learner_wait_s", "generator_wait_s", "staleness", "weight_version", "reward"}
