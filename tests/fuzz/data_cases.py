"""What ms-data reads: corpora, tokenizers, templates, shards and their index."""

import gzip
import json
import os
from functools import partial
from pathlib import Path

from fuzz.case import Case, command, contents, output

run = partial(command, "ms_data")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|endoftext|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
RULES = """[unicode]
form = "NFKC"
[gopher_quality]
min_words = 3
max_bullet_lines = 0.5
stop_words = ["the", "after"]
[gopher_repetition]
max_top_ngrams = [0.9, 0.9, 0.9]
[decontaminate]
benchmarks = "benchmarks.jsonl"
ngram_words = 9
"""
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


def table(folder: Path) -> None:
    """Parquet, in three row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(LINES), folder / "corpus.parquet", row_group_size=4)


def batches(folder: Path) -> None:
    """An Arrow stream whose texts are numbers into a dictionary, packed."""
    import pyarrow as pa
    import pyarrow.ipc

    texts = pa.array([one["text"] for one in LINES]).dictionary_encode()
    coded = pa.table({"text": texts})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(folder / "corpus.arrow", coded.schema, options=options) as writer:
        writer.write_table(coded)


def saved(folder: Path) -> None:
    """A folder as `datasets` saves it."""
    import pyarrow as pa
    import pyarrow.ipc

    (folder / "corpus").mkdir()
    whole = pa.Table.from_pylist(LINES)
    with pa.ipc.new_stream(folder / "corpus" / "data-00000-of-00001.arrow", whole.schema) as writer:
        writer.write_table(whole)
    listed = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
    (folder / "corpus" / "state.json").write_text(json.dumps(listed))
    (folder / "corpus" / "dataset_info.json").write_text("{}")


def delimited(folder: Path) -> None:
    """CSV with quotes and lines within."""
    texts = (one["text"].replace("comes", '""comes,""\n') for one in LINES)
    rows = "".join(f'{n},"{text}"\n' for n, text in enumerate(texts))
    (folder / "corpus.csv").write_text("id,text\n" + rows)


def archive(folder: Path) -> None:
    """A WebDataset archive of texts and rows."""
    import io
    import tarfile

    with tarfile.open(folder / "corpus.tar", "w") as file:
        for number, one in enumerate(LINES):
            row = number % 2
            content = json.dumps(one).encode() if row else one["text"].encode()
            info = tarfile.TarInfo(f"{number:03d}.{'json' if row else 'txt'}")
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))


def web(folder: Path) -> None:
    """A web archive: texts, and a page that was sent in chunks."""
    records = []
    page = b"<html><body><h1>Numbers</h1><p>one <b>two</b></body></html>"
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer += b"%x\r\n%s\r\n0\r\n\r\n" % (len(page), page)
    for number, one in enumerate(LINES):
        kind, block = "conversion", one["text"].encode()
        if number % 4 == 3:
            kind, block = "response", answer
        head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Target-URI: http://x/{number}\r\n"
        head += f"Content-Type: application/http\r\nContent-Length: {len(block)}\r\n\r\n"
        records.append(head.encode() + block + b"\r\n\r\n")
    (folder / "corpus.warc").write_bytes(b"".join(records))


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
        held_out_fraction=0.2,
    )


def rules(folder: Path) -> None:
    """Lines, benchmarks and the rules to clean with."""
    lines(folder)
    row = json.dumps({"text": "the number nine comes before the number ten, as all know"})
    (folder / "benchmarks.jsonl").write_text(row + "\n")
    (folder / "RULES.toml").write_text(RULES)


def cleaned(folder: Path) -> None:
    """A ledger, with what it is of."""
    from ms_data import clean

    rules(folder)
    clean(folder / "corpus.jsonl", {"c4_quality": {}}, out=folder / "cleaned", workers=1)


def hashed(folder: Path) -> None:
    """A deduplication that was killed once it had hashed all documents."""
    import ms_data.deduplication.dedup as place

    lines(folder)
    child = os.fork()
    if child == 0:
        place.join_alike = lambda *_, **__: os._exit(0)
        place.dedup(folder / "corpus.jsonl", out=folder / "out", workers=1)
    if os.waitpid(child, 0)[1] or not (folder / "out.partial").exists():
        raise RuntimeError("nothing was left to go on from")


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
    *(
        Case(name=f"learn {name}", make=make, files=(files,), run=run(*_learn(corpus)), needs=needs)
        for name, make, files, corpus, needs in (
            ("Parquet", table, "*.parquet", "corpus.parquet", "pyarrow"),
            ("Arrow", batches, "*.arrow", "corpus.arrow", "pyarrow"),
            ("saved datasets", saved, "corpus/*", "corpus", "pyarrow"),
            ("CSV", delimited, "*.csv", "corpus.csv", ""),
            ("tar", archive, "*.tar", "corpus.tar", ""),
            ("WARC", web, "*.warc", "corpus.warc", "warcio"),
        )
    ),
    Case(
        name="build lines",
        make=with_tokenizer,
        files=("corpus.jsonl", "tokenizer.json"),
        run=run(*_build("corpus.jsonl")),
        share=2,
    ),
    Case(
        name="clean",
        make=rules,
        files=("corpus.jsonl", "benchmarks.jsonl", "RULES.toml"),
        run=run("clean", "corpus.jsonl", "RULES.toml", "--out", "out", "--workers", "1"),
        share=2,
    ),
    Case(
        name="dedup",
        make=lines,
        files=("corpus.jsonl",),
        run=run(
            *("dedup", "corpus.jsonl", "--out", "out", "--workers", "1"),
            *("--substring-words", "5", "--rows", "2"),
        ),
    ),
    Case(
        name="dedup goes on",
        make=hashed,
        files=("out.partial/**/*",),
        run=run("dedup", "corpus.jsonl", "--out", "out", "--workers", "1"),
        sealed=True,
        result=contents("out/**/*"),
        one_may_miss=True,
    ),
    Case(
        name="stats",
        make=cleaned,
        files=("cleaned/ledger.json", "cleaned/ledger/*"),
        run=run("stats", "cleaned", "--out", "page.html"),
        sealed=True,
        result=contents("page.html"),
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
