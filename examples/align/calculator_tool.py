"""How do I train a model to use a tool, and check that it learns from the rewards?

    python examples/align/calculator_tool.py

The task: sums, differences and products of two numbers. A model with a million weights learns the
format from demonstrations, most of which guess the answer or call the tool with a random operator.
GRPO then rewards right answers, and the model learns to call the tool with the right operator. A
control run gets the same rewards in random order and must not improve. `learning.svg` shows both.
"""

import argparse
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARTS = ['<tool_call>{"name": "calculate", "arguments": {"a": ', ', "operator": "', '", "b": ',
         "}}</tool_call>"]  # fmt: skip
TOKENS = [*"0123456789+-*=.", *PARTS]
TEMPLATE = """{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>\
{"name": "calculate", "arguments": {"a": {{ c.function.arguments.a }}, "operator": \
"{{ c.function.arguments.operator }}", "b": {{ c.function.arguments.b }}}}</tool_call>\
{% endfor %}{{ '.' if m.role == 'assistant' else '=' }}{% endfor %}"""
"""Chat template: questions and results of the tool end with `=`, responses with `.`."""


def calculate(a: int, operator: str, b: int) -> int:
    """Add, subtract or multiply two numbers.

    Args:
        a: first number
        operator: one of +, - and *
        b: second number
    """
    return {"+": a + b, "-": a - b, "*": a * b}[operator]


def question(rng: random.Random) -> dict[str, str]:
    """Return a prompt such as `12*34` and its answer."""
    a, operator, b = rng.randint(10, 99), rng.choice("+-*"), rng.randint(10, 99)
    return {"prompt": f"{a}{operator}{b}", "answer": str(calculate(a, operator, b))}


def demonstration(rng: random.Random) -> str:
    """Return a conversation: 60% guess, half of the others call with a random operator."""
    prompt = question(rng)["prompt"]
    if rng.random() < 0.6:
        return f"{prompt}={rng.randint(-89, 9801)}."
    a, operator, b = prompt[:2], prompt[2], prompt[3:]
    operator = rng.choice("+-*") if rng.random() < 0.5 else operator
    call = PARTS[0] + a + PARTS[1] + operator + PARTS[2] + b + PARTS[3]
    result = calculate(int(a), operator, int(b))
    return f"{prompt}={call}.{result}={result}."


def save_tokenizer(folder: Path) -> Any:
    """Save a tokenizer with one token per character and per fixed part of a tool call."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(models.WordLevel({token: i for i, token in enumerate(TOKENS)}, "="))
    model.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    model.decoder = decoders.Fuse()
    model.add_tokens([AddedToken(part, normalized=False) for part in PARTS])
    tokenizer: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=model, eos_token="."
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def learn_format(model: Any, tokenizer: Any, steps: int) -> None:
    """Train on everything after the question of each demonstration."""
    import torch

    rng, optimizer = random.Random(1), torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        rows = [torch.tensor(tokenizer.encode(demonstration(rng))) for _ in range(64)]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-100)
        logits = model(tokens[:, :-1].clamp(min=0))[:, 5:]  # a question has six tokens
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 6:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Draw the mean reward of each rollout, from 0 to 1."""
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 300" '
             'font-family="sans-serif" font-size="13"><rect width="640" height="300" fill="white"/>'
             '<path d="M50,20V260H620" fill="none" stroke="black"/>'
             '<text x="335" y="285" text-anchor="middle">update</text>']  # fmt: skip
    parts += [f'<text x="42" y="{264 - 240 * value}" text-anchor="end">{value:.0%}</text>'
              for value in (0.0, 0.5, 1.0)]  # fmt: skip
    for (name, curve), color in zip(curves.items(), ("#2471a3", "#c0392b"), strict=True):
        width = 560 / max(len(curve) - 1, 1)
        points = " ".join(f"{50 + width * i:.1f},{260 - 240 * y:.1f}" for i, y in enumerate(curve))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        label = f'x="610" y="{230 - 190 * curve[-1]:.0f}" text-anchor="end" fill="{color}"'
        parts.append(f"<text {label}>{name}</text>")
    path.write_text("\n".join([*parts, "</svg>", ""]))


def main(arguments: list[str] | None = None) -> dict[str, list[float]]:
    """Train with both rewards; return the mean reward of each rollout."""
    from copy import deepcopy

    from ms_align import ExactMatch, GRPOTrainer
    from ms_parallel.models import architecture, build_model
    from ms_parallel.weights import initialize

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("calculator-tool"))
    parser.add_argument("--format-steps", type=int, default=200)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args(arguments)
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4}
    model = build_model(architecture("llama", {**sizes, "vocab_size": len(TOKENS)}))
    initialize(model, seed=0)
    learn_format(model, save_tokenizer(options.folder / "tokenizer"), options.format_steps)
    rng, shuffling = random.Random(2), random.Random(3)
    questions, exact = [question(rng) for _ in range(4000)], ExactMatch()

    def shuffled(samples: Sequence[Any]) -> list[float]:
        return shuffling.sample(rewards := exact(samples), len(rewards))

    curves: dict[str, list[float]] = {"rewards": [], "shuffled rewards": []}
    for (name, curve), reward in zip(curves.items(), (exact, shuffled), strict=True):
        GRPOTrainer(
            policy_model=deepcopy(model), reward_model=reward, tools=[calculate],
            tokenizer=options.folder / "tokenizer", num_generations=8,
            batch_size=options.batch_size, max_num_seqs=options.batch_size, max_new_tokens=10,
            max_episode_tokens=32, learning_rate=1e-4, warmup_steps=5, steps=options.steps,
            output_dir=options.folder / name,
            on_event=lambda kind, fields, curve=curve: (
                curve.append(float(fields["reward"])) if kind == "rollout" else None),
        ).optimize(questions)  # fmt: skip
        print(f"{name}: right answers {curve[0]:.0%} -> {curve[-1]:.0%}")
    draw(curves, options.folder / "learning.svg")
    return curves


if __name__ == "__main__":
    main()
