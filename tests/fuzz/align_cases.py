"""Inputs of ms-align: run files, prompts, models, adapters, tokenizers, shards, checkpoints."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from fuzz.case import Case, command, contents
from fuzz.data_cases import TEMPLATE

run = partial(command, "ms_align")
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "tie_word_embeddings": True,
}
TUNE = """model = "start"
output_dir = "out"
sequence_length = 32
batch_size = 2
steps = 3
checkpoint_every = 1
keep_checkpoints = 3
learning_rate = 0.001
progress = false
seed = 1
"""
ONLINE = """model = "start"
tokenizer = "start/tokenizer.json"
dataset = "prompts.jsonl"
reward_model = "fuzz.align_cases:length"
output_dir = "out"
steps = 2
batch_size = 4
max_new_tokens = 3
checkpoint_every = 1
keep_checkpoints = 3
progress = false
seed = 1
"""
GENERATE = """model = "start"
tokenizer = "start"
dataset = "prompts.jsonl"
output_path = "responses.jsonl"
max_new_tokens = 3
seed = 1
"""


def length(samples: Any) -> list[float]:
    """A reward computed from the token ids."""
    return [float(sum(sample.response_tokens) % 7) for sample in samples]


def model(folder: Path, *, plain: bool = False) -> None:
    """Write a model with its tokenizer, prompts, and run files."""
    from ms_data import train_tokenizer
    from ms_parallel.models import architecture, build_model
    from ms_parallel.weights import initialize, save_model

    rows = [{"text": f"{n} comes after {n - 1}"} for n in range(9)]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    network = build_model(architecture("llama", {**SIZES, "vocab_size": 270}))
    initialize(network, seed=0)
    save_model(network, folder / "start")
    train_tokenizer(
        folder / "corpus.jsonl", vocab_size=262, out=folder / "start" / "tokenizer.json"
    )
    settings = {"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"}
    (folder / "start" / "tokenizer_config.json").write_text(json.dumps(settings))
    chat = "two?" if plain else [{"role": "user", "content": "two?"}]
    prompts = [{"prompt": "one", "answer": "1"}, {"prompt": chat, "answer": "2"}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    (folder / "GENERATE.toml").write_text(GENERATE)
    (folder / "RUN.toml").write_text(ONLINE)


def dataset(folder: Path, *, command_name: str = "sft") -> None:
    """Write shards of conversations or pairs, and the run file."""
    from ms_data import build

    model(folder)
    pairs = command_name != "sft"
    rows: list[dict[str, Any]] = []
    for n in range(12):
        question, answer = f"what is {n}?", f"{n}."
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        pair = {"prompt": question, "chosen": answer, "rejected": "no"}
        rows.append(pair if pairs else {"messages": chat})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "chat.jinja").write_text(TEMPLATE)
    build(
        folder / "rows.jsonl",
        tokenizer=folder / "start" / "tokenizer.json",
        out=folder / "shards",
        chat=folder / "chat.jinja",
        pairs=pairs,
    )
    (folder / "RUN.toml").write_text(TUNE + 'dataset = "shards"\n')


def interrupted_run(folder: Path, *, command_name: str) -> None:
    """Write the state of a run that was killed after its second-to-last step."""
    if command_name == "ppo":
        model(folder, plain=True)
    else:
        dataset(folder, command_name=command_name)
    if run(command_name, "RUN.toml")():
        raise RuntimeError("the run to resume does not train")
    shutil.rmtree(folder / "out" / "model")
    shutil.rmtree(max((folder / "out" / "checkpoints").glob("step-*")))


def load_adapter() -> int:
    """Read an adapter with `load_lora`, as no command does."""
    import sys

    from ms_align import load_lora
    from ms_align.errors import AlignError
    from ms_parallel import load_model
    from ms_parallel.errors import ParallelError

    try:
        load_lora(load_model("start"), "adapter")
    except (AlignError, ParallelError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def unmerged_adapter(folder: Path) -> None:
    """Write a model and a separate adapter."""
    from ms_align import LoraOptions, add_lora
    from ms_parallel import load_model

    model(folder)
    add_lora(load_model(folder / "start"), LoraOptions(rank=2)).save_pretrained(folder / "adapter")


CASES = (
    Case(
        name="generate",
        make=model,
        files=("GENERATE.toml", "prompts.jsonl"),
        run=run("generate", "GENERATE.toml"),
        weight=2,
    ),
    Case(
        name="generate from a model",
        make=model,
        files=("start/*",),
        run=run("generate", "GENERATE.toml"),
        weight=3,
    ),
    Case(
        name="ppo",
        make=partial(model, plain=True),
        files=("RUN.toml", "prompts.jsonl"),
        run=run("ppo", "RUN.toml"),
        weight=1.5,
        trains=True,
    ),
    Case(
        name="ppo resume",
        make=partial(interrupted_run, command_name="ppo"),
        files=("out/checkpoints/**/*", "out/*.json"),
        run=run("ppo", "RUN.toml"),
        sealed=True,
        result=contents("out/model/*.safetensors"),
    ),
    Case(
        name="sft",
        make=dataset,
        files=("RUN.toml", "shards/**/*"),
        run=run("sft", "RUN.toml"),
        weight=1.5,
        trains=True,
    ),
    Case(
        name="sft resume",
        make=partial(interrupted_run, command_name="sft"),
        files=("out/checkpoints/**/*", "out/*.json"),
        run=run("sft", "RUN.toml"),
        weight=0.5,
        sealed=True,
        result=contents("out/model/*.safetensors"),
    ),
    Case(
        name="dpo",
        make=partial(dataset, command_name="dpo"),
        files=("RUN.toml", "shards/**/*"),
        run=run("dpo", "RUN.toml"),
        weight=0.5,
        trains=True,
    ),
    Case(
        name="kto",
        make=partial(dataset, command_name="kto"),
        files=("RUN.toml", "shards/**/*"),
        run=run("kto", "RUN.toml"),
        weight=0.5,
        trains=True,
    ),
    Case(
        name="reward",
        make=partial(dataset, command_name="reward"),
        files=("RUN.toml", "start/*"),
        run=run("reward", "RUN.toml"),
        weight=0.5,
        trains=True,
    ),
    Case(
        name="adapter",
        make=unmerged_adapter,
        files=("adapter/*",),
        run=load_adapter,
        weight=2,
    ),
)
