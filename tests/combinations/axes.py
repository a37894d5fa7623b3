"""Axes of each command's array: the keys of its run file with the values to test.

Keys and choices come from the options, as in `--help` and the reference page, so a new key becomes
an axis automatically: true and false, or all of its choices. `REGISTRIES` has the tables of the
names that a text may be, `VALUES` the values of keys whose type implies none, and `FIXED` the
excluded keys with the reasons.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs" / "extensions"))
import run_keys  # noqa: E402

UNSET = None
"""Leaves the key out of the run file."""
COMMANDS = (
    "ms-parallel train",
    *(f"ms-align {name}" for name in ("sft", "reward", "dpo", "kto", "gkd", "ppo", "grpo", "rloo")),
    *(f"ms-compress {name}" for name in ("qat", "prune", "distill", "quantize")),
)
OTHER_COMMANDS = {
    "ms-parallel plan": "a description of a cluster, which runs nothing",
    "ms-data clean": "one table per rule, each with its own tests",
    "ms-align generate": "sampling settings, which the arrays of ppo, grpo and rloo combine",
    "ms-align evaluate": "tasks of lm-evaluation-harness, with their own tests",
    "ms-compress evaluate": "sizes of a measurement, with their own tests",
    "ms-compress compare-schemes": "lists of settings that the array of quantize combines",
}
"""Commands with a run file but no array, by reason."""
LAYOUTS = [UNSET, *({axis: 2} for axis in ("data", "tensor", "pipeline", "context"))]

VALUES: dict[str, dict[str, list[Any]]] = {
    "ms-parallel train": {
        "model": ["llama", "qwen3_moe", "deepseek_v3", "gemma3_text", "gpt_oss", "@foreign"],
        "dataset": ["@texts", "@shards"],
        "layout": [*LAYOUTS, {"data": 2, "expert": 2}, {"data": 2, "replicate": 2}],
        "optimizer": ["AdamW", "Muon", "SGD", "Adafactor"],
        "learning_rate_decay": ["cosine", "linear", "wsd"],
        "balance": [UNSET, "step", "sequence", "bias", "none"],
        "balance_coefficient": [UNSET, 0.01],
        "mixed_precision": [False, True, "float16"],
        "loss_scale": [UNSET, {"initial": 1024}],
        "audit_every": [UNSET, 1],
        "microbatch_size": [UNSET, 1, "auto"],
        "compile": ["auto", True],
        "recompute": ["none", "selective", "attention", "full", "1MiB"],
        "shares": ["equal", "measured"],
        "schedule": ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zb-v"],
        "max_grad_norm": [1.0, 0.5],
        "eval_every": [UNSET, 1],
        "checkpoint_every": [UNSET, 1],
        "record_every": [UNSET, 1],
        "sample_prompt": [UNSET, "the"],
        "z_loss_coefficient": [0.0, 1e-4],
        "router_z_loss_coefficient": [0.0, 1e-3],
        "tokenizer": [UNSET, "@tokenizer"],
    },
    "ms-align": {
        "model": ["@llama", "@qwen3_moe", "@gpt2"],
        "layout": [{"data": 1}, UNSET, {"data": 2}, {"tensor": 2}, {"pipeline": 2}],
        "lora": [
            UNSET,
            {"rank": 2},
            {"rank": 2, "quantize_base": "nf4"},
            {"rank": 2, "use_dora": True, "dropout": 0.1},
            {"rank": 2, "init_lora_weights": "pissa", "target_parameters": ["experts.down_proj"]},
        ],
        "microbatch_size": [UNSET, 1],
        "reference_model": [UNSET, "@llama"],
        "dataset": [UNSET],
        "tokenizer": [UNSET],
        "max_grad_norm": [1.0, 0.5],
        "eval_every": [UNSET, 1],
        "checkpoint_every": [50, 1],
        "kl_coeff": [0.05, 0.0],
        "kl_target": [UNSET, 0.1],
        "entropy_coeff": [0.0, 0.01],
        "temperature": [1.0, 0.7],
        "top_k": [UNSET, 5],
        "top_p": [1.0, 0.9],
        "stop_strings": [[], ["e"]],
        "missing_eos_penalty": [0.0, 0.1],
        "length_penalty": [0.0, 0.1],
        "soft_punish_cache": [UNSET, 2],
        "max_resample_times": [0, 1],
        "reward_clip": [UNSET, 0.5],
        "kl_estimator": ["k1", "k2", "k3"],
        "value_model": [UNSET, "copy"],
        "weights": [UNSET],
        "tasks": [UNSET],
        "mixed_precision": [False, True, "float16"],
        "recompute": ["none", "selective", "full"],
        "label_smoothing": [0.0, 0.1],
        "open_rows": [512, 0],
        "max_num_seqs": [64, 2],
        "sequence_length": [32],
        "loss_scale": [UNSET, {"initial": 1024}],
        "minibatch_size": [UNSET, 2],
        "balance_coefficient": [UNSET, 0.01],
        "save_dtype": [UNSET, "bfloat16"],
        "generator": ["policy", "vllm"],
        "max_staleness": [0, 1],
        "rollout_rs_threshold": [UNSET, 2.0],
        "off_policy_mask_threshold": [UNSET, 0.1],
        "vllm": [UNSET, "@server"],
        "pass_at_k": [1, 2],
    },
    "ms-align dpo": {
        "microbatch_size": [UNSET, 1, 2],
        "loss_weights": [UNSET, [1.0], [0.5, 2.0]],
        "f_alpha_divergence_coef": [0.5],
        "ld_alpha": [UNSET, 0.5],
        "discopop_tau": [0.05],
        "simpo_gamma": [0.5],
        "cpo_alpha": [1.0],
    },
    "ms-align gkd": {
        "lmbda": [0.5, 0.0, 1.0],
        "teacher_layout": [UNSET],
    },
    "ms-align reward": {"microbatch_size": [UNSET, 1, 2], "layout": LAYOUTS[:4]},
    # k1 needs kl_in = "reward", so it cannot be the default value.
    "ms-align grpo": {
        "kl_estimator": ["k3_weighted", "k1", "k2", "k3", "k1_to_go"],
        "delta": [UNSET, 2.0],
        "dual_clip": [UNSET, 3.0],
        "sapo_temperature_pos": [1.0],
        "sapo_temperature_neg": [1.05],
    },
    "ms-compress": {
        "model": ["@llama", "@qwen3_moe", "@pruned_llama"],
        "tokenizer": [UNSET],
        "pattern": ["2:4", 0.5],
        "teacher": [UNSET, "@llama"],
        "float_steps": [0, 1],
        "ignore": [[], ["*.down_proj"]],
        "layers": [UNSET, 1],
        "inner": [UNSET, 32],
        "dataset": ["@tokens", "@shards"],
        "tuning.weight_decay": [0.0, 0.1],
        "tuning.distill_weight": [1.0, 0.5],
        "tuning.hidden_weight": [0.0, 1.0],
    },
    "ms-compress quantize": {"dataset": ["@tokens", "@shards", UNSET]},
}
"""Values of keys without choices; the first is the default value of the rows."""

REGISTRIES: dict[str, dict[str, str]] = {
    "ms-align dpo": {
        "loss_type": "ms_align.losses.preference:LOSSES",
        "f_divergence_type": "ms_align.losses.preference:F_DIVERGENCES",
    },
    "ms-align kto": {"loss_type": "ms_align.losses.unpaired:LOSSES"},
    "ms-align grpo": {
        "loss_type": "ms_align.losses.surrogates:LOSS_TYPES",
        "importance_sampling_level": "ms_align.losses.surrogates:LEVELS",
    },
    "ms-align": {"rollout_rs": "ms_align.rollouts.options:REJECTIONS"},
    "ms-compress": {"scheme": "ms_compress.targets.rules:NAMES"},
}
"""Tables whose names are the values of a key; the default comes first."""
LISTS = {"ms-align dpo": {"loss_type": ["orpo", "hinge"]}}
"""Another value of a key with a table: a list of its names."""

FIXED = {
    "set by every run": "steps batch_size sequence_length output_dir seed resume progress log_every"
    " device vocab_size held_out_fraction num_generations max_new_tokens rows eval_batches"
    " reward_model teacher_model"
    " tuning.steps tuning.batch_size tuning.sequence_length tuning.seed timeout_s iters",
    "a number in one formula that no other key uses": "learning_rate warmup_steps betas eps"
    " final_learning_rate_ratio weight_decay spike_factor spike_window"
    " balance_bias_rate mtp_weight beta desirable_weight undesirable_weight"
    " center_rewards_coefficient margin_scale gamma lam"
    " value_coeff value_clip"
    " clip_low clip_high min_p kl_horizon reward_failure_penalty"
    " equal_rewards_limit decay_steps"
    " uncertainty_rate importance_sampling_clip_min importance_sampling_clip_max"
    " max_logprob_difference tuning.learning_rate tuning.scale_rate tuning.max_grad_norm"
    " lora.rank lora.alpha lora.target_modules lora.use_rslora lora.quantize_base"
    " lora.use_dora lora.target_parameters lora.dropout lora.init_lora_weights lora.expert_files"
    " tasks.* layout.*",
    "only how much is saved or shown": "keep_checkpoints sample_tokens eval_samples eval_batches",
    "a file or table with its own tests": "model_config cluster devices text_column"
    " task_weights teacher_weights held_out response_dataset stop_token_ids tuning",
    "only an object store, with its own tests": "dataset_cache dataset_cache_mib checkpoint_store",
    "only how the server of rollouts is reached, with its own tests": "vllm.*",
    "only with a chat template, with its own tests": "tools environment agent tool_limits"
    " tool_limits.* max_tool_calling_iterations max_episode_tokens",
    "a limit on the choice of another key": "memory_gib schedule_memory_gib",
    "another way to set the length of a run, exclusive with steps": "epochs",
}
"""Excluded keys by reason."""


def package_of(command: str) -> str:
    """Package of a command: `ms-align sft` -> `ms-align`."""
    return command.partition(" ")[0]


def fixed_keys() -> dict[str, str]:
    """Reason for each excluded key or pattern of keys of a table."""
    return {key: reason for reason, keys in FIXED.items() for key in keys.split()}


def is_fixed(key: str) -> bool:
    """Whether a key is excluded, by its name or its table's name."""
    fixed = fixed_keys()
    table, dot, _ = key.partition(".")
    return key in fixed or (bool(dot) and f"{table}.*" in fixed)


def values_of(command: str, row: Any) -> list[Any] | None:
    """Values of a key; None if they are unknown."""
    for name in (command, package_of(command)):
        if row.name in VALUES.get(name, {}):
            return VALUES[name][row.name]
        if row.name in REGISTRIES.get(name, {}):
            module, _, table = REGISTRIES[name][row.name].partition(":")
            names = list(getattr(import_module(module), table))
            unset = UNSET if row.default == "" else names[0]  # a required key has no default
            default = json.loads(row.default) if row.default else unset
            lists = [LISTS[name][row.name]] if row.name in LISTS.get(name, {}) else []
            return [default, *(item for item in names if item != default), *lists]
    if row.accepted.startswith("`"):
        choices = [word.strip("` ") for word in row.accepted.split(",")]
        default = json.loads(row.default) if row.default else UNSET
        return [default, *(choice for choice in choices if choice != default)]
    if row.types == ("true or false",):
        return [row.default == "true", row.default != "true"]
    return None


def axes_of(command: str) -> dict[str, list[Any]]:
    """Values of each axis of a command."""
    axes = {}
    for section in run_keys.commands()[command]():
        for row in section.rows:
            if is_fixed(row.name):
                continue
            values = values_of(command, row)
            if values is not None and len(values) > 1:
                axes[row.name] = values
    return axes


def unknown_keys(command: str) -> list[str]:
    """Keys that are neither an axis nor excluded."""
    rows = [row for section in run_keys.commands()[command]() for row in section.rows]
    return [row.name for row in rows if not is_fixed(row.name) and values_of(command, row) is None]
