"""One process and a layout for one process produce the same run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_models import decoder
from torch import nn

from ms_align import GRPOTrainer, LoraOptions, PPOTrainer, RLOOTrainer, Sample
from ms_align.seeds import position_seed
from ms_parallel import save_model
from ms_parallel.engine.generation import _seed_at

PROMPTS = [[5, 6, 7], [11], [20, 21], [30, 31, 32, 33]]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small model."""
    folder = tmp_path_factory.mktemp("start") / "model"
    save_model(decoder(), folder)  # type: ignore[arg-type]
    return folder


def run(
    trainer_class: type[Any], start: Path, out: Path, **overrides: Any
) -> tuple[list[Any], list[float]]:
    """Return the responses of a run, and the losses of its updates."""
    responses: list[Any] = []
    losses: list[float] = []

    def reward(samples: Sequence[Sample]) -> list[float]:
        responses.extend(sample.response_tokens for sample in samples)
        return [sum(sample.response_tokens) % 7 / 6 for sample in samples]

    def on_event(name: str, fields: Any) -> None:
        if name == "step":
            losses.append(fields["loss"])

    groups = {} if trainer_class is PPOTrainer else {"num_generations": 4}
    trainer_class(
        policy_model=start,
        reward_model=reward,
        learning_rate=1e-3,
        kl_coeff=0.05,
        epochs=1,
        steps=3,
        batch_size=8,
        max_new_tokens=6,
        top_k=100,
        output_dir=out,
        on_event=on_event,
        progress=False,
        **{**groups, **overrides},
    ).optimize(PROMPTS)
    return responses, losses


@pytest.mark.parametrize("trainer_class", [PPOTrainer, GRPOTrainer, RLOOTrainer])
def test_a_seed_gives_the_same_responses_under_a_layout(
    trainer_class: type[Any], start: Path, tmp_path: Path
) -> None:
    """Three rollouts, the later ones after updates; losses within 1e-5."""
    single, losses = run(trainer_class, start, tmp_path / "alone")
    split, split_losses = run(trainer_class, start, tmp_path / "split", layout={"data": 1})
    assert len(single) == 24
    assert single == split
    assert losses == pytest.approx(split_losses, abs=1e-5)


@pytest.mark.parametrize("trainer_class", [PPOTrainer, GRPOTrainer, RLOOTrainer])
def test_a_reference_model_in_mixed_precision_is_checksummed(
    trainer_class: type[Any], start: Path, tmp_path: Path
) -> None:
    """Its frozen weights are DTensors even over one rank; losses stay near the float32 run's."""
    plain = run(trainer_class, start, tmp_path / "plain", layout={"data": 1})[1]
    mixed = run(trainer_class, start, tmp_path / "mixed", layout={"data": 1}, mixed_precision=True)[
        1
    ]
    assert len(mixed) == len(plain)
    assert mixed[0] == pytest.approx(plain[0], abs=5e-2)


def test_both_generators_use_the_same_position_seeds() -> None:
    """Includes seeds of more than 32 bits."""
    for seed in (0, 1, 2**40 + 3):
        assert [position_seed(seed, n) for n in range(9)] == [_seed_at(seed, n) for n in range(9)]


@pytest.mark.parametrize("layout", [None, {"data": 1}])
@pytest.mark.parametrize("lora", [None, LoraOptions(rank=4)])
def test_a_copied_value_model_trains_all_its_weights(
    start: Path, lora: LoraOptions | None, layout: Any
) -> None:
    """With and without adapters on the policy, in one process and under a layout."""
    trainer = PPOTrainer(
        policy_model=start, reward_model=len, value_model="copy", lora=lora, layout=layout
    )
    policy = trainer.start_engine(start, heads=trainer.heads(), adapted=True)
    module = trainer.value_engine(policy).module
    assert isinstance(module, nn.Module)
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert trained >= sum(p.numel() for p in decoder().parameters())
