"""Under ms-parallel's layouts PPO and GRPO do what one process does."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from ms_parallel import save_model

sys.path.insert(0, str(Path(__file__).parent))
from small_models import decoder

SCRIPT = Path(__file__).with_name("online_layout_run.py")


def launch(folder: Path, axis: str) -> None:
    """Run the script in one process, or in two that split one axis."""
    count = 1 if axis == "one" else 2
    runner = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    paths = os.pathsep.join(part for part in sys.path if part)
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *runner, str(SCRIPT), str(folder), axis]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert made.returncode == 0, made.stderr[-3000:]


def steps(folder: Path, axis: str, trainer: str) -> list[dict[str, float]]:
    """The events of all updates."""
    lines = (folder / axis / trainer / "events.jsonl").read_bytes().splitlines()
    return [e for e in map(msgspec.json.decode, lines) if e["kind"] == "step"]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a start, and what one process made of it."""
    folder = tmp_path_factory.mktemp("layouts")
    save_model(decoder(), folder / "start")  # type: ignore[arg-type]
    launch(folder, "one")
    return folder


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_losses_equal_those_of_one_process(one: Path, axis: str) -> None:
    """Losses, norms, KL and entropies of four updates: float32 sums in another order, 1e-5."""
    launch(one, axis)
    for trainer in ("PPOTrainer", "GRPOTrainer"):
        pairs = list(zip(steps(one, axis, trainer), steps(one, "one", trainer), strict=True))
        assert len(pairs) == 4
        for got, want in pairs:
            for name in ("loss", "reward", "kl", "entropy", "clip_fraction", "kl_old"):
                assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-5), name
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
