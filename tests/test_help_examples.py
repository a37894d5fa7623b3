"""Every example line of every `--help` runs unchanged, with exit code 0.

So does each line of the page blocks that are marked for this file. Each line runs in its own folder
with only the files that it names. Run files come from `init` with smaller sizes, and the paths in
them and on the line are small inputs.
"""

import json
import os
import pickle
import random
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from documented_commands import FENCE, SHELL, help_of, pages, subcommands
from packages import PACKAGES, module_of

RECORDINGS = ("before", "before2", "after", "after2", "A1", "A2", "A3", "B1", "B2", "B3")
SNAPSHOT = {
    "segments": [],
    "device_traces": [[{"action": "alloc", "addr": 4096, "size": 512, "time_us": 1, "frames": []}]],
}
"""Memory snapshot of one allocation."""
MARK = "<!-- not run: tests/test_help_examples.py runs each line on small inputs -->"
OUTPUTS = {"--out", "--html", "--output-dir", "--tokenizer-out"}
"""Options whose value is an output path."""
NEEDS = {
    "ms-align evaluate": "lm-evaluation-harness and its datasets",
    "ms-kernels bench": "a CUDA device",
    "ms-profile serve": "a user who ends it with Ctrl-C",
    "torchrun --nnodes": "two machines",
}
"""Prefixes of lines that cannot run everywhere, and their requirement."""
QUICK = {
    *("ms-data tokenizer", "ms-data inspect", "ms-data verify", "ms-data clean", "ms-data dedup"),
    *("ms-data import", "ms-data export", "ms-data stats", "ms-data init"),
    *("ms-kernels list", "ms-align init", "ms-compress init"),
    *("ms-parallel init", "ms-parallel schedule", "ms-profile memory"),
}
"""Commands whose examples take seconds and run in the default tests."""
SMALL = {
    "steps": "4",
    "sequence_length": "32",
    "batch_size": "4",
    "max_new_tokens": "4",
    "num_generations": "2",
    "rows": "4",
    "hidden_size": "32",
    "intermediate_size": "64",
    "num_hidden_layers": "4",
    "vocab_size": "320",
    "eval_batches": "1",
    "prefill_tokens": "16",
    "decode_tokens": "4",
}
"""Smaller sizes for run files."""
# fmt: off
NOUNS = (
    "river", "mountain", "engine", "teacher", "letter", "garden", "window", "system", "bridge",
    "market", "doctor", "forest", "island", "harbor", "kitchen", "library", "machine",
    "message", "mirror", "museum", "number", "orchard", "painter", "pencil", "planet",
    "question", "railway", "season", "shadow", "signal", "silver", "station", "street",
    "student", "summer", "theater", "thunder",
)
VERBS = (
    "carried", "measured", "painted", "repaired", "counted", "described", "followed",
    "gathered", "invented", "lifted", "moved", "noticed", "opened", "planted", "remembered",
    "repeated", "served", "tested", "traded", "visited", "washed", "written",
)
# fmt: on
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TRAIN = """
import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
options = parser.parse_args()
model = torch.nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(40 * options.epochs):
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CLUSTER = """
chip = "h100-sxm"
nodes = 1
devices_per_node = 2
"""


def examples() -> Iterator[str]:
    """Yield the example lines of all commands and subcommands, without duplicates."""
    lines = {
        line: None
        for package in PACKAGES
        for command in (None, *subcommands(package))
        for line in re.findall(r"^example: (.+)$", help_of(package, command), re.MULTILINE)
    }
    yield from lines | dict.fromkeys(page_lines())


def page_lines() -> Iterator[str]:
    """Yield the command lines, without comments, of page blocks marked for this file."""
    for page in pages():
        for part in page.read_text().split(MARK)[1:]:
            block = FENCE.match(part.lstrip("\n"))
            assert block is not None, page
            assert block[3] in SHELL, page
            yield from re.findall(r"^(?:\$ )?(.*?)(?: +# .*)?$", block[4].strip(), re.MULTILINE)


def command_of(line: str) -> str:
    """Command and subcommand of a line, with or without torchrun: `ms-parallel train`."""
    words = shlex.split(line)
    index = words.index("-m") + 1 if "-m" in words else 0
    return f"{words[index].replace('_', '-')} {words[index + 1]}"


def requirement_of(line: str) -> str | None:
    """Requirement of a line that not every machine meets, or None."""
    return next((need for start, need in NEEDS.items() if line.startswith(start)), None)


def run(line: str, folder: Path) -> None:
    """Run a line in a folder; fail with its output."""
    commands = [f'{p}() {{ {sys.executable} -m {module_of(p)} "$@"; }}' for p in PACKAGES]
    commands.append(f'torchrun() {{ {sys.executable} -m torch.distributed.run "$@"; }}')
    result = subprocess.run(
        ["bash", "-c", "\n".join([*commands, line])],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert result.returncode == 0, f"$ {line}\n{result.stdout[-3000:]}{result.stderr[-4000:]}"


class Inputs:
    """Small inputs under the names in examples and run files, created on first use."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writers: dict[str, Callable[[Path], None]] = {
            "corpus": self.write_corpus,
            "cleaned": self.write_cleaned,
            "unique": self.write_unique,
            "tokenizer.json": self.write_tokenizer,
            "shards": self.write_shards,
            "corpus_text_document.idx": self.write_megatron,
            "chats": self.write_chats,
            "pairs": self.write_pairs,
            "prompts.jsonl": self.write_prompts,
            "runs/train/model": self.write_model,
            "runs/sft/model": lambda path: self.copy("runs/train/model", path),
            "run/model": lambda path: self.copy("runs/train/model", path),
            "path/to/teacher": lambda path: self.copy("runs/train/model", path),
            "path/to/model": lambda path: self.copy("runs/train/model", path),
            "runs/reward/model": self.write_reward_model,
            "runs/quantize": self.write_quantized,
            "runs/qat": lambda path: self.copy("runs/quantize", path),
            "runs/sft": self.write_events,
            "model.gguf": self.write_gguf,
            "outputs/checkpoint/step-1000": self.write_distributed_checkpoint,
            "train.py": lambda path: void(path.write_text(TRAIN)),
            "CLUSTER.toml": lambda path: void(path.write_text(CLUSTER)),
            "RULES.toml": lambda path: run("ms-data init clean --out RULES.toml", path.parent),
            "profile_results": self.write_profile,
            "snapshot.pickle": lambda path: void(path.write_bytes(pickle.dumps(SNAPSHOT))),
            **{name: lambda path: self.copy("profile_results", path) for name in RECORDINGS},
        }

    def __getitem__(self, name: str) -> Path:
        """Path of an input, created if missing."""
        path = self.folder / name.replace("/", "-")  # keeps runs/sft/model out of runs/sft
        if not path.exists():
            self.writers[name](path)
        return path

    def copy(self, name: str, path: Path) -> None:
        """Copy an input; a Megatron index together with its data."""
        source = self[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, path, dirs_exist_ok=True)
            return
        for part in source.parent.glob(f"{source.stem}.*") if source.suffix == ".idx" else [source]:
            shutil.copy(part, path.with_name(part.name))

    def write_corpus(self, path: Path) -> None:
        """Texts that pass the cleaning rules."""
        path.mkdir()
        rng = random.Random(0)
        for number in range(24):
            sentences = (
                f"The {rng.choice(NOUNS)} that {rng.choice(VERBS)} the {rng.choice(NOUNS)} of"
                f" {rng.choice(NOUNS)} {rng.randrange(100)} was {rng.choice(VERBS)} and"
                f" {rng.choice(VERBS)} with a {rng.choice(NOUNS)} to be {rng.choice(VERBS)}."
                for _ in range(12)
            )
            (path / f"{number}.txt").write_text("\n".join(sentences))

    def write_cleaned(self, path: Path) -> None:
        """The texts cleaned with the default rules."""
        self["corpus"], self["RULES.toml"]
        run("ms-data clean corpus/ RULES.toml --out cleaned", path.parent)

    def write_unique(self, path: Path) -> None:
        """The cleaned texts without duplicates."""
        self["cleaned"]
        run("ms-data dedup cleaned --out unique", path.parent)

    def write_tokenizer(self, path: Path) -> None:
        """A byte-level BPE tokenizer."""
        from ms_data import train_tokenizer

        train_tokenizer(self["corpus"], vocab_size=320, out=path)

    def write_shards(self, path: Path) -> None:
        """Shards of texts."""
        from ms_data import build

        build(self["corpus"], tokenizer=self["tokenizer.json"], out=path, held_out_fraction=0.2)

    def write_megatron(self, path: Path) -> None:
        """The shards in Megatron's format."""
        line = f"ms-data export shards --format megatron --out {path.stem}"
        self["shards"]
        run(line, path.parent)

    def write_rows(self, path: Path, rows: list[dict[str, object]], *options: str) -> None:
        """Shards of conversations or pairs."""
        file, template = path.with_suffix(".jsonl"), path.with_suffix(".jinja")
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        template.write_text(TEMPLATE)
        self["tokenizer.json"]
        files = f"{file.name} --tokenizer tokenizer.json --chat-template {template.name}"
        extra_options = " ".join(["--held-out-fraction", "0.2", *options])
        run(f"ms-data build {files} --out {path.name} {extra_options}", path.parent)

    def write_chats(self, path: Path) -> None:
        """Shards of conversations."""
        answer = {"role": "assistant", "content": "the rest"}
        rows: list[dict[str, object]] = [
            {"messages": [{"role": "user", "content": f"and {n}?"}, answer]} for n in range(40)
        ]
        self.write_rows(path, rows)

    def write_pairs(self, path: Path) -> None:
        """Shards of preference pairs."""
        rows: list[dict[str, object]] = [
            {"prompt": f"and {n}?", "chosen": "the rest", "rejected": "no"} for n in range(40)
        ]
        self.write_rows(path, rows, "--pairs")

    def write_prompts(self, path: Path) -> None:
        """Text prompts."""
        path.write_text("".join(json.dumps({"prompt": f"number {n}"}) + "\n" for n in range(16)))

    def write_model(self, path: Path) -> None:
        """A decoder with its tokenizer; its sizes fit the block size of every scheme."""
        from ms_parallel import save_model
        from ms_parallel.models import architecture, build_model
        from ms_parallel.weights import initialize

        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
        model = build_model(architecture("llama", {**sizes, **heads, "vocab_size": 320}))
        initialize(model, seed=0)
        save_model(model, path)  # type: ignore[arg-type]
        shutil.copy(self["tokenizer.json"], path)

    def write_reward_model(self, path: Path) -> None:
        """A sequence classifier with one output."""
        import transformers

        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
        config = transformers.LlamaConfig(
            **sizes, num_attention_heads=2, vocab_size=320, num_labels=1, pad_token_id=0
        )
        transformers.LlamaForSequenceClassification(config).save_pretrained(path)
        shutil.copy(self["tokenizer.json"], path)

    def write_quantized(self, path: Path) -> None:
        """The output of `ms-compress quantize`."""
        line = "ms-compress quantize RUN.toml --set method=gptq --set scheme=ct.int4_g32"
        workdir = path.with_name("quantizing")
        workdir.mkdir()
        copy_inputs(line, workdir, self)
        run(line, workdir)
        shutil.copytree(workdir / "runs" / "quantize", path)

    def write_gguf(self, path: Path) -> None:
        """A GGUF file of the model."""
        model, out = self["runs/train/model"], path.with_name("exported")
        run(f"ms-compress export {model.name} --scheme gguf.q8_0 --out {out.name}", path.parent)
        shutil.move(out / "model.gguf", path)

    def write_distributed_checkpoint(self, path: Path) -> None:
        """A checkpoint with torchtitan's names, of a run with the small run file."""
        line = "ms-parallel train RUN.toml"
        workdir = path.with_name("training")
        workdir.mkdir()
        copy_inputs(line, workdir, self)
        run(line, workdir)
        run("ms-parallel convert RUN.toml --to-dcp step-4", workdir)
        shutil.copytree(workdir / "step-4", path)

    def write_events(self, path: Path) -> None:
        """The events of a finished run."""
        path.mkdir()
        steps = [{"kind": "step", "step": n, "loss": 4.0 - n, "time": 1.7e9 + n} for n in (1, 2)]
        events = [*steps, {"kind": "finished", "steps": 2, "time": 1.7e9 + 3}]
        (path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))

    def write_profile(self, path: Path) -> None:
        """A recording of two processes."""
        self["train.py"]
        run(f"ms-profile run --nproc-per-node 2 --train-script train.py --output-dir {path.name}"
            " --metrics communication_time,compute_time", path.parent)  # fmt: skip


def void(_: object) -> None:
    """Discard a result."""


def copy_inputs(line: str, folder: Path, inputs: Inputs) -> None:
    """Copy the inputs that the line and its run file name into the folder."""
    words = shlex.split(line)
    names = [
        word for previous, word in zip(["", *words], words, strict=False) if previous not in OUTPUTS
    ]
    if "init" not in words:
        for name in {"RUN.toml", "GENERATE.toml", "REWARD.toml"} & set(names):
            write_run_file(command_of(line), folder / name)
            text = (folder / name).read_text()
            names += re.findall(r'^(?!out)[^#\n]*"([^"\n]+)"', text, re.MULTILINE)
    rows = {"sft": "chats", "gkd": "chats", "dpo": "pairs", "kto": "pairs", "reward": "pairs"}
    for name in {re.sub(r"^\./|/$", "", name) for name in names}:
        source = rows.get(command_of(line).split()[1], name) if name == "shards" else name
        if name in inputs.writers:
            inputs.copy(source, folder / name)


def write_run_file(command: str, path: Path) -> None:
    """Write the run file of `init` with small sizes."""
    package, name = command.split()
    line = "ms-parallel init" if package == "ms-parallel" else f"{package} init {name}"
    if package == "ms-profile":
        line = "ms-align init sft"
    run(f"{line} --out {path.name}", path.parent)
    text = path.read_text()
    head, table, _ = re.split(r"^(# \[tuning\]\n|\Z)", text, maxsplit=1, flags=re.MULTILINE)
    for key, value in SMALL.items():
        head = re.sub(rf"^(?:# )?{key} = .*$", f"{key} = {value}", head, flags=re.MULTILINE)
    text = f"{head}[tuning]\nsteps = 4\nsequence_length = 32\nbatch_size = 4\n" if table else head
    text = re.sub(r"^epochs = .*\n", "", text, flags=re.MULTILINE)
    path.write_text(text)


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """Inputs of the examples, created on first use."""
    return Inputs(tmp_path_factory.mktemp("inputs"))


def parameter_of(line: str) -> object:
    """Parameter of the test below; slow unless the command is quick."""
    quick = command_of(line) in QUICK and "stdlib" not in line
    return pytest.param(line, id=line, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.parametrize(
    "line", [parameter_of(line) for line in examples() if requirement_of(line) is None]
)
def test_an_example_runs_with_only_the_inputs_it_names(
    line: str, tmp_path: Path, inputs: Inputs
) -> None:
    """The folder is otherwise empty."""
    copy_inputs(line, tmp_path, inputs)
    run(line, tmp_path)


def test_few_examples_have_special_requirements() -> None:
    """Each requirement belongs to one line; all other lines run."""
    lines = [line for line in examples() if requirement_of(line)]
    assert len(lines) == len(NEEDS)
    assert len(list(examples())) > 45
