"""A tokenizer's folder gives documents the tokens that transformers gives a text."""

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

from .test_build import texts_of

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
MERGES = [("a", "l"), ("al", "p"), ("b", "e"), ("t", "a"), ("r", "e")]
TEXTS = [*texts_of(11, 20), "plain words", "  two spaces", "a", "42", "x\n\ny"]


def bpe(special: list[str], *, plain: list[str] = [], blank: str = "Ġ") -> Model:  # noqa: B006
    """A BPE of single characters with a few merges; special tokens first, as published ones."""
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), "▁", *LETTERS]
    pieces = [*special, *sorted({*alphabet, blank}), *("".join(pair) for pair in MERGES)]
    vocab = {piece: number for number, piece in enumerate(pieces)}
    model = Model(models.BPE(vocab=vocab, merges=MERGES, unk_token=special[0]))
    model.add_special_tokens([AddedToken(name, special=True) for name in special])
    model.add_tokens([AddedToken(name, normalized=False, special=False) for name in plain])
    return model


def byte_level(model: Model) -> Model:
    """Cut and spell words as GPT-2 does."""
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.post_processor = processors.ByteLevel(trim_offsets=False)
    return model


def put_around(model: Model, single: str) -> None:
    """Add a post-processor that puts tokens around a text, after the one that is there."""
    names = [name for name in single.split() if name != "$A"]
    numbers = [(name, model.token_to_id(name)) for name in names]
    template = processors.TemplateProcessing(single=single, special_tokens=numbers)
    now = model.post_processor
    model.post_processor = template if now is None else processors.Sequence([now, template])


def gemma() -> tuple[Model, dict[str, Any]]:
    """HTML tags are ordinary added tokens, `</s>` among them."""
    tags = ["<strong>", "<s>", "</strong>", "</s>"]
    model = bpe(["<pad>", "<eos>", "<bos>", "<unk>"], plain=tags)
    model.normalizer = normalizers.Replace(" ", "▁")
    model.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    put_around(model, "<bos> $A")
    return model, {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}


def llama_2() -> tuple[Model, dict[str, Any]]:
    """A space is put before each text; `<s>` begins it."""
    model = bpe(["<unk>", "<s>", "</s>"])
    model.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    put_around(model, "<s> $A")
    return model, {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}


def llama_3() -> tuple[Model, dict[str, Any]]:
    """The tuned model ends its turns with another token than documents."""
    model = byte_level(bpe(["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]))
    put_around(model, "<|begin_of_text|> $A")
    return model, {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}


def qwen() -> tuple[Model, dict[str, Any]]:
    """Nothing begins a text; the end of a turn ends it."""
    model = byte_level(bpe(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]))
    return model, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None}


def mistral() -> tuple[Model, dict[str, Any]]:
    """As Llama 2, with named tokens as objects."""
    model, config = llama_2()
    content = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    config["eos_token"] = {"__type": "AddedToken", "content": "</s>", **content}
    return model, config


def gpt_2() -> tuple[Model, dict[str, Any]]:
    """One token for begin and end, which nothing puts before a text."""
    model = byte_level(bpe(["<|endoftext|>"]))
    return model, {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}


def phi_3() -> tuple[Model, dict[str, Any]]:
    """Tokens that only tokenizer_config.json lists."""
    model, config = llama_2()
    model.post_processor = None
    first = model.get_vocab_size()
    names = ["<|endoftext|>", "<|assistant|>", "<|end|>"]
    flags = {"lstrip": False, "normalized": False, "single_word": False, "rstrip": True}
    listed = {
        str(first + at): {"content": name, "special": at != 1, **flags}
        for at, name in enumerate(names)
    }
    config |= {"eos_token": "<|endoftext|>", "added_tokens_decoder": listed}
    return model, config


def gpt_oss() -> tuple[Model, dict[str, Any]]:
    """A begin that is named and not used."""
    model = byte_level(bpe(["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|end|>"]))
    return model, {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"}


def glm() -> tuple[Model, dict[str, Any]]:
    """Two tokens begin each text."""
    model = byte_level(bpe(["<|endoftext|>", "[gMASK]", "<sop>"]))
    put_around(model, "[gMASK] <sop> $A")
    return model, {"eos_token": "<|endoftext|>"}


def t_5() -> tuple[Model, dict[str, Any]]:
    """The tokenizer itself ends each text."""
    model = byte_level(bpe(["<pad>", "</s>", "<unk>"]))
    put_around(model, "$A </s>")
    return model, {"eos_token": "</s>"}


def bert() -> tuple[Model, dict[str, Any]]:
    """No `eos_token`, but tokens around each text."""
    model = byte_level(bpe(["[UNK]", "[CLS]", "[SEP]"]))
    put_around(model, "[CLS] $A [SEP]")
    return model, {"cls_token": "[CLS]", "sep_token": "[SEP]"}


def end_missing() -> tuple[Model, dict[str, Any]]:
    """An end of text that is only named, and so added."""
    model = byte_level(bpe(["<|endoftext|>"]))
    return model, {"eos_token": "<|stop|>", "extra_special_tokens": ["<|tool|>"]}


KINDS: list[Callable[[], tuple[Model, dict[str, Any]]]] = [
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
    """Write a tokenizer's folder."""
    folder.mkdir(exist_ok=True)
    model.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder


def check_against_transformers(folder: Path) -> int:
    """Compare documents, ends and added tokens with AutoTokenizer; return the tokens compared."""
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    compared = 0
    for ours in (Tokenizer.load(folder), Tokenizer.load(folder / "tokenizer.json")):
        if theirs.eos_token is not None:
            assert ours.end_of_text_name == theirs.eos_token
        for text, tokens in zip(TEXTS, ours.encode_documents(TEXTS), strict=True):
            expected = theirs(text)["input_ids"]
            if expected[-1] != ours.end_of_text:
                expected = [*expected, ours.end_of_text]
            assert tokens.tolist() == expected, text
            compared += len(expected)
        for name in theirs.get_added_vocab():
            assert ours._model.token_to_id(name) == theirs.convert_tokens_to_ids(name), name
            compared += 1
        assert set(theirs.all_special_tokens) - {theirs.pad_token} <= set(ours.special_tokens)
    return compared


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_documents_have_the_tokens_of_transformers(kind: Any, tmp_path: Path) -> None:
    """Begin, end and added tokens come from the files next to tokenizer.json."""
    folder = write_folder(tmp_path / "model", *kind())
    assert check_against_transformers(folder) > 500


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_shards_reopen_with_the_same_begin_and_end(kind: Any, tmp_path: Path) -> None:
    """What a build takes from the folder is in the shards, and in the folder that they make."""
    folder = write_folder(tmp_path / "model", *kind())
    loaded = Tokenizer.load(folder)
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    summary = build(tmp_path / "c.jsonl", tokenizer=folder, out=tmp_path / "shards")
    shards = Tokenizer.load(tmp_path / "shards")
    assert (shards.begin_of_text, shards.end_of_text) == (loaded.begin_of_text, loaded.end_of_text)
    split = Split(tmp_path / "shards", "train")
    assert split.read(0, split.tokens).tolist() == [
        token for tokens in loaded.encode_documents(TEXTS) for token in tokens.tolist()
    ]
    assert summary.begin_of_text == loaded.begin_of_text_names
    assert summary.end_of_text == loaded.end_of_text_name
    shards.save(tmp_path / "again")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert theirs("a")["input_ids"][: len(loaded.begin_of_text)] == list(loaded.begin_of_text)
    assert theirs.eos_token == loaded.end_of_text_name


@pytest.mark.parametrize("older", ["special_tokens_map.json", "added_tokens.json"])
def test_older_folders_name_their_tokens_in_files_of_their_own(older: str, tmp_path: Path) -> None:
    """Both are read where tokenizer_config.json lists no added tokens, as transformers does."""
    model, _ = gemma()
    folder = write_folder(tmp_path / "model", model, {})
    if older == "added_tokens.json":
        (folder / older).write_text(json.dumps({"<|im_end|>": model.get_vocab_size()}))
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    else:
        (folder / older).write_text(json.dumps({"eos_token": {"content": "<eos>"}}))
    assert check_against_transformers(folder) > 500


def test_a_loose_file_takes_a_special_token_for_its_end(tmp_path: Path) -> None:
    """An ordinary token comes after all special ones of the usual names."""
    model, _ = gemma()
    model.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path / "tokenizer.json").end_of_text_name == "<eos>"


def test_the_begin_of_text_can_be_chosen(tmp_path: Path) -> None:
    """By name, by id, or none; tokenizer.json of the shards then says the same."""
    folder = write_folder(tmp_path / "model", *llama_3())
    end, begin = "<|end_of_text|>", "<|eot_id|>"
    usual = ("<|begin_of_text|>",)
    for wanted, names in ((None, usual), (False, ()), (begin, (begin,)), (2, (begin,))):
        ours = Tokenizer.load(folder, end_of_text=end, begin_of_text=wanted)
        assert ours.begin_of_text_names == names
        write_folder(tmp_path / "out", Model.from_str(ours.content.decode()), {"eos_token": end})
        assert check_against_transformers(tmp_path / "out") > 500
        (tokens,) = ours.encode_documents(["alpha beta"])
        expected = [*ours.begin_of_text, *ours.encode("alpha beta"), ours.end_of_text]
        assert tokens.tolist() == expected
    for wrong in ("<none>", 10**6, True):
        with pytest.raises(TokenizerError, match="begin"):
            Tokenizer.load(folder, begin_of_text=wrong)


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
def test_a_damaged_file_next_to_the_tokenizer_is_named(
    name: str, content: str, tmp_path: Path
) -> None:
    """It decides the special tokens, so it is never passed over."""
    folder = write_folder(tmp_path / "model", gemma()[0], {})
    (folder / name).write_text(content)
    with pytest.raises(TokenizerError):
        Tokenizer.load(folder)
