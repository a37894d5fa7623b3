"""Two-digit addition in characters: judged exactly and learned in minutes."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ms_align import LocalEngine, Sample
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.losses.protocol import IGNORED, Batch, Output
from ms_parallel.models import architecture, build_model
from ms_parallel.weights import initialize

CHARACTERS = "0123456789+="
END = len(CHARACTERS)
HELD_OUT_SHARE = 0.2


class Characters:
    """Tokenizer with one token per character and an end token."""

    vocabulary_size = END + 1

    def encode(self, text: str) -> list[int]:
        """Return one token per character."""
        return [CHARACTERS.index(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the characters without the end token."""
        return "".join(CHARACTERS[token] for token in tokens if token < END)


def problems(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Return all sums of two numbers from 10 to 99, split into training and held-out rows."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [
        {"prompt": f"{a}+{b}=", "answer": str(a + b)} for a, b in (pairs[index] for index in order)
    ]
    cut = int(len(rows) * HELD_OUT_SHARE)
    return rows[cut:], rows[:cut]


def exact(samples: Sequence[Sample]) -> list[float]:
    """Reward 1 for a response that is the right sum and stops there, else 0."""
    return [float(sample.stopped and sample.response == sample.answer) for sample in samples]


class Shuffled:
    """The rewards of `exact`, assigned to other samples: same distribution, no information."""

    __name__ = "shuffled"

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Return the rewards of `exact` in random order."""
        rewards = exact(samples)
        order = torch.randperm(len(rewards), generator=self.generator).tolist()
        return [rewards[index] for index in order]


def model(seed: int) -> nn.Module:
    """Build a decoder with 4 layers, 128 wide."""
    sizes = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "intermediate_size": 344,
        "vocab_size": END + 1,
        "tie_word_embeddings": True,
    }
    built = build_model(architecture("llama", sizes))
    initialize(built, seed=seed)
    return built


class Imitation:
    """Mean negative log-likelihood of the answer characters."""

    statistics = ()

    def weight(self, batch: Batch) -> float:
        """Return the number of targets."""
        return float((batch["targets"] != IGNORED).sum())

    def __call__(self, output: Output, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the sum of the token losses."""
        return output.token_losses(batch["targets"]).sum(), torch.zeros(0)


def imitate(policy: nn.Module, rows: Sequence[dict[str, str]], *, steps: int, seed: int) -> None:
    """Train on right answers for this many updates of 128 rows, as a start for PPO."""
    engine = LocalEngine(policy, OptimizerOptions(learning_rate=1e-3, warmup_steps=20))
    tokenizer, generator = Characters(), torch.Generator().manual_seed(seed)
    texts = [[*tokenizer.encode(row["prompt"] + row["answer"]), END] for row in rows]
    width = max(map(len, texts)) - 1
    tokens, targets = torch.zeros(len(rows), width).long(), torch.full((len(rows), width), IGNORED)
    for index, (text, row) in enumerate(zip(texts, rows, strict=True)):
        tokens[index, : len(text) - 1] = torch.tensor(text[:-1])
        start = len(row["prompt"]) - 1
        targets[index, start : len(text) - 1] = torch.tensor(text[start + 1 :])
    for _ in range(steps):
        indices = torch.randint(len(rows), (128,), generator=generator)
        engine.step({"tokens": tokens[indices], "targets": targets[indices]}, Imitation())
