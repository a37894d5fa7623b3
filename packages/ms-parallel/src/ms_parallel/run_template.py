"""The keys of a run file in groups, and as a file to begin with."""

from attrs import evolve

from ms_parallel.cluster.layout import Layout
from ms_parallel.settings.keys import Key, KeyGroup, groups_of, place_of
from ms_parallel.settings.template import template_text
from ms_parallel.training.options import Options

LENGTH = {
    "model": (
        "str",
        "An architecture (llama, qwen3, ...), or a folder with a Hugging Face config.json.",
    ),
    "dataset": ("str", "A folder of shards, or raw text: a file, a folder, or `stdlib`."),
    "steps": ("int | None", "Updates; or give epochs."),
    "epochs": ("float | None", "Passes over the training text; or give steps."),
    "layout": (
        "dict",
        "A table of axes: data, tensor, pipeline, context, expert, replicate; or `auto`.",
    ),
}
GROUPS = {
    "what is trained on what": (
        "model",
        "dataset",
        "steps",
        "epochs",
        "model_config",
        "layout",
        "cluster",
    ),
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
    "steps that go wrong": ("on_nonfinite", "on_spike", "spike_factor", "spike_window"),
    "experts": (
        "balance",
        "balance_coefficient",
        "balance_bias_rate",
        "router_z_coefficient",
    ),
    "how it is computed": (
        "mixed_precision",
        "loss_scale",
        "audit_every",
        "microbatch_size",
        "memory_gib",
        "recompute",
        "compile",
        "sharding",
        "shares",
        "offload",
        "reproducible",
        "context_attention",
        "context_balance",
        "mtp_weight",
        "z_coefficient",
        "schedule",
        "schedule_memory_gib",
        "ops",
        "device",
        "devices",
        "timeout_s",
    ),
    "raw text, built into shards": ("tokenizer", "vocab_size", "hold_out", "text_column"),
    "what is written": (
        "output_dir",
        "resume",
        "checkpoint_every",
        "async_checkpoints",
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
BEGIN = {
    "model": "llama",
    "dataset": "corpus/",
    "steps": 1000,
    "model_config": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4},
}
"""A small model once `dataset` is filled in."""


def key_groups() -> list[KeyGroup]:
    """List every key of a run file with its default and meaning, in groups."""
    own = {key.name: key for group in groups_of(place_of(Options)) for key in group.keys}
    axes = tuple(
        evolve(key, default=1, required=False)
        for group in groups_of(place_of(Layout))
        for key in group.keys
    )
    own |= {name: Key(name=name, kind=kind, meaning=text) for name, (kind, text) in LENGTH.items()}
    own["layout"] = evolve(own["layout"], inner=axes)
    own |= {name: evolve(own[name], required=True) for name in ("model", "dataset")}
    return [
        KeyGroup(title=title, keys=tuple(own[name] for name in names))
        for title, names in GROUPS.items()
    ]


def template() -> str:
    """Write a run file that trains a small model once it names a dataset; the rest is default."""
    return template_text("ms-parallel train RUN.toml", key_groups(), BEGIN)
