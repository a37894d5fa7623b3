"""One side of a comparison, in a separate process; prints its rate as JSON.

    python side.py grpo-trl | ppo-trl | grpo | ppo | ppo-shared | generate | rollout ...

The rate is work per CPU second, without startup and the first step.
"""

import json
import sys
import tempfile
from time import process_time
from typing import Any

import tiny
import torch

STEPS = 3
"""Timed rollouts with their updates, after an untimed one."""


def parity(tokens: list[int]) -> float:
    """Cheap reward: the fraction of even tokens."""
    return sum(token % 2 == 0 for token in tokens) / max(len(tokens), 1)


def grpo_trl() -> float:
    """Run TRL 1.16's GRPO with β = 0 and without its default recomputation."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    step_ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_ends.append(process_time())

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [parity(ids) for ids in completion_ids]

    texts = [{"prompt": tiny.text(row)} for row in tiny.prompts(64)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=tiny.causal(),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=tiny.BATCH,
                gradient_accumulation_steps=1,
                num_generations=tiny.GROUP,
                max_completion_length=tiny.RESPONSE,
                beta=0.0,
                max_steps=STEPS + 1,
                learning_rate=1e-6,
                lr_scheduler_type="constant",
                report_to="none",
                save_strategy="no",
                logging_steps=1000,
                disable_tqdm=True,
            ),
            train_dataset=Dataset.from_list(texts),
            processing_class=tiny.tokenizer(),
            callbacks=[Clock()],
        )
        trainer.train()
    return tiny.BATCH * STEPS / (step_ends[-1] - step_ends[0])


def ppo_trl() -> float:
    """Run TRL 1.12's PPO: policy, reference, reward and value models, 4 epochs."""
    from datasets import Dataset
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    rows = [{"input_ids": row} for row in tiny.prompts(64)]
    tokenizer = tiny.tokenizer()
    step_ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = PPOTrainer(
            args=PPOConfig(
                output_dir=folder,
                use_cpu=True,
                bf16=False,
                gradient_checkpointing=False,
                per_device_train_batch_size=tiny.BATCH,
                gradient_accumulation_steps=1,
                num_mini_batches=1,
                num_ppo_epochs=4,
                local_rollout_forward_batch_size=tiny.BATCH,
                response_length=tiny.RESPONSE,
                total_episodes=tiny.BATCH * (STEPS + 1),
                num_sample_generations=0,
                learning_rate=3e-6,
                report_to="none",
                save_strategy="no",
                disable_tqdm=True,
                logging_steps=1000,
            ),
            processing_class=tokenizer,
            model=tiny.causal(),
            ref_model=tiny.causal(),
            reward_model=tiny.classifier(1),
            value_model=tiny.classifier(2),
            train_dataset=Dataset.from_list(rows),
            eval_dataset=Dataset.from_list(rows[:16]),
        )
        log = trainer.log

        def clock(*arguments: Any, **options: Any) -> None:
            step_ends.append(process_time())
            log(*arguments, **options)

        trainer.log = clock  # called once at the end of each rollout's updates
        trainer.train()
    return tiny.BATCH * STEPS / (step_ends[STEPS] - step_ends[0])


def ours(name: str, model: Any, updates: int, **settings: Any) -> float:
    """Run one of our trainers with this many updates per rollout."""
    import ms_align

    step_ends: list[float] = []

    def on_event(event_kind: str, fields: Any) -> None:
        if event_kind == "step" and fields["step"] % updates == 0:
            step_ends.append(process_time())

    with tempfile.TemporaryDirectory() as folder:
        getattr(ms_align, name)(
            policy_model=model,
            output_dir=folder,
            steps=(STEPS + 1) * updates,
            batch_size=tiny.BATCH,
            max_new_tokens=tiny.RESPONSE,
            stop_token_ids=tiny.END,
            max_num_seqs=tiny.BATCH,
            on_event=on_event,
            checkpoint_every=10**6,
            progress=False,
            **settings,
        ).optimize(tiny.prompts(64))
    return tiny.BATCH * STEPS / (step_ends[STEPS] - step_ends[0])


def grpo(model: Any) -> float:
    """Run our GRPO with the same settings."""

    def reward(samples: Any) -> list[float]:
        return [parity(list(sample.response_tokens)) for sample in samples]

    return ours(
        "GRPOTrainer", model, 1, reward_model=reward, num_generations=tiny.GROUP, learning_rate=1e-6
    )


def ppo(model: Any, value: str | None) -> float:
    """Run our PPO with the same settings; values from a separate model or a head on the policy."""
    return ours(
        "PPOTrainer",
        model,
        4,
        reward_model=tiny.classifier(1),
        value_model=value,
        epochs=4,
        learning_rate=3e-6,
    )


def rows_of(group: int) -> tuple[list[list[int]], int]:
    """Return prompts of unequal lengths, or a few prompts for groups."""
    if group == 1:
        return tiny.prompts(tiny.BATCH, low=8), 1
    return tiny.prompts(tiny.BATCH // group), group


@torch.no_grad()
def generate(group: int, stops: list[int]) -> float:
    """Return tokens per second of transformers' `generate` with its cache."""
    model, (prompts, count) = tiny.causal().eval(), rows_of(group)
    width = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        tokens[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1

    def run(seed: int) -> int:
        torch.manual_seed(seed)
        generated = model.generate(
            tokens,
            attention_mask=mask,
            do_sample=True,
            top_k=0,
            max_new_tokens=tiny.RESPONSE,
            num_return_sequences=count,
            eos_token_id=stops,
            pad_token_id=0,
        )[:, width:]
        ended = torch.isin(generated, torch.tensor(stops))
        before = ended.cumsum(1) - ended.long()
        return int((before == 0).sum())

    return timed(run)


def rollout(model: Any, group: int, stops: list[int]) -> float:
    """Return tokens per second of our rollouts, including log-probabilities."""
    from ms_align import LocalGenerator, Sampling

    prompts, count = rows_of(group)
    generator = LocalGenerator(model, max_num_seqs=tiny.BATCH)
    sampling = Sampling(max_new_tokens=tiny.RESPONSE, stop_token_ids=stops)
    return timed(
        lambda seed: int(generator(prompts, sampling, count=count, seed=seed).lengths.sum())
    )


def timed(run: Any) -> float:
    """Return tokens per CPU second, without the first run."""
    run(0)
    start = process_time()
    tokens = sum(run(seed) for seed in range(1, STEPS + 1))
    return tokens / (process_time() - start)


SIDES = {
    "grpo-trl": grpo_trl,
    "grpo": lambda: grpo(tiny.causal()),
    "grpo-decoder": lambda: grpo(tiny.decoder()),
    "ppo-trl": ppo_trl,
    "ppo": lambda: ppo(tiny.causal(), "copy"),
    "ppo-shared": lambda: ppo(tiny.causal(), None),
    "ppo-decoder": lambda: ppo(tiny.decoder(), "copy"),
    "ppo-decoder-shared": lambda: ppo(tiny.decoder(), None),
    "generate": lambda: generate(1, tiny.STOPS),
    "rollout": lambda: rollout(tiny.causal(), 1, tiny.STOPS),
    "rollout-decoder": lambda: rollout(tiny.decoder(), 1, tiny.STOPS),
    "generate-groups": lambda: generate(tiny.GROUP, tiny.STOPS),
    "rollout-groups": lambda: rollout(tiny.causal(), tiny.GROUP, tiny.STOPS),
    "generate-full": lambda: generate(1, [tiny.END]),
    "rollout-full": lambda: rollout(tiny.causal(), 1, [tiny.END]),
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({"figure": SIDES[sys.argv[1]]()}))
