"""Small instruction and preference datasets over bytes, as shards, and a model folder."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from small_models import decoder

from ms_data import build
from ms_parallel import save_model

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WORDS = ("red", "green", "blue", "long", "short", "early", "late")


def byte_tokenizer() -> bytes:
    """Tokenizer with bytes as tokens 0 to 255 in permuted order, and an end of text."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=257,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([], trainer)
    return model.to_str().encode()


def row(question: str, answer: str) -> dict[str, Any]:
    """Return a question and its answer as a conversation."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def instruction_rows(task: str, count: int = 60) -> list[dict[str, Any]]:
    """Return rows of a task that copies a word or reverses it."""
    rows = []
    for number in range(count):
        word = WORDS[number % len(WORDS)] * (1 + number % 3)
        rows.append(row(f"{task} {word} {number}", word if task == "copy" else word[::-1]))
    return rows


def preference_rows(count: int = 60) -> list[dict[str, Any]]:
    """Pairs of a polite (chosen) and a rude (rejected) answer."""
    return [
        {
            "prompt": f"Say {WORDS[n % len(WORDS)]} {n}",
            "chosen": f"please, {WORDS[n % len(WORDS)]}",
            "rejected": f"no! {WORDS[(n + 1) % len(WORDS)]}",
            "margin": 0.5,
        }
        for n in range(count)
    ]


def write_sets(folder: Path) -> Path:
    """Write the datasets `copy`, `reverse` and `pairs`, and the folder `model`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_bytes(byte_tokenizer())
    (folder / "chat.jinja").write_text(TEMPLATE)
    rows = {
        "copy": instruction_rows("copy"),
        "reverse": instruction_rows("reverse", 40),
        "pairs": preference_rows(),
    }
    for name, examples in rows.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(example) + "\n" for example in examples))
        build(
            path,
            tokenizer=folder / "tokenizer.json",
            out=folder / name,
            chat=folder / "chat.jinja",
            pairs=name == "pairs",
            held_out_fraction=0.15,
        )
    # One token more than the tokenizer has, so that two processes can share the vocabulary.
    save_model(decoder(vocab_size=258), folder / "model")  # type: ignore[arg-type]
    return folder
