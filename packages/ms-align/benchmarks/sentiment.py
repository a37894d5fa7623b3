"""A learned reward on a sentiment lexicon, and reward against KL for three kl_coeff, drawn.

    python packages/ms-align/benchmarks/sentiment.py [--out sentiment.svg]

A policy is tuned on reviews of a small grammar whose moods are mixed. Of pairs of such reviews the
one with the better lexicon score is preferred, a tenth of them the wrong way round. The reward
model learns from these pairs alone; PPO then raises what it says, for three coefficients of the
KL. The lexicon's own score, which nobody optimizes, is shown beside it: where the learned reward
goes on rising and the lexicon doesn't, the reward model is exploited.
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
NUMBER = {word: at for at, word in enumerate(WORDS)}
THINGS, LENGTH, LONGEST = WORDS[4:12], 20, 14
COEFFICIENTS = (0.02, 0.1, 0.4)
STEPS, BATCH = 240, 64


def lexicon_score(tokens: list[int]) -> float:
    """Good words less bad ones."""
    words = [WORDS[token] for token in tokens]
    return float(sum(word in GOOD for word in words) - sum(word in BAD for word in words))


def review(chance: random.Random) -> list[int]:
    """`the film was quite dull and the cast is warm <end>`, for example."""
    words: list[str] = []
    for clause in range(chance.choice((1, 2, 2))):
        words += ["and" if chance.random() < 0.7 else "but"] if clause else []
        words += [chance.choice(("the", "a")), chance.choice(THINGS), chance.choice(("was", "is"))]
        words += [chance.choice(("very", "quite", "so"))] if chance.random() < 0.4 else []
        words += [chance.choice(GOOD if chance.random() < 0.5 else BAD)]
    return [*(NUMBER[word] for word in words), END]


def laid(rows: list[list[int]]) -> dict[str, Any]:
    """Rows behind BEGIN, filled up; what follows END is another document."""
    tokens = np.full((len(rows), LENGTH), END, np.int64)
    targets = np.full((len(rows), LENGTH), -100, np.int64)
    documents = np.ones((len(rows), LENGTH), np.int32)
    for at, row in enumerate(rows):
        tokens[at, : len(row) + 1] = [BEGIN, *row]
        targets[at, : len(row)] = row
        documents[at, : len(row) + 1] = 0
    return {"tokens": tokens, "targets": targets, "documents": documents}


class Reviews:
    """Batches of reviews, or of pairs of them."""

    def __init__(self, seed: int, *, pairs: bool) -> None:
        self.seed, self.pairs, self.count = seed, pairs, 0

    def __next__(self) -> dict[str, Any]:
        self.count += 1
        chance = random.Random(f"{self.seed} {self.count}")
        rows = [review(chance) for _ in range(BATCH)]
        if self.pairs:
            for at in range(0, BATCH, 2):
                while lexicon_score(rows[at]) == lexicon_score(rows[at + 1]):
                    rows[at] = review(chance)
                better = lexicon_score(rows[at]) > lexicon_score(rows[at + 1])
                if better == (chance.random() < 0.1):
                    rows[at], rows[at + 1] = rows[at + 1], rows[at]
        return laid(rows)

    def state_dict(self) -> dict[str, Any]:
        """Batches made."""
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        """Go back."""
        self.count = state["count"]


def model(seed: int) -> Any:
    """A decoder of 2 layers, 64 wide."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    more = {"num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": len(WORDS)}
    made = build_model(architecture("llama", {**sizes, **more, "tie_word_embeddings": True}))
    initialize(made, seed=seed)
    return made


def quiet(folder: Path, name: str, **more: Any) -> dict[str, Any]:
    """The settings of a quiet run."""
    return {"output_dir": folder / name, "progress": False, "checkpoint_every": 10**6, **more}


def learn_reward(folder: Path) -> tuple[RewardModel, dict[str, float]]:
    """Trained on pairs, a tenth of them wrong; saved and read back."""

    def held_out() -> Iterator[dict[str, Any]]:
        stream = Reviews(99, pairs=True)
        return (next(stream) for _ in range(8))

    settings = quiet(folder, "reward", model=model(1), steps=150, learning_rate=1e-3)
    result = RewardTrainer(**settings).train(Reviews(1, pairs=True), held_out=held_out)
    return RewardModel.load(folder / "reward" / "model"), dict(result.last)


def optimize(folder: Path, policy: Path, reward: RewardModel, kl_coeff: float) -> list[Any]:
    """A point each rollout: KL of a response, what the reward model says, the lexicon's score."""
    from ms_align.models.folder import load_model

    points: list[Any] = []
    scores: list[float] = []

    def lexicon(samples: list[Sample]) -> list[float]:
        found = [lexicon_score(list(sample.response_tokens)) for sample in samples]
        scores[:] = found
        return found

    def on_event(kind: str, fields: Any) -> None:
        if kind == "rollout":
            points.append((fields["kl"], fields["reward"], sum(scores) / len(scores)))

    PPOTrainer(
        policy_model=load_model(policy),
        reward_model={"learned": reward, "lexicon": (lexicon, 0.0)},
        kl_coeff=kl_coeff,
        output_dir=folder / f"ppo-{kl_coeff}",
        steps=STEPS,
        batch_size=BATCH,
        epochs=2,
        max_new_tokens=LONGEST,
        stop_token_ids=END,
        learning_rate=5e-4,
        checkpoint_every=10**6,
        progress=False,
        on_event=on_event,
    ).optimize([[BEGIN]] * 8)
    return points


def smoothed(points: list[Any], window: int = 8) -> np.ndarray[Any, Any]:
    """Means of neighbors, (N, 3)."""
    whole = np.array(points)
    kernel = np.ones(window) / window
    return np.stack([np.convolve(column, kernel, mode="valid") for column in whole.T], 1)


def draw(curves: dict[float, np.ndarray[Any, Any]], out: Path) -> None:
    """Learned reward (line) and lexicon score (dashes) over KL."""
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
        "line the learned one, dashes the lexicon</text>",
    ]
    for at, ((coefficient, curve), color) in enumerate(zip(curves.items(), colors, strict=True)):
        for column, dash in ((1, ""), (2, ' stroke-dasharray="5 4"')):
            parts.append(
                f'<path d="{path(curve, column)}" fill="none" stroke="{color}"{dash} '
                'stroke-width="1.5"/>'
            )
        parts.append(
            f'<text x="{width - edge - 110}" y="{height - edge - 60 + 16 * at}" fill="{color}">'
            f"kl_coeff {coefficient:g}</text>"
        )
    out.write_text("\n".join([*parts, "</svg>", ""]))


def main() -> None:
    """Print the figures and write the drawing."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("sentiment.svg"))
    out = parser.parse_args().out
    torch.set_num_threads(1)
    with TemporaryDirectory() as place:
        folder = Path(place)
        reward, figures = learn_reward(folder)
        print("reward model, held out (a tenth of the labels is wrong):", json.dumps(figures))
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
            began = curves[coefficient][0]
            print(
                f"kl_coeff {coefficient:g}: KL {kl:.2f} nats, learned reward {began[1]:.2f} to "
                f"{learned:.2f}, lexicon {began[2]:.2f} to {lexicon:.2f}",
                flush=True,
            )
        draw(curves, out)


if __name__ == "__main__":
    main()
