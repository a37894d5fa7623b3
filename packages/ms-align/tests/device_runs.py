"""Runs of all trainers, engines and generators on this process's device; see `test_device.py`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from layout_run import engine_of
from layout_run import run as run_offline
from small_models import biased, decoder, gpt2, llama
from torch import nn

from ms_align import (
    GRPOTrainer,
    LocalGenerator,
    LoraOptions,
    PPOTrainer,
    RewardModel,
    RewardTrainer,
    RLOOTrainer,
    Sample,
    Sampling,
    add_lora,
    load_lora,
)
from ms_align.engines.assembly import start_engine
from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.protocol import Engine
from ms_align.rewards.scoring import ModuleReward
from ms_align.rollouts.rows import logprobs_of, sequences
from ms_align.tokenizer import ByteTokenizer
from ms_data import PreferenceStream

PROMPTS = ["hello", "a", "what is", "xyz"]
OPTIMIZER = OptimizerOptions(learning_rate=1e-3)


def here() -> torch.device:
    """Return this process's device, which is not the CPU."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return torch.device(found.type, torch.accelerator.current_device_index())


def model(seed: int = 0) -> Any:
    """A decoder on the device."""
    return decoder(seed=seed).to(here())


def varied(samples: Sequence[Sample]) -> list[float]:
    """Reward with many distinct values, so that groups have advantages."""
    return [float(sum(sample.response_tokens) % 7) for sample in samples]


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Settings for two updates of an online trainer."""
    return {
        "policy_model": model(),
        "reward_model": varied,
        "tokenizer": ByteTokenizer(),
        "steps": 2,
        "batch_size": 8,
        "max_new_tokens": 5,
        "output_dir": folder,
        "progress": False,
        "held_out": ["to be"],
        "checkpoint_every": 1,
        **more,
    }


def learn(kind: Callable[..., Any], folder: Path, **more: Any) -> list[float]:
    """Losses of an update and of the next after a resume, with all tensors on the device."""
    losses: list[float] = []

    def listen(name: str, fields: Any) -> None:
        if name == "step":
            losses.append(fields["loss"])

    for steps in (1, 2):
        made = {name: make() for name, make in more.items()}
        trainer = kind(**settings(folder, **{**made, "steps": steps, "on_event": listen}))
        trainer.optimize(PROMPTS)
    return losses


def online(folder: str) -> dict[str, list[float]]:
    """Run every online trainer in one process."""
    place = Path(folder)
    critic: dict[str, Any] = {
        "value_model": lambda: model(2),
        "reward_model": lambda: RewardModel(model(1)),
        "kl_coeff": lambda: 0.2,
    }
    adapted: dict[str, Any] = {
        "policy_model": lambda: add_lora(model(), LoraOptions(rank=2)),
        "reference_model": lambda: "adapter_off",
    }
    cut: dict[str, Any] = {
        "policy_model": lambda: LocalEngine(
            model(), OPTIMIZER, microbatch_size=3, heads={"value": 1}
        )
    }
    return {
        "ppo": learn(PPOTrainer, place / "ppo", **critic),
        "ppo in microbatches": learn(PPOTrainer, place / "cut", **cut),
        "grpo": learn(GRPOTrainer, place / "grpo", num_generations=lambda: 4),
        "rloo": learn(RLOOTrainer, place / "rloo", num_generations=lambda: 4),
        "grpo with adapters": learn(
            GRPOTrainer, place / "lora", num_generations=lambda: 4, **adapted
        ),
    }


def generated() -> dict[str, bool]:
    """Return whether each type of model generates the same tokens on the device as on the CPU."""
    sampling = Sampling(max_new_tokens=6, top_k=50, top_p=0.9, min_p=0.01, stop_strings=("A",))
    prompts = [[5, 6, 7, 8], [11], [20, 21]]
    made = {
        "decoder": decoder,
        "window": lambda: decoder("mistral", sliding_window=4),
        "llama": llama,
        "gpt2": gpt2,
        "bloom": lambda: biased("bloom"),
        "adapters": lambda: add_lora(decoder(), LoraOptions(rank=2)),
    }

    def write(written: nn.Module, fused: bool) -> list[list[int]]:
        decode = ByteTokenizer().decode
        generator = LocalGenerator(written, max_num_seqs=3, decode=decode, fused=fused)
        responses = generator(prompts, sampling, count=2, seed=1)
        rows = sequences([prompt for prompt in prompts for _ in range(2)], responses)
        again = logprobs_of(LocalEngine(written), rows, 1.0)
        assert torch.isfinite(again).all()
        return [responses.row(row) for row in range(6)]

    same = {}
    for name, make in made.items():
        for fused in (False, True):
            there = write(make().to(here()), fused)
            same[f"{name}, fused: {fused}"] = there == write(make(), fused)
    return same


def rewarded(sets: str, folder: str) -> dict[str, Any]:
    """Train, save, load and evaluate a reward model on the device."""
    stream = PreferenceStream(Path(sets, "pairs"), sequence_length=64, batch_size=4)
    trainer = RewardTrainer(
        model=str(Path(sets, "model")), steps=2, output_dir=Path(folder), progress=False
    )
    trained = trainer.train(stream).model
    read = RewardModel.load(Path(folder, "model"))
    assert next(read.parameters()).device == here()
    samples = [
        Sample(prompt="", response="", prompt_tokens=(1, 2), response_tokens=tokens)
        for tokens in ((3, 4, 5), (6,))
    ]
    found, again = (ModuleReward(each)(samples) for each in (trained, read))
    return {"same": torch.allclose(found, again), "scores": found.tolist()}


def adapted(folder: str) -> dict[str, bool]:
    """Write, read, merge and unmerge adapters on the device."""
    tokens = torch.arange(8, device=here())[None]
    made = add_lora(model(), LoraOptions(rank=2))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.normal_()
        found = made(tokens)
        made.save_pretrained(folder)
        read = load_lora(model(), Path(folder))
        again = read(tokens)
        read.merge()
        merged = read(tokens)
    return {
        "read": torch.equal(found, again),
        "merged": torch.allclose(found, merged, rtol=1e-4, atol=1e-4),
    }


def online_layouts(folder: str, layout: dict[str, int]) -> dict[str, list[float]]:
    """Run PPO and GRPO on an engine of ms-parallel."""

    def engine(**more: Any) -> Engine:
        return start_engine(Path(folder, "start"), layout=layout, optimizer=OPTIMIZER, **more)

    common: dict[str, Any] = {"reference_model": engine, "kl_coeff": lambda: 0.1}
    out = Path(folder, "-".join(layout) or "one")
    critic = {"policy_model": lambda: engine(heads={"value": 1})}
    found = {"ppo": learn(PPOTrainer, out / "ppo", **common, **critic)}
    groups = {"policy_model": engine, "num_generations": lambda: 4}
    strings = {"stop_strings": lambda: ("A", "7", "e ")}
    found["grpo"] = learn(GRPOTrainer, out / "grpo", **common, **groups, **strings)
    return found


def offline(sets: str, folder: str, layout: dict[str, int] | None) -> dict[str, list[float]]:
    """Run SFT, DPO and DPO with adapters."""
    assert engine_of(Path(sets), None).device.type == here().type
    return run_offline(Path(sets), Path(folder), layout)
