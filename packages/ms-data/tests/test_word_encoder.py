"""Documents encoded word by word have the tokens that the `tokenizers` library gives them."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from ms_data import Tokenizer, build
from ms_data.tokenization import word_encoder, word_table
from ms_data.tokenization.splits import WordSplit, find_split
from ms_data.tokenization.word_encoder import WordEncoder, WordsDifferError

from .test_build import texts_of, write_lines

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TRICKY = [
    *"'sStTrReEvVlLdDmMaZ_-()=.,<>|\u2581",
    *"\n\r\t \x0b\x1c\x85\xa0\u2003\u2028\u3000\0\x7f",
    *"0189\xb2\u2167\u0663",
    *"\xe9\u0301\u0e33\u4e2d\u6587\ufb06\u017f\u212a\U0001f600\U0001d7d8",
    *["\u1100\u1161", "don't", "'ll", "'RE", "\r\n", "    ", "  \n", "100000", "\U000e0041"],
    *["<tool>", "<|endoftext|>", "):\n\n\n  ", " (a", "  'tis"],
]
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(TRICKY), max_size=30).map("".join))


def cl100k(digits: str) -> Any:
    """The pre-tokenizer of Llama 3 or Qwen 2."""
    regex = tokenizers.Regex(CL100K.replace("DIGITS", digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(regex, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def metaspace(scheme: str) -> Any:
    """The pre-tokenizer of T5 and its kin."""
    return pre_tokenizers.Metaspace(prepend_scheme=scheme)


KINDS: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "GPT-2 with a space": lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
    "Qwen 2": lambda: cl100k(r"\p{N}"),
    "Llama 3": lambda: cl100k(r"\p{N}{1,3}"),
    "Metaspace always": lambda: metaspace("always"),
    "Metaspace first": lambda: metaspace("first"),
    "Metaspace never": lambda: metaspace("never"),
}


def make(kind: str, normalizer: Any = None) -> tokenizers.Tokenizer:
    """A small BPE behind a published pre-tokenizer."""
    model = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    model.pre_tokenizer = KINDS[kind]()
    if normalizer is not None:
        model.normalizer = normalizer
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<unk>"],
        initial_alphabet=[] if "Meta" in kind else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    said = "it's we'll they've I'd 1234567 (foo) ):\n\n  x" * 9
    texts = [*texts_of(3, 50), "".join(TRICKY), said]
    model.train_from_iterator(texts, trainer)
    model.add_tokens(["<tool>"])
    model.encode_special_tokens = True
    return model


def by_library(model: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    """The slow truth."""
    return [one.ids for one in model.encode_batch(texts, add_special_tokens=False)]


MODELS = {kind: make(kind) for kind in KINDS}
ENCODERS = {kind: WordEncoder(model) for kind, model in MODELS.items()}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120, deadline=None)
@given(texts=st.lists(TEXTS, max_size=4))
def test_tokens_are_those_of_the_library(kind: str, texts: list[str]) -> None:
    """For each published cut that is known, whatever the text."""
    found = ENCODERS[kind].encode(texts)
    assert [one.tolist() for one in found] == by_library(MODELS[kind], texts)


@pytest.mark.parametrize("kind", ["GPT-2", "Llama 3", "Metaspace always"])
@settings(max_examples=50, deadline=None)
@given(text=TEXTS.flatmap(lambda text: st.just((text + " a\n (b ") * 9)))
def test_a_long_document_is_cut_where_a_word_begins(kind: str, text: str) -> None:
    """Parts of few characters, of which most begin in the midst of a document."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_encoder, "GROUP_CHARACTERS", 7)
        found = ENCODERS[kind].encode([text])[0]
        assert len(list(word_encoder._cut(text))) > 1
    assert found.tolist() == by_library(MODELS[kind], [text])[0]


NORMALIZERS = {
    "NFC": normalizers.NFC(),
    "NFKD": normalizers.NFKD(),
    "Lowercase": normalizers.Lowercase(),
    "Replace": normalizers.Replace("a", "  "),
}


@pytest.mark.parametrize("kind", NORMALIZERS)
@settings(max_examples=50, deadline=None)
@given(text=TEXTS)
def test_a_normalizer_is_applied_first(kind: str, text: str) -> None:
    """By the library itself, whichever it is."""
    if kind not in ENCODERS:
        MODELS[kind] = make("Qwen 2", NORMALIZERS[kind])
        ENCODERS[kind] = WordEncoder(MODELS[kind])
    found = ENCODERS[kind].encode([text, "plain ASCII"])
    assert [one.tolist() for one in found] == by_library(MODELS[kind], [text, "plain ASCII"])


def test_words_that_find_no_room_are_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for five words and six tokens, and words longer than are remembered."""
    texts = [*texts_of(5, 20), "x" * 1000, "x" * 64 + " " + "x" * 65]
    for words, tokens in ((5, 1 << 10), (1 << 10, 6)):
        monkeypatch.setattr(word_table, "_MAX_WORDS", words)
        monkeypatch.setattr(word_table, "_MAX_TOKENS", tokens)
        encoder = WordEncoder(MODELS["GPT-2"])
        for _ in range(2):
            found = encoder.encode(texts)
            assert [one.tolist() for one in found] == by_library(MODELS["GPT-2"], texts)


def test_slots_that_are_taken_lead_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of 512 slots and some 300 words, so that many begin at the same one."""
    monkeypatch.setattr(word_table, "_SLOT_BITS", 9)
    monkeypatch.setattr(word_table, "_MAX_WORDS", 400)
    encoder = WordEncoder(MODELS["GPT-2"])
    texts = [f" a{n}b  c{n * 7}" for n in range(130)]
    for _ in range(2):
        found = encoder.encode(texts)
        assert [one.tolist() for one in found] == by_library(MODELS["GPT-2"], texts)


def test_threads_share_one_table() -> None:
    """Eight threads that learn the same words at the same time find the same tokens."""
    texts = texts_of(6, 400)
    expected = by_library(MODELS["Llama 3"], texts)
    for _ in range(3):
        encoder = WordEncoder(MODELS["Llama 3"])
        with ThreadPoolExecutor(8) as pool:
            for found in pool.map(lambda _, e=encoder: e.encode(texts), range(16)):
                assert [one.tolist() for one in found] == expected


def test_what_cannot_be_cut_is_named() -> None:
    """A tokenizer without a known cut says why, for the record of a build."""
    model = tokenizers.Tokenizer(models.BPE())
    with pytest.raises(ValueError, match="no pre-tokenizer"):
        WordEncoder(model)
    for unknown, why in (
        (pre_tokenizers.Whitespace(), "Whitespace"),
        (pre_tokenizers.Metaspace(split=False), "Metaspace"),
        (cl100k(r"\p{N}{1,2}"), "regular expression"),
    ):
        model.pre_tokenizer = unknown
        with pytest.raises(ValueError, match=why):
            WordEncoder(model)


def wrong_split(pre_tokenizer: dict[str, Any]) -> WordSplit | str:
    """The cut of Llama 3 for a tokenizer that cuts as GPT-2 does."""
    del pre_tokenizer
    return find_split(json.loads(MODELS["Llama 3"].to_str())["pre_tokenizer"])


def test_a_build_says_what_encoded_it(tmp_path: Path) -> None:
    """Word by word, in the summary and in the record on disk."""
    lines = write_lines(tmp_path / "a.jsonl", texts_of(1, 30))
    tokenizer = Tokenizer(MODELS["GPT-2"].to_str().encode())
    summary = build(lines, tokenizer=tokenizer, out=tmp_path / "out")
    assert summary.encoder == "word by word, split like GPT-2"
    record = json.loads((tmp_path / "out" / "build.json").read_bytes())
    assert record["summary"]["encoder"] == summary.encoder


def test_words_that_differ_are_found_and_the_library_encodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut that is not the tokenizer's is found on the sample; the build begins anew without."""
    texts = ["x = (foo + 'bar')\n", *texts_of(1, 30)]
    lines = write_lines(tmp_path / "a.jsonl", texts)
    tokenizer = Tokenizer(MODELS["GPT-2"].to_str().encode())
    build(lines, tokenizer=tokenizer, out=tmp_path / "right")
    monkeypatch.setattr(word_encoder, "find_split", wrong_split)
    with pytest.raises(WordsDifferError, match="other tokens"):
        WordEncoder(MODELS["GPT-2"]).encode(texts)
    summary = build(lines, tokenizer=tokenizer, out=tmp_path / "out")
    assert summary.encoder.startswith("tokenizers ")
    assert "has other tokens" in summary.encoder
    shards = [(tmp_path / name / "shard-00000.msd").read_bytes() for name in ("out", "right")]
    assert shards[0] == shards[1]
