"""Sampling tasks by difficulty, compared with uniform sampling: updates to a target, three seeds.

    python packages/ms-align/benchmarks/task_scheduling.py

Two mixtures of five tasks over digits. In the first, four tasks copy or repeat and are learned
quickly, and the fifth sorts: uniform sampling spends four fifths of its rows on solved tasks. In
the second, all five sort, so no schedule can help and none should hurt. A run counts the updates
until the worst task's held-out loss is below the target.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from ms_align import SFTTrainer, TaskOptions
from ms_align.run.loop import RunLog
from ms_align.streams.text_ends import TextEnds
from ms_align.trainers.base.offline import TrainingData
from ms_parallel.models import architecture, build_model
from ms_parallel.weights import initialize

ROWS, LENGTH, WORD = 32, 16, 6
START, ARROW, END = 10, 11, 12
TARGET, MAX_STEPS, EVAL_EVERY = 0.05, 1500, 20
SEEDS = (0, 1, 2)

Digits = list[int]
EASY: dict[str, Callable[[Digits], Digits]] = {
    "copy": lambda digits: digits,
    "first": lambda digits: digits[:1] * WORD,
    "last": lambda digits: digits[-1:] * WORD,
    "zero": lambda digits: [0] * WORD,
}
MIXTURES: dict[str, dict[str, Callable[[Digits], Digits]]] = {
    "four easy, one hard": {**EASY, "sort": sorted},
    "five equal": {f"sort {number}": sorted for number in range(5)},
}
SCHEDULES: dict[str, TaskOptions] = {
    "uniform": TaskOptions(signal="given", temperature=1e3, warmup_steps=0),
    "loss": TaskOptions(signal="loss", temperature=0.7, floor=0.1),
    "loss, corrected": TaskOptions(signal="loss", temperature=0.7, floor=0.1, correction=1.0),
    "progress": TaskOptions(signal="progress", temperature=0.7, floor=0.1),
}


class Tasks:
    """Stream of task rows, generated on demand from the seed and the row count."""

    batch_size = ROWS

    def __init__(self, tasks: Mapping[str, Callable[[Digits], Digits]], seed: int) -> None:
        self.tasks, self.seed, self.count = tasks, seed, 0
        self.names = tuple(tasks)

    def of_tasks(self, tasks: Sequence[int]) -> dict[str, Any]:
        """Return a batch whose rows belong to these tasks."""
        rows = [self._row(task, self.count + index) for index, task in enumerate(tasks)]
        self.count += len(tasks)
        tokens = np.array([row[:LENGTH] for row in rows])
        targets = np.array([row[1:] for row in rows])
        targets[:, : WORD + 2] = -100
        return {"tokens": tokens, "targets": targets, "task": np.array(tasks)}

    def _row(self, task: int, number: int) -> list[int]:
        rng = random.Random(f"{self.seed} {number}")
        digits = [rng.randrange(10) for _ in range(WORD)]
        answer = list(self.tasks[self.names[task]](digits))
        return [START + 3 + task, START, *digits, ARROW, *answer, END, END][: LENGTH + 1]

    def __next__(self) -> dict[str, Any]:
        return self.of_tasks([index % len(self.names) for index in range(ROWS)])

    def state_dict(self) -> dict[str, Any]:
        """Return the number of rows drawn."""
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the number of rows drawn."""
        self.count = state["count"]


def updates_to_target(mixture: str, schedule: str, seed: int) -> tuple[int, str]:
    """Return the updates until the worst task reaches the target, and the final sampling."""
    tasks = MIXTURES[mixture]
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    other_sizes = {"num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 24}
    model = build_model(
        architecture("llama", {**sizes, **other_sizes, "tie_word_embeddings": True})
    )
    initialize(model, seed=seed)
    options = SCHEDULES[schedule]
    if options.signal == "given":
        options = TaskOptions(signal="given", given=dict.fromkeys(tasks, 1.0))
    worst: list[float] = []
    probabilities: dict[str, float] = {}

    def on_event(event_kind: str, fields: Any) -> None:
        if event_kind == "evaluate":
            losses = [v for k, v in fields.items() if k.startswith("held_out_loss.")]
            worst.append(max(losses))
        elif event_kind == "tasks":
            probabilities.update({k: v for k, v in fields.items() if k.startswith("probability.")})

    with TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            tasks=options,
            learning_rate=2e-3,
            warmup_steps=20,
            steps=MAX_STEPS,
            output_dir=Path(folder),
            seed=seed,
        )
        data = TrainingData(
            stream=Tasks(tasks, seed),
            held_out=lambda: [next(Tasks(tasks, 1000 + index)) for index in range(5)],
        )
        learner = trainer.learner(trainer.engine(), data, TextEnds.of(None))
        step, reached = 0, MAX_STEPS
        log = RunLog(event=on_event, note=lambda text: None)
        while step < MAX_STEPS:
            learner.update(log)
            step += 1
            if step % EVAL_EVERY == 0:
                on_event("evaluate", learner.evaluate(log))
                if worst[-1] < TARGET:
                    reached = step
                    break
    probability_text = " ".join(f"{value:.2f}" for value in probabilities.values())
    return reached, probability_text


def main() -> None:
    """Print updates to the target for all seeds, and the median relative to uniform."""
    torch.set_num_threads(1)
    for mixture in MIXTURES:
        uniform = 0.0
        for schedule in SCHEDULES:
            results = [updates_to_target(mixture, schedule, seed) for seed in SEEDS]
            steps = [result[0] for result in results]
            uniform = uniform or median(steps)
            print(
                f"{mixture:20} {schedule:16} updates {steps} median {median(steps):.0f} "
                f"({median(steps) / uniform:.2f} of uniform)  last chances {results[0][1]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
