"""A custom language model and runs with it, for `test_own_model.py`."""

from pathlib import Path
from typing import Any

import torch
from runs import VOCABULARY, global_batch, local_rows
from torch import Tensor, nn
from torch.nn import functional as F

from ms_parallel import AdamWConfig, Engine, Layout, ModelPlan, NextTokenLoss, ParallelError
from ms_parallel import checkpoint as checkpoints
from ms_parallel.cluster.connection import connect

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    """Plain attention; the number of heads follows from the local width."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, *, mask: Tensor) -> Tensor:
        """(B, S, H) and (B, 1, S, S) to (B, S, H)."""
        q, k, v = (
            part(hidden).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two linear layers with GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        return self.down(F.gelu(self.up(hidden)))


class Layer(nn.Module):
    """Pre-norm attention and feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.inner_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.feed = FeedForward()

    def forward(self, hidden: Tensor, *, mask: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        hidden = hidden + self.attention(self.attention_norm(hidden), mask=mask)
        return hidden + self.feed(self.inner_norm(hidden))


class Mine(nn.Module):
    """A custom model without position embeddings."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.tensor(1.0 + seed))

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: Any = None,
    ) -> Tensor:
        """(B, S) to logits (B, S, V)."""
        count = tokens.shape[1]
        order = torch.ones(count, count, dtype=torch.bool, device=tokens.device)
        mask = order.tril()[None, None]
        if documents is not None:
            mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
        hidden = self.embed(tokens) * self.scale
        for layer in self.layers:
            hidden = layer(hidden, mask=mask)
        return self.head(self.norm(hidden))


PLAN = ModelPlan(
    tensor={
        "embed": "vocabulary",
        "layers.*.attention_norm": "sequence",
        "layers.*.inner_norm": "sequence",
        "layers.*.attention.query": "column",
        "layers.*.attention.key": "column",
        "layers.*.attention.value": "column",
        "layers.*.attention.out": "row",
        "layers.*.feed.up": "column",
        "layers.*.feed.down": "row",
        "norm": "sequence",
        "head": "vocabulary",
    },
    blocks="layers.*",
    embedding=("embed",),
    head=("norm", "head"),
)


def train_jobs(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Losses of each job; processes initialize differently and get the weights of the first."""
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        model = Mine(seed=groups.place.data)
        engine = Engine(
            model,
            groups=groups,
            plan=PLAN if job.get("plan") else None,
            optimizer=AdamWConfig(learning_rate=5e-3, warmup_steps=2, decay_steps=20),
            microbatch_size=job.get("microbatch_size"),
            recompute=job.get("recompute", "none"),
        )
        losses = []
        for step in range(job["steps"]):
            if step == job.get("keep"):
                folder = Path(job["folder"])
                state = engine.state_dict()
                checkpoints.save(folder, state, step=engine.step_count, facts={})
                engine.load_state_dict({name: value.clone() for name, value in state.items()})
            losses.append(engine.step(local_rows(global_batch(step), groups), NextTokenLoss()).loss)
        rows = local_rows(global_batch(99), groups)
        answer = engine.evaluate(rows, lambda output, _: output.logits()[:, -1])
        results.append({"losses": losses, "sum": float(answer.sum()), "data": groups.place.data})
    return results


def refusals(layouts: list[str]) -> list[str]:
    """Messages of layouts that are refused."""
    messages = []
    for layout in layouts:
        try:
            Engine(Mine(), Layout.parse(layout), device="cpu")
        except ParallelError as error:
            messages.append(str(error))
    return messages
