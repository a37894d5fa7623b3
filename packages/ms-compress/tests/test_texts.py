"""Exported folders tokenize, stop and answer like the original model."""

import gzip
import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import tokenizers
import torch
import transformers
from chats import (
    ANSWER,
    END,
    QUESTION,
    TEMPLATE,
    write_chat_model,
    write_conversations,
    write_tokenizer,
)
from models import decoder
from page_blocks import run_block

from ms_compress import ExportError, VerifyError, export, qat, verify
from ms_compress.cli import main
from ms_compress.corpus import read_batch, read_tokens
from ms_compress.targets.target import open_runtime
from ms_compress.text_ends import read_tokenizer, text_ends
from ms_parallel import load_model

PROMPT = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose model answers and ends its text."""
    folder = tmp_path_factory.mktemp("taught")
    return write_chat_model(folder / "model", write_conversations(folder / "chats.jsonl"))


def run_command(chat_model: Path, out: Path, name: str, *settings: str) -> int:
    """Run a command on the chat model."""
    run_file = out.with_suffix(".toml")
    run_file.write_text(f'model = "{chat_model}"\noutput_dir = "{out}"\n')
    return main(
        [name, str(run_file), *(part for setting in settings for part in ("--set", setting))]
    )


def test_a_compressed_folder_chats_in_transformers(chat_model: Path, tmp_path: Path) -> None:
    """With `AutoTokenizer`, `AutoModelForCausalLM`, its chat template and its end token."""
    out = tmp_path / "out"
    assert run_command(chat_model, out, "quantize", "scheme=ct.int4_g32", "verify=true") == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    inputs = tokenizer.apply_chat_template(
        PROMPT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = model.generate(**inputs, max_new_tokens=40)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(reply) == ANSWER + END
    config = json.loads((out / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (0, 0)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 0


@pytest.mark.parametrize(
    ("runtime", "target", "lines"),
    [("transformers", "ct.int4_g32", 1), ("onnxruntime", "ort.matmulnbits", 2)],
)
def test_the_runtimes_page_runs_a_folder(
    runtime: str,
    target: str,
    lines: int,
    chat_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code of docs/compress/runtimes.md prints the answer; `nox -s deploy` covers llama.cpp."""
    monkeypatch.chdir(tmp_path)
    folder = Path("deploy") / target.partition(".")[0]
    export(qat(load_model(chat_model), target), folder, tokenizer=chat_model)
    assert run_block(runtime) == f"{ANSWER}\n" * lines


def test_an_onnx_folder_answers_and_ends(chat_model: Path, tmp_path: Path) -> None:
    """The folder has everything that a decoding loop over onnxruntime needs."""
    out = tmp_path / "out"
    assert run_command(chat_model, out, "quantize", "scheme=ort.matmulnbits", "verify=true") == 0
    runtime = open_runtime(out, "ort")
    text = transformers.AutoTokenizer.from_pretrained(out).apply_chat_template(
        PROMPT, add_generation_prompt=True, tokenize=False
    )
    reply = runtime.generate(runtime.encode(text), 40)
    tokenizer = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert tokenizer.decode(reply, skip_special_tokens=False) == ANSWER + END


def test_a_gguf_file_has_end_tokens_and_a_chat_template(chat_model: Path, tmp_path: Path) -> None:
    """In the fields that llama.cpp reads; `nox -s deploy` tests their effect."""
    out = tmp_path / "out"
    assert run_command(chat_model, out, "quantize", "scheme=gguf.q8_0") == 0
    fields = gguf.GGUFReader(out / "model.gguf").fields

    def field(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    assert field("ggml.eos_token_id") == field("ggml.padding_token_id") == 0
    assert field("chat_template") == TEMPLATE
    assert field("ggml.pre") == "gpt-2"
    assert field("ggml.add_bos_token") is False
    assert field("ggml.add_eos_token") is False


@pytest.mark.parametrize(
    ("name", "settings"), [("prune", ["pattern=2:4", "retrain=false"]), ("distill", ["layers=1"])]
)
def test_a_pruned_or_distilled_folder_opens_with_its_tokenizer(
    name: str, settings: list[str], chat_model: Path, tmp_path: Path
) -> None:
    """With the chat template and end token of the original folder."""
    chats = write_conversations(tmp_path / "chats.jsonl")
    common = [f"dataset={chats}", "rows=16", "tuning.steps=1", "tuning.sequence_length=48"]
    assert run_command(chat_model, tmp_path / "out", name, *settings, *common) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 0


def test_a_model_without_a_tokenizer_is_refused_for_llama_cpp(
    chat_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any work, because llama.cpp would crash when asked to tokenize."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((chat_model / name).read_bytes())
    assert run_command(bare, tmp_path / "out", "quantize", "scheme=gguf.q4_0") == 2
    assert "has no tokenizer.json, which llama.cpp needs to read text" in capsys.readouterr().err
    assert run_command(bare, tmp_path / "out", "quantize", "scheme=ct.int4_g32") == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def test_a_gguf_file_without_a_tokenizer_has_placeholder_tokens(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One per vocabulary entry; the end token comes from the model or is the last token."""
    out = export(qat(decoder(), "gguf.q4_0"), tmp_path / "out")
    fields = gguf.GGUFReader(out / "model.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert len(fields["tokenizer.ggml.tokens"].contents()) == 192
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 191
    assert "end-of-text token is unknown" in caplog.text


def with_changes(chat_model: Path, folder: Path, name: str, **values: object) -> Path:
    """Copy the tokenizer's files and change keys in one file."""
    folder.mkdir()
    for file_name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file_name).write_bytes((chat_model / file_name).read_bytes())
    path = folder / name
    document = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps({**document, **values}))
    return folder


@pytest.mark.parametrize(
    ("name", "values", "ends"),
    [
        ("generation_config.json", {"eos_token_id": [5, 0]}, (0, 5)),
        ("generation_config.json", {"eos_token_id": 7}, (7,)),
        ("tokenizer_config.json", {"eos_token": {"content": END}}, (0,)),
        ("tokenizer_config.json", {"eos_token": None}, (0,)),
    ],
)
def test_end_tokens_come_from_the_first_file_that_names_them(
    name: str, values: dict[str, object], ends: tuple[int, ...], chat_model: Path, tmp_path: Path
) -> None:
    """First generation_config.json, then config.json, tokenizer settings, and known token names."""
    files = read_tokenizer(with_changes(chat_model, tmp_path / "changed", name, **values))
    assert text_ends(files, {}, 288).ends == ends


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (
            "tokenizer.json",
            {"normalizer": {"type": "Lowercase"}},
            "normalizer 'Lowercase' changes text",
        ),
        (
            "tokenizer.json",
            {"pre_tokenizer": {"type": "Whitespace"}},
            "no equivalent of its pre-tokenizer",
        ),
        ("tokenizer.json", {"pre_tokenizer": [1]}, "pre_tokenizer is damaged"),
        ("tokenizer.json", {"added_tokens": [{"id": "a"}]}, "its vocabulary is damaged"),
        *(
            (
                "tokenizer.json",
                {"added_tokens": [{"id": 0, "content": END, "special": True, flag: True}]},
                flag,
            )
            for flag in ("lstrip", "rstrip", "single_word")
        ),
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template must be a string"),
        (
            "generation_config.json",
            {"eos_token_id": 999},
            "must be a token of the model's vocabulary",
        ),
        ("generation_config.json", {"eos_token_id": [1, 2, 3, 4]}, "4 tokens end a text"),
        ("generation_config.json", {"eos_token_id": "x"}, "must be a token id"),
    ],
)
def test_tokenizers_that_llama_cpp_cannot_represent_are_refused(
    name: str, values: dict[str, object], message: str, chat_model: Path, tmp_path: Path
) -> None:
    """In one line, before a file is written."""
    folder = with_changes(chat_model, tmp_path / "changed", name, **values)
    with pytest.raises(ExportError, match=message):
        export(qat(load_model(chat_model), "gguf.q4_0"), tmp_path / "out", tokenizer=folder)
    assert not (tmp_path / "out").exists()


def test_verify_refuses_a_folder_without_end_tokens(chat_model: Path, tmp_path: Path) -> None:
    """The runtime would generate up to its limit."""
    model = qat(load_model(chat_model), "ort.matmulnbits")
    folder = export(model, tmp_path / "out", tokenizer=chat_model, verify=True)
    assert len(verify(model, folder, "ort").generated) > 0
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(VerifyError, match="token 0 ends a text, but onnxruntime does not stop"):
        verify(model, folder, "ort")


def test_verify_refuses_a_runtime_with_other_tokenization(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as llama.cpp splitting words differently than the folder's tokenizer."""
    from ms_compress.targets.ort.runtime import OnnxRuntime

    model = qat(load_model(chat_model), "ort.matmulnbits")
    folder = export(model, tmp_path / "out", tokenizer=chat_model)
    encode = OnnxRuntime.encode
    monkeypatch.setattr(
        OnnxRuntime, "encode", lambda self, text: encode(self, text.replace("  ", " "))
    )
    with pytest.raises(VerifyError, match="onnxruntime reads '  two  spaces"):
        verify(model, folder, "ort")


def test_verify_refuses_a_runtime_that_generates_other_tokens(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if every tensor and the logits of the probe match."""
    from ms_compress.targets.ort.runtime import OnnxRuntime

    model = qat(load_model(chat_model), "ort.matmulnbits")
    folder = export(model, tmp_path / "out", tokenizer=chat_model)
    monkeypatch.setattr(OnnxRuntime, "generate", lambda self, tokens, max_tokens: [9] * max_tokens)
    with pytest.raises(VerifyError, match="onnxruntime generated token 9 at position"):
        verify(model, folder, "ort")


@pytest.mark.parametrize("name", ["rows.json", "ROWS.JSON", "rows.json.gz", "rows"])
def test_conversations_are_detected_by_content(name: str, tmp_path: Path) -> None:
    """A JSON array of rows, compressed or not, gives the tokens of the same rows in JSON Lines."""
    chats = write_conversations(tmp_path / "chats.jsonl", count=4)
    folder = write_tokenizer(tmp_path / "tokenizer")
    rows = json.dumps([json.loads(line) for line in chats.read_text().splitlines()]).encode()
    (tmp_path / name).write_bytes(gzip.compress(rows) if name.endswith("gz") else rows)
    expected = read_batch(chats, count=4, length=48, chat=folder)
    batch = read_batch(tmp_path / name, count=4, length=48, chat=folder)
    assert all(torch.equal(batch[key], expected[key]) for key in expected)


def test_truncated_and_missing_conversations_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every third prompt fills its row, so its answer is cut off completely."""
    folder = write_tokenizer(tmp_path / "model")
    rows = [
        {
            "messages": [
                {"role": "user", "content": "ping " * (40 if number % 3 == 0 else 1)},
                {"role": "assistant", "content": ANSWER},
            ]
        }
        for number in range(9)
    ]
    path = tmp_path / "chats.json"
    path.write_text(json.dumps(rows))
    batch = read_batch(path, count=6, length=40, chat=folder)
    assert len(batch["tokens"]) == 6
    assert "9 conversations, 3 were truncated at sequence_length (40 tokens), and 3" in caplog.text
    caplog.clear()
    read_batch(path, count=9, length=400, chat=folder)
    assert not caplog.text
    assert len(read_tokens(path, count=500, length=40, chat=folder)) < 500
    assert "rows of 40 tokens, fewer than rows=500" in caplog.text
