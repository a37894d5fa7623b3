"""How do I train a model to use a tool?

    python examples/align/grpo_calculator.py --steps 30

The task: add two numbers of two digits. A model with 1.2M parameters first learns two habits from
demonstrations: to guess a sum, which is wrong, or to call a calculator. GRPO then learns
to call it, from the final answer alone. The output shows the share of right answers and the calls
per answer at the start and the end, and the last conversation. With `--shuffle`, each response
gets the reward of another one: the control, which learns nothing.
"""

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerFast

from ms_align import GRPOTrainer, Sample
from ms_parallel import save_model
from ms_parallel.models import architecture, build_model
from ms_parallel.weights import initialize

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>"
    '{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL = ('<tool_call>{"name": "add", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
ROLES = ("user\n", "assistant\n", "tool\n")
NUMBERS = tuple(str(number) for number in range(10, 100))


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: first number
        b: second number
    """
    return a + b


def exact(samples: Sequence[Sample]) -> list[float]:
    """Reward 1 for the right final answer, else 0."""
    return [float(sample.response == sample.answer) for sample in samples]


def exact_of_another(samples: Sequence[Sample]) -> list[float]:
    """The same rewards, each given to another response."""
    rewards = exact(samples)
    random.Random(str(rewards)).shuffle(rewards)
    return rewards


def write_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Write a tokenizer of characters, with one token per number and fixed part of a call."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {character: index for index, character in enumerate(characters)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    model.decoder = tokenizers.decoders.Fuse()
    model.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    model.add_tokens(
        [tokenizers.AddedToken(text, normalized=False) for text in (*CALL, *ROLES, *NUMBERS)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def demonstration(rng: random.Random, question: str) -> list[tuple[str, bool]]:
    """Return the parts of a conversation; True for those that the model is to write."""
    a, b = question.split(" + ")
    prompt = (f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", False)
    if rng.random() < 0.7:
        return [prompt, (f"{rng.randint(20, 98)}<|im_end|>", True)]
    call = f"{CALL[0]}{a}{CALL[1]}{b}{CALL[2]}<|im_end|>"
    total = f"{int(a) + int(b)}<|im_end|>"
    result = f"\n<|im_start|>tool\n{total}\n<|im_start|>assistant\n"
    return [prompt, (call, True), (result, False), (total, True)]


def warm_up(policy: torch.nn.Module, tokenizer: PreTrainedTokenizerFast, steps: int) -> None:
    """Train on demonstrations of both habits."""
    rng, optimizer = random.Random(0), torch.optim.AdamW(policy.parameters(), lr=2e-3)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, step / 20, 2 * (1 - step / steps) + 0.02)
        tokens, targets = torch.zeros(64, 30, dtype=torch.int64), torch.full((64, 30), -100)
        for row in range(64):
            position = 0
            for text, is_learned in demonstration(rng, question(rng)):
                ids = tokenizer.encode(text, add_special_tokens=False)
                tokens[row, position : position + len(ids)] = torch.tensor(ids)
                if is_learned:  # the token at position p is the target of position p - 1
                    targets[row, position - 1 : position - 1 + len(ids)] = torch.tensor(ids)
                position += len(ids)
        loss = cross_entropy(policy(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def question(rng: random.Random) -> str:
    """Return a random addition."""
    return f"{rng.randint(10, 49)} + {rng.randint(10, 49)}"


def main(arguments: list[str] | None = None) -> None:
    """Show the model how to guess and how to call, then train with GRPO."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("grpo-calculator"))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=150)
    parser.add_argument("--shuffle", action="store_true")
    options = parser.parse_args(arguments)
    model = options.folder / "model"
    if not model.is_dir():
        sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 6}
        policy = build_model(architecture("llama", {**sizes, "vocab_size": 194}))
        initialize(policy, seed=0)
        warm_up(policy, write_tokenizer(options.folder / "tokenizer"), options.warm_up)
        save_model(policy, model)

    rng = random.Random(1)
    questions = [question(rng) for _ in range(2000)]
    answers = [str(int(q[:2]) + int(q[-2:])) for q in questions]
    run = options.folder / ("shuffled" if options.shuffle else "run")
    GRPOTrainer(
        policy_model=model,
        tokenizer=options.folder / "tokenizer",
        reward_model=exact_of_another if options.shuffle else exact,
        tools=[add],
        max_new_tokens=8,
        max_episode_tokens=32,
        batch_size=64,
        num_generations=8,
        learning_rate=3e-4,
        max_tool_calling_iterations=1,
        equal_rewards_limit=1000,
        steps=options.steps,
        output_dir=run,
        progress=False,
    ).optimize(questions, answers)
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    rollouts = [line for line in lines if line["kind"] == "rollout"]
    for name, rollout in (("first", rollouts[0]), ("last", rollouts[-1])):
        calls = rollout["tool_calls"]
        print(f"{name} rollout: {rollout['reward']:.0%} right, {calls:.2f} calls per answer")
    sample = [line for line in lines if line["kind"] == "sample"][-1]
    print(f"{sample['prompt']} = {sample['response']}")


if __name__ == "__main__":
    main()
