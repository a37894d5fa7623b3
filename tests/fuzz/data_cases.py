"""Inputs of ms-data: corpora, tokenizers, templates, shards and their index."""

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
    """Write plain texts."""
    (folder / "corpus").mkdir()
    for number in range(3):
        (folder / "corpus" / f"{number}.txt").write_text(LINES[number]["text"] * 3)


def lines(folder: Path) -> None:
    """Write JSON Lines."""
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in LINES))


def gzipped(folder: Path) -> None:
    """Write gzip-compressed JSON Lines."""
    lines(folder)
    plain = (folder / "corpus.jsonl").read_bytes()
    (folder / "corpus.jsonl.gz").write_bytes(gzip.compress(plain, mtime=0))
    (folder / "corpus.jsonl").unlink()


def zstandard_compressed(folder: Path) -> None:
    """Write Zstandard-compressed JSON Lines."""
    import zstandard

    lines(folder)
    plain = (folder / "corpus.jsonl").read_bytes()
    (folder / "corpus.jsonl.zst").write_bytes(zstandard.compress(plain))
    (folder / "corpus.jsonl").unlink()


def parquet_file(folder: Path) -> None:
    """Write a Parquet file with three row groups."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(LINES), folder / "corpus.parquet", row_group_size=4)


def arrow_stream(folder: Path) -> None:
    """Write a compressed Arrow stream with dictionary-encoded texts."""
    import pyarrow as pa
    import pyarrow.ipc

    texts = pa.array([row["text"] for row in LINES]).dictionary_encode()
    coded = pa.table({"text": texts})
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(folder / "corpus.arrow", coded.schema, options=options) as writer:
        writer.write_table(coded)


def saved_dataset(folder: Path) -> None:
    """Write a folder in the format of `datasets.save_to_disk`."""
    import pyarrow as pa
    import pyarrow.ipc

    (folder / "corpus").mkdir()
    rows = pa.Table.from_pylist(LINES)
    with pa.ipc.new_stream(folder / "corpus" / "data-00000-of-00001.arrow", rows.schema) as writer:
        writer.write_table(rows)
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
    (folder / "corpus" / "state.json").write_text(json.dumps(state))
    (folder / "corpus" / "dataset_info.json").write_text("{}")


def csv_file(folder: Path) -> None:
    """Write CSV with quotes and line breaks in fields."""
    texts = (row["text"].replace("comes", '""comes,""\n') for row in LINES)
    rows = "".join(f'{n},"{text}"\n' for n, text in enumerate(texts))
    (folder / "corpus.csv").write_text("id,text\n" + rows)


def tar_archive(folder: Path) -> None:
    """Write a WebDataset archive of texts and JSON rows."""
    import io
    import tarfile

    with tarfile.open(folder / "corpus.tar", "w") as file:
        for number, row in enumerate(LINES):
            is_json = number % 2
            content = json.dumps(row).encode() if is_json else row["text"].encode()
            info = tarfile.TarInfo(f"{number:03d}.{'json' if is_json else 'txt'}")
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))


def web_archive(folder: Path) -> None:
    """Write a web archive with texts and a chunked HTML response."""
    records = []
    page = b"<html><body><h1>Numbers</h1><p>one <b>two</b></body></html>"
    answer = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer += b"%x\r\n%s\r\n0\r\n\r\n" % (len(page), page)
    for number, row in enumerate(LINES):
        record_type, block = "conversion", row["text"].encode()
        if number % 4 == 3:
            record_type, block = "response", answer
        header = f"WARC/1.0\r\nWARC-Type: {record_type}\r\nWARC-Target-URI: http://x/{number}\r\n"
        header += f"Content-Type: application/http\r\nContent-Length: {len(block)}\r\n\r\n"
        records.append(header.encode() + block + b"\r\n\r\n")
    (folder / "corpus.warc").write_bytes(b"".join(records))


def with_tokenizer(folder: Path) -> None:
    """Write JSON Lines and a tokenizer trained on them."""
    from ms_data import train_tokenizer

    lines(folder)
    train_tokenizer(folder / "corpus.jsonl", vocab_size=280, out=folder / "tokenizer.json")


def conversations(folder: Path, *, pairs: bool = False) -> None:
    """Write conversations or preference pairs, a tokenizer and a chat template."""
    with_tokenizer(folder)
    (folder / "chat.jinja").write_text(TEMPLATE)
    (folder / "chat").mkdir()
    (folder / "chat" / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|endoftext|>"})
    )
    rows = []
    for n in range(8):
        question, answer = f"what is {n}?", f"{n}."
        if pairs:
            rows.append({"prompt": question, "chosen": answer, "rejected": "no", "margin": 0.5})
        else:
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            rows.append({"messages": messages})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def shards(folder: Path) -> None:
    """Write two shards and their index."""
    from ms_data import build

    with_tokenizer(folder)
    build(
        folder / "corpus.jsonl",
        tokenizer=folder / "tokenizer.json",
        out=folder / "shards",
        held_out_fraction=0.2,
    )


def rules(folder: Path) -> None:
    """Write JSON Lines, benchmarks and cleaning rules."""
    lines(folder)
    row = json.dumps({"text": "the number nine comes before the number ten, as all know"})
    (folder / "benchmarks.jsonl").write_text(row + "\n")
    (folder / "RULES.toml").write_text(RULES)


def cleaned(folder: Path) -> None:
    """Write a cleaned corpus with its ledger."""
    from ms_data import clean

    rules(folder)
    clean(folder / "corpus.jsonl", {"c4_quality": {}}, out=folder / "cleaned", workers=1)


def interrupted_dedup(folder: Path) -> None:
    """Write the state of a deduplication that was killed after hashing all documents."""
    import ms_data.deduplication.dedup as dedup_module

    lines(folder)
    child = os.fork()
    if child == 0:
        dedup_module.join_equal_keys = lambda *_, **__: os._exit(0)
        try:
            dedup_module.dedup(folder / "corpus.jsonl", out=folder / "out", workers=1)
        finally:
            os._exit(1)  # it did not end where it should
    if os.waitpid(child, 0)[1] or not (folder / "out.partial").exists():
        raise RuntimeError("the killed run left no state to resume")


def _build(corpus: str, *options: str) -> tuple[str, ...]:
    return ("build", corpus, "--tokenizer", "tokenizer.json", "--out", "out", *options)


def _train_tokenizer(corpus: str) -> tuple[str, ...]:
    return ("tokenizer", corpus, "--vocab-size", "270", "--out", "learned.json")


pairs = partial(conversations, pairs=True)
chat, template = ("--chat-template", "chat"), ("--chat-template", "chat.jinja")

CASES = (
    Case(name="learn text", make=text, files=("corpus/*",), run=run(*_train_tokenizer("corpus"))),
    Case(
        name="learn lines",
        make=lines,
        files=("*.jsonl",),
        run=run(*_train_tokenizer("corpus.jsonl")),
    ),
    Case(
        name="learn gzip",
        make=gzipped,
        files=("*.gz",),
        run=run(*_train_tokenizer("corpus.jsonl.gz")),
    ),
    Case(
        name="learn zstandard",
        make=zstandard_compressed,
        files=("*.zst",),
        run=run(*_train_tokenizer("corpus.jsonl.zst")),
    ),
    *(
        Case(
            name=f"learn {name}",
            make=make,
            files=(files,),
            run=run(*_train_tokenizer(corpus)),
            needs=needs,
        )
        for name, make, files, corpus, needs in (
            ("Parquet", parquet_file, "*.parquet", "corpus.parquet", "pyarrow"),
            ("Arrow", arrow_stream, "*.arrow", "corpus.arrow", "pyarrow"),
            ("saved datasets", saved_dataset, "corpus/*", "corpus", "pyarrow"),
            ("CSV", csv_file, "*.csv", "corpus.csv", ""),
            ("tar", tar_archive, "*.tar", "corpus.tar", ""),
            ("WARC", web_archive, "*.warc", "corpus.warc", "warcio"),
        )
    ),
    Case(
        name="build lines",
        make=with_tokenizer,
        files=("corpus.jsonl", "tokenizer.json"),
        run=run(*_build("corpus.jsonl")),
        weight=2,
    ),
    Case(
        name="clean",
        make=rules,
        files=("corpus.jsonl", "benchmarks.jsonl", "RULES.toml"),
        run=run("clean", "corpus.jsonl", "RULES.toml", "--out", "out", "--workers", "1"),
        weight=2,
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
        name="dedup resume",
        make=interrupted_dedup,
        files=("out.partial/**/*",),
        run=run("dedup", "corpus.jsonl", "--out", "out", "--workers", "1"),
        sealed=True,
        result=contents("out/**/*"),
        may_be_missing=True,
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
        weight=2,
    ),
    Case(
        name="build by template",
        make=conversations,
        files=("chat.jinja",),
        run=run(*_build("rows.jsonl", *template)),
        weight=2,
    ),
    Case(
        name="build by folder",
        make=conversations,
        files=("chat/*", "tokenizer.json"),
        run=run(*_build("rows.jsonl", *chat)),
        weight=2,
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
        weight=2,
        sealed=True,
        result=output,
    ),
    Case(
        name="inspect",
        make=shards,
        files=("shards/*.json",),
        run=run("inspect", "shards", "--json"),
        weight=2,
        sealed=True,
    ),
)
