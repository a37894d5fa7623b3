"""Inputs of ms-compress: run files, models, tokens, shards, saved training state, exports."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

from fuzz.case import Case, command, contents, function

run = partial(command, "ms_compress")
RUN = """model = "model"
output_dir = "out"
dataset = "tokens.json"
rows = 8
scheme = "ct.int4_g32"

[tuning]
steps = 2
batch_size = 2
sequence_length = 16
"""
EVALUATE = """baseline = "model"
dataset = "shards"
output_dir = "report"
sequence_length = 16
sequences = 2
prefill_tokens = 8
decode_tokens = 2
rounds = 1

[models]
one = "exported"
"""
VOCABULARY = 288


def model(folder: Path) -> None:
    """Write a small model, tokens, and a run file."""
    from ms_parallel.models import architecture, build_model
    from ms_parallel.weights import initialize, save_model

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    vocabulary = {"vocab_size": VOCABULARY, "tie_word_embeddings": True}
    network = build_model(architecture("llama", {**sizes, **heads, **vocabulary}))
    initialize(network, seed=0)
    save_model(network, folder / "model")
    rows = [[(7 * n + m * (n % 5 + 1)) % VOCABULARY for m in range(17)] for n in range(8)]
    (folder / "tokens.json").write_text(json.dumps(rows))
    (folder / "run.toml").write_text(RUN)


def exported(folder: Path, *, scheme: str) -> None:
    """Write a model's export, shards, and the run file that evaluates both models."""
    from ms_data import Tokenizer, build, train_tokenizer

    model(folder)
    (folder / "texts").mkdir()
    for n in range(6):
        (folder / "texts" / f"{n}.txt").write_text(f"{n} comes after {n - 1}. " * 30)
    train_tokenizer(folder / "texts", vocab_size=280, out=folder / "tokenizer.json")
    Tokenizer.load(folder / "tokenizer.json").save(folder / "model")
    if run("quantize", "run.toml", "--set", f"scheme={scheme}", "--set", "output_dir=exported")():
        raise RuntimeError("the export failed")
    build(
        folder / "texts",
        tokenizer=folder / "tokenizer.json",
        out=folder / "shards",
        held_out_fraction=0.4,
    )
    (folder / "run.toml").write_text(EVALUATE)


def interrupted_run(folder: Path) -> None:
    """Write the state of a training that was killed after its last step."""
    model(folder)
    child = os.fork()
    if child == 0:
        unlink = Path.unlink

        def die(path: Path, missing_ok: bool = False) -> None:
            if path.name.endswith(".training"):
                os._exit(0)
            unlink(path, missing_ok)

        Path.unlink = die  # type: ignore[method-assign]
        os._exit(run("qat", "run.toml")() + 1)
    if os.waitpid(child, 0)[1] or not (folder / "out.training").exists():
        raise RuntimeError("no training state was saved")
    shutil.rmtree(folder / "out", ignore_errors=True)


CASES = (
    Case(
        name="quantize",
        make=model,
        files=("run.toml",),
        run=run("quantize", "run.toml"),
        weight=1.5,
    ),
    Case(
        name="quantize a model",
        make=model,
        files=("model/*",),
        run=run("quantize", "run.toml"),
        weight=2,
    ),
    Case(
        name="qat",
        make=model,
        files=("run.toml", "tokens.json"),
        run=run("qat", "run.toml"),
        weight=1.5,
        trains=True,
    ),
    Case(
        name="qat resume",
        make=interrupted_run,
        files=("out.training",),
        run=run("qat", "run.toml"),
        sealed=True,
        result=contents("out/model.safetensors"),
    ),
    Case(
        name="evaluate compressed tensors",
        make=partial(exported, scheme="ct.int4_g32"),
        files=("exported/*",),
        run=run("evaluate", "run.toml"),
        weight=0.5,
    ),
    Case(
        name="evaluate onnx",
        make=partial(exported, scheme="ort.matmulnbits"),
        files=("exported/*",),
        run=run("evaluate", "run.toml"),
        weight=0.5,
    ),
    Case(
        name="evaluate gguf",
        make=partial(exported, scheme="gguf.q4_0"),
        files=("exported/*", "run.toml"),
        run=run("evaluate", "run.toml"),
        weight=0.5,
        needs="llama_cpp",
    ),
    Case(
        name="size of gguf",
        make=partial(exported, scheme="gguf.q4_0"),
        files=("exported/*",),
        run=function("ms_compress.targets.footprint", "footprint", "exported", "CompressError"),
    ),
)
