"""PPO and GRPO give the same results under ms-parallel's layouts as in one process."""

from pathlib import Path

import msgspec
import pytest
import torch
from processes import run_command
from small_models import decoder

from ms_align import load_lora
from ms_parallel import load_model, save_model

SCRIPT = Path(__file__).with_name("online_layout_run.py")


def launch(folder: Path, axis: str, *more: str) -> int:
    """Run the script in one process, or in two along one axis; return the exit status."""
    count = 1 if axis == "one" else 2
    runner = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    words = [*runner, str(SCRIPT), str(folder), axis, *more]
    made = run_command(words, imports=("ms_align.trainers.ppo", "ms_parallel.engine.engine"))
    assert made.returncode == 0 or len(more) > 1, made.stderr[-3000:]
    return made.returncode


def events(folder: Path, kind: str) -> list[dict[str, float]]:
    """Read the events of one kind."""
    lines = (folder / "events.jsonl").read_bytes().splitlines()
    return [e for e in map(msgspec.json.decode, lines) if e["kind"] == kind]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the initial model and the results of one process."""
    folder = tmp_path_factory.mktemp("layouts")
    save_model(decoder(), folder / "start")  # type: ignore[arg-type]
    launch(folder, "one")
    return folder


@pytest.mark.parametrize("axis", ["data", "tensor", "pipeline"])
def test_losses_equal_those_of_one_process(one: Path, axis: str) -> None:
    """Losses, norms, KL and entropies of four updates: float32 sums in another order, 1e-5."""
    launch(one, axis)
    for trainer in ("PPOTrainer", "GRPOTrainer"):
        split, whole = one / axis / trainer, one / "one" / trainer
        for name in ("response_tokens", "stopped"):
            told = [[e[name] for e in events(each, "rollout")] for each in (split, whole)]
            assert told[0] == told[1], name
        pairs = list(zip(events(split, "step"), events(whole, "step"), strict=True))
        assert len(pairs) == 4
        for got, want in pairs:
            for name in ("loss", "reward", "kl", "entropy", "clip_fraction", "kl_old"):
                assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-5), name
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    stopped = [e["stopped"] for e in events(one / axis / "GRPOTrainer", "rollout")]
    assert sum(stopped) > 0, "stop tokens and stop strings are to end some response"

    if axis != "tensor":
        check_adapters(one, axis)


def check_adapters(one: Path, axis: str) -> None:
    """Compare runs with adapters, stopped after two updates and resumed, with one process.

    The same losses as in one process, a KL of 0 at the first update, and equal adapter files and
    merged models.
    """
    for trainer in ("PPOTrainer", "GRPOTrainer", "RLOOTrainer"):
        split, whole = (one / place / f"{trainer}-lora" for place in (axis, "one"))
        assert [e["step"] for e in events(split, "resume")] == [2], trainer
        steps = [events(each, "step") for each in (split, whole)]
        assert [e["step"] for e in steps[0]] == [1, 2, 3, 4]
        assert steps[0][0]["kl"] == pytest.approx(0, abs=1e-5)
        for got, want in zip(*steps, strict=True):
            for name in ("loss", "reward", "kl", "entropy", "kl_old"):
                assert got[name] == pytest.approx(want[name], rel=1e-5, abs=1e-5), (trainer, name)
        merged = load_model(split / "model").state_dict()
        base = load_model(one / "start")
        wanted = load_lora(base, split / "adapter").merged_model().state_dict()
        for name, weight in merged.items():
            torch.testing.assert_close(weight, wanted[name], rtol=0, atol=1e-6)
        found = [load_lora(decoder(), each / "adapter").adapters() for each in (split, whole)]
        assert found[0].keys() == found[1].keys()
        moved = 0.0
        for name, layer in found[0].items():
            # Adam's first steps are of the size of the rate, 1e-3, whatever rounding does.
            torch.testing.assert_close(layer.lora_B, found[1][name].lora_B, rtol=1e-3, atol=1e-4)
            moved += float(layer.lora_B.detach().abs().sum())
        assert moved > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_killed_run_of_two_processes_resumes_bit_for_bit(tmp_path: Path, axis: str) -> None:
    """The first process is killed in a rollout and between its updates."""
    save_model(decoder(), tmp_path / "start")  # type: ignore[arg-type]
    launch(tmp_path, axis, "whole")
    for kill_at in ("6", "4"):
        assert launch(tmp_path, axis, "killed", kill_at) != 0
    launch(tmp_path, axis, "killed")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert events(killed, "resume")
    last = {e["step"]: e for e in events(killed, "step")}
    for e in events(whole, "step"):
        assert all(last[e["step"]][name] == e[name] for name in ("loss", "grad_norm", "reward"))
    for file in (whole / "model").glob("*.safetensors"):
        assert (killed / "model" / file.name).read_bytes() == file.read_bytes()
