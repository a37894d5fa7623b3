"""Names of settings in other tools, for the suggestion in the message about an unknown key."""

from collections.abc import Iterable

from .validators import nearest

SYNONYMS: dict[str, tuple[str, ...]] = {
    # Hugging Face Trainer, TRL, axolotl and LLaMA-Factory
    "max_steps": ("steps",),
    "num_epochs": ("epochs",),
    "num_train_epochs": ("epochs",),
    "num_iterations": ("epochs",),
    "num_ppo_epochs": ("epochs",),
    "per_device_train_batch_size": ("microbatch_size", "batch_size"),
    "gradient_accumulation_steps": ("microbatch_size", "batch_size"),
    "gradient_checkpointing": ("recompute",),
    "activation_checkpointing": ("recompute",),
    "bf16": ("mixed_precision",),
    "fp16": ("mixed_precision",),
    "torch_compile": ("compile",),
    "lr": ("learning_rate", "tuning.learning_rate"),
    "lr_scheduler": ("learning_rate_decay",),
    "lr_scheduler_type": ("learning_rate_decay",),
    "warmup_ratio": ("warmup_steps",),
    "adam_beta1": ("betas",),
    "adam_beta2": ("betas",),
    "adam_epsilon": ("eps",),
    "gradient_clipping": ("max_grad_norm",),
    "save_steps": ("checkpoint_every",),
    "save_total_limit": ("keep_checkpoints",),
    "eval_steps": ("eval_every",),
    "logging_steps": ("log_every",),
    "resume_from_checkpoint": ("resume",),
    "train_dataset": ("dataset",),
    "datasets": ("dataset",),
    "base_model": ("model",),
    "model_arch": ("model",),
    "dataset_path": ("dataset",),
    "model_name_or_path": ("model",),
    "max_length": ("sequence_length",),
    "max_seq_length": ("sequence_length", "tuning.sequence_length"),
    "max_seq_len": ("sequence_length", "tuning.sequence_length"),
    "sequence_len": ("sequence_length",),
    "cutoff_len": ("sequence_length",),
    "packing": ("open_rows",),
    "sample_packing": ("open_rows",),
    "val_set_size": ("held_out_fraction",),
    "eval_dataset": ("held_out",),
    "truncation_mode": ("long",),
    "excess_length_strategy": ("long",),
    "adapter": ("lora",),
    "lora_alpha": ("lora.alpha",),
    "lora_r": ("lora.rank",),
    "lora_rank": ("lora.rank",),
    "r": ("rank",),
    "lora_target_modules": ("lora.target_modules",),
    "merge_lora": ("merge",),
    # TRL and verl
    "beta": ("kl_coeff",),
    "kl_loss_coef": ("kl_coeff",),
    "target_kl": ("kl_target",),
    "ref_model": ("reference_model",),
    "reward_funcs": ("reward_model",),
    "reward_fn": ("reward_model",),
    "epsilon": ("clip_low", "eps"),
    "epsilon_high": ("clip_high",),
    "cliprange": ("clip_low",),
    "clip_ratio": ("clip_low",),
    "clip_ratio_low": ("clip_low",),
    "clip_ratio_high": ("clip_high",),
    "cliprange_value": ("value_clip",),
    "vf_coef": ("value_coeff",),
    "loss_type": ("loss",),
    "loss_agg_mode": ("loss_type",),
    "aggregation": ("loss_type",),
    "num_return_sequences": ("num_generations",),
    "n": ("num_generations",),
    "group_size": ("num_generations",),
    "slots": ("max_num_seqs",),
    "centring": ("center_rewards_coefficient",),
    "stop_tokens": ("stop_token_ids",),
    "stop_token_id": ("stop_token_ids",),
    "response_length": ("max_new_tokens",),
    "max_completion_length": ("max_new_tokens",),
    "max_tokens": ("max_new_tokens",),
    "prompts": ("dataset",),
    "data": ("dataset",),
    "stop": ("stop_strings",),
    "use_vllm": ("generator",),
    "vllm_mode": ("vllm.url", "vllm"),
    "vllm_server_base_url": ("vllm.url",),
    "vllm_server_host": ("vllm.url",),
    "vllm_server_timeout": ("vllm.timeout_s",),
    "vllm_importance_sampling_correction": ("importance_sampling_correction",),
    "vllm_importance_sampling_mode": ("importance_sampling_mode",),
    "vllm_importance_sampling_cap": ("importance_sampling_clip_max",),
    "vllm_importance_sampling_clip_max": ("importance_sampling_clip_max",),
    "vllm_importance_sampling_clip_min": ("importance_sampling_clip_min",),
    # Megatron-LM and torchtitan
    "global_batch_size": ("batch_size",),
    "train_iters": ("steps",),
    "training_steps": ("steps",),
    "seq_len": ("sequence_length",),
    "seq_length": ("sequence_length",),
    "tensor_model_parallel_size": ("layout.tensor", "layout"),
    "tensor_parallel_size": ("layout.tensor", "layout"),
    "pipeline_model_parallel_size": ("layout.pipeline", "layout"),
    "context_parallel_size": ("layout.context", "layout"),
    "expert_model_parallel_size": ("layout.expert", "layout"),
    "data_parallel_size": ("layout.data", "layout"),
    "lr_warmup_iters": ("warmup_steps",),
    "lr_decay_style": ("learning_rate_decay",),
    "min_lr": ("final_learning_rate_ratio",),
    "clip_grad": ("max_grad_norm",),
    "save": ("output_dir",),
    "save_interval": ("checkpoint_every",),
    "eval_interval": ("eval_every",),
    "eval_iters": ("eval_batches",),
    "log_interval": ("log_every",),
    "pipeline_schedule": ("schedule",),
    "recompute_granularity": ("recompute",),
    "deterministic_mode": ("reproducible",),
    "deterministic": ("reproducible",),
    "moe_aux_loss_coeff": ("balance_coefficient",),
    "router_aux_loss_coef": ("balance_coefficient",),
    "moe_z_loss_coeff": ("router_z_loss_coefficient",),
    "z_loss": ("z_loss_coefficient",),
    "mtp_loss_scaling_factor": ("mtp_weight",),
    # lm-evaluation-harness
    "fewshot": ("num_fewshot",),
    "few_shot": ("num_fewshot",),
    "task_folder": ("include_path",),
    "chat": ("apply_chat_template",),
    "chat_template": ("apply_chat_template",),
    "out": ("output_path", "output_dir"),
    # llm-compressor and torchtune
    "num_calibration_samples": ("rows",),
    "exceptions": ("ignore",),
    "targets": ("target_modules", "scheme"),
    "target": ("scheme",),
    "desc_act": ("act_order",),
    "by_use": ("act_order",),
    "kd_ratio": ("tuning.distill_weight",),
    "intermediate_size": ("inner",),
    "num_hidden_layers": ("layers",),
}
"""Candidates by the other tool's name; the first that a command has is suggested."""


MAX_REMEDY = 500
"""Maximum length of a list of all keys, in characters."""


def nearest_key(name: str, known: Iterable[str]) -> str:
    """Return the remedy for an unknown key: its name here, the nearest key, or all keys.

    Args:
        name: unknown key.
        known: keys of the command; a dotted candidate needs only its table.
    """
    known = set(known)
    for candidate in SYNONYMS.get(name.lower().replace("-", "_"), ()):
        if candidate.partition(".")[0] in known:
            return f"did you mean {candidate!r}?"
    remedy = nearest(name, known)
    if len(remedy) > MAX_REMEDY:
        return f"none of the {len(known)} keys is similar; `init` writes a run file with all keys"
    return remedy
