"""Make the tuning data: three tasks, preference pairs, prompts and held-out questions.

Two tasks come from the running Python's standard library, function to docstring and back, as
`examples/docstrings.py` writes them, except texts that are too long for a small model. The third
can be verified: sums of two two-digit numbers, a fifth of them held out. Digits are separated by
spaces, because a tokenizer trained on source code merges them irregularly. The same seed gives the
same bytes.

Run it: python examples/road/tasks.py DOCSTRINGS OUT
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MAX_CHARACTERS = 480
"""Maximum length of a docstring task, question and answer together: about 150 tokens."""
MAX_PAIR_CHARACTERS = 200
"""Maximum length of a docstring pair; all rows of a batch are padded to the longest."""
HELD_OUT_FRACTION = 0.2
"""Fraction of all sums that is held out."""
EVALUATION_SUMS = 200
"""Number of held-out sums that are evaluated during training."""
DOCSTRING_STRIDE = 50
"""One docstring in this many is held out."""


def spaced(number: int) -> str:
    """Return the digits of a number separated by spaces: 131 -> `1 3 1`."""
    return " ".join(str(number))


def question(a: int, b: int) -> str:
    """Return the user's question for a sum."""
    return f"What is {spaced(a)} + {spaced(b)}?"


def split_sums(seed: int = 0) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return all pairs of numbers from 10 to 99 in random order: (training, held out)."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    held_out = round(len(pairs) * HELD_OUT_FRACTION)
    return pairs[held_out:], pairs[:held_out]


def chat(prompt: str, answer: str) -> dict[str, Any]:
    """Return a conversation of one question and its answer."""
    return {
        "messages": [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": answer},
        ]
    }


def wrong_answer(rng: random.Random, total: int) -> int:
    """Return a wrong sum: a forgotten carry, a digit off by up to 3, or another number."""
    near = (total - 10, total + 10, total + rng.choice([-3, -2, -1, 1, 2, 3]))
    far = [number for number in rng.sample(range(20, 199), 5) if number != total]
    return rng.choice([*near, *far])


def write_rows(path: Path, rows: Iterable[Any]) -> int:
    """Write JSON Lines and return the number of rows."""
    lines = [json.dumps(row, ensure_ascii=True) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def read_short_chats(path: Path) -> list[dict[str, Any]]:
    """Return the conversations of a file that have at most `MAX_CHARACTERS`."""
    chats = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        row
        for row in chats
        if sum(len(message["content"]) for message in row["messages"]) <= MAX_CHARACTERS
    ]


def docstring_pairs(chats: list[dict[str, Any]], rng: random.Random) -> list[dict[str, str]]:
    """Return preference pairs: a function's docstring over another function's docstring."""
    pairs = []
    for row, other_row in zip(chats, rng.sample(chats, len(chats)), strict=True):
        prompt, answer = (message["content"] for message in row["messages"])
        rejected = other_row["messages"][1]["content"]
        length = len(prompt) + max(len(answer), len(rejected))
        if answer != rejected and length <= MAX_PAIR_CHARACTERS:
            pairs.append({"prompt": prompt, "chosen": answer, "rejected": rejected})
    return pairs


def write_tasks(docstrings: Path, folder: Path, *, seed: int = 0) -> dict[str, int]:
    """Write the files of all tasks.

    Args:
        docstrings: folder with `describe.jsonl` and `implement.jsonl`.
        folder: output folder; created if needed.
        seed: random seed.

    Returns:
        Number of rows of each file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    training, held_out = split_sums(seed)
    names = ("describe", "implement")
    chats = {name: read_short_chats(docstrings / f"{name}.jsonl") for name in names}
    held_out_docstrings = chats["describe"][::DOCSTRING_STRIDE]
    for name in names:
        chats[name] = [row for index, row in enumerate(chats[name]) if index % DOCSTRING_STRIDE]
    chats["add"] = [chat(question(a, b), spaced(a + b)) for a, b in training]
    counts = {name: write_rows(folder / f"{name}.jsonl", rows) for name, rows in chats.items()}
    pairs = [
        {
            "prompt": question(a, b),
            "chosen": spaced(a + b),
            "rejected": spaced(wrong_answer(rng, a + b)),
        }
        for a, b in training
    ] + docstring_pairs(chats["describe"], rng)
    rng.shuffle(pairs)
    counts["pairs"] = write_rows(folder / "pairs.jsonl", pairs)
    few = held_out[:: len(held_out) // EVALUATION_SUMS]
    for name, sums in (("prompts", training), ("held_out", held_out), ("held_out_few", few)):
        prompts = [
            {"prompt": [{"role": "user", "content": question(a, b)}], "answer": spaced(a + b)}
            for a, b in sums
        ]
        counts[name] = write_rows(folder / f"{name}.jsonl", prompts)
    unseen = [chat(question(a, b), spaced(a + b)) for a, b in few] + held_out_docstrings
    counts["held_out_chats"] = write_rows(folder / "held_out_chats.jsonl", unseen)
    # Data of quantization-aware training: four sums for each docstring, shuffled.
    mixed = [*rng.sample(chats["add"], 2000), *rng.sample(chats["describe"], 500)]
    rng.shuffle(mixed)
    counts["mixed"] = write_rows(folder / "mixed.jsonl", mixed)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("docstrings", type=Path, help="folder that examples/docstrings.py wrote")
    parser.add_argument("out", type=Path, help="output folder")
    options = parser.parse_args()
    for name, count in write_tasks(options.docstrings, options.out).items():
        print(f"{name}: {count:,} rows")
