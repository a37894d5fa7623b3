"""Hostile tokenizers cost no more memory or time than valid ones."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Model
from tokenizers import models, normalizers, pre_tokenizers

from ms_data import Tokenizer, TokenizerError, build, train_tokenizer
from ms_data.disk.split import Split
from ms_data.tokenization import tokenizer_limits

LETTERS = "abcdefghijklmnopqrstuvwxyz ."


def tokenizer_spec(**overrides: Any) -> dict[str, Any]:
    """Return a small tokenizer.json, with some members replaced."""
    vocab = {letter: number for number, letter in enumerate(["<|endoftext|>", *LETTERS])}
    model = Model(models.BPE(vocab=vocab, merges=[]))
    model.add_special_tokens(["<|endoftext|>"])
    spec: dict[str, Any] = json.loads(model.to_str())
    return spec | overrides


def load(spec: dict[str, Any]) -> Tokenizer:
    """Load a tokenizer.json."""
    return Tokenizer(json.dumps(spec).encode())


def test_ids_far_beyond_the_vocabulary_are_refused() -> None:
    """The library allocates by the largest id: 4 GB for a 5 kB file."""
    spec = tokenizer_spec()
    for shift in (10**6, 10**9, 2**32 - 100):
        vocab = {token: number + shift for token, number in spec["model"]["vocab"].items()}
        with pytest.raises(TokenizerError, match="renumber them"):
            load({**spec, "model": {**spec["model"], "vocab": vocab}, "added_tokens": []})
    token = {**spec["added_tokens"][0], "id": 10**9, "content": "<far>"}
    with pytest.raises(TokenizerError, match="renumber them"):
        load({**spec, "added_tokens": [*spec["added_tokens"], token]})


def test_an_oversized_vocabulary_is_refused() -> None:
    """Before the library reads it, which would take minutes."""
    vocab = {str(number): number for number in range(tokenizer_limits.MAX_TOKENS + 1)}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "0"}
    with pytest.raises(TokenizerError, match="must not exceed 2,097,152"):
        load(tokenizer_spec(model=model))


def replacements(*pairs: tuple[str, str]) -> dict[str, Any]:
    """Return a normalizer that applies a sequence of replacements."""
    parts = [{"type": "Replace", "pattern": {"String": old}, "content": new} for old, new in pairs]
    return {"type": "Sequence", "normalizers": parts}


@pytest.mark.parametrize(
    "normalizer",
    [
        replacements(("e", "x" * 100_000)),
        replacements(*[("a", "aa")] * 30),
        replacements(("", "x" * 5000)),
        {"type": "Replace", "pattern": {"Regex": "e*"}, "content": "y" * 9000},
    ],
    ids=["long", "chain", "empty", "expression"],
)
def test_replacements_that_expand_text_too_much_are_refused(normalizer: dict[str, Any]) -> None:
    """On loading."""
    with pytest.raises(TokenizerError, match="thousands of times longer"):
        load(tokenizer_spec(normalizer=normalizer))


def test_text_that_a_normalizer_expands_too_much_is_refused(tmp_path: Path) -> None:
    """Other text passes."""
    tokenizer = load(tokenizer_spec(normalizer=replacements(("e", "x" * 100))))
    assert tokenizer.encode("a bad cat")
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_documents([text])):
        with pytest.raises(TokenizerError, match="16 times longer"):
            encode("e" * 1000)
    (tmp_path / "a.txt").write_text("e" * 1000)
    with pytest.raises(TokenizerError, match="16 times longer"):
        build(tmp_path / "a.txt", tokenizer=tokenizer, out=tmp_path / "out")


@pytest.mark.parametrize(
    "normalizer",
    [
        normalizers.NFKC(),
        normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
        normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()]),
    ],
    ids=["nfkc", "llama", "bert"],
)
def test_common_normalizers_are_not_measured(normalizer: Any) -> None:
    """Their expansion is bounded, and measuring takes time."""
    model = Model.from_str(json.dumps(tokenizer_spec()))
    model.normalizer = normalizer
    assert not tokenizer_limits.may_grow(json.loads(model.to_str())["normalizer"])


def test_post_processors_that_add_many_tokens_are_refused() -> None:
    spec = tokenizer_spec()
    piece = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    template = {
        "type": "TemplateProcessing",
        "single": [*[piece] * 1000, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    with pytest.raises(TokenizerError, match="adds 1000 tokens around each text"):
        load({**spec, "post_processor": template})


def test_a_model_that_does_not_round_trip_is_encoded_by_the_library(
    tmp_path: Path,
) -> None:
    """Two tokens share an id: the library reads both but writes one."""
    pieces = ["<|endoftext|>", "Ġ", "w", "Ġw", *LETTERS[:9]]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    model = Model(models.BPE(vocab=vocab, merges=[("Ġ", "w")]))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    spec = json.loads(model.to_str())
    spec["model"]["vocab"]["a"] = vocab["Ġw"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "a.txt").write_text("abc w w")
    tokenizer = Tokenizer.load(tmp_path / "tokenizer.json")
    build(tmp_path / "a.txt", tokenizer=tokenizer, out=tmp_path / "out")
    split = Split(tmp_path / "out", "train")
    expected = [*tokenizer.encode("abc w w"), tokenizer.end_of_text]
    assert split.read(0, split.tokens).tolist() == expected


def test_a_longer_document_takes_little_more_memory(tmp_path: Path) -> None:
    """1 and 4 MiB of one letter; unsplit, each MiB would take 280 MiB."""
    (tmp_path / "words.txt").write_text("so it is " * 99)
    tokenizer = tmp_path / "tokenizer.json"
    train_tokenizer(tmp_path / "words.txt", vocab_size=300, out=tokenizer)
    script = (
        "import re, sys; from ms_data import build\n"
        "build(sys.argv[1], tokenizer=sys.argv[2], out=sys.argv[3])\n"
        # ru_maxrss is inherited from the parent process.
        "print(re.search(r'VmHWM:\\s+(\\d+) kB', open('/proc/self/status').read())[1])\n"
    )
    peaks_mib = []
    for size_mib in (1, 4):
        path = tmp_path / f"{size_mib}.txt"
        path.write_text("a" * (size_mib << 20))
        out = tmp_path / f"{size_mib}"
        command = [sys.executable, "-c", script, str(path), str(tokenizer), str(out)]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        peaks_mib.append(int(result.stdout) >> 10)
    assert peaks_mib[1] < peaks_mib[0] + 200
