"""A setting that another setting makes useless is refused in one line when options are built."""

import re
from typing import Any

import pytest

from ms_align import (
    ConfigError,
    DPOTrainer,
    GKDTrainer,
    GRPOTrainer,
    LoraOptions,
    PPOTrainer,
    RLOOTrainer,
    SFTTrainer,
    TaskOptions,
    VllmOptions,
)

ONLINE = {"policy_model": "model", "reward_model": "judge:score"}
OFFLINE = {"model": "model", "steps": 1}
TRAINERS: dict[Any, dict[str, Any]] = {
    **dict.fromkeys((PPOTrainer, GRPOTrainer, RLOOTrainer), ONLINE),
    **dict.fromkeys((DPOTrainer, SFTTrainer), OFFLINE),
    GKDTrainer: {**OFFLINE, "teacher_model": "teacher"},
    LoraOptions: {},
    TaskOptions: {},
    VllmOptions: {"url": "http://localhost:8000"},
}


@pytest.mark.parametrize(
    ("trainer", "settings", "message"),
    [
        (PPOTrainer, {"kl_horizon": 5}, "kl_horizon is only used with kl_target, so 5 has no eff"),
        (PPOTrainer, {"value_coeff": 0.5, "value_model": "copy"}, "value_coeff is only used with"),
        (PPOTrainer, {"reward_failure_penalty": -2.0}, "is only used with on_reward_failure="),
        (PPOTrainer, {"max_logprob_difference": 0.5}, "is only used with rollouts from servers"),
        (PPOTrainer, {"merge": False}, "merge is only used with lora, so False has no effect"),
        (PPOTrainer, {"max_episode_tokens": 9}, "is only used with tools, an environment or an"),
        (PPOTrainer, {"max_tool_calling_iterations": 9}, "is only used with tools, so 9 has no"),
        (GRPOTrainer, {"sapo_temperature_pos": 2.0}, "is only used with loss_type='sapo'"),
        (GRPOTrainer, {"clip_high": 0.3, "loss_type": "sapo"}, "clip_high is only used by losses"),
        (
            GRPOTrainer,
            {"scale_rewards": "none", "advantage_estimator": "reinforce_plus_plus"},
            "scale_rewards is only used with advantage_estimator='grpo', so none has",
        ),
        (
            RLOOTrainer,
            {"importance_sampling_correction": False, "importance_sampling_clip_max": 2.0},
            "importance_sampling_clip_max is only used with importance_sampling_correction=true",
        ),
        (DPOTrainer, {"label_smoothing": 0.1, "loss_type": "hinge"}, "is only used by the losses"),
        (DPOTrainer, {"simpo_gamma": 1.0}, "simpo_gamma is only used by the loss simpo, so 1.0"),
        (DPOTrainer, {"f_alpha_divergence_coef": 0.7}, "is only used with f_divergence_type="),
        (
            DPOTrainer,
            {"reference_free": True, "reference_model": "m"},
            "reference_model is only used by losses of log-ratios, without reference_free",
        ),
        (SFTTrainer, {"uncertainty_rate": 0.1}, "is only used with uncertainty=true"),
        (TaskOptions, {"slow_smoothing": 0.9}, "tasks.slow_smoothing is only used with tasks.sig"),
        (LoraOptions, {"expert_files": "stacked"}, "lora.expert_files is only used with lora.tar"),
        (VllmOptions, {"start_timeout_s": 9.0}, "vllm.start_timeout_s is only used with vllm.pyt"),
    ],
)
def test_a_setting_without_effect_is_refused(
    trainer: Any, settings: dict[str, Any], message: str
) -> None:
    """The message names the setting, the condition and the value; defaults are accepted."""
    with pytest.raises(ConfigError, match=re.escape(message)):
        trainer(**TRAINERS[trainer], **settings)
    trainer(**TRAINERS[trainer])
