"""Encoding documents word by word gives the tokens of the `tokenizers` library."""

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

from .test_build import random_texts, write_lines

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
    """Return the pre-tokenizer of Llama 3 or Qwen 2."""
    regex = tokenizers.Regex(CL100K.replace("DIGITS", digits))
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(regex, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def metaspace(scheme: str) -> Any:
    """Return the pre-tokenizer of T5 and similar models."""
    return pre_tokenizers.Metaspace(prepend_scheme=scheme)


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "GPT-2 with a space": lambda: pre_tokenizers.ByteLevel(add_prefix_space=True),
    "Qwen 2": lambda: cl100k(r"\p{N}"),
    "Llama 3": lambda: cl100k(r"\p{N}{1,3}"),
    "Metaspace always": lambda: metaspace("always"),
    "Metaspace first": lambda: metaspace("first"),
    "Metaspace never": lambda: metaspace("never"),
}


def train_model(name: str, normalizer: Any = None) -> tokenizers.Tokenizer:
    """Train a small BPE with a published pre-tokenizer."""
    model = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    model.pre_tokenizer = PRE_TOKENIZERS[name]()
    if normalizer is not None:
        model.normalizer = normalizer
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<unk>"],
        initial_alphabet=[] if "Meta" in name else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = "it's we'll they've I'd 1234567 (foo) ):\n\n  x" * 9
    texts = [*random_texts(3, 50), "".join(TRICKY), sample]
    model.train_from_iterator(texts, trainer)
    model.add_tokens(["<tool>"])
    model.encode_special_tokens = True
    return model


def library_ids(model: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    """Encode with the library."""
    return [encoding.ids for encoding in model.encode_batch(texts, add_special_tokens=False)]


MODELS = {name: train_model(name) for name in PRE_TOKENIZERS}
ENCODERS = {name: WordEncoder(model) for name, model in MODELS.items()}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
@settings(max_examples=120, deadline=None)
@given(texts=st.lists(TEXTS, max_size=4))
def test_tokens_match_the_library(name: str, texts: list[str]) -> None:
    """For every supported pre-tokenizer and any text."""
    encoded = ENCODERS[name].encode(texts)
    assert [ids.tolist() for ids in encoded] == library_ids(MODELS[name], texts)


@pytest.mark.parametrize("name", ["GPT-2", "Llama 3", "Metaspace always"])
@settings(max_examples=50, deadline=None)
@given(text=TEXTS.flatmap(lambda text: st.just((text + " a\n (b ") * 9)))
def test_long_documents_are_split_at_word_starts(name: str, text: str) -> None:
    """Small groups, so most begin inside a document."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(word_encoder, "GROUP_CHARACTERS", 7)
        ids = ENCODERS[name].encode([text])[0]
        assert len(list(word_encoder._cut(text))) > 1
    assert ids.tolist() == library_ids(MODELS[name], [text])[0]


NORMALIZERS = {
    "NFC": normalizers.NFC(),
    "NFKD": normalizers.NFKD(),
    "Lowercase": normalizers.Lowercase(),
    "Replace": normalizers.Replace("a", "  "),
}


@pytest.mark.parametrize("name", NORMALIZERS)
@settings(max_examples=50, deadline=None)
@given(text=TEXTS)
def test_normalizers_are_applied_first(name: str, text: str) -> None:
    """The library applies them."""
    if name not in ENCODERS:
        MODELS[name] = train_model("Qwen 2", NORMALIZERS[name])
        ENCODERS[name] = WordEncoder(MODELS[name])
    encoded = ENCODERS[name].encode([text, "plain ASCII"])
    assert [ids.tolist() for ids in encoded] == library_ids(MODELS[name], [text, "plain ASCII"])


def test_words_beyond_the_table_capacity_are_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for five words or six tokens, and words too long to be cached."""
    texts = [*random_texts(5, 20), "x" * 1000, "x" * 64 + " " + "x" * 65]
    for words, tokens in ((5, 1 << 10), (1 << 10, 6)):
        monkeypatch.setattr(word_table, "_MAX_WORDS", words)
        monkeypatch.setattr(word_table, "_MAX_TOKENS", tokens)
        encoder = WordEncoder(MODELS["GPT-2"])
        for _ in range(2):
            encoded = encoder.encode(texts)
            assert [ids.tolist() for ids in encoded] == library_ids(MODELS["GPT-2"], texts)


def test_hash_collisions_probe_the_next_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    """About 300 words in a table of 512 slots."""
    monkeypatch.setattr(word_table, "_SLOT_BITS", 9)
    monkeypatch.setattr(word_table, "_MAX_WORDS", 400)
    encoder = WordEncoder(MODELS["GPT-2"])
    texts = [f" a{n}b  c{n * 7}" for n in range(130)]
    for _ in range(2):
        encoded = encoder.encode(texts)
        assert [ids.tolist() for ids in encoded] == library_ids(MODELS["GPT-2"], texts)


def test_threads_share_one_table() -> None:
    """Eight threads that add the same words concurrently get the same tokens."""
    texts = random_texts(6, 400)
    expected = library_ids(MODELS["Llama 3"], texts)
    for _ in range(3):
        encoder = WordEncoder(MODELS["Llama 3"])
        with ThreadPoolExecutor(8) as pool:
            for encoded in pool.map(lambda _, e=encoder: e.encode(texts), range(16)):
                assert [ids.tolist() for ids in encoded] == expected


def test_unsupported_pre_tokenizers_are_named() -> None:
    """The build record stores the reason."""
    model = tokenizers.Tokenizer(models.BPE())
    with pytest.raises(ValueError, match="no pre-tokenizer"):
        WordEncoder(model)
    for unknown, message in (
        (pre_tokenizers.Whitespace(), "Whitespace"),
        (pre_tokenizers.Metaspace(split=False), "Metaspace"),
        (cl100k(r"\p{N}{1,2}"), "regular expression"),
    ):
        model.pre_tokenizer = unknown
        with pytest.raises(ValueError, match=message):
            WordEncoder(model)


def find_wrong_split(pre_tokenizer: dict[str, Any]) -> WordSplit | str:
    """Return the word split of Llama 3 for any tokenizer."""
    del pre_tokenizer
    return find_split(json.loads(MODELS["Llama 3"].to_str())["pre_tokenizer"])


def test_a_build_reports_its_encoder(tmp_path: Path) -> None:
    """In the summary and in the record on disk."""
    lines = write_lines(tmp_path / "a.jsonl", random_texts(1, 30))
    tokenizer = Tokenizer(MODELS["GPT-2"].to_str().encode())
    summary = build(lines, tokenizer=tokenizer, out=tmp_path / "out")
    assert summary.encoder == "word by word, split like GPT-2"
    record = json.loads((tmp_path / "out" / "build.json").read_bytes())
    assert record["summary"]["encoder"] == summary.encoder


def test_a_build_falls_back_to_the_library_if_word_encoding_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong split is detected on a sample, and the build restarts with the library."""
    texts = ["x = (foo + 'bar')\n", *random_texts(1, 30)]
    lines = write_lines(tmp_path / "a.jsonl", texts)
    tokenizer = Tokenizer(MODELS["GPT-2"].to_str().encode())
    build(lines, tokenizer=tokenizer, out=tmp_path / "right")
    monkeypatch.setattr(word_encoder, "find_split", find_wrong_split)
    with pytest.raises(WordsDifferError, match="other tokens"):
        WordEncoder(MODELS["GPT-2"]).encode(texts)
    summary = build(lines, tokenizer=tokenizer, out=tmp_path / "out")
    assert summary.encoder.startswith("tokenizers ")
    assert "has other tokens" in summary.encoder
    shards = [(tmp_path / name / "shard-00000.msd").read_bytes() for name in ("out", "right")]
    assert shards[0] == shards[1]
