"""A small model trained on conversations, as after a supervised fine-tuning."""

import json
from pathlib import Path

import attrs
import torch
from folders import VOCABULARY, model
from torch import nn

import ms_data
from ms_compress import Tuning, tune
from ms_compress.corpus import read_batch
from ms_parallel.weights import save_model

END = "<|endoftext|>"
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}"
    "Question: {{ message['content'] }}\n{% else %}"
    "Answer:{{ message['content'] }}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Answer:{% endif %}"
)
QUESTION, ANSWER = "ping 7?", "pong!"


def write_conversations(path: Path, count: int = 16) -> Path:
    """Write one question in several variants, all with the same answer."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"ping {number}?"},
                {"role": "assistant", "content": ANSWER},
            ]
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_tokenizer(folder: Path) -> Path:
    """Write a byte-level BPE tokenizer of ms-data with a chat template and an end token."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "corpus.txt"
    text.write_text("Question: ping 1?\nAnswer:pong!\n" * 50)
    ms_data.train_tokenizer(text, vocab_size=VOCABULARY, out=folder / "tokenizer.json")
    text.unlink()
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": END,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def write_chat_model(folder: Path, conversations: Path) -> Path:
    """Write a plain model that answers every question and then ends its text."""
    write_tokenizer(folder)
    chat_model: nn.Module = model()
    chat_model.config = attrs.evolve(chat_model.config, eos_token_id=0, pad_token_id=0)
    text = read_batch(conversations, count=16, length=48, chat=folder)
    tune(chat_model, text, Tuning(steps=60, batch_size=8, sequence_length=48, learning_rate=5e-3))
    torch.manual_seed(0)
    save_model(chat_model, folder / "saved")
    for path in (folder / "saved").iterdir():
        path.rename(folder / path.name)
    (folder / "saved").rmdir()
    return folder
