"""Tokenizer folders give documents the same tokens as transformers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Model

from ms_data import Tokenizer, TokenizerError, build
from ms_data.disk.split import Split

from .test_build import random_texts

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
MERGES = [("a", "l"), ("al", "p"), ("b", "e"), ("t", "a"), ("r", "e")]
TEXTS = [*random_texts(11, 20), "plain words", "  two spaces", "a", "42", "x\n\ny"]


def bpe(special: list[str], *, plain: list[str] = [], space: str = "Ġ") -> Model:  # noqa: B006
    """Return a character-level BPE with a few merges and the special tokens first."""
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "▁", *LETTERS]
    pieces = [*special, *sorted({*alphabet, space}), *("".join(pair) for pair in MERGES)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    model = Model(models.BPE(vocab=vocab, merges=MERGES, unk_token=special[0]))
    model.add_special_tokens([AddedToken(name, special=True) for name in special])
    model.add_tokens([AddedToken(name, normalized=False, special=False) for name in plain])
    return model


def byte_level(model: Model) -> Model:
    """Split and spell words like GPT-2."""
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.post_processor = processors.ByteLevel(trim_offsets=False)
    return model


def add_template(model: Model, single: str) -> None:
    """Add a post-processor that puts special tokens around each text."""
    names = [name for name in single.split() if name != "$A"]
    numbers = [(name, model.token_to_id(name)) for name in names]
    template = processors.TemplateProcessing(single=single, special_tokens=numbers)
    previous = model.post_processor
    model.post_processor = (
        template if previous is None else processors.Sequence([previous, template])
    )


def gemma() -> tuple[Model, dict[str, Any]]:
    """HTML tags, `</s>` among them, are ordinary added tokens."""
    tags = ["<strong>", "<s>", "</strong>", "</s>"]
    model = bpe(["<pad>", "<eos>", "<bos>", "<unk>"], plain=tags)
    model.normalizer = normalizers.Replace(" ", "▁")
    model.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    add_template(model, "<bos> $A")
    return model, {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}


def llama_2() -> tuple[Model, dict[str, Any]]:
    """Prepends a space to each text and starts it with `<s>`."""
    model = bpe(["<unk>", "<s>", "</s>"])
    model.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    add_template(model, "<s> $A")
    return model, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}


def llama_3() -> tuple[Model, dict[str, Any]]:
    """The instruction-tuned model ends turns with another token than documents."""
    model = byte_level(bpe(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]))
    add_template(model, "<|begin_of_text|> $A")
    return model, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def qwen() -> tuple[Model, dict[str, Any]]:
    """No begin token; documents end with the end-of-turn token."""
    model = byte_level(bpe(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))
    return model, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}


def mistral() -> tuple[Model, dict[str, Any]]:
    """Like Llama 2, with special tokens as objects."""
    model, config = llama_2()
    content = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config["eos_token"] = {"__type": "AddedToken", "content": "</s>", **content}
    return model, config


def gpt_2() -> tuple[Model, dict[str, Any]]:
    """One token for begin and end, never added automatically."""
    model = byte_level(bpe(["<|endoftext|>"]))
    return model, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def phi_3() -> tuple[Model, dict[str, Any]]:
    """Tokens listed only in tokenizer_config.json."""
    model, config = llama_2()
    model.post_processor = None
    first = model.get_vocab_size()
    names = ["<|endoftext|>", "<|assistant|>", "<|end|>"]
    flags = {"lstrip": False, "normalized": False, "single_word": False, "rstrip": True}
    added = {
        str(first + index): {"content": name, "special": index != 1, **flags}
        for index, name in enumerate(names)
    }
    config |= {"eos_token": "<|endoftext|>", "added_tokens_decoder": added}
    return model, config


def gpt_oss() -> tuple[Model, dict[str, Any]]:
    """Declares a begin token without using it."""
    model = byte_level(bpe(["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|end|>"]))
    return model, {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"}


def glm() -> tuple[Model, dict[str, Any]]:
    """Two begin tokens."""
    model = byte_level(bpe(["<|endoftext|>", "[gMASK]", "<sop>"]))
    add_template(model, "[gMASK] <sop> $A")
    return model, {"eos_token": "<|endoftext|>"}


def t_5() -> tuple[Model, dict[str, Any]]:
    """The post-processor ends each text."""
    model = byte_level(bpe(["<pad>", "</s>", "<unk>"]))
    add_template(model, "$A </s>")
    return model, {"eos_token": "</s>"}


def bert() -> tuple[Model, dict[str, Any]]:
    """No `eos_token`, but tokens around each text."""
    model = byte_level(bpe(["[UNK]", "[CLS]", "[SEP]"]))
    add_template(model, "[CLS] $A [SEP]")
    return model, {"cls_token": "[CLS]", "sep_token": "[SEP]"}


def end_missing() -> tuple[Model, dict[str, Any]]:
    """An end token that is only declared in the config, and therefore added."""
    model = byte_level(bpe(["<|endoftext|>"]))
    return model, {"eos_token": "<|stop|>", "extra_special_tokens": ["<|tool|>"]}


FAMILIES: list[Callable[[], tuple[Model, dict[str, Any]]]] = [
    gemma,
    llama_2,
    llama_3,
    qwen,
    mistral,
    gpt_2,
    phi_3,
    gpt_oss,
    glm,
    t_5,
    bert,
    end_missing,
]


def write_folder(folder: Path, model: Model, config: dict[str, Any]) -> Path:
    """Write a tokenizer folder."""
    folder.mkdir(exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def check_against_transformers(folder: Path) -> int:
    """Compare documents, end and added tokens with AutoTokenizer; return the comparison count."""
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    compared = 0
    for tokenizer in (Tokenizer.load(folder), Tokenizer.load(folder / "tokenizer.json")):
        if reference.eos_token is not None:
            assert tokenizer.end_of_text_name == reference.eos_token
        for text, tokens in zip(TEXTS, tokenizer.encode_documents(TEXTS), strict=True):
            expected = reference(text)["input_ids"]
            if expected[-1] != tokenizer.end_of_text:
                expected = [*expected, tokenizer.end_of_text]
            assert tokens.tolist() == expected, text
            compared += len(expected)
        for name in reference.get_added_vocab():
            assert tokenizer._model.token_to_id(name) == reference.convert_tokens_to_ids(name), name
            compared += 1
        assert set(reference.all_special_tokens) - {reference.pad_token} <= set(
            tokenizer.special_tokens
        )
    return compared


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_document_tokens_match_transformers(family: Any, tmp_path: Path) -> None:
    """Begin, end and added tokens come from the files next to tokenizer.json."""
    folder = write_folder(tmp_path / "model", *family())
    assert check_against_transformers(folder) > 500


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_shards_reopen_with_the_same_begin_and_end(family: Any, tmp_path: Path) -> None:
    """The dataset stores them, and a folder saved from it has them too."""
    folder = write_folder(tmp_path / "model", *family())
    loaded = Tokenizer.load(folder)
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    summary = build(tmp_path / "c.jsonl", tokenizer=folder, out=tmp_path / "shards")
    shards = Tokenizer.load(tmp_path / "shards")
    assert (shards.begin_of_text, shards.end_of_text) == (loaded.begin_of_text, loaded.end_of_text)
    split = Split(tmp_path / "shards", "train")
    assert split.read(0, split.tokens).tolist() == [
        token for tokens in loaded.encode_documents(TEXTS) for token in tokens.tolist()
    ]
    assert summary.begin_of_text == loaded.begin_of_text_names
    assert summary.end_of_text == loaded.end_of_text_name
    shards.save(tmp_path / "saved")
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert reference("a")["input_ids"][: len(loaded.begin_of_text)] == list(loaded.begin_of_text)
    assert reference.eos_token == loaded.end_of_text_name


@pytest.mark.parametrize("legacy_file", ["special_tokens_map.json", "added_tokens.json"])
def test_legacy_special_token_files_are_read(legacy_file: str, tmp_path: Path) -> None:
    """Both are read if tokenizer_config.json lists no added tokens, as in transformers."""
    model, _ = gemma()
    folder = write_folder(tmp_path / "model", model, {})
    if legacy_file == "added_tokens.json":
        (folder / legacy_file).write_text(json.dumps({"<|im_end|>": model.get_vocab_size()}))
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    else:
        (folder / legacy_file).write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    assert check_against_transformers(folder) > 500


def test_a_bare_file_prefers_special_tokens_as_end(tmp_path: Path) -> None:
    """Ordinary tokens rank below all special ones with the usual names."""
    model, _ = gemma()
    model.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path / "tokenizer.json").end_of_text_name == "<eos>"


def test_the_begin_of_text_can_be_chosen(tmp_path: Path) -> None:
    """By name, by id, or none; the saved tokenizer.json agrees."""
    folder = write_folder(tmp_path / "model", *llama_3())
    end, begin = "<|end_of_text|>", "<|eot_id|>"
    default = ("<|begin_of_text|>",)
    for choice, names in ((None, default), (False, ()), (begin, (begin,)), (2, (begin,))):
        tokenizer = Tokenizer.load(folder, end_of_text=end, begin_of_text=choice)
        assert tokenizer.begin_of_text_names == names
        write_folder(
            tmp_path / "out", Model.from_str(tokenizer.content.decode()), {"eos_token": end}
        )
        assert check_against_transformers(tmp_path / "out") > 500
        (tokens,) = tokenizer.encode_documents(["alpha beta"])
        expected = [
            *tokenizer.begin_of_text,
            *tokenizer.encode("alpha beta"),
            tokenizer.end_of_text,
        ]
        assert tokens.tolist() == expected
    for value in ("<none>", 10**6, True):
        with pytest.raises(TokenizerError, match="begin"):
            Tokenizer.load(folder, begin_of_text=value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"7": {"kontent": 3}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {"content": "y"}}}'),
        ("tokenizer_config.json", '{"added_tokens_decoder": 3}'),
        ("added_tokens.json", "[]"),
        ("added_tokens.json", '{"<x>": null}'),
        ("special_tokens_map.json", "7"),
    ],
)
def test_damaged_files_next_to_the_tokenizer_are_refused(
    name: str, content: str, tmp_path: Path
) -> None:
    """They decide the special tokens, so they are never skipped."""
    folder = write_folder(tmp_path / "model", gemma()[0], {})
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError):
        Tokenizer.load(folder)
