"""Ask the models of the road the held-out questions, each in its own runtime, and count.

torch and transformers run the trained models and compressed-tensors, onnxruntime runs ONNX, and
llama.cpp runs GGUF if its Python package is installed; otherwise transformers reads that file.
Decoding is greedy.

Run it in the road's folder:

    python .../examples/road/ask.py --out answers.json
    python .../examples/road/ask.py --model ppo/model --sample 0     # sampled, as PPO does
"""

import argparse
import importlib.util
import json
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

BATCH_ROWS = 128
SUM_TOKENS = 8
"""Longest answer to a sum; a right one has at most five tokens."""
DOCSTRING_TOKENS = 40
SHOWN = 4
"""Number of sums and of docstrings that the page shows."""

Answer = Callable[[list[str], int], list[str]]
"""(prompts, maximum number of new tokens) -> one text per prompt, without the end token."""


class ModelAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """Answers of one model."""

    model: str
    runtime: str
    folder: str
    correct: int
    asked: int
    sums: list[str]
    """Answers to the sums that the page shows."""
    docstrings: list[str]


class Answers(msgspec.Struct, frozen=True, kw_only=True, tag="road-answers-2"):
    """Questions, expected answers, and the answers of all models."""

    questions: list[str]
    expected: list[str]
    functions: list[str]
    docstrings: list[str]
    """The library's own docstrings of `functions`."""
    models: list[ModelAnswers]


def stop_tokens(folder: Path) -> set[int]:
    """Return the tokens that end an answer, from `generation_config.json`."""
    eos = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    return {eos} if isinstance(eos, int) else set(eos)


def decode(tokenizer: Any, tokens: Sequence[int], stops: Collection[int]) -> str:
    """Return the text of the tokens before the first stop token."""
    end = next((i for i, token in enumerate(tokens) if token in stops), len(tokens))
    return str(tokenizer.decode(list(tokens)[:end]))


def open_transformers(folder: Path, *, seed: int | None = None, **options: str) -> Answer:
    """Open a Hugging Face folder, or a GGUF file in it (`gguf_file=`).

    With a seed, answers are sampled at temperature 1, as PPO samples its rollouts.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, **options)
    model.train(mode=False)
    stops = stop_tokens(folder)
    tokenizer.pad_token_id = min(stops)
    sampling: dict[str, Any] = {"do_sample": False}
    if seed is not None:
        torch.manual_seed(seed)
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}

    def answer(prompts: list[str], max_new_tokens: int) -> list[str]:
        batch = tokenizer(
            prompts,
            return_tensors="pt",
            padding=True,
            add_special_tokens=False,
            return_token_type_ids=False,
        )
        with torch.inference_mode():
            output = model.generate(
                **batch,
                **sampling,
                max_new_tokens=max_new_tokens,
                eos_token_id=sorted(stops),
                pad_token_id=min(stops),
            )
        new_tokens = output[:, batch["input_ids"].shape[1] :].tolist()
        return [decode(tokenizer, row, stops) for row in new_tokens]

    return answer


def open_onnx(folder: Path) -> Answer:
    """Open `model.onnx` in onnxruntime; keys and values are fed back at each step."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    stops = stop_tokens(folder)
    cache_inputs = [i for i in session.get_inputs() if i.name.startswith("past_key_values")]

    def answer(prompts: list[str], max_new_tokens: int) -> list[str]:
        rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in prompts]
        width = max(map(len, rows))
        ids = np.array([[min(stops)] * (width - len(row)) + row for row in rows])
        mask = np.array([[0] * (width - len(row)) + [1] * len(row) for row in rows])
        cache = {
            i.name: np.zeros((len(ids), i.shape[1], 0, i.shape[3]), np.float32)
            for i in cache_inputs
        }
        new_tokens = np.zeros((len(ids), 0), np.int64)
        while new_tokens.shape[1] < max_new_tokens:
            logits, *presents = session.run(
                None, {"input_ids": ids, "attention_mask": mask, **cache}
            )
            cache = dict(zip(cache, presents, strict=True))
            ids = logits[:, -1:].argmax(-1)
            mask = np.concatenate([mask, np.ones_like(ids)], axis=1)
            new_tokens = np.concatenate([new_tokens, ids], axis=1)
            if np.isin(new_tokens, sorted(stops)).any(axis=1).all():
                break
        return [decode(tokenizer, row, stops) for row in new_tokens.tolist()]

    return answer


def open_gguf(folder: Path) -> Answer:
    """Open `model.gguf` in llama.cpp, with llama.cpp's tokenizer."""
    from llama_cpp import Llama

    llama = Llama(str(folder / "model.gguf"), n_ctx=256, verbose=False)

    def answer(prompts: list[str], max_new_tokens: int) -> list[str]:
        return [
            llama.create_completion(text, max_tokens=max_new_tokens, temperature=0.0)["choices"][0][
                "text"
            ]
            for text in prompts
        ]

    return answer


def models() -> list[tuple[str, str, Path, Callable[[Path], Answer]]]:
    """Return name, runtime, folder and opener of each model."""
    gguf: tuple[str, Callable[[Path], Answer]] = ("llama.cpp", open_gguf)
    if not importlib.util.find_spec("llama_cpp"):
        gguf = (
            "transformers, from the GGUF file",
            lambda folder: open_transformers(folder, gguf_file="model.gguf"),
        )
    return [
        ("pre-trained", "transformers", Path("pretrain/model"), open_transformers),
        ("tuned", "transformers", Path("sft/model"), open_transformers),
        ("optimized with PPO", "transformers", Path("ppo/model"), open_transformers),
        ("compressed-tensors", "transformers", Path("deploy/ct"), open_transformers),
        ("ONNX", "onnxruntime", Path("deploy/onnx"), open_onnx),
        ("GGUF", gguf[0], Path("deploy/gguf"), gguf[1]),
    ]


def read_rows(path: Path) -> list[Any]:
    """Read a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    """Return the prompt of a conversation, up to the start of the answer."""
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def answer_sums(answer: Answer, folder: Path, sums: Sequence[Any]) -> list[str]:
    """Return a model's answers to all sums; `folder` holds its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [render(tokenizer, row["prompt"]) for row in sums]
    batches = (prompts[i : i + BATCH_ROWS] for i in range(0, len(prompts), BATCH_ROWS))
    return [text.strip() for batch in batches for text in answer(batch, SUM_TOKENS)]


def count_correct(answers: Sequence[str], sums: Sequence[Any]) -> int:
    """Return the number of right answers."""
    return sum(text == row["answer"] for text, row in zip(answers, sums, strict=True))


def ask_all(sums: Sequence[Any]) -> Answers:
    """Ask every model all held-out sums and some docstrings."""
    chats = [row["messages"] for row in read_rows(Path("tasks/held_out_chats.jsonl"))]
    docstrings = [messages for messages in chats if "docstring" in messages[0]["content"]]
    shown = docstrings[:: max(len(docstrings) // SHOWN, 1)][:SHOWN]
    tokenizer_folder = Path("sft/model")  # the pre-trained model has no chat template
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    prompts = [render(tokenizer, messages[:1]) for messages in shown]
    results = []
    for name, runtime, folder, open_model in models():
        answer = open_model(folder)
        answers = answer_sums(answer, tokenizer_folder, sums)
        correct = count_correct(answers, sums)
        print(f"{name} in {runtime}: {correct:,} of {len(sums):,} sums are right", flush=True)
        results.append(
            ModelAnswers(
                model=name,
                runtime=runtime,
                folder=str(folder),
                correct=correct,
                asked=len(sums),
                sums=answers[:SHOWN],
                docstrings=[answer([text], DOCSTRING_TOKENS)[0].strip() for text in prompts],
            )
        )
    return Answers(
        questions=[row["prompt"][0]["content"] for row in sums[:SHOWN]],
        expected=[row["answer"] for row in sums[:SHOWN]],
        functions=[messages[0]["content"].partition("\n\n")[2] for messages in shown],
        docstrings=[messages[1]["content"] for messages in shown],
        models=results,
    )


def main() -> None:
    """Ask all models, or only `--model`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("answers.json"), help="JSON to write")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="ask only this model")
    parser.add_argument("--sample", type=int, metavar="SEED", help="with --model: sample answers")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    sums = read_rows(Path("tasks/held_out.jsonl"))
    if options.model:
        answer = open_transformers(options.model, seed=options.sample)
        correct = count_correct(answer_sums(answer, options.model, sums), sums)
        print(f"{options.model}: {correct:,} of {len(sums):,} sums are right")
    else:
        options.out.write_bytes(msgspec.json.format(msgspec.json.encode(ask_all(sums))))


if __name__ == "__main__":
    main()
