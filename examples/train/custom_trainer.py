"""How do I write my own training loop around my own module?

    python examples/train/custom_trainer.py --steps 40

`TokenStream` reads shards, `Engine` trains the module (with any layout under torchrun), `Recorder`
records where the time goes, and `EventLog` stores the losses. The output shows the loss and the
share of each step spent on data, forward, backward and optimizer. All files are in `--folder`.
"""

import argparse
import email
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ms_data import TokenStream, build, train_tokenizer
from ms_parallel import AdamWConfig, Engine, ModelPlan, NextTokenLoss
from ms_profile import EventLog, Kind, Recorder, read_events, read_ring

CORPUS = Path(email.__file__).parent
"""The standard library's email package, about 400 kB of Python."""
WIDTH, VOCABULARY, ROW = 64, 512, 64


class Recurrent(nn.Module):
    """GRU layers with residuals, from tokens (B, S) to logits (B, S, V)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

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
            hidden = hidden + layer(hidden)[0]
        logits: Tensor = self.head(hidden)
        return logits


def shards(folder: Path) -> Path:
    """Build tokenized shards of the corpus, unless they exist."""
    if not (folder / "shards").exists():
        folder.mkdir(parents=True, exist_ok=True)
        train_tokenizer(CORPUS, vocab_size=VOCABULARY, out=folder / "tokenizer.json")
        build(
            CORPUS,
            tokenizer=folder / "tokenizer.json",
            out=folder / "shards",
            held_out_fraction=0.05,
        )
    return folder / "shards"


def main(arguments: list[str] | None = None) -> None:
    """Train, and print losses and the time breakdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("custom-trainer"))
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    engine = Engine(
        Recurrent(),
        plan=ModelPlan(blocks="layers.*"),
        optimizer=AdamWConfig(learning_rate=1e-2, warmup_steps=5, decay_steps=options.steps),
        device="cpu",
    )
    stream = TokenStream(shards(options.folder), sequence_length=ROW, batch_size=16, seed=0)
    events = EventLog(options.folder / "events")
    with events, Recorder(options.folder / "rank-0.ring") as recorder:
        recorder.attach()
        for batch in recorder.batches(stream):
            report = engine.step(batch, NextTokenLoss())
            events("step", {"step": engine.step_count, "loss": report.loss})
            if engine.step_count % 10 == 0:
                print(f"step {engine.step_count:>4}  loss {report.loss:.3f}", flush=True)
            if engine.step_count == options.steps:
                break

    losses = [event.fields["loss"] for event in read_events(options.folder / "events")]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    spans = read_ring(options.folder / "rank-0.ring").spans
    times = (spans["end_ns"] - spans["start_ns"]).astype(np.float64)
    total = times[spans["kind"] == Kind.STEP].sum()
    for phase in (Kind.DATA, Kind.MODULE, Kind.BACKWARD, Kind.OPTIMIZER):
        print(
            f"{phase.name.lower():>10} {times[spans['kind'] == phase].sum() / total:6.1%} of steps"
        )


if __name__ == "__main__":
    main()
