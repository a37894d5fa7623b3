"""What ms-data reads: corpora, tokenizers, templates, shards and their index."""

import gzip
import json
from functools import partial
from pathlib import Path

from fuzz.case import Case, command, output

run = partial(command, "ms_data")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LINES = [{"text": f"the number {n} comes after {n - 1}. " * 4} for n in range(12)]


def text(folder: Path) -> None:
    """Plain texts."""
    (folder / "corpus").mkdir()
    for number in range(3):
        (folder / "corpus" / f"{number}.txt").write_text(LINES[number]["text"] * 3)


def lines(folder: Path) -> None:
    """JSON Lines."""
    (folder / "corpus.jsonl").write_text("".join(json.dumps(one) + "\n" for one in LINES))


def packed(folder: Path) -> None:
    """JSON Lines, by gzip."""
    lines(folder)
    plain = (folder / "corpus.jsonl").read_bytes()
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(plain, mtime=0))
    (folder / "corpus.jsonl").unlink()


def packed_by_zstandard(folder: Path) -> None:
    """JSON Lines, by Zstandard."""
    import zstandard

    lines(folder)
    plain = (folder / "corpus.jsonl").read_bytes()
    (folder / "corpus.jsonl.zst").write_bytes(zstandard.compress(plain))
    (folder / "corpus.jsonl").unlink()


def with_tokenizer(folder: Path) -> None:
    """Lines and a tokenizer of theirs."""
    from ms_data import train_tokenizer

    lines(folder)
    train_tokenizer(folder / "corpus.jsonl", vocab_size=280, out=folder / "tokenizer.json")


def conversations(folder: Path, *, pairs: bool = False) -> None:
    """Conversations or preference pairs, a tokenizer and a chat template."""
    with_tokenizer(folder)
    (folder / "chat.jinja").write_text(TEMPLATE)
    (folder / "chat").mkdir()
    (folder / "chat" / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"})
    )
    rows = []
    for n in range(8):
        asked, said = f"what is {n}?", f"{n}."
        if pairs:
            rows.append({"prompt": asked, "chosen": said, "rejected": "no", "margin": 0.5})
        else:
            users = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
            rows.append({"messages": users})
    (folder / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))


def shards(folder: Path) -> None:
    """Two shards and their index."""
    from ms_data import build

    with_tokenizer(folder)
    build(
        folder / "corpus.jsonl",
        tokenizer=folder / "tokenizer.json",
        out=folder / "shards",
        hold_out=0.2,
    )


def _build(corpus: str, *more: str) -> tuple[str, ...]:
    return ("build", corpus, "--tokenizer", "tokenizer.json", "--out", "out", *more)


def _learn(corpus: str) -> tuple[str, ...]:
    return ("tokenizer", corpus, "--vocab-size", "270", "--out", "made.json")


pairs = partial(conversations, pairs=True)
chat, template = ("--chat-template", "chat"), ("--chat-template", "chat.jinja")

CASES = (
    Case(name="learn text", make=text, files=("corpus/*",), run=run(*_learn("corpus"))),
    Case(name="learn lines", make=lines, files=("*.jsonl",), run=run(*_learn("corpus.jsonl"))),
    Case(name="learn gzip", make=packed, files=("*.gz",), run=run(*_learn("corpus.jsonl.gz"))),
    Case(
        name="learn zstandard",
        make=packed_by_zstandard,
        files=("*.zst",),
        run=run(*_learn("corpus.jsonl.zst")),
    ),
    Case(
        name="build lines",
        make=with_tokenizer,
        files=("corpus.jsonl", "tokenizer.json"),
        run=run(*_build("corpus.jsonl")),
        share=2,
    ),
    Case(
        name="build conversations",
        make=conversations,
        files=("rows.jsonl",),
        run=run(*_build("rows.jsonl", *template)),
        share=2,
    ),
    Case(
        name="build by template",
        make=conversations,
        files=("chat.jinja",),
        run=run(*_build("rows.jsonl", *template)),
        share=2,
    ),
    Case(
        name="build by folder",
        make=conversations,
        files=("chat/*", "tokenizer.json"),
        run=run(*_build("rows.jsonl", *chat)),
        share=2,
    ),
    Case(
        name="build pairs",
        make=pairs,
        files=("rows.jsonl",),
        run=run(*_build("rows.jsonl", *template, "--pairs")),
    ),
    Case(
        name="verify",
        make=shards,
        files=("shards/**/*",),
        run=run("verify", "shards", "--json"),
        share=2,
        sealed=True,
        result=output,
    ),
    Case(
        name="inspect",
        make=shards,
        files=("shards/*.json",),
        run=run("inspect", "shards", "--json"),
        share=2,
        sealed=True,
    ),
)
