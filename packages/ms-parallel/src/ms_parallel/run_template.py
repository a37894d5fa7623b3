"""Every key of a run file with its default and meaning: for `--help`, and as a file to begin."""

import ast
import inspect
from itertools import pairwise
from pathlib import Path
from types import ModuleType

from attrs import NOTHING, fields

from ms_parallel.cluster import layout
from ms_parallel.cluster.layout import Layout
from ms_parallel.training import options
from ms_parallel.training.options import Options

__all__ = ["GROUPS", "keys_text", "template"]

LENGTH = {
    "model": "An architecture (llama, qwen3, ...), or a folder with a Hugging Face config.json.",
    "dataset": "A folder of shards, or raw text: a file, a folder, or `stdlib`.",
    "steps": "Updates; or give epochs.",
    "epochs": "Passes over the training text; or give steps.",
    "layout": "A table of axes: data, tensor, pipeline; by default all processes on data.",
}
GROUPS = {
    "what is trained on what": ("model", "dataset", "steps", "epochs", "model_config", "layout"),
    "optimization": (
        "optimizer",
        "learning_rate",
        "warmup_steps",
        "learning_rate_decay",
        "final_learning_rate_ratio",
        "weight_decay",
        "betas",
        "epsilon",
        "max_grad_norm",
        "batch_size",
        "sequence_length",
        "seed",
    ),
    "how it is computed": (
        "mixed_precision",
        "microbatch_size",
        "recompute",
        "schedule",
        "schedule_memory_gib",
        "ops",
        "device",
        "timeout_s",
    ),
    "raw text, built into shards": ("tokenizer", "vocab_size", "hold_out", "text_key"),
    "what is written": (
        "output_dir",
        "resume",
        "checkpoint_every",
        "keep_checkpoints",
        "evaluate_every",
        "evaluate_batches",
        "record_every",
        "sample_prompt",
        "sample_tokens",
        "log_every",
        "progress",
    ),
}
"""Every key of a run file, in the order in which people look for them."""
SMALL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}


def keys_text() -> str:
    """A line a key, grouped: its default and its meaning."""
    meanings, defaults = _meanings(options), _defaults()
    lines = ["keys of RUN.toml; --set KEY=VALUE changes one:"]
    for title, names in GROUPS.items():
        lines.append(f"\n  {title}")
        for name in names:
            default = defaults.get(name)
            shown = f" [{default}]" if default is not None else ""
            lines.append(f"    {name}{shown}: {LENGTH.get(name) or meanings[name]}")
    return "\n".join(lines)


def template() -> str:
    """A run file that trains a small model once its dataset is filled in; the rest is default."""
    meanings, defaults = _meanings(options), _defaults()
    lines = [
        "# A run of `ms-parallel train`. What stands behind # is the default.",
        'model = "llama"  # an architecture, or a folder with a Hugging Face config.json',
        'dataset = "corpus/"  # a folder of shards, or raw text: a file, a folder, or `stdlib`',
        "steps = 1000  # updates; or epochs = 1",
    ]
    for title, names in list(GROUPS.items())[1:]:
        lines += ["", f"# {title}"]
        for name in names:
            default = defaults.get(name)
            text = f"# {name} = {default}" if default is not None else f"# {name} (not set)"
            lines.append(f"{text}  # {meanings[name]}")
    lines += [
        "",
        "# sizes of a model with random weights, named as in config.json",
        "[model_config]",
    ]
    lines += [f"{name} = {size}" for name, size in SMALL.items()]
    lines += ["", "# processes on each axis; by default all that torchrun starts are on data"]
    lines += ["# [layout]"]
    axes = _meanings(layout)
    lines += [f"# {axis.name} = {axis.default}  # {axes[axis.name]}" for axis in fields(Layout)]
    return "\n".join(lines) + "\n"


def _defaults() -> dict[str, str]:
    """Each key's default as TOML has it; None is no value there."""
    found = {}
    for each in fields(Options):
        factory = getattr(each.default, "factory", None)
        default = each.default if factory is None else factory()
        if default is not NOTHING and default is not None:
            found[each.name] = _toml(default)
    return found


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str | Path):
        return f'"{value}"'
    return str(value)


def _meanings(module: ModuleType) -> dict[str, str]:
    """The first sentence under each field of a module's classes."""
    found: dict[str, str] = {}
    for part in ast.parse(inspect.getsource(module)).body:
        body = part.body if isinstance(part, ast.ClassDef) else []
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                assert isinstance(field.target, ast.Name)
                assert isinstance(text.value, ast.Constant)
                meaning = str(text.value.value).replace("None", "unset")
                found[field.target.id] = " ".join(meaning.split())
    return found
