"""The tokenizer is exact, deterministic and careful with other people's files."""

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
from ms_data.tokenization.training import LONGEST_WORD, _split_long_words

from .test_build import texts_of, write_lines


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fifty texts."""
    return write_lines(tmp_path_factory.mktemp("lines") / "a.jsonl", texts_of(6, 50))


@pytest.fixture(scope="module")
def tokenizer(lines: Path) -> Tokenizer:
    """A small BPE."""
    return train_tokenizer(lines, vocab_size=300)


@given(text=st.text(max_size=60))
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    """Bytes that were never seen in training are encoded all the same."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_documents_end_in_the_end_of_text(tokenizer: Tokenizer) -> None:
    """Encoding many equals encoding one by one, and adds the end."""
    texts = texts_of(7, 20)
    encoded = [tokens.tolist() for tokens in tokenizer.encode_documents(texts)]
    assert encoded == [[*tokenizer.encode(text), tokenizer.end_of_text] for text in texts]
    assert tokenizer.decode(encoded[0]) == texts[0]


def test_training_twice_gives_the_same_file(lines: Path, tmp_path: Path) -> None:
    """The tokenizer depends on the corpus alone, and is written whole."""
    for name in ("one.json", "two.json"):
        train_tokenizer(lines, vocab_size=300, out=tmp_path / name)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "two.json"]
    assert Tokenizer.load(tmp_path / "one.json").vocabulary_size == 300


def test_a_folder_of_shards_gives_its_tokenizer(
    lines: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Shards carry their tokenizer, and one that was exchanged is refused."""
    build(lines, tokenizer=tokenizer, out=tmp_path / "out")
    loaded = Tokenizer.load(tmp_path / "out")
    assert loaded.digest == tokenizer.digest
    assert loaded.end_of_text == tokenizer.end_of_text
    (tmp_path / "out" / "tokenizer.json").write_bytes(tokenizer.content + b" ")
    with pytest.raises(DamageError, match=r"tokenizer\.json"):
        Tokenizer.load(tmp_path / "out")


def test_truncation_and_padding_of_a_file_are_ignored(tokenizer: Tokenizer) -> None:
    """A published tokenizer that cuts at 5 tokens must not cut documents."""
    model = json.loads(tokenizer.content)
    model["truncation"] = {
        "direction": "Right",
        "max_length": 5,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    cutting = Tokenizer(json.dumps(model).encode())
    text = "alpha beta gamma " * 9
    assert cutting.encode(text) == tokenizer.encode(text)


def test_dropout_of_a_file_is_ignored(tokenizer: Tokenizer) -> None:
    """A BPE that was published with it gives the same text the same tokens every time."""
    model = json.loads(tokenizer.content)
    model["model"]["dropout"] = 0.9
    dropping = Tokenizer(json.dumps(model).encode())
    text = "alpha beta gamma " * 9
    assert dropping.encode(text) == tokenizer.encode(text)
    assert dropping.encode_chat(text) == tokenizer.encode_chat(text)


def test_the_end_of_text_can_be_named(tokenizer: Tokenizer) -> None:
    """A file without a usual name needs one; a wrong name is refused with the remedy."""
    odd = tokenizer.content.replace(END_OF_TEXT.encode(), b"<<stop>>")
    with pytest.raises(TokenizerError, match="--end-of-text"):
        Tokenizer(odd)
    with pytest.raises(TokenizerError, match="'<stop>'"):
        Tokenizer(odd, end_of_text="<stop>")
    assert Tokenizer(odd, end_of_text="<<stop>>").end_of_text == 0
    assert Tokenizer(odd, end_of_text=5).end_of_text == 5
    for number in (-1, tokenizer.vocabulary_size):
        with pytest.raises(TokenizerError, match=f"has no token {number} to end a text"):
            Tokenizer(odd, end_of_text=number)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"model": 3}', b"\xff\xfe", b"[1, 2]"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path: Path, content: bytes) -> None:
    """The path and the remedy are in the error."""
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"t\.json: not a tokenizer\.json"):
        Tokenizer.load(tmp_path / "t.json")
    shutil.rmtree(tmp_path)
    with pytest.raises(TokenizerError, match="cannot be read"):
        Tokenizer.load(tmp_path / "t.json")


def test_training_needs_room_and_text(lines: Path, tmp_path: Path) -> None:
    """A vocabulary without room for the bytes, and a corpus without text, are refused."""
    with pytest.raises(SettingError, match="257"):
        train_tokenizer(lines, vocab_size=256)
    with pytest.raises(SettingError, match="to 2097152, got"):
        train_tokenizer(lines, vocab_size=1 << 64)
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(CorpusError, match="is empty"):
        train_tokenizer(tmp_path, vocab_size=300)


def test_a_tokenizers_folder_opens_in_transformers(tmp_path: Path) -> None:
    """With its end and padding set and the same tokens; a name in .json is the file alone."""
    from transformers import AutoTokenizer

    path = write_lines(tmp_path / "a.jsonl", texts_of(1, 40))
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
    for text in texts_of(2, 9):
        assert theirs(text)["input_ids"] == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    told = json.loads(
        ours.files({"bos_token": "<s>", "eos_token": "</s>"})["tokenizer_config.json"]
    )
    assert (told["bos_token"], told["eos_token"], told["pad_token"]) == ("<s>", "</s>", END_OF_TEXT)


@pytest.mark.parametrize("letter", ["{", "x", " ", "\u4e00"])
def test_a_word_without_end_is_cut_for_the_trainer(letter: str, tmp_path: Path) -> None:
    """200,000 equal characters were one word; training time grows with its square."""
    text = "one two three. " * 50 + letter * 200_000
    parts = list(_split_long_words(text))
    assert "".join(parts) == text
    assert not any(re.search(rf"{re.escape(letter)}{{{LONGEST_WORD + 1}}}", one) for one in parts)
    (tmp_path / "text.txt").write_text(text)
    tokenizer = train_tokenizer(tmp_path / "text.txt", vocab_size=270)
    assert len(json.loads(tokenizer.content)["model"]["vocab"]) == 270
