"""The tokenizer is exact, deterministic and robust against untrusted files."""

import json
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_data import (
    CorpusError,
    DamageError,
    SettingError,
    Tokenizer,
    TokenizerError,
    build,
    train_tokenizer,
)
from ms_data.tokenization.tokenizer import END_OF_TEXT
from ms_data.tokenization.training import MAX_WORD_LENGTH, _split_long_words

from .test_build import random_texts, write_lines


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of fifty texts."""
    return write_lines(tmp_path_factory.mktemp("lines") / "a.jsonl", random_texts(6, 50))


@pytest.fixture(scope="module")
def tokenizer(lines: Path) -> Tokenizer:
    """A small BPE tokenizer."""
    return train_tokenizer(lines, vocab_size=300)


@given(text=st.text(max_size=60))
def test_any_text_decodes_to_itself(tokenizer: Tokenizer, text: str) -> None:
    """Including bytes not seen in training."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_documents_end_in_the_end_of_text(tokenizer: Tokenizer) -> None:
    """Batched encoding equals single encoding plus the end token."""
    texts = random_texts(7, 20)
    encoded = [tokens.tolist() for tokens in tokenizer.encode_documents(texts)]
    assert encoded == [[*tokenizer.encode(text), tokenizer.end_of_text] for text in texts]
    assert tokenizer.decode(encoded[0]) == texts[0]


def test_training_twice_gives_the_same_file(lines: Path, tmp_path: Path) -> None:
    """No temporary file is left."""
    for name in ("one.json", "two.json"):
        train_tokenizer(lines, vocab_size=300, out=tmp_path / name)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "two.json"]
    assert Tokenizer.load(tmp_path / "one.json").vocabulary_size == 300


def test_a_dataset_folder_loads_as_its_tokenizer(
    lines: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A replaced tokenizer file is detected."""
    build(lines, tokenizer=tokenizer, out=tmp_path / "out")
    loaded = Tokenizer.load(tmp_path / "out")
    assert loaded.digest == tokenizer.digest
    assert loaded.end_of_text == tokenizer.end_of_text
    (tmp_path / "out" / "tokenizer.json").write_bytes(tokenizer.content + b" ")
    with pytest.raises(DamageError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path / "out")


def test_truncation_settings_of_a_tokenizer_file_are_ignored(tokenizer: Tokenizer) -> None:
    model = json.loads(tokenizer.content)
    model["truncation"] = {
        "direction": "Right",
        "max_length": 5,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    truncating = Tokenizer(json.dumps(model).encode())
    text = "alpha beta gamma " * 9
    assert truncating.encode(text) == tokenizer.encode(text)


def test_bpe_dropout_of_a_tokenizer_file_is_ignored(tokenizer: Tokenizer) -> None:
    model = json.loads(tokenizer.content)
    model["model"]["dropout"] = 0.9
    dropping = Tokenizer(json.dumps(model).encode())
    text = "alpha beta gamma " * 9
    assert dropping.encode(text) == tokenizer.encode(text)
    assert dropping.encode_chat(text) == tokenizer.encode_chat(text)


def test_the_end_of_text_can_be_chosen(tokenizer: Tokenizer) -> None:
    """Required if no usual name exists; unknown names are refused with the remedy."""
    content = tokenizer.content.replace(END_OF_TEXT.encode(), b"<<stop>>")
    with pytest.raises(TokenizerError, match="--end-of-text"):
        Tokenizer(content)
    with pytest.raises(TokenizerError, match="'<stop>'"):
        Tokenizer(content, end_of_text="<stop>")
    assert Tokenizer(content, end_of_text="<<stop>>").end_of_text == 0
    assert Tokenizer(content, end_of_text=5).end_of_text == 5
    for number in (-1, tokenizer.vocabulary_size):
        with pytest.raises(TokenizerError, match=f"has no token {number} to end a text"):
            Tokenizer(content, end_of_text=number)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": 3}', b"\xff\xfe", b"[1, 2]"])
def test_invalid_tokenizer_files_are_refused_by_path(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"t\.json: not a tokenizer\.json"):
        Tokenizer.load(tmp_path / "t.json")
    shutil.rmtree(tmp_path)
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.load(tmp_path / "t.json")


@pytest.mark.parametrize("name", ["tok.json", "TOK.JSON", "tok.Json"])
def test_a_name_of_json_means_a_file(lines: Path, tmp_path: Path, name: str) -> None:
    """Any other name means a folder."""
    train_tokenizer(lines, vocab_size=260, out=tmp_path / name)
    assert (tmp_path / name).is_file()
    train_tokenizer(lines, vocab_size=260, out=tmp_path / "tok")
    assert (tmp_path / "tok" / "tokenizer.json").is_file()


def test_training_needs_a_valid_vocab_size_and_text(lines: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="257"):
        train_tokenizer(lines, vocab_size=256)
    with pytest.raises(SettingError, match="to 2097152, got"):
        train_tokenizer(lines, vocab_size=1 << 64)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(CorpusError, match="is empty"):
        train_tokenizer(tmp_path, vocab_size=300)


def test_a_tokenizer_folder_loads_in_transformers(tmp_path: Path) -> None:
    """With end and padding tokens and equal ids. An `out` ending in .json writes only that file."""
    from transformers import AutoTokenizer

    path = write_lines(tmp_path / "a.jsonl", random_texts(1, 40))
    train_tokenizer(path, vocab_size=300, out=tmp_path / "folder")
    train_tokenizer(path, vocab_size=300, out=tmp_path / "file.json")
    ours, theirs = (
        Tokenizer.load(tmp_path / "folder"),
        AutoTokenizer.from_pretrained(tmp_path / "folder"),
    )
    assert ours.content == (tmp_path / "file.json").read_bytes()
    assert theirs.eos_token == theirs.pad_token == END_OF_TEXT == ours.end_of_text_name
    assert theirs.eos_token_id == ours.end_of_text
    assert len(theirs) == ours.vocabulary_size
    for text in random_texts(2, 9):
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    config = json.loads(
        ours.files({"bos_token": "<s>", "eos_token": "</s>"})["tokenizer_config.json"]
    )
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<s>",
        "</s>",
        END_OF_TEXT,
    )


@pytest.mark.parametrize("letter", ["{", "x", " ", "\u4e00"])
def test_extremely_long_words_are_split_for_training(letter: str, tmp_path: Path) -> None:
    """Training time grows with the square of the word length."""
    text = "one two three. " * 50 + letter * 200_000
    parts = list(_split_long_words(text))
    assert "".join(parts) == text
    assert not any(
        re.search(rf"{re.escape(letter)}{{{MAX_WORD_LENGTH + 1}}}", part) for part in parts
    )
    (tmp_path / "text.txt").write_text(text)
    tokenizer = train_tokenizer(tmp_path / "text.txt", vocab_size=270)
    assert len(json.loads(tokenizer.content)["model"]["vocab"]) == 270
