"""How do I train with GRPO on a task whose answers can be checked?

    python examples/align/grpo_verifiable.py --steps 120

The task: which of two words is longer, 1 or 2? A byte-level model first learns the answer format
from a few rows with random answers. GRPO then learns the correct answers from an `ExactMatch`
reward alone, comparing eight responses per prompt. The words are Python keywords and builtins.
"""

import argparse
import builtins
import itertools
import keyword
import random
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from ms_align import ExactMatch, GRPOTrainer
from ms_parallel.models import architecture, build_model
from ms_parallel.weights import initialize


def questions() -> list[dict[str, str]]:
    """Prompts with two words of different lengths, and the number of the longer word."""
    words = [*keyword.kwlist, *(name for name in dir(builtins) if name.islower())]
    words = [word for word in words if len(word) in (2, 3, 9, 10, 11)]
    rows = [
        {"prompt": f"{a}|{b}|", "answer": "1" if len(a) > len(b) else "2"}
        for a, b in itertools.permutations(words, 2)
        if abs(len(a) - len(b)) > 5
    ]
    random.Random(0).shuffle(rows)
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Teach the answer format, then train with GRPO."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("grpo-verifiable"))
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args(arguments)
    rows = questions()
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 258}
    policy = build_model(architecture("llama", sizes))
    initialize(policy, seed=0)

    rng, optimizer = random.Random(1), torch.optim.AdamW(policy.parameters(), lr=3e-3)
    for _ in range(60):  # the answer format: a random digit, then the end-of-text token, 256
        loss = torch.zeros(())
        for row in rng.sample(rows, 8):
            tokens = [*row["prompt"].encode(), ord(rng.choice("12")), 256]
            logits = policy(torch.tensor([tokens[:-1]]))[0, -2:]
            loss = loss + cross_entropy(logits, torch.tensor(tokens[-2:]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    result = GRPOTrainer(
        policy_model=policy,
        reward_model=ExactMatch(),
        tokenizer="bytes",
        num_generations=8,
        batch_size=64,
        max_new_tokens=2,
        learning_rate=1e-3,
        steps=options.steps,
        output_dir=options.folder,
        held_out=rows[:64],
        log_every=20,
    ).optimize(rows[64:])
    print(f"correct answers {result.first['reward']:.0%} -> {result.last['reward']:.0%}")


if __name__ == "__main__":
    main()
