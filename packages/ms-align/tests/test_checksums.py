"""All files needed to resume have checksums: no flipped bit goes unnoticed."""

import json
import random
from pathlib import Path

import pytest
import torch

from ms_align.errors import AlignError, ConfigError, DamageError, FolderError, WriteError
from ms_align.files import durable, run_folder
from ms_align.run import checkpoint
from ms_align.run.checkpoint import State
from ms_align.run.options import RunOptions
from ms_align.run.ownership import Ownership

from .small_models import decoder
from .test_online import PROMPTS, PPOTrainer, events, settings

STATE = State(
    tensors={"a": torch.arange(12.0).view(3, 4), "b": torch.tensor(7)},
    facts={"identity": {"kind": "x"}, "standing": {"step": 3}, "work": {"order": [[1, 2], [3]]}},
)


def flipped(content: bytes, bit: int) -> bytes:
    """Return the content with one bit flipped."""
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.safetensors"])
def test_every_flipped_bit_of_a_checkpoint_is_detected(tmp_path: Path, name: str) -> None:
    """300 bits of each file, one at a time."""
    folder = checkpoint.write(tmp_path, 3, STATE)
    path = folder / name
    content = path.read_bytes()
    rng = random.Random(0)
    for bit in rng.sample(range(8 * len(content)), 300):
        path.write_bytes(flipped(content, bit))
        with pytest.raises(DamageError):
            checkpoint.read(folder)
    path.write_bytes(content)
    restored = checkpoint.read(folder)
    assert restored.facts == STATE.facts
    assert all(torch.equal(restored.tensors[key], STATE.tensors[key]) for key in STATE.tensors)


def test_a_renamed_checkpoint_is_not_read(tmp_path: Path) -> None:
    """It would resume from a step other than its name says."""
    folder = checkpoint.write(tmp_path, 3, STATE)
    with pytest.raises(DamageError):
        checkpoint.read(folder.rename(tmp_path / "step-00000009"))


def test_every_flipped_bit_of_run_json_is_detected(tmp_path: Path) -> None:
    """run.json records the owner of the folder."""
    owner = Ownership(command="ms-align sft", identity={"model": "m"}, settings={"seed": 1})
    with owner.lock_folder(tmp_path):
        (tmp_path / "model").mkdir()
    content = (tmp_path / "run.json").read_bytes()
    rng = random.Random(0)
    for bit in rng.sample(range(8 * len(content)), 200):
        (tmp_path / "run.json").write_bytes(flipped(content, bit))
        with pytest.raises(FolderError), owner.lock_folder(tmp_path):
            pass


def test_a_checkpoint_without_its_manifest_is_set_aside(tmp_path: Path) -> None:
    """The previous one is used; if none is left, the run does not silently restart."""
    options = settings(tmp_path, checkpoint_every=1)
    PPOTrainer(**{**options, "steps": 2}).optimize(PROMPTS)
    root = tmp_path / "checkpoints"
    (root / "step-00000002" / "manifest.json").unlink()
    result = PPOTrainer(**{**options, "steps": 2, "policy_model": decoder()}).optimize(PROMPTS)
    assert result.step == 2
    assert events(tmp_path, "damaged_checkpoint")
    assert events(tmp_path, "resume")[-1]["step"] == 1
    for path in root.glob("step-*/manifest.json"):
        path.unlink()
    with pytest.raises(AlignError, match="no complete checkpoint is left"):
        PPOTrainer(**{**options, "steps": 3, "policy_model": decoder()}).optimize(PROMPTS)


def test_an_invalid_folder_name_is_rejected_in_one_line(tmp_path: Path) -> None:
    """Before the file system is accessed."""
    with pytest.raises(FolderError, match="null byte"):
        run_folder.inside(tmp_path, "a\0b")
    with pytest.raises(WriteError, match="not a valid path"):
        durable.write_file(Path("a\0b"), b"")
    with pytest.raises(ConfigError, match="output_dir"):
        RunOptions(output_dir="a\0b")


def test_settings_are_recorded_as_they_are_read_back() -> None:
    """Otherwise tuples would look changed at each launch."""
    from ms_align import LoraOptions, SFTTrainer
    from ms_align.run.ownership import plain

    recorded = plain(SFTTrainer(model=torch.nn.Linear(2, 2), steps=1, lora=LoraOptions()))
    assert (recorded["model"], recorded["betas"]) == ("Linear", [0.9, 0.999])
    assert json.loads(json.dumps(recorded)) == recorded
