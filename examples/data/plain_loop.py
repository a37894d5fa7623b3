"""How do I use ms-data alone in a plain PyTorch loop?

    python examples/data/plain_loop.py --steps 60

The stream yields numpy arrays, and its position in the data is a small JSON dictionary: the loop
stops halfway, saves it, and resumes in a new stream with the next batch. The model is plain torch;
no other package of this repository is imported.
"""

import argparse
import email
import json
from itertools import islice
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ms_data import TokenStream, build, inspect, train_tokenizer, verify

CORPUS = Path(email.__file__).parent
VOCABULARY, ROW, WIDTH = 512, 64, 64


class Convolutional(nn.Module):
    """Causal convolutions with residuals, from tokens (B, S) to logits (B, S, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 4) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (B, S, V)."""
        hidden = self.embed(tokens).transpose(1, 2)
        for layer in self.layers:
            hidden = hidden + layer(nn.functional.pad(hidden, (3, 0))).relu()
        logits: torch.Tensor = self.head(hidden.transpose(1, 2))
        return logits


def stream(folder: Path) -> TokenStream:
    """Stream of the training split, from its start."""
    return TokenStream(folder / "shards", sequence_length=ROW, batch_size=16, seed=0)


def main(arguments: list[str] | None = None) -> None:
    """Build and verify shards, train, and resume halfway."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("plain-loop"))
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args(arguments)
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "shards").exists():
        train_tokenizer(CORPUS, vocab_size=VOCABULARY, out=folder / "tokenizer.json")
        build(
            CORPUS,
            tokenizer=folder / "tokenizer.json",
            out=folder / "shards",
            held_out_fraction=0.05,
        )
    assert verify(folder / "shards").ok
    print(inspect(folder / "shards").splits)

    torch.manual_seed(0)
    model = Convolutional()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batches, half = stream(folder), options.steps // 2
    for step in range(options.steps):
        if step == half:  # simulate a crash: one small file is enough to resume
            (folder / "stream.json").write_text(json.dumps(batches.state_dict()))
            batches = stream(folder)
            batches.load_state_dict(json.loads((folder / "stream.json").read_text()))
        batch = {name: torch.as_tensor(array) for name, array in next(batches).items()}
        logits = model(batch["tokens"])
        loss = cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())  # ignores -100
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:>4}  loss {loss.item():.3f}", flush=True)

    model.eval()
    held_out = TokenStream(
        folder / "shards", sequence_length=ROW, batch_size=8, split="held_out", shuffle=False
    )
    with torch.no_grad():
        losses = [
            cross_entropy(
                model(torch.as_tensor(batch["tokens"])).flatten(0, 1),
                torch.as_tensor(batch["targets"]).flatten(),
            ).item()
            for batch in islice(held_out, 8)
        ]
    print(f"held-out loss {sum(losses) / len(losses):.3f}")


if __name__ == "__main__":
    main()
