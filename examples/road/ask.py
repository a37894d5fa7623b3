"""Puts held-out questions to each model of the road, each in its own runtime, and counts.

torch and transformers answer for the trained models and compressed-tensors, onnxruntime for ONNX,
and for GGUF llama.cpp where its Python package is installed; else transformers reads the same file.
The likeliest token is taken each time. Answers are kept in `facts/answers.json`.

Run it in the road's folder: python .../examples/road/ask.py .
"""

import argparse
import importlib.util
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

ROWS = 128
"""Questions that are answered side by side."""
ANSWER = 8
"""Tokens that the answer to a sum has at most; five are enough for a right one."""
DOCSTRING = 40
SHOWN = 4
"""Sums that the page shows, and as many docstrings."""

Answers = Callable[[list[str], int], list[str]]
"""Rendered prompts and the most tokens of an answer -> the answers."""
Chat = list[dict[str, str]]


class Told(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one model answered."""

    model: str
    runtime: str
    right: int
    asked: int
    sums: list[str]
    """Answers to the questions that are shown."""
    docstrings: list[str]


class Answered(msgspec.Struct, frozen=True, kw_only=True, tag="road-answers-1"):
    """All answers, and what was asked."""

    questions: list[str]
    known: list[str]
    """The right answers."""
    functions: list[str]
    docstrings: list[str]
    """What stands in the library."""
    told: list[Told]


def until_end(tokenizer: Any, made: Sequence[int], ends: set[int]) -> str:
    """The text of an answer's tokens up to the first that ends it."""
    length = next((at for at, token in enumerate(made) if token in ends), len(made))
    return str(tokenizer.decode(list(made)[:length]))


def ends_of(folder: Path) -> set[int]:
    """The tokens that end an answer, as the folder says."""
    said = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return {said} if isinstance(said, int) else set(said)


def open_transformers(folder: Path, *, seed: int | None = None, **options: str) -> Answers:
    """A folder, or a GGUF file in it, as transformers runs it.

    The likeliest token each time, or with a `seed` tokens that are drawn as PPO draws them.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    model.train(mode=False)
    ends = ends_of(folder)
    tokenizer.pad_token_id = min(ends)
    how: dict[str, Any] = {"do_sample": False}
    if seed is not None:
        torch.manual_seed(seed)
        how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}

    def answers(prompts: list[str], most: int) -> list[str]:
        rows = tokenizer(
            prompts, return_tensors="pt", padding=True, add_special_tokens=False,
            return_token_type_ids=False,
        )  # fmt: skip
        with torch.inference_mode():
            out = model.generate(
                **rows, **how, max_new_tokens=most, eos_token_id=sorted(ends),
                pad_token_id=min(ends),
            )  # fmt: skip
        made = out[:, rows["input_ids"].shape[1] :].tolist()
        return [until_end(tokenizer, row, ends) for row in made]

    return answers


def open_onnx(folder: Path) -> Answers:
    """`model.onnx` as onnxruntime runs it, keys and values fed back."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = ends_of(folder)
    pasts = [one for one in session.get_inputs() if one.name.startswith("past_key_values")]

    def answers(prompts: list[str], most: int) -> list[str]:
        rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
        width = max(map(len, rows))
        ids = np.array([[min(ends)] * (width - len(row)) + row for row in rows])
        mask = np.array([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        held = {p.name: np.zeros((len(ids), p.shape[1], 0, p.shape[3]), np.float32) for p in pasts}
        made = np.zeros((len(ids), 0), np.int64)
        while made.shape[1] < most and not np.isin(made, sorted(ends)).any(axis=1).all():
            logits, *now = session.run(None, {"input_ids": ids, "attention_mask": mask, **held})
            held = dict(zip(held, now, strict=True))
            ids = logits[:, -1:].argmax(-1)
            mask = np.concatenate([mask, np.ones_like(ids)], axis=1)
            made = np.concatenate([made, ids], axis=1)
        return [until_end(tokenizer, row, ends) for row in made.tolist()]

    return answers


def open_llama(folder: Path) -> Answers:
    """`model.gguf` as llama.cpp runs it, with its own tokenizer."""
    from llama_cpp import Llama

    llama = Llama(str(folder / "model.gguf"), n_ctx=256, verbose=False)

    def answers(prompts: list[str], most: int) -> list[str]:
        return [
            str(
                llama.create_completion(text, max_tokens=most, temperature=0.0)["choices"][0][
                    "text"
                ]
            )
            for text in prompts
        ]

    return answers


def runtimes(road: Path) -> list[tuple[str, str, Path, Callable[[], Answers]]]:
    """Each model's name, its runtime's, its folder, and how it is opened."""
    trained = {"pre-trained": "pretrain", "tuned": "sft", "optimized by PPO": "ppo"}
    found = [(name, "transformers", road / place / "model") for name, place in trained.items()]
    found.append(("compressed-tensors", "transformers", road / "deploy" / "ct"))
    rows: list[tuple[str, str, Path, Callable[[], Answers]]] = [
        (name, runtime, folder, lambda folder=folder: open_transformers(folder))  # type: ignore[misc]
        for name, runtime, folder in found
    ]
    onnx, gguf = road / "deploy" / "onnx", road / "deploy" / "gguf"
    rows.append(("ONNX", "onnxruntime", onnx, lambda: open_onnx(onnx)))
    if importlib.util.find_spec("llama_cpp"):
        rows.append(("GGUF", "llama.cpp", gguf, lambda: open_llama(gguf)))
    else:
        how = "transformers, from the GGUF file"
        rows.append(("GGUF", how, gguf, lambda: open_transformers(gguf, gguf_file="model.gguf")))
    return rows


def read_lines(path: Path) -> list[Any]:
    """Read JSON Lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rendered(tokenizer: Any, chat: Chat) -> str:
    """A conversation as the model reads it, up to its answer."""
    return str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))


def ask(road: Path) -> Answered:
    """Put all held-out sums, and some docstrings, to each model."""
    sums = read_lines(road / "tasks" / "held_out.jsonl")
    chats = read_lines(road / "tasks" / "held_out_chats.jsonl")
    docstrings = [row["messages"] for row in chats if "docstring" in row["messages"][0]["content"]]
    shown = docstrings[:: max(len(docstrings) // SHOWN, 1)][:SHOWN]
    tokenizer = AutoTokenizer.from_pretrained(road / "sft" / "model")
    prompts = [rendered(tokenizer, row["prompt"]) for row in sums]
    described = [rendered(tokenizer, messages[:1]) for messages in shown]
    known = [row["answer"] for row in sums]
    told = []
    for name, runtime, _, opened in runtimes(road):
        answers = opened()
        said = [
            text.strip()
            for at in range(0, len(prompts), ROWS)
            for text in answers(prompts[at : at + ROWS], ANSWER)
        ]
        right = sum(a == b for a, b in zip(said, known, strict=True))
        print(f"{name} in {runtime}: {right:,} of {len(known):,} sums are right", flush=True)
        said_of = [answers([text], DOCSTRING)[0].strip() for text in described]
        told.append(
            Told(
                model=name, runtime=runtime, right=right, asked=len(known), sums=said[:SHOWN],
                docstrings=said_of,
            )
        )  # fmt: skip
    return Answered(
        questions=[row["prompt"][0]["content"] for row in sums[:SHOWN]],
        known=known[:SHOWN],
        functions=[messages[0]["content"].partition("\n\n")[2] for messages in shown],
        docstrings=[messages[1]["content"] for messages in shown],
        told=told,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("road", type=Path, help="the road's folder")
    place = parser.parse_args().road
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    answered = ask(place)
    (place / "facts").mkdir(exist_ok=True)
    aside = place / "facts" / "answers.part"
    aside.write_bytes(msgspec.json.format(msgspec.json.encode(answered)))
    aside.replace(place / "facts" / "answers.json")
