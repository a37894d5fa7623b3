"""A language model that is nobody's but the user's, and runs of it; see `test_own_model.py`."""

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
    """Plain attention whose heads are counted from the width that is there."""

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
    """Two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, S, H) to the same."""
        return self.down(F.gelu(self.up(hidden)))


class Layer(nn.Module):
    """Attention and a feed-forward, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.inner_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.feed = FeedForward()

    def forward(self, hidden: Tensor, *, mask: Tensor) -> Tensor:
        """(B, S, H) to the same."""
        hidden = hidden + self.attention(self.attention_norm(hidden), mask=mask)
        return hidden + self.feed(self.inner_norm(hidden))


class Mine(nn.Module):
    """Has no positions but the mask's."""

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


def curve(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Losses under each layout; each process draws other weights, and takes the first one's."""
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        mine = Mine(seed=groups.place.data)
        engine = Engine(
            mine,
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
        found.append({"losses": losses, "sum": float(answer.sum()), "data": groups.place.data})
    return found


def refusals(layouts: list[str]) -> list[str]:
    """What each layout that cannot be says."""
    said = []
    for layout in layouts:
        try:
            Engine(Mine(), Layout.parse(layout), device="cpu")
        except ParallelError as error:
            said.append(str(error))
    return said
