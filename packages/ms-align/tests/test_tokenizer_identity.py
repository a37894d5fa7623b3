"""Data, reward models and references of another tokenizer are refused; equal tokenizers are not."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from ms_align.errors import DataError
from ms_align.files.tokenizer_source import tokenizer_difference

VOCABULARY = {"a": 0, "b": 1, "c": 2, "ab": 3, "bc": 4}


def write(
    folder: Path, vocabulary: dict[str, int], merges: list[tuple[str, str]], *more: str
) -> Path:
    """Write a folder with a tokenizer.json of BPE and some added tokens."""
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in more])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_formatting_and_tokens_added_later_are_no_difference(tmp_path: Path) -> None:
    """Merges written as texts or as pairs, indentation, truncation and a new padding token."""
    base = write(tmp_path / "base", VOCABULARY, [("a", "b"), ("b", "c")], "<end>")
    more = write(tmp_path / "more", VOCABULARY, [("a", "b"), ("b", "c")], "<end>", "<pad>")
    document = json.loads((more / "tokenizer.json").read_text())
    document["model"]["merges"] = ["a b", "b c"]
    document["truncation"] = {
        "max_length": 8,
        "stride": 0,
        "strategy": "LongestFirst",
        "direction": "Right",
    }
    (more / "tokenizer.json").write_text(json.dumps(document, indent=4))
    assert tokenizer_difference(base, more, error=DataError) is None
    assert tokenizer_difference(more, base / "tokenizer.json", error=DataError) is None


@pytest.mark.parametrize(
    ("vocabulary", "merges", "more", "said"),
    [
        ({**VOCABULARY, "a": 1, "b": 0}, [("a", "b"), ("b", "c")], ("<end>",), "token 0 is 'a'"),
        (VOCABULARY, [("b", "c"), ("a", "b")], ("<end>",), "different merges"),
        (VOCABULARY, [("a", "b"), ("b", "c")], ("<stop>",), "token 5 is '<end>'"),
        (VOCABULARY, [("a", "b"), ("b", "c")], ("<stop>", "<end>"), "token 5"),
        ({"a": 0, "b": 1, "c": 2, "ab": 3}, [("a", "b")], (), "token 4"),
    ],
)
def test_another_vocabulary_order_or_merges_is_a_difference(
    tmp_path: Path,
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
    more: tuple[str, ...],
    said: str,
) -> None:
    """Also where the number of tokens is the same."""
    base = write(tmp_path / "base", VOCABULARY, [("a", "b"), ("b", "c")], "<end>")
    other = write(tmp_path / "other", vocabulary, merges, *more)
    assert said in (tokenizer_difference(base, other, error=DataError) or "")
    assert tokenizer_difference(other, base, error=DataError) is not None


def test_a_folder_without_a_tokenizer_is_not_compared(tmp_path: Path) -> None:
    """A model folder need not hold a tokenizer."""
    base = write(tmp_path / "base", VOCABULARY, [("a", "b")])
    assert tokenizer_difference(base, tmp_path / "nothing", error=DataError) is None
