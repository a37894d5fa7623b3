"""Tiny transformers models and runs with them, for `test_transformers.py` and others."""

from pathlib import Path
from typing import Any

import torch
import transformers
from runs import VOCABULARY, global_batch, local_rows
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ms_parallel import AdamWConfig, Engine, Layout, NextTokenLoss, ParallelError, load_model
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.groups import Groups
from ms_parallel.models import TransformersModel
from ms_parallel.optim.optimizer import learning_rate
from ms_parallel.split.part import gather_full_tensor

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

# The delta rule with normalized keys amplifies roundings at higher rates, also in plain torch.
OPTIMIZER = AdamWConfig(learning_rate=1e-3, warmup_steps=2, decay_steps=20)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_hidden_layers": 4,
}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen3": {},
    "qwen3_5_text": DELTA,
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma2": {"num_hidden_layers": 4, "query_pre_attn_scalar": 8, **WINDOWS},
    "gemma3_text": {"num_hidden_layers": 4, "query_pre_attn_scalar": 8, **WINDOWS},
    "glm4": {},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_hidden_layers": 4,
        "num_experts_per_tok": 2,
        **WINDOWS,
    },
    "phi3": {},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "qwen3_next": {"num_experts": 4, "shared_expert_intermediate_size": 16, **EXPERTS, **DELTA},
}

MORE = {
    "recurrent_gemma": {
        "lru_width": 32,
        "attention_window_size": 5,
        "block_types": ["recurrent", "attention", "recurrent"],
    },
    "qwen2_moe": {
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "use_sliding_window": True,
        "sliding_window": 3,
        "max_window_layers": 1,
        **EXPERTS,
    },
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3},
    "codegen": {"rotary_dim": 4, "n_ctx": 64, "n_positions": 64, "n_inner": 64},
}
"""Families with features that the others lack."""


def hf_model(family: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model with random weights."""
    torch.manual_seed(seed)
    settings = CONFIG_MAPPING[family](
        **{**SIZES, **{**FAMILIES, **MORE}.get(family, {}), **changes}
    )
    return transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="eager")


def separate_logits(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Logits (B, S, V) of a batch, from a separate forward of each document."""
    rows = []
    for tokens, documents in zip(batch["tokens"], batch["documents"], strict=True):
        lengths = documents.unique_consecutive(return_counts=True)[1].tolist()
        parts = [model(part[None], use_cache=False).logits[0] for part in tokens.split(lengths)]
        rows.append(torch.cat(parts))
    return torch.stack(rows)


def plain_torch_losses(family: str, folder: Path, steps: int) -> list[float]:
    """Losses of plain torch in one process with separate documents; saves the initial model."""
    model = hf_model(family)
    model.save_pretrained(folder)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps)
    losses = []
    for step in range(steps):
        batch = global_batch(step)
        logits, targets = separate_logits(model, batch).flatten(0, 1), batch["targets"].flatten()
        token_losses = nn.functional.cross_entropy(logits, targets, reduction="none")
        weights = (batch["weights"] * (batch["targets"] >= 0)).flatten()
        loss = (token_losses * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm or 1e9)
        for group in adam.param_groups:
            group["lr"] = learning_rate(step, OPTIMIZER)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    return losses


def train_jobs(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Losses of each job.

    A job has the model's `folder`, `layout`, `steps`, and optionally engine `options` and a folder
    to `save` to. A refused layout gives the message as `refused`.
    """
    torch.set_num_threads(1)
    groups_by_layout: dict[str, Groups] = {}
    results: list[dict[str, Any]] = []
    for job in jobs:
        layout = job["layout"]
        if layout not in groups_by_layout:
            groups_by_layout[layout] = connect(Layout.parse(layout), device="cpu", timeout_s=120)
        groups = groups_by_layout[layout]
        options = {"optimizer": OPTIMIZER, **job.get("options", {})}
        try:
            engine = Engine(TransformersModel(job["folder"]), groups=groups, **options)
        except ParallelError as error:
            results.append({"refused": str(error)})
            continue
        losses = [
            engine.step(local_rows(global_batch(step), groups), NextTokenLoss()).loss
            for step in range(job["steps"])
        ]
        if "save" in job:
            engine.save(job["save"])
        results.append({"losses": losses})
    return results


def initial_weights(jobs: list[dict[str, Any]]) -> list[dict[str, list[float]]]:
    """Mean and standard deviation of each initial parameter of this rank's stages."""
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        engine = Engine(TransformersModel(job["document"]), groups=groups, seed=3)
        full_weights = {
            name: gather_full_tensor(value.detach()) for name, value in engine.parameters.items()
        }
        results.append({name: _spread(value.double()) for name, value in full_weights.items()})
    return results


def _spread(value: Tensor) -> list[float]:
    return [float(value.mean()), float(value.std())]


def gradient_of(folder: str, layout: str, name: str) -> list[float]:
    """Gradient norm of the first update, and the change of a weight under plain SGD with rate 1."""
    torch.set_num_threads(1)
    sgd = {"name": "SGD", "momentum": 0.0, "learning_rate": 1.0, "weight_decay": 0.0}
    groups = connect(Layout.parse(layout), device="cpu", timeout_s=120)
    options = {"groups": groups, "optimizer": {**sgd, "max_grad_norm": None}}
    engine = Engine(TransformersModel(folder), **options)
    tokens = torch.arange(3, 27)[None]
    before = gather_full_tensor(engine.parameters[name].detach()).clone()
    update = engine.step({"tokens": tokens, "targets": tokens.roll(-1, 1)}, NextTokenLoss())
    after = gather_full_tensor(engine.parameters[name].detach())
    return [update.grad_norm, float((before - after).sum())]


def logit_sum_of_loaded(folder: str) -> list[float]:
    """Sum of the logits of `load_model`, in a process that has not built a model before."""
    model = load_model(folder)
    return [float(model(torch.arange(3, 27)[None]).detach().double().sum())]
