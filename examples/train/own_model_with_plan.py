"""How do I split my own model over processes with a plan?

    torchrun --standalone --nproc-per-node 2 examples/train/own_model_with_plan.py

The module is plain single-device code. Its `ModelPlan` says which weights the tensor axis splits,
what is one block, and where a pipeline may cut. One process, tensor=2 and pipeline=2 then print
the same losses, but for float32's rounding.
"""

import json
import os

import torch
from torch import Tensor, nn

from ms_parallel import AdamWConfig, Engine, Layout, ModelPlan, NextTokenLoss

WIDTH, INNER, VOCABULARY, ROW = 32, 128, 256, 48


class Block(nn.Module):
    """Mixes each token with the one before it, then a feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * WIDTH)
        self.up = nn.Linear(2 * WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        before = nn.functional.pad(hidden, (0, 0, 1, -1))
        mixed = self.norm(torch.cat((hidden, before), dim=-1))
        out: Tensor = hidden + self.down(self.up(mixed).relu())
        return out


class Mixer(nn.Module):
    """A small language model; a layer sees one token further back."""

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
        "layers.*.up": "column",  # rows of the matrix, so features of its output
        "layers.*.down": "row",  # columns; its outputs are summed over the ranks
        "head": "column_to_whole",
    },
    blocks="layers.*",
    cuts=(0, 1, 2, 3),
    embedding=("embed",),
    head=("head",),
    split_sequence=False,  # a token needs the one before it, on whichever rank
)


def losses(layout: Layout, text: bytes) -> list[float]:
    """Eight updates under a layout, from the same weights and rows."""
    torch.manual_seed(0)
    config = AdamWConfig(learning_rate=1e-2)
    engine = Engine(Mixer(), layout, plan=PLAN, optimizer=config, device="cpu", microbatch_size=4)
    rows = torch.tensor(list(text[: 8 * 8 * (ROW + 1)])).view(8, 8, ROW + 1)
    found = []
    for batch in rows:
        own = batch.chunk(engine.data_ranks)[engine.data_rank]
        report = engine.step({"tokens": own[:, :-1], "targets": own[:, 1:]}, NextTokenLoss())
        found.append(report.loss)
    return found


def main() -> None:
    """Each layout in turn, in the processes that torchrun started."""
    with open(json.__file__, "rb") as file:
        text = file.read()
    count = int(os.environ.get("WORLD_SIZE", "1"))
    layouts = [Layout(data=count)]
    layouts += [Layout(tensor=count), Layout(pipeline=count)] if count > 1 else []
    told = {str(layout): losses(layout, text) for layout in layouts}
    if os.environ.get("RANK", "0") == "0":
        for layout, found in told.items():
            print(f"{layout:>12}: {' '.join(f'{loss:.5f}' for loss in found)}", flush=True)
    first = next(iter(told.values()))
    assert all(abs(a - b) < 1e-4 for one in told.values() for a, b in zip(one, first, strict=True))


if __name__ == "__main__":
    main()
