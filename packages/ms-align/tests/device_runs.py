"""Runs of all trainers, engines and generators on this process's device; see `test_device.py`."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from layout_run import run as run_offline
from layout_run import start_sets_engine
from small_models import alibi_model, decoder, gpt2, llama
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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


def this_device() -> torch.device:
    """Return this process's device, which is not the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def model(seed: int = 0) -> Any:
    """A decoder on the device."""
    return decoder(seed=seed).to(this_device())


def varied(samples: Sequence[Sample]) -> list[float]:
    """Reward with many distinct values, so that groups have advantages."""
    return [float(sum(sample.response_tokens) % 7) for sample in samples]


def settings(folder: Path, **overrides: Any) -> dict[str, Any]:
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
        **overrides,
    }


def train_twice(trainer_class: Callable[..., Any], folder: Path, **builders: Any) -> list[float]:
    """Return the losses of one update and of the next after a resume, all on the device."""
    losses: list[float] = []

    def listen(name: str, fields: Any) -> None:
        if name == "step":
            losses.append(fields["loss"])

    for steps in (1, 2):
        options = {name: build() for name, build in builders.items()}
        trainer = trainer_class(
            **settings(folder, **{**options, "steps": steps, "on_event": listen})
        )
        trainer.optimize(PROMPTS)
    return losses


def run_online(folder: str) -> dict[str, list[float]]:
    """Run every online trainer in one process."""
    out = Path(folder)
    critic: dict[str, Any] = {
        "value_model": lambda: model(2),
        "reward_model": lambda: RewardModel(model(1)),
        "kl_coeff": lambda: 0.2,
    }
    lora: dict[str, Any] = {
        "policy_model": lambda: add_lora(model(), LoraOptions(rank=2)),
        "reference_model": lambda: "adapter_off",
    }
    microbatched: dict[str, Any] = {
        "policy_model": lambda: LocalEngine(
            model(), OPTIMIZER, microbatch_size=3, heads={"value": 1}
        )
    }
    return {
        "ppo": train_twice(PPOTrainer, out / "ppo", **critic),
        "ppo in microbatches": train_twice(PPOTrainer, out / "cut", **microbatched),
        "grpo": train_twice(GRPOTrainer, out / "grpo", num_generations=lambda: 4),
        "rloo": train_twice(RLOOTrainer, out / "rloo", num_generations=lambda: 4),
        "grpo with adapters": train_twice(
            GRPOTrainer, out / "lora", num_generations=lambda: 4, **lora
        ),
    }


def compare_generation() -> dict[str, bool]:
    """Return whether each type of model generates the same tokens on the device as on the CPU."""
    sampling = Sampling(max_new_tokens=6, top_k=50, top_p=0.9, min_p=0.01, stop_strings=("A",))
    prompts = [[5, 6, 7, 8], [11], [20, 21]]
    models = {
        "decoder": decoder,
        "window": lambda: decoder("mistral", sliding_window=4),
        "llama": llama,
        "gpt2": gpt2,
        "bloom": lambda: alibi_model("bloom"),
        "adapters": lambda: add_lora(decoder(), LoraOptions(rank=2)),
    }

    def write(module: nn.Module, fused: bool) -> list[list[int]]:
        decode = ByteTokenizer().decode
        generator = LocalGenerator(module, max_num_seqs=3, decode=decode, fused=fused)
        responses = generator(prompts, sampling, count=2, seed=1)
        rows = sequences([prompt for prompt in prompts for _ in range(2)], responses)
        rescored = logprobs_of(LocalEngine(module), rows, 1.0)
        assert torch.isfinite(rescored).all()
        return [responses.row(row) for row in range(6)]

    matches = {}
    for name, build in models.items():
        for fused in (False, True):
            on_device = write(build().to(this_device()), fused)
            matches[f"{name}, fused: {fused}"] = on_device == write(build(), fused)
    return matches


class WaitCounter(TorchDispatchMode):
    """Counts reads of device values by the host, and blocking copies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator."""
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in (*args, result) if isinstance(x, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        name = func.name().partition(".")[0]
        if name in ("aten::_local_scalar_dense", "aten::nonzero"):
            self.count += devices != {"cpu"}
        elif name in ("aten::copy_", "aten::_to_copy"):
            self.count += len(devices) > 1
        return result


def count_generation_waits(lengths: list[int]) -> dict[str, list[int]]:
    """Waits of the host while it generates responses of these lengths, for each type of model."""
    prompts = [[5, 6, 7, 8], [11], [20, 21]]
    waits: dict[str, list[int]] = {}
    for name, build, fused in (
        ("fused", llama, True),
        ("llama", llama, False),
        ("decoder", decoder, False),
        ("strings", decoder, False),
    ):
        decode = ByteTokenizer().decode
        generator = LocalGenerator(build().to(this_device()), fused=fused, decode=decode)
        strings = ("never generated",) if name == "strings" else ()
        for length in (2, *lengths):  # the first call also verifies the fused weights
            counter = WaitCounter()
            with counter:
                sampling = Sampling(max_new_tokens=length, stop_strings=strings)
                responses = generator(prompts, sampling, count=2, seed=1)
            assert int(responses.lengths.max()) == length
            waits.setdefault(name, []).append(counter.count)
        del waits[name][0]
    return waits


def train_reward_model(sets: str, folder: str) -> dict[str, Any]:
    """Train, save, load and evaluate a reward model on the device."""
    stream = PreferenceStream(Path(sets, "pairs"), sequence_length=64, batch_size=4)
    trainer = RewardTrainer(
        model=str(Path(sets, "model")), steps=2, output_dir=Path(folder), progress=False
    )
    trained = trainer.train(stream).model
    loaded = RewardModel.load(Path(folder, "model"))
    assert next(loaded.parameters()).device == this_device()
    samples = [
        Sample(prompt="", response="", prompt_tokens=(1, 2), response_tokens=tokens)
        for tokens in ((3, 4, 5), (6,))
    ]
    scores, loaded_scores = (
        ModuleReward(reward_model)(samples) for reward_model in (trained, loaded)
    )
    return {"same": torch.allclose(scores, loaded_scores), "scores": scores.tolist()}


def check_adapters(folder: str) -> dict[str, bool]:
    """Write, read, merge and unmerge adapters on the device."""
    tokens = torch.arange(8, device=this_device())[None]
    lora_model = add_lora(model(), LoraOptions(rank=2))
    with torch.no_grad():
        for parameter in lora_model.parameters():
            if parameter.requires_grad:
                parameter.normal_()
        outputs = lora_model(tokens)
        lora_model.save_pretrained(folder)
        loaded = load_lora(model(), Path(folder))
        loaded_outputs = loaded(tokens)
        loaded.merge()
        merged = loaded(tokens)
    return {
        "read": torch.equal(outputs, loaded_outputs),
        "merged": torch.allclose(outputs, merged, rtol=1e-4, atol=1e-4),
    }


def run_online_layouts(folder: str, layout: dict[str, int]) -> dict[str, list[float]]:
    """Run PPO and GRPO on an engine of ms-parallel."""

    def engine(**options: Any) -> Engine:
        return start_engine(Path(folder, "start"), layout=layout, optimizer=OPTIMIZER, **options)

    common: dict[str, Any] = {"reference_model": engine, "kl_coeff": lambda: 0.1}
    out = Path(folder, "-".join(layout) or "one")
    critic = {"policy_model": lambda: engine(heads={"value": 1})}
    losses = {"ppo": train_twice(PPOTrainer, out / "ppo", **common, **critic)}
    groups = {"policy_model": engine, "num_generations": lambda: 4}
    strings = {"stop_strings": lambda: ("A", "7", "e ")}
    losses["grpo"] = train_twice(GRPOTrainer, out / "grpo", **common, **groups, **strings)
    return losses


def run_offline_trainers(
    sets: str, folder: str, layout: dict[str, int] | None
) -> dict[str, list[float]]:
    """Run SFT, DPO and DPO with adapters."""
    assert start_sets_engine(Path(sets), None).device.type == this_device().type
    return run_offline(Path(sets), Path(folder), layout)
