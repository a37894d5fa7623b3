"""How do I split my own model over processes with a plan?

    torchrun --standalone --nproc-per-node 2 examples/train/own_model_with_plan.py

The module is plain single-device code. Its `ModelPlan` declares which weights tensor parallelism
splits, which modules are blocks, and where a pipeline can be cut. One process, tensor=2 and
pipeline=2 then give the same losses, up to float32 rounding.
"""

import json
import os

import torch
from torch import Tensor, nn

from ms_parallel import AdamWConfig, Engine, Layout, ModelPlan, NextTokenLoss

WIDTH, INNER, VOCABULARY, ROW = 32, 128, 256, 48


class Block(nn.Module):
    """Mixes each token with the previous token, then applies a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.up = nn.Linear(2 * WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        previous = nn.functional.pad(hidden, (0, 0, 1, -1))
        mixed = self.norm(torch.cat((hidden, previous), dim=-1))
        out: Tensor = hidden + self.down(self.up(mixed).relu())
        return out


class Mixer(nn.Module):
    """A small language model; each layer extends the context by one token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(
        self,
        tokens: Tensor,
        *,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
        cache: object = None,
    ) -> Tensor:
        """Logits (B, S, V)."""
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


PLAN = ModelPlan(
    tensor={
        "embed": "replicated",
        "layers.*.norm": "replicated",
        "layers.*.up": "column",  # splits rows of the weight: output features
        "layers.*.down": "row",  # splits columns; outputs are summed over ranks
        "head": "column_to_whole",
    },
    blocks="layers.*",
    cuts=(0, 1, 2, 3),
    embedding=("embed",),
    head=("head",),
    split_sequence=False,  # a token needs the previous one, which may be on another rank
)


def losses(layout: Layout, text: bytes) -> list[float]:
    """Losses of eight updates with this layout, from fixed weights and data."""
    torch.manual_seed(0)
    config = AdamWConfig(learning_rate=1e-2)
    engine = Engine(Mixer(), layout, plan=PLAN, optimizer=config, device="cpu", microbatch_size=4)
    rows = torch.tensor(list(text[: 8 * 8 * (ROW + 1)])).view(8, 8, ROW + 1)
    losses_per_step = []
    for batch in rows:
        local = batch.chunk(engine.data_ranks)[engine.data_rank]
        report = engine.step({"tokens": local[:, :-1], "targets": local[:, 1:]}, NextTokenLoss())
        losses_per_step.append(report.loss)
    return losses_per_step


def main() -> None:
    """Train with each layout in the processes that torchrun started."""
    with open(json.__file__, "rb") as file:
        text = file.read()
    count = int(os.environ.get("WORLD_SIZE", "1"))
    layouts = [Layout(data=count)]
    layouts += [Layout(tensor=count), Layout(pipeline=count)] if count > 1 else []
    results = {str(layout): losses(layout, text) for layout in layouts}
    if os.environ.get("RANK", "0") == "0":
        for layout, layout_losses in results.items():
            print(f"{layout:>12}: {' '.join(f'{loss:.5f}' for loss in layout_losses)}", flush=True)
    first = next(iter(results.values()))
    assert all(
        abs(a - b) < 1e-4
        for layout_losses in results.values()
        for a, b in zip(layout_losses, first, strict=True)
    )


if __name__ == "__main__":
    main()
