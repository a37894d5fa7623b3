"""Inputs of ms-parallel: run files, models, shards, checkpoints, schedules, recorded steps."""

import json
import shutil
from functools import partial
from pathlib import Path

from fuzz.case import Case, command, contents

run = partial(command, "ms_parallel")
RUN = """model = "llama"
dataset = "shards"
output_dir = "out"
sequence_length = 16
batch_size = 2
steps = 2
checkpoint_every = 1
keep_checkpoints = 3
log_every = 1
learning_rate = 0.003
held_out_fraction = 0.0
device = "cpu"
seed = 1
mixed_precision = false

[model_config]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 8

[layout]
data = 1
"""
TEXT = "the number {} comes after {}. "


def shards(folder: Path) -> None:
    """Write shards and the run file."""
    from ms_data import build, train_tokenizer

    (folder / "corpus").mkdir()
    for n in range(4):
        (folder / "corpus" / f"{n}.txt").write_text(TEXT.format(n, n - 1) * 30)
    train_tokenizer(folder / "corpus", vocab_size=280, out=folder / "tokenizer.json")
    build(folder / "corpus", tokenizer=folder / "tokenizer.json", out=folder / "shards")
    (folder / "RUN.toml").write_text(RUN)


def interrupted_run(folder: Path) -> None:
    """Write the state of a run of three steps that was killed after two."""
    shards(folder)
    (folder / "RUN.toml").write_text(RUN.replace("steps = 2", "steps = 3"))
    if run("train", "RUN.toml")():
        raise RuntimeError("the run to resume does not train")
    shutil.rmtree(folder / "out" / "model")
    shutil.rmtree(folder / "out" / "checkpoints" / "step-00000003")


def model(folder: Path) -> None:
    """Write a run file that starts from a saved model."""
    from ms_parallel.models import architecture, build_model
    from ms_parallel.weights import initialize, save_model

    shards(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 280}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    network = build_model(architecture("llama", {**sizes, **heads}))
    initialize(network, seed=0)
    save_model(network, folder / "start")
    settings = RUN.partition("[model_config]")[0].replace('"llama"', '"start"')
    (folder / "RUN.toml").write_text(settings)


def schedule(folder: Path) -> None:
    """Write a schedule's table and a recorded step."""
    from ms_parallel.schedules import one_f_one_b

    table = one_f_one_b(2, 3).to_csv()
    (folder / "schedule.csv").write_text(table)
    times = [[[10 * n + 5 * rank, 10 * n + 9 + 5 * rank] for n in range(6)] for rank in range(2)]
    recorded = {"step": 1, "layout": "pipeline=2", "name": "1F1B", "table": table}
    text = json.dumps({"type": "timeline.v1", **recorded, "times_ns": times})
    (folder / "step.json").write_text(text)


CASES = (
    Case(
        name="inspect",
        make=shards,
        files=("RUN.toml",),
        run=run("inspect", "RUN.toml", "--json"),
        weight=3,
    ),
    Case(
        name="inspect a model",
        make=model,
        files=("start/config.json",),
        run=run("inspect", "RUN.toml", "--json"),
        weight=2,
    ),
    Case(
        name="train from a model",
        make=model,
        files=("start/*",),
        run=run("train", "RUN.toml"),
        weight=1.5,
    ),
    Case(
        name="train on shards",
        make=shards,
        files=("shards/**/*", "RUN.toml"),
        run=run("train", "RUN.toml"),
        weight=1.5,
        trains=True,
    ),
    Case(
        name="resume",
        make=interrupted_run,
        files=("out/checkpoints/**/*", "out/*.json"),
        run=run("train", "RUN.toml"),
        weight=2,
        sealed=True,
        result=contents("out/model/*.safetensors"),
    ),
    Case(
        name="schedule",
        make=schedule,
        files=("schedule.csv",),
        run=run("schedule", "schedule.csv", "--json"),
        weight=2,
    ),
    Case(
        name="recorded step",
        make=schedule,
        files=("step.json",),
        run=run("schedule", "step.json", "--json"),
        weight=2,
    ),
)
