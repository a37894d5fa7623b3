"""An exported folder reads, ends and answers as the model that it was made from."""

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
    write_conversations,
    write_taught,
    write_tokenizer,
)
from models import decoder
from page_blocks import printed

from ms_compress import ExportError, VerifyError, export, qat, verify
from ms_compress.cli import main
from ms_compress.targets.target import open_runtime
from ms_compress.text_ends import read_tokenizer, text_ends
from ms_compress.training.corpus import read_batch, read_tokens
from ms_parallel import load_model

PROMPT = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose model answers and ends its text."""
    folder = tmp_path_factory.mktemp("taught")
    return write_taught(folder / "model", write_conversations(folder / "chats.jsonl"))


def command(taught: Path, out: Path, name: str, *settings: str) -> int:
    """A command on the taught model."""
    file = out.with_suffix(".toml")
    file.write_text(f'model = "{taught}"\noutput_dir = "{out}"\n')
    return main([name, str(file), *(part for each in settings for part in ("--set", each))])


def test_a_compressed_folder_chats_in_transformers(taught: Path, tmp_path: Path) -> None:
    """With `AutoTokenizer`, `AutoModelForCausalLM`, its own template and its own end."""
    out = tmp_path / "out"
    assert command(taught, out, "quantize", "scheme=ct.int4_g32", "verify=true") == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    given = tokenizer.apply_chat_template(
        PROMPT, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    made = model.generate(**given, max_new_tokens=40)[0, given["input_ids"].shape[1] :]
    assert tokenizer.decode(made) == ANSWER + END
    config = json.loads((out / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (0, 0)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 0


@pytest.mark.parametrize(
    ("runtime", "target", "lines"),
    [("transformers", "ct.int4_g32", 1), ("onnxruntime", "ort.matmulnbits", 2)],
)
def test_the_page_shows_how_to_run_a_folder(
    runtime: str,
    target: str,
    lines: int,
    taught: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The code of docs/compress/runtimes.md prints the answer; `nox -s deploy` runs llama.cpp's."""
    monkeypatch.chdir(tmp_path)
    folder = Path("deploy") / target.partition(".")[0]
    export(qat(load_model(taught), target), folder, tokenizer=taught)
    assert printed(runtime) == f"{ANSWER}\n" * lines


def test_an_onnx_folder_answers_and_ends(taught: Path, tmp_path: Path) -> None:
    """The folder holds all that a loop over onnxruntime needs."""
    out = tmp_path / "out"
    assert command(taught, out, "quantize", "scheme=ort.matmulnbits", "verify=true") == 0
    runtime = open_runtime(out, "ort")
    text = transformers.AutoTokenizer.from_pretrained(out).apply_chat_template(
        PROMPT, add_generation_prompt=True, tokenize=False
    )
    made = runtime.generate(runtime.encode(text), 40)
    decoder_of = tokenizers.Tokenizer.from_file(str(out / "tokenizer.json"))
    assert decoder_of.decode(made, skip_special_tokens=False) == ANSWER + END


def test_a_gguf_file_names_its_ends_and_its_template(taught: Path, tmp_path: Path) -> None:
    """As llama.cpp looks for them; what it does with them is proved by `nox -s deploy`."""
    out = tmp_path / "out"
    assert command(taught, out, "quantize", "scheme=gguf.q8_0") == 0
    fields = gguf.GGUFReader(out / "model.gguf").fields

    def said(name: str) -> Any:
        return fields[f"tokenizer.{name}"].contents()

    assert said("ggml.eos_token_id") == said("ggml.padding_token_id") == 0
    assert said("chat_template") == TEMPLATE
    assert said("ggml.pre") == "gpt-2"
    assert said("ggml.add_bos_token") is False
    assert said("ggml.add_eos_token") is False


@pytest.mark.parametrize(
    ("name", "settings"), [("prune", ["pattern=2:4", "retrain=false"]), ("distill", ["layers=1"])]
)
def test_a_pruned_or_distilled_folder_opens_with_its_tokenizer(
    name: str, settings: list[str], taught: Path, tmp_path: Path
) -> None:
    """And with the end of its texts, as the folder that it was made from."""
    chats = write_conversations(tmp_path / "chats.jsonl")
    more = [f"dataset={chats}", "rows=16", "tuning.steps=1", "tuning.sequence_length=48"]
    assert command(taught, tmp_path / "out", name, *settings, *more) == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id == 0


def test_a_model_without_a_tokenizer_is_refused_for_llama_cpp(
    taught: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before any work; llama.cpp would end the process where it is asked for text."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((taught / name).read_bytes())
    assert command(bare, tmp_path / "out", "quantize", "scheme=gguf.q4_0") == 2
    assert "has no tokenizer.json, which llama.cpp needs to read text" in capsys.readouterr().err
    assert command(bare, tmp_path / "out", "quantize", "scheme=ct.int4_g32") == 0
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": 0,
        "pad_token_id": 0,
    }


def test_a_gguf_file_without_a_tokenizer_has_tokens_without_texts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As many as the model has, and one that ends a text: what the model says, else the last."""
    out = export(qat(decoder(), "gguf.q4_0"), tmp_path / "out")
    fields = gguf.GGUFReader(out / "model.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "gpt2"
    assert len(fields["tokenizer.ggml.tokens"].contents()) == 192
    assert fields["tokenizer.ggml.eos_token_id"].contents() == 191
    assert "end-of-text token is unknown" in caplog.text


def changed(taught: Path, folder: Path, name: str, **values: object) -> Path:
    """The tokenizer's files with keys of one of them changed."""
    folder.mkdir()
    for each in ("tokenizer.json", "tokenizer_config.json"):
        (folder / each).write_bytes((taught / each).read_bytes())
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
def test_the_first_place_that_names_an_end_holds(
    name: str, values: dict[str, object], ends: tuple[int, ...], taught: Path, tmp_path: Path
) -> None:
    """What `generate` heeds, then the configuration, the settings, a token of a known name."""
    files = read_tokenizer(changed(taught, tmp_path / "changed", name, **values))
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
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template must be a text"),
        (
            "generation_config.json",
            {"eos_token_id": 999},
            "must be a token of the model's vocabulary",
        ),
        ("generation_config.json", {"eos_token_id": [1, 2, 3, 4]}, "4 tokens end a text"),
        ("generation_config.json", {"eos_token_id": "x"}, "must be a token id"),
    ],
)
def test_what_llama_cpp_cannot_do_is_refused(
    name: str, values: dict[str, object], message: str, taught: Path, tmp_path: Path
) -> None:
    """In one line, before a file is written."""
    folder = changed(taught, tmp_path / "changed", name, **values)
    with pytest.raises(ExportError, match=message):
        export(qat(load_model(taught), "gguf.q4_0"), tmp_path / "out", tokenizer=folder)
    assert not (tmp_path / "out").exists()


def test_verify_refuses_a_folder_that_does_not_end_its_texts(taught: Path, tmp_path: Path) -> None:
    """The runtime would write on to its limit."""
    model = qat(load_model(taught), "ort.matmulnbits")
    folder = export(model, tmp_path / "out", tokenizer=taught, verify=True)
    assert len(verify(model, folder, "ort").generated) > 0
    (folder / "generation_config.json").write_text("{}")
    with pytest.raises(VerifyError, match="token 0 ends a text, but onnxruntime does not stop"):
        verify(model, folder, "ort")


def test_verify_refuses_a_runtime_that_reads_another_text(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As llama.cpp does where it cuts words otherwise than the tokenizer that lies beside it."""
    from ms_compress.targets.ort.runtime import OnnxRuntime

    model = qat(load_model(taught), "ort.matmulnbits")
    folder = export(model, tmp_path / "out", tokenizer=taught)
    encode = OnnxRuntime.encode
    monkeypatch.setattr(
        OnnxRuntime, "encode", lambda self, text: encode(self, text.replace("  ", " "))
    )
    with pytest.raises(VerifyError, match="onnxruntime reads '  two  spaces"):
        verify(model, folder, "ort")


def test_verify_refuses_a_runtime_that_writes_another_text(
    taught: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though each tensor, and the logits of the probe, are the model's."""
    from ms_compress.targets.ort.runtime import OnnxRuntime

    model = qat(load_model(taught), "ort.matmulnbits")
    folder = export(model, tmp_path / "out", tokenizer=taught)
    monkeypatch.setattr(OnnxRuntime, "generate", lambda self, tokens, most: [9] * most)
    with pytest.raises(VerifyError, match="onnxruntime generated token 9 at position"):
        verify(model, folder, "ort")


@pytest.mark.parametrize("name", ["rows.json", "ROWS.JSON", "rows.json.gz", "rows"])
def test_conversations_are_known_by_content_and_not_by_name(name: str, tmp_path: Path) -> None:
    """One array of rows, packed or not, gives the tokens of the same rows in JSON Lines."""
    chats = write_conversations(tmp_path / "chats.jsonl", count=4)
    folder = write_tokenizer(tmp_path / "tokenizer")
    rows = json.dumps([json.loads(line) for line in chats.read_text().splitlines()]).encode()
    (tmp_path / name).write_bytes(gzip.compress(rows) if name.endswith("gz") else rows)
    expected = read_batch(chats, count=4, length=48, chat=folder)
    found = read_batch(tmp_path / name, count=4, length=48, chat=folder)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_conversations_that_are_cut_off_or_too_few_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each third prompt fills its row, so that nothing of its answer is left."""
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
    found = read_batch(path, count=6, length=40, chat=folder)
    assert len(found["tokens"]) == 6
    assert "9 conversations, 3 were truncated at sequence_length (40 tokens), and 3" in caplog.text
    caplog.clear()
    read_batch(path, count=9, length=400, chat=folder)
    assert not caplog.text
    assert len(read_tokens(path, count=500, length=40, chat=folder)) < 500
    assert "rows of 40 tokens, fewer than rows=500" in caplog.text
