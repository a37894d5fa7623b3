"""Train a reward model on a sentiment lexicon, and plot reward against KL for three coefficients.

    python packages/ms-align/benchmarks/sentiment.py [--out sentiment.svg]

A policy is tuned on reviews from a small grammar with mixed sentiment. In pairs of such reviews the
one with the better lexicon score is preferred; a tenth of the pairs have swapped labels. The reward
model learns from these pairs alone. PPO then maximizes its output for three KL coefficients. The
lexicon score, which is never optimized, is plotted as well: if the learned reward rises and the
lexicon score does not, the policy exploits the reward model.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from ms_align import PPOTrainer, RewardModel, RewardTrainer, Sample, SFTTrainer
from ms_parallel.models import architecture, build_model
from ms_parallel.weights import initialize

GOOD = "wonderful great lovely bright fresh moving honest funny warm rich".split()  # noqa: SIM905
BAD = "dreadful dull ugly slow stale boring false tired cold poor".split()  # noqa: SIM905
PLAIN = "the a film book play song plot cast scene ending was is and with very quite but so"
WORDS = ["<end>", "<begin>", *PLAIN.split(" "), *GOOD, *BAD]
END, BEGIN = 0, 1
NUMBER = {word: index for index, word in enumerate(WORDS)}
THINGS, LENGTH, MAX_LENGTH = WORDS[4:12], 20, 14
COEFFICIENTS = (0.02, 0.1, 0.4)
STEPS, BATCH = 240, 64


def lexicon_score(tokens: list[int]) -> float:
    """Return the number of good words minus the number of bad words."""
    words = [WORDS[token] for token in tokens]
    return float(sum(word in GOOD for word in words) - sum(word in BAD for word in words))


def review(rng: random.Random) -> list[int]:
    """Return the tokens of `the film was quite dull and the cast is warm <end>`, for example."""
    words: list[str] = []
    for clause in range(rng.choice((1, 2, 2))):
        words += ["and" if rng.random() < 0.7 else "but"] if clause else []
        words += [rng.choice(("the", "a")), rng.choice(THINGS), rng.choice(("was", "is"))]
        words += [rng.choice(("very", "quite", "so"))] if rng.random() < 0.4 else []
        words += [rng.choice(GOOD if rng.random() < 0.5 else BAD)]
    return [*(NUMBER[word] for word in words), END]


def make_batch(rows: list[list[int]]) -> dict[str, Any]:
    """Return padded rows that start with BEGIN; positions after END belong to another document."""
    tokens = np.full((len(rows), LENGTH), END, np.int64)
    targets = np.full((len(rows), LENGTH), -100, np.int64)
    documents = np.ones((len(rows), LENGTH), np.int32)
    for index, row in enumerate(rows):
        tokens[index, : len(row) + 1] = [BEGIN, *row]
        targets[index, : len(row)] = row
        documents[index, : len(row) + 1] = 0
    return {"tokens": tokens, "targets": targets, "documents": documents}


class Reviews:
    """Stream of batches of reviews, or of review pairs."""

    def __init__(self, seed: int, *, pairs: bool) -> None:
        self.seed, self.pairs, self.count = seed, pairs, 0

    def __next__(self) -> dict[str, Any]:
        self.count += 1
        rng = random.Random(f"{self.seed} {self.count}")
        rows = [review(rng) for _ in range(BATCH)]
        if self.pairs:
            for index in range(0, BATCH, 2):
                while lexicon_score(rows[index]) == lexicon_score(rows[index + 1]):
                    rows[index] = review(rng)
                first_is_better = lexicon_score(rows[index]) > lexicon_score(rows[index + 1])
                if first_is_better == (rng.random() < 0.1):
                    rows[index], rows[index + 1] = rows[index + 1], rows[index]
        return make_batch(rows)

    def state_dict(self) -> dict[str, Any]:
        """Return the number of batches drawn."""
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        """Restore the number of batches drawn."""
        self.count = state["count"]


def model(seed: int) -> Any:
    """Build a decoder with 2 layers, 64 wide."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    other_sizes = {"num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": len(WORDS)}
    decoder = build_model(
        architecture("llama", {**sizes, **other_sizes, "tie_word_embeddings": True})
    )
    initialize(decoder, seed=seed)
    return decoder


def quiet(folder: Path, name: str, **options: Any) -> dict[str, Any]:
    """Return settings of a run without output."""
    return {"output_dir": folder / name, "progress": False, "checkpoint_every": 10**6, **options}


def learn_reward(folder: Path) -> tuple[RewardModel, dict[str, float]]:
    """Train a reward model on pairs with 10% wrong labels; save and reload it."""

    def held_out() -> Iterator[dict[str, Any]]:
        stream = Reviews(99, pairs=True)
        return (next(stream) for _ in range(8))

    settings = quiet(folder, "reward", model=model(1), steps=150, learning_rate=1e-3)
    result = RewardTrainer(**settings).train(Reviews(1, pairs=True), held_out=held_out)
    return RewardModel.load(folder / "reward" / "model"), dict(result.last)


def optimize(folder: Path, policy: Path, reward: RewardModel, kl_coeff: float) -> list[Any]:
    """Return a point per rollout: KL of a response, learned reward, lexicon score."""
    from ms_align.models.folder import load_model

    points: list[Any] = []
    scores: list[float] = []

    def lexicon(samples: list[Sample]) -> list[float]:
        lexicon_scores = [lexicon_score(list(sample.response_tokens)) for sample in samples]
        scores[:] = lexicon_scores
        return lexicon_scores

    def on_event(event_kind: str, fields: Any) -> None:
        if event_kind == "rollout":
            points.append((fields["kl"], fields["reward"], sum(scores) / len(scores)))

    PPOTrainer(
        policy_model=load_model(policy),
        reward_model={"learned": reward, "lexicon": (lexicon, 0.0)},
        kl_coeff=kl_coeff,
        output_dir=folder / f"ppo-{kl_coeff}",
        steps=STEPS,
        batch_size=BATCH,
        epochs=2,
        max_new_tokens=MAX_LENGTH,
        stop_token_ids=END,
        learning_rate=5e-4,
        checkpoint_every=10**6,
        progress=False,
        on_event=on_event,
    ).optimize([[BEGIN]] * 8)
    return points


def smoothed(points: list[Any], window: int = 8) -> np.ndarray[Any, Any]:
    """Return moving averages, (N, 3)."""
    values = np.array(points)
    kernel = np.ones(window) / window
    return np.stack([np.convolve(column, kernel, mode="valid") for column in values.T], 1)


def draw(curves: dict[float, np.ndarray[Any, Any]], out: Path) -> None:
    """Draw learned reward (line) and lexicon score (dashed) over KL."""
    width, height, edge = 640, 400, 50
    highest = max(curve[:, 0].max() for curve in curves.values())
    low = min(curve[:, 1:].min() for curve in curves.values())
    top = max(curve[:, 1:].max() for curve in curves.values())

    def path(curve: np.ndarray[Any, Any], column: int) -> str:
        x = edge + (width - 2 * edge) * curve[:, 0] / highest
        y = height - edge - (height - 2 * edge) * (curve[:, column] - low) / (top - low)
        return "M" + "L".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))

    colors = ("#c0392b", "#2471a3", "#1e8449")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<path d="M{edge},{edge}V{height - edge}H{width - edge}" fill="none" stroke="black"/>',
        f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle">'
        f"KL of a response from the reference, nats (0 to {highest:.1f})</text>",
        f'<text x="{edge}" y="{edge - 12}">reward {low:.1f} to {top:.1f}: '
        "line: learned, dashed: lexicon</text>",
    ]
    for index, ((coefficient, curve), color) in enumerate(zip(curves.items(), colors, strict=True)):
        for column, dash in ((1, ""), (2, ' stroke-dasharray="5 4"')):
            parts.append(
                f'<path d="{path(curve, column)}" fill="none" stroke="{color}"{dash} '
                'stroke-width="1.5"/>'
            )
        parts.append(
            f'<text x="{width - edge - 110}" y="{height - edge - 60 + 16 * index}" fill="{color}">'
            f"kl_coeff {coefficient:g}</text>"
        )
    out.write_text("\n".join([*parts, "</svg>", ""]))


def main() -> None:
    """Print the results and write the plot."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("sentiment.svg"))
    out = parser.parse_args().out
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        reward, figures = learn_reward(folder)
        print("reward model, held out (a tenth of the labels are wrong):", json.dumps(figures))
        policy = model(2)
        settings = quiet(folder, "sft", model=policy, steps=200, learning_rate=2e-3)
        SFTTrainer(**settings).train(Reviews(2, pairs=False))
        from ms_align.models.folder import save_model

        save_model(policy, folder / "policy")
        curves = {}
        for coefficient in COEFFICIENTS:
            points = optimize(folder, folder / "policy", reward, coefficient)
            curves[coefficient] = smoothed(points)
            kl, learned, lexicon = curves[coefficient][-1]
            start = curves[coefficient][0]
            print(
                f"kl_coeff {coefficient:g}: KL {kl:.2f} nats, learned reward {start[1]:.2f} to "
                f"{learned:.2f}, lexicon {start[2]:.2f} to {lexicon:.2f}",
                flush=True,
            )
        draw(curves, out)


if __name__ == "__main__":
    main()
