"""Kills before any change to the file system leave checkpoints and results complete or absent."""

from pathlib import Path

import torch

from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.lora.adapter_file import read_adapter
from ms_align.lora.adapters import add_lora
from ms_align.run import checkpoint, saving

from .kills import killed_at
from .small_models import decoder


def state(value: int) -> checkpoint.State:
    """Return a checkpoint state whose tensor and facts hold `value`."""
    return checkpoint.State(tensors={"a": torch.full((8,), value)}, facts={"value": value})


def test_rewriting_a_checkpoint_killed_at_any_change_leaves_a_complete_one(tmp_path: Path) -> None:
    """A run whose later files are damaged or lost writes the same step again."""
    killed, event, values = True, 0, set()
    checkpoint.write(tmp_path, 3, state(1))
    while killed:
        event += 1
        killed = killed_at(event, lambda: checkpoint.write(tmp_path, 3, state(2)))
        loaded = checkpoint.read(checkpoint.step_folder(tmp_path, 3))
        assert bool((loaded.tensors["a"] == loaded.facts["value"]).all())
        values.add(loaded.facts["value"])
        checkpoint.write(tmp_path, 3, state(1))
    assert event > 5
    assert values == {1, 2}


def test_deleting_checkpoints_killed_at_any_change_leaves_only_complete_ones(
    tmp_path: Path,
) -> None:
    """A partly deleted checkpoint does not count as complete, and the next deletion removes it."""
    killed, event = True, 0
    while killed:
        event += 1
        for step in (1, 2, 3):
            checkpoint.write(tmp_path, step, state(step))
        killed = killed_at(event, lambda: checkpoint.keep_last(tmp_path, 1))
        for step in checkpoint.complete_steps(tmp_path):
            assert checkpoint.read(checkpoint.step_folder(tmp_path, step)).facts["value"] == step
        checkpoint.keep_last(tmp_path, 1)
        assert [path.name for path in tmp_path.iterdir()] == ["step-00000003"]
    assert event > 5


def test_an_adapter_killed_at_any_change_is_complete_or_missing(tmp_path: Path) -> None:
    """An existing folder marks the result as finished, so it must not be partial."""
    adapted = add_lora(decoder())
    engine = LocalEngine(adapted, OptimizerOptions(learning_rate=0.1))
    killed, event, missing = True, 0, 0
    while killed:
        event += 1
        output = tmp_path / str(event)
        output.mkdir()
        killed = killed_at(event, lambda: saving.write_result(engine, output, None, merge=False))  # noqa: B023
        result = saving.result_folder(engine, output, merge=False)
        if result.exists():
            _, weights = read_adapter(result)
            assert weights.keys() == adapted.adapters().keys()
        else:
            missing += 1
    assert missing > 5
