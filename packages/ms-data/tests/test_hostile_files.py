"""Hostile or damaged files give one line with an error class of this package."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers

from ms_data import (
    ChatTemplate,
    DataError,
    Tokenizer,
    TokenizerError,
    TokenStream,
    build,
    inspect,
    train_tokenizer,
    verify,
)
from ms_data.cli import main
from ms_data.corpus.find import find_corpus
from ms_data.disk.format import decode_index, encode_index
from ms_data.disk.writer import ShardState

from .chat_templates import CHATML, write_tokenizer
from .test_build import random_texts, write_lines

DEEP = b"[" * 100_000
DAMAGED = {
    "deep": DEEP,
    "deep objects": b'{"a":' * 100_000,
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "half a character": b'{"type": "ms-data.index.1", "token_type": "\\ud800"}',
    "another type": b"[]",
    "a number": b"1e999",
    "empty": b"",
    "no facts": b"{}",
    "huge number": b'{"type": "ms-data.index.1", "frame_tokens": 1' + b"0" * 5000 + b"}",
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset. Read-only."""
    folder = tmp_path_factory.mktemp("hostile")
    path = write_lines(folder / "a.jsonl", random_texts(1, 40))
    tokenizer = train_tokenizer(path, vocab_size=300)
    build(path, tokenizer=tokenizer, out=folder / "shards")
    return folder / "shards"


def is_one_line(error: BaseException) -> bool:
    """Return whether an error is one printable line of reasonable length."""
    return str(error).isprintable() and len(str(error)) < 1000


@pytest.mark.parametrize("name", DAMAGED)
@pytest.mark.parametrize("file", ["index.json", "tokenizer.json", "build.json"])
def test_a_damaged_dataset_file_gives_one_line(
    tmp_path: Path, shards: Path, file: str, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """From inspect, verify, Tokenizer.load and a rebuild; never a traceback."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for path in shards.iterdir():
        os.link(path, folder / path.name)
    (folder / file).unlink()
    (folder / file).write_bytes(DAMAGED[name])
    corpus = write_lines(tmp_path / "a.jsonl", random_texts(1, 40))
    tokenizer = str(shards / "tokenizer.json")
    for arguments in (
        ["inspect", str(folder)],
        ["verify", str(folder)],
        ["build", str(corpus), "--tokenizer", str(folder), "--out", str(tmp_path / "new")],
        ["build", str(corpus), "--tokenizer", tokenizer, "--out", str(folder)],
    ):
        assert main(arguments) in (0, 1, 2)
        error = capsys.readouterr().err
        assert error.count("\n") <= 1
        assert len(error) < 1000


def test_overflowing_sizes_are_refused_despite_valid_checksums(
    tmp_path: Path, shards: Path
) -> None:
    """Counts whose sums exceed 64 bits."""
    index = decode_index((shards / "index.json").read_bytes())
    huge = (1 << 63) - 1
    for change in ({"tokens": huge}, {"size_bytes": huge}, {"tokens": huge, "documents": huge}):
        shard = json.loads(msgspec.json.encode(index.shards[0])) | change
        raw = json.loads(msgspec.json.encode(index)) | {"shards": [shard]}
        (tmp_path / "index.json").write_text(json.dumps(raw))
        with pytest.raises(DataError) as caught:
            TokenStream(tmp_path, sequence_length=8, batch_size=1)
        assert is_one_line(caught.value)
    assert encode_index(index) == (shards / "index.json").read_bytes()


@pytest.mark.parametrize(
    "path", ["a\0b", "x" * 1_000_000, "y/" * 3000], ids=["NUL", "long name", "long path"]
)
def test_impossible_paths_give_one_line(tmp_path: Path, path: str) -> None:
    """A NUL, a million characters, thousands of folders."""
    for call in (
        lambda: inspect(path),
        lambda: verify(path),
        lambda: Tokenizer.load(path),
        lambda: ChatTemplate.load(path),
        lambda: find_corpus(path),
    ):
        with pytest.raises(DataError) as caught:
            call()
        assert is_one_line(caught.value)


def test_symlink_loops_give_one_line(tmp_path: Path) -> None:
    """As a corpus, a tokenizer, a dataset, and inside a corpus."""
    for name, target in (("a", "b"), ("b", "a")):
        (tmp_path / name).symlink_to(tmp_path / target)
    for call in (
        lambda: find_corpus(tmp_path),
        lambda: find_corpus(tmp_path / "a"),
        lambda: Tokenizer.load(tmp_path / "a"),
        lambda: inspect(tmp_path / "a"),
    ):
        with pytest.raises(DataError) as caught:
            call()
        assert is_one_line(caught.value)


def _word_level(**vocab: int) -> dict[str, Any]:
    model = tokenizers.models.WordLevel({"<|endoftext|>": 0}, unk_token="<|endoftext|>")
    spec: dict[str, Any] = json.loads(tokenizers.Tokenizer(model).to_str())
    spec["model"]["vocab"] |= vocab  # the library itself drops huge ids
    return spec


def test_tokenizers_with_absurd_ids_or_no_tokens_are_refused() -> None:
    """Ids too large for stored tokens, no tokens at all, or no valid model."""
    empty = _word_level()
    empty["model"]["vocab"] = {}
    specs = [
        empty,
        _word_level(a=(1 << 31) - 1),
        _word_level(a=(1 << 32) - 1),
        {**_word_level(), "model": None},
        [],
        3,
    ]
    for spec in specs:
        with pytest.raises(TokenizerError) as caught:
            Tokenizer(json.dumps(spec).encode())
        assert is_one_line(caught.value)


def test_a_tokenizer_that_fails_to_encode_is_named() -> None:
    spec = _word_level()
    spec["model"]["unk_token"] = "gone"
    for call in (Tokenizer.encode, Tokenizer.encode_chat):
        with pytest.raises(TokenizerError, match="cannot encode"):
            call(Tokenizer(json.dumps(spec).encode()), "unknown")


def test_text_that_encodes_to_the_end_of_text_is_refused() -> None:
    """The vocabulary itself maps a word to the end-of-text id; the error quotes the text."""
    tokenizer = Tokenizer(json.dumps(_word_level(a=1)).encode())
    assert [ids.tolist() for ids in tokenizer.encode_documents(["a"])] == [[1, 0]]
    with pytest.raises(TokenizerError, match=r"end-of-text token 0 .*as in '<\|endoftext\|>'"):
        tokenizer.encode_documents(["a", "<|endoftext|>"])


CONFIGS = {
    "deep": b'{"chat_template": ' + DEEP,
    "not UTF-8": b'{"chat_template": "\xff"}',
    "an array": b"[]",
    "half a character": b'{"chat_template": "\\ud800"}',
    "a token of half a character": b'{"chat_template": "x", "bos_token": "\\ud800"}',
    "a number": b'{"chat_template": 1e999}',
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_damaged_tokenizer_config_gives_one_line(tmp_path: Path, name: str) -> None:
    """Wherever a template folder is read."""
    (tmp_path / "tokenizer_config.json").write_bytes(CONFIGS[name])
    with pytest.raises(TokenizerError) as caught:
        ChatTemplate.load(tmp_path)
    assert is_one_line(caught.value)
    if name not in ("half a character", "a number"):
        with pytest.raises(TokenizerError):
            ChatTemplate("{{ bos_token }}").with_tokens_of(tmp_path).files()


def test_an_oversized_template_file_is_refused_before_reading(tmp_path: Path) -> None:
    """A sparse file of a terabyte takes no memory."""
    with (tmp_path / "chat_template.jinja").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TokenizerError, match="larger than the limit of 1 MiB"):
        ChatTemplate.load(tmp_path)


def test_malformed_rows_are_refused_with_their_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Deep nesting, lone surrogates, overflowing numbers, wrong types."""
    folder = write_tokenizer(tmp_path / "model", CHATML)
    user = {"role": "user", "content": "x"}
    rows = [
        b'{"messages": ' + DEEP,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        json.dumps({"messages": [user, {"role": "assistant", "content": 1}]}).encode(),
        json.dumps({"messages": [user], "weight": "NaN"}).encode(),
        b'{"instruction": "a", "output": "b", "weight": 1e999}',
        b'{"instruction": "a", "output": "b", "weight": 1' + b"0" * 5000 + b"}",
        b'{"instruction": "a", "output": "b", "tools": "[[[["}',
        b'{"instruction": "a", "output": "b", "tools": "' + b"[" * 5000 + b'"}',
        b"\xff\xfe{}",
        b"null",
    ]
    for number, row in enumerate(rows):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(row + b"\n")
        out = str(tmp_path / "out")
        options = ["--tokenizer", str(folder), "--chat-template", str(folder), "--out", out]
        assert main(["build", str(path), *options]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"{number}.jsonl" in error
        assert len(error) < 1000


def test_a_journal_entry_with_another_path_is_refused() -> None:
    """Otherwise a resumed build could truncate an unrelated file."""
    valid = {
        "name": "shard-00000.msd",
        "split": "train",
        "size_bytes": 16,
        "tokens": 0,
        "documents": 0,
        "position": 0,
        "pending": b"",
        "ends": (),
        "table": b"",
    }
    ShardState(**valid)  # type: ignore[arg-type]
    for change in ({"name": "../x"}, {"name": "/etc/passwd"}, {"table": b"x"}, {"tokens": -1}):
        with pytest.raises(ValueError, match=r"is not a shard|is invalid"):
            ShardState(**{**valid, **change})  # type: ignore[arg-type]
