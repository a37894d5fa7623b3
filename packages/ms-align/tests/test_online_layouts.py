"""PPO and GRPO give the same results under ms-parallel layouts as in one process."""

from pathlib import Path

import msgspec
import pytest
import torch
from processes import run_command
from small_models import decoder

from ms_align import load_lora
from ms_parallel import load_model, save_model

SCRIPT = Path(__file__).with_name("online_layout_run.py")


def launch(folder: Path, axis: str, *arguments: str) -> int:
    """Run the script in one process, or in two along one axis; return the exit status."""
    count = 1 if axis == "one" else 2
    runner = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    words = [*runner, str(SCRIPT), str(folder), axis, *arguments]
    result = run_command(words, imports=("ms_align.trainers.ppo", "ms_parallel.engine.engine"))
    assert result.returncode == 0 or len(arguments) > 1, result.stderr[-3000:]
    return result.returncode


def events(folder: Path, event_kind: str) -> list[dict[str, float]]:
    """Read the events of one kind."""
    lines = (folder / "events.jsonl").read_bytes().splitlines()
    return [e for e in map(msgspec.json.decode, lines) if e["kind"] == event_kind]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the initial model and the results of a single process."""
    folder = tmp_path_factory.mktemp("layouts")
    save_model(decoder(), folder / "start")  # type: ignore[arg-type]
    launch(folder, "one")
    return folder


@pytest.mark.parametrize(
    "axis", ["data", pytest.param("tensor", marks=pytest.mark.slow), "pipeline"]
)
def test_layouts_give_the_losses_of_a_single_process(results: Path, axis: str) -> None:
    """Losses, norms, KL and entropies of four updates: float32 sums in another order, 1e-5."""
    launch(results, axis)
    for trainer in ("PPOTrainer", "GRPOTrainer"):
        split, single = results / axis / trainer, results / "one" / trainer
        for name in ("response_tokens", "stopped"):
            counts = [[e[name] for e in events(run, "rollout")] for run in (split, single)]
            assert counts[0] == counts[1], name
        pairs = list(zip(events(split, "step"), events(single, "step"), strict=True))
        assert len(pairs) == 4
        for actual, expected in pairs:
            for name in ("loss", "reward", "kl", "entropy", "clip_fraction", "kl_old"):
                assert actual[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
            assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
    stopped = [e["stopped"] for e in events(results / axis / "GRPOTrainer", "rollout")]
    assert sum(stopped) > 0, "stop tokens and stop strings are to end some response"

    if axis != "tensor":
        check_adapters(results, axis)


def check_adapters(results: Path, axis: str) -> None:
    """Compare adapter runs, stopped after two updates and resumed, with a single process.

    Equal losses, a KL of 0 at the first update, equal adapter files, and equal merged models.
    """
    for trainer in ("PPOTrainer", "GRPOTrainer", "RLOOTrainer"):
        split, single = (results / axis_name / f"{trainer}-lora" for axis_name in (axis, "one"))
        assert [e["step"] for e in events(split, "resume")] == [2], trainer
        steps = [events(run, "step") for run in (split, single)]
        assert [e["step"] for e in steps[0]] == [1, 2, 3, 4]
        assert steps[0][0]["kl"] == pytest.approx(0, abs=1e-5)
        for actual, expected in zip(*steps, strict=True):
            for name in ("loss", "reward", "kl", "entropy", "kl_old"):
                assert actual[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), (
                    trainer,
                    name,
                )
        merged = load_model(split / "model").state_dict()
        base = load_model(results / "start")
        expected_weights = load_lora(base, split / "adapter").merged_model().state_dict()
        for name, weight in merged.items():
            torch.testing.assert_close(weight, expected_weights[name], rtol=0, atol=1e-6)
        adapters = [load_lora(decoder(), run / "adapter").adapters() for run in (split, single)]
        assert adapters[0].keys() == adapters[1].keys()
        total_change = 0.0
        for name, layer in adapters[0].items():
            # Adam's first steps have the size of the learning rate, 1e-3, despite rounding.
            torch.testing.assert_close(layer.lora_B, adapters[1][name].lora_B, rtol=1e-3, atol=1e-4)
            total_change += float(layer.lora_B.detach().abs().sum())
        assert total_change > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("axis", ["data", "tensor"])
def test_a_killed_run_of_two_processes_resumes_bit_for_bit(tmp_path: Path, axis: str) -> None:
    """The first process is killed during a rollout and between its updates."""
    save_model(decoder(), tmp_path / "start")  # type: ignore[arg-type]
    launch(tmp_path, axis, "reference")
    for kill_at in ("6", "4"):
        assert launch(tmp_path, axis, "killed", kill_at) != 0
    launch(tmp_path, axis, "killed")
    reference, killed = tmp_path / "reference", tmp_path / "killed"
    assert events(killed, "resume")
    last = {e["step"]: e for e in events(killed, "step")}
    for e in events(reference, "step"):
        assert all(last[e["step"]][name] == e[name] for name in ("loss", "grad_norm", "reward"))
    for file in (reference / "model").glob("*.safetensors"):
        assert (killed / "model" / file.name).read_bytes() == file.read_bytes()
