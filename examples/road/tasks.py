"""Makes what the model is tuned on: three tasks, preference pairs, prompts, held-out questions.

Two tasks are of the running Python's own library, function to docstring and back, as
`examples/docstrings.py` writes them, without those that are too long for a small model. The third
can be checked: sums of two numbers of two digits, of which a fifth is held out. Digits stand
apart, since a tokenizer learned from source code joins them as it likes. The same seed gives the
same bytes.

Run it: python examples/road/tasks.py DOCSTRINGS OUT
"""

import argparse
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 480
"""Length of a docstring task's question and answer together: about 150 tokens."""
PAIR_CHARACTERS = 200
"""Length of a docstring pair's question and longer answer: rows are as wide as the widest."""
HELD_OUT_SHARE = 0.2
"""Share of all sums that is held out."""
FEW = 200
"""Held-out sums that are asked during a training."""
DESCRIBED_APART = 50
"""One docstring of so many is held out."""


def apart(number: int) -> str:
    """The digits of a number, a space between them: 131 -> `1 3 1`."""
    return " ".join(str(number))


def question(first: int, second: int) -> str:
    """What a user asks."""
    return f"What is {apart(first)} + {apart(second)}?"


def sums(seed: int = 0) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Pairs of numbers from 10 to 99, in random order: those to learn from, and those held out."""
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    held_out = round(len(pairs) * HELD_OUT_SHARE)
    return pairs[held_out:], pairs[:held_out]


def chat(asked: str, answer: str) -> dict[str, Any]:
    """A conversation of one question and its answer."""
    return {
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": answer},
        ]
    }


def wrong(rng: random.Random, total: int) -> int:
    """A wrong sum: mostly of other numbers, else with a carry forgotten or a digit off."""
    near = (total - 10, total + 10, total + rng.choice([-3, -2, -1, 1, 2, 3]))
    far = [other for other in rng.sample(range(20, 199), 5) if other != total]
    return rng.choice([*near, *far])


def write_lines(path: Path, rows: Iterable[Any]) -> int:
    """Write JSON Lines, and return how many."""
    lines = [json.dumps(row, ensure_ascii=True) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")
    return len(lines)


def short_chats(path: Path) -> list[dict[str, Any]]:
    """The conversations of a file that a small model can read whole."""
    chats = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        each
        for each in chats
        if sum(len(message["content"]) for message in each["messages"]) <= MOST_CHARACTERS
    ]


def docstring_pairs(chats: list[dict[str, Any]], rng: random.Random) -> list[dict[str, str]]:
    """Preference pairs: a function's own docstring against that of another function."""
    others = rng.sample(chats, len(chats))
    pairs = []
    for own, other in zip(chats, others, strict=True):
        asked, chosen = (message["content"] for message in own["messages"])
        rejected = other["messages"][1]["content"]
        length = len(asked) + max(len(chosen), len(rejected))
        if chosen != rejected and length <= PAIR_CHARACTERS:
            pairs.append({"prompt": asked, "chosen": chosen, "rejected": rejected})
    return pairs


def write_tasks(docstrings: Path, folder: Path, *, seed: int = 0) -> dict[str, int]:
    """Write the files of all tasks into `folder`.

    Args:
        docstrings: holds `describe.jsonl` and `implement.jsonl`.
        folder: is made.
        seed: of what is drawn.

    Returns:
        Rows of each file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    learned, held_out = sums(seed)
    chats = {task: short_chats(docstrings / f"{task}.jsonl") for task in ("describe", "implement")}
    described = chats["describe"][::DESCRIBED_APART]
    for task in ("describe", "implement"):
        chats[task] = [each for at, each in enumerate(chats[task]) if at % DESCRIBED_APART]
    chats["add"] = [chat(question(a, b), apart(a + b)) for a, b in learned]
    counts = {task: write_lines(folder / f"{task}.jsonl", rows) for task, rows in chats.items()}
    sum_pairs = [
        {"prompt": question(a, b), "chosen": apart(a + b), "rejected": apart(wrong(rng, a + b))}
        for a, b in learned
    ]
    pairs = sum_pairs + docstring_pairs(chats["describe"], rng)
    rng.shuffle(pairs)
    counts["pairs"] = write_lines(folder / "pairs.jsonl", pairs)
    few = held_out[:: len(held_out) // FEW]
    for name, rows in (("prompts", learned), ("held_out", held_out), ("held_out_few", few)):
        asked = [
            {"prompt": [{"role": "user", "content": question(a, b)}], "answer": apart(a + b)}
            for a, b in rows
        ]
        counts[name] = write_lines(folder / f"{name}.jsonl", asked)
    unseen = [chat(question(a, b), apart(a + b)) for a, b in few] + described
    counts["held_out_chats"] = write_lines(folder / "held_out_chats.jsonl", unseen)
    # What the weights are rounded on: sums, and as many docstrings, one after another.
    mixed = [*rng.sample(chats["add"], 2000), *rng.sample(chats["describe"], 500)]
    rng.shuffle(mixed)
    counts["mixed"] = write_lines(folder / "mixed.jsonl", mixed)
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("docstrings", type=Path, help="folder that examples/docstrings.py wrote")
    parser.add_argument("out", type=Path, help="folder to write into")
    given = parser.parse_args()
    for name, count in write_tasks(given.docstrings, given.out).items():
        print(f"{name}: {count:,} rows")
