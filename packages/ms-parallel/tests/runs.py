"""Small training runs that every layout must reproduce, for `run_processes`."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ms_parallel import checkpoint
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss, Output
from ms_parallel.models import ModelConfig, TransformerXLConfig, architecture
from ms_parallel.models.batch import Batch
from ms_parallel.models.family import families
from ms_parallel.optim.optimizers.adamw import AdamWConfig
from ms_parallel.proof.probes import probe_generation
from ms_parallel.proof.records import Counterexample
from ms_parallel.weights import save_model

families()  # imports all families here once instead of lazily in every process
ROWS, LENGTH, VOCABULARY = 4, 16, 48

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"num_key_value_heads": 4},
    "grouped": {"num_key_value_heads": 2},
    "tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "tied grouped": {"num_key_value_heads": 2, "tie_word_embeddings": True},
}

FAMILIES: dict[str, dict[str, Any]] = {
    "biases": {"attention_bias": True, "mlp_bias": True},
    "transformer-xl": {"model_type": "transformer-xl", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "query_key_norm": True, "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 5, "sliding_window": 9},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [0],
        "router_aux_loss_coef": 0.05,
    },
    "olmoe": {
        "model_type": "olmoe",
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 0.05,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 4,
        "q_lora_rank": 12,
        "kv_lora_rank": 10,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 20,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "attention_bias": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "sliding_window": 5,
        "sliding_layers": [0, 2],
        "num_local_experts": 5,
    },
}
"""All other features that a plan has to split."""


def tiny(**settings: Any) -> ModelConfig:
    """Config of a model with three layers, so that two stages differ."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 8,
        "initializer_range": 0.1,
        **settings,
    }
    if settings.get("model_type") == "transformer-xl":
        return TransformerXLConfig(**{"segment_length": 4, "memory_length": 4, **sizes})
    return architecture(sizes.get("model_type", "llama"), {"num_key_value_heads": 2, **sizes})


def global_batch(step: int, rows: int = ROWS, length: int = LENGTH) -> dict[str, Tensor]:
    """Two documents per row with random boundaries; rows differ in the number of targets."""
    generator = torch.Generator().manual_seed(step)
    start = torch.randint(0, VOCABULARY, (rows, 1), generator=generator)
    stride = torch.randint(1, 4, (rows, 1), generator=generator)
    text = (start + stride * torch.arange(length + 1)) % VOCABULARY  # learnable: counting by stride
    cut = torch.randint(3, length - 3, (rows, 1), generator=generator)
    at = torch.arange(length).expand(rows, length)
    targets = text[:, 1:].clone()
    targets[at == cut - 1] = -100
    ignored = torch.arange(rows)[:, None]  # later rows lack more targets
    targets[at < ignored] = -100
    return {
        "tokens": text[:, :-1].contiguous(),
        "targets": targets,
        "positions": torch.where(at < cut, at, at - cut),
        "documents": (at >= cut).int(),
        "weights": torch.rand(rows, length, generator=generator) + 0.5,
    }


def local_rows(batch: Batch, groups: Groups) -> dict[str, Tensor]:
    """Rows of a global batch that this data rank reads."""
    rows = len(batch["tokens"]) // groups.layout.data
    start = groups.place.data * rows
    return {name: value[start : start + rows] for name, value in batch.items()}


OPTIMIZER = AdamWConfig(
    learning_rate=5e-3, warmup_steps=5, decay_steps=40, weight_decay=0.1, max_grad_norm=1.0
)


def train(engine: Engine, steps: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of `steps` updates."""
    losses, norms = [], []
    for step in range(steps):
        update = engine.step(local_rows(global_batch(step), engine.groups), NextTokenLoss())
        losses.append(update.loss)
        norms.append(update.grad_norm)
    return losses, norms


def build(settings: dict[str, Any], groups: Groups, **options: Any) -> Engine:
    """Engine of a tiny model with microbatches of one or two rows."""
    return Engine(
        tiny(**settings), groups=groups, **{"optimizer": OPTIMIZER, "microbatch_size": 2, **options}
    )


def curves(jobs: list[dict[str, Any]], device: str | None = "cpu") -> list[dict[str, Any]]:
    """Losses and gradient norms of each job, in one set of processes.

    A job has `layout`, model `settings`, `steps` and engine `options`.
    """
    torch.set_num_threads(1)
    groups_by_layout: dict[str, Groups] = {}
    results = []
    for job in jobs:
        layout = job["layout"]
        if layout not in groups_by_layout:
            groups_by_layout[layout] = connect(Layout.parse(layout), device=device, timeout_s=120)
        engine = build(job["settings"], groups_by_layout[layout], **job.get("options", {}))
        losses, norms = train(engine, job["steps"])
        results.append({"losses": losses, "norms": norms})
    return results


PROMPTS = [[5, 6, 7, 8], [11], [20, 22, 24, 26, 28], [3, 6, 9]]


def passed_probes(layout: str) -> list[str]:
    """Checks that passed in a generation probe of a model with four key-value heads."""
    torch.set_num_threads(1)
    groups = connect(Layout.parse(layout), device="cpu", timeout_s=120)
    outcome = probe_generation(build({"num_key_value_heads": 4}, groups), global_batch(0))
    return [outcome.what] if isinstance(outcome, Counterexample) else list(outcome)


def token_losses(output: Output, batch: Batch) -> Tensor:
    """Token losses of a batch; a module-level function, as all processes must pass the same one."""
    return output.token_losses(batch["targets"])


def evaluation_results(engine: Engine) -> dict[str, Any]:
    """Results of evaluation and generation, which do not change an engine."""
    groups = engine.groups
    local = local_rows(global_batch(99), groups)
    prompts_per_rank = len(PROMPTS) // groups.layout.data
    prompts = PROMPTS[groups.place.data * prompts_per_rank :][:prompts_per_rank]
    logits = engine.evaluate(local, lambda output, _: output.logits())
    return {
        "data": groups.place.data,
        "losses": engine.evaluate(local, token_losses).tolist(),
        "from logits": torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).cpu(), local["targets"].flatten(), reduction="none"
        ).tolist(),
        "greedy": engine.generate(prompts, max_new_tokens=3, temperature=0.0),
        "sampled": engine.generate(
            prompts, max_new_tokens=3, temperature=1.0, top_k=20, top_p=0.95, min_p=0.01, seed=3
        ),
    }


def save_and_evaluate(
    layouts: list[str], settings: dict[str, Any], folder: str, device: str | None = "cpu"
) -> list[dict[str, Any]]:
    """Train under each layout, save, and collect evaluation results and the next two losses."""
    torch.set_num_threads(1)
    results = []
    for layout in layouts:
        engine = build(settings, connect(Layout.parse(layout), device=device, timeout_s=120))
        train(engine, 2)
        save_model(list(engine.stages.values()), Path(folder, f"{layout} model"))
        checkpoint.save(Path(folder, layout), engine.state_dict(), step=engine.step_count, facts={})
        results.append({**evaluation_results(engine), "next": train(engine, 2)})
    return results


def load_and_evaluate(
    jobs: list[tuple[str, str]], settings: dict[str, Any], folder: str, device: str | None = "cpu"
) -> list[dict[str, Any]]:
    """Load each saved checkpoint under another layout, and collect the same results."""
    torch.set_num_threads(1)
    results = []
    for saved, layout in jobs:
        groups = connect(Layout.parse(layout), device=device, timeout_s=120)
        engine = build(settings, groups, seed=7)
        state, path = engine.state_dict(), Path(folder, saved)
        checkpoint.load(path, checkpoint.read_manifest(path), state)
        engine.load_state_dict(state)
        reloaded = Engine(Path(folder, f"{saved} model"), groups=groups)
        reloaded_losses = reloaded.evaluate(
            local_rows(global_batch(99), groups), token_losses
        ).tolist()
        results.append(
            {
                **evaluation_results(engine),
                "step": engine.step_count,
                "next": train(engine, 2),
                "losses of the folder": reloaded_losses,
            }
        )
    return results
