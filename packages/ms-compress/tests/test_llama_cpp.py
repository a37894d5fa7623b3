"""Inference in llama.cpp matches training. Run by `nox -s deploy`, which builds its package."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("llama_cpp", reason="run `nox -s deploy`, which builds llama.cpp")
import llama_cpp
from chats import ANSWER, END, QUESTION, write_chat_model, write_conversations, write_tokenizer
from folders import model as small_model
from models import VOCABULARY, decoder, llama, qwen3, tokens
from mutants import GGUF, mutate_gguf
from page_blocks import run_block

from ms_compress import Tuning, VerifyError, export, qat, tune, verify
from ms_compress.cli import main
from ms_compress.deployment.verification import TEXTS, compare
from ms_compress.models.logits import model_logits
from ms_compress.targets.gguf.tokenizer import LLAMA_3
from ms_compress.targets.target import open_runtime
from ms_compress.targets.tokenizer_json import encoder
from ms_parallel import load_model, save_model

SCHEMES = ["gguf.q8_0", "gguf.q4_0"]
MODELS: dict[str, Callable[[int], nn.Module]] = {
    "ms_parallel": decoder,
    "llama": llama,
    "qwen3": qwen3,
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("name", SCHEMES)
def test_one_layer_matches(name: str, model: str, tmp_path: Path) -> None:
    """With inputs rounded in training as in llama.cpp, at most 1e-4 off on average.

    Sums run in other orders, so an input sometimes falls on the other side of a border between
    codes; that moves a logit by about one code, 1/127 of a block's largest value.
    """
    prepared = qat(MODELS[model](1), name)
    folder = export(prepared, tmp_path / "out", target=name, verify=True)
    text = tokens(2, 100)
    comparison = compare(model_logits(prepared, text), open_runtime(folder, "gguf").logits(text))
    assert comparison.mean <= 1e-4
    assert comparison.argmax == 1.0


@pytest.fixture(scope="module")
def trained_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers trained on half of a standard library module, byte by byte.

    The logits of random weights are nearly tied everywhere; trained ones differ.
    """
    model = decoder(6)
    tuning = Tuning(steps=150, batch_size=8, sequence_length=64, learning_rate=2e-3)
    tune(model, source_bytes()[: 8 * 65 * 40].view(-1, 65), tuning)
    folder = tmp_path_factory.mktemp("taught") / "model"
    save_model(model, folder)
    return folder


def source_bytes() -> torch.Tensor:
    """Return the characters of argparse.py, about 98,000."""
    text = Path(argparse.__file__).read_bytes()
    return torch.tensor([byte for byte in text if byte < VOCABULARY])


@pytest.mark.parametrize("name", SCHEMES)
def test_rounding_inputs_in_training_matches_llama_cpp_better(
    name: str, trained_model: Path, tmp_path: Path
) -> None:
    """At 99% of positions; weight-only training is farther from llama.cpp."""
    prepared = qat(load_model(trained_model), name)
    folder = export(prepared, tmp_path / "out")
    text = source_bytes()[-1600:].view(-1, 100)
    runtime_logits = open_runtime(folder, "gguf").logits(text)
    simulated = compare(model_logits(prepared, text), runtime_logits)
    weight_only = qat(load_model(trained_model), name, activations=False)
    assert simulated.mean < 0.7 * compare(model_logits(weight_only, text), runtime_logits).mean
    assert simulated.argmax >= 0.99


@pytest.mark.parametrize("name", SCHEMES)
def test_embedding_and_head_of_one_weight_are_quantized_once(name: str, tmp_path: Path) -> None:
    """The tied weight is rounded for token lookup and for the logits."""
    prepared = qat(decoder(1), name, embeddings=True, head=True, learned_scales=True)
    folder = export(prepared, tmp_path / "out")
    text = tokens(2, 100)
    comparison = compare(model_logits(prepared, text), open_runtime(folder, "gguf").logits(text))
    assert comparison.mean <= 1e-3  # the head's input is rounded too: one code moves a full row


@pytest.mark.parametrize("mutant", GGUF)
def test_a_wrong_file_is_refused(mutant: str, tmp_path: Path) -> None:
    """Each of these loads in llama.cpp without complaint."""
    prepared = qat(decoder(), "gguf.q4_0")
    folder = export(prepared, tmp_path / "out", verify=True)
    mutate_gguf(str(folder / "model.gguf"), GGUF[mutant])
    with pytest.raises(VerifyError, match="differs from the model"):
        verify(prepared, folder, "gguf")


@pytest.fixture(scope="module")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF folder of a model trained to answer, verified by the command."""
    folder = tmp_path_factory.mktemp("chatting")
    chat_model = write_chat_model(folder / "model", write_conversations(folder / "chats.jsonl"))
    run = folder / "run.toml"
    run.write_text(
        f'model = "{chat_model}"\noutput_dir = "{folder}/out"\n'
        'scheme = "gguf.q8_0"\nverify = true\n'
    )
    assert main(["quantize", str(run)]) == 0
    return folder / "out"


def test_chat_completion_answers_and_stops(chat_folder: Path) -> None:
    """Template and end token come from the file, without settings."""
    model = llama_cpp.Llama(str(chat_folder / "model.gguf"), n_ctx=128, verbose=False)
    reply = model.create_chat_completion(
        [{"role": "user", "content": QUESTION}], max_tokens=40, temperature=0.0
    )
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == ANSWER
    assert choice["finish_reason"] == "stop"
    assert model.token_eos() == 0


def test_the_runtimes_page_runs_a_file(
    chat_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code of docs/compress/runtimes.md prints the answer."""
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "gguf").symlink_to(chat_folder)
    monkeypatch.chdir(tmp_path)
    assert run_block("llama_cpp") == f"{ANSWER}\n"


def test_llama_cpp_tokenizes_like_the_tokenizer(chat_folder: Path) -> None:
    """It splits and merges spaces, digits, other scripts and special tokens itself."""
    runtime = open_runtime(chat_folder, "gguf")
    for text in (*TEXTS, f"one{END}two", "can't  won't\t12345\n\n ünïcode"):
        assert runtime.encode(text) == encoder(chat_folder)(text)
    assert runtime.ends() == {0}


@pytest.mark.parametrize("whole_words", [True, False])
def test_llama_3_splitting_is_tokenized_identically(whole_words: bool, tmp_path: Path) -> None:
    """Whether full words of the vocabulary are used directly or merged from letters."""
    folder = write_tokenizer(tmp_path / "tokenizer")
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": LLAMA_3}, "behavior": "Isolated"}
    byte_level = {**document["pre_tokenizer"], "use_regex": False}
    pre_tokenizers = [{**split, "invert": False}, byte_level]
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": pre_tokenizers}
    document["model"]["ignore_merges"] = whole_words
    document["model"]["vocab"]["Zq"] = 287  # not reachable by merges
    path.write_text(json.dumps(document))
    prepared = qat(small_model(), "gguf.q8_0")
    out = export(prepared, tmp_path / "out", tokenizer=folder, verify=True)
    assert (287 in open_runtime(out, "gguf").encode("Zq")) == whole_words


def test_a_file_without_a_tokenizer_does_not_crash(tmp_path: Path) -> None:
    """Text tokenizes to nothing, and tokens are shown as numbers."""
    folder = export(qat(decoder(1), "gguf.q4_0"), tmp_path / "out", verify=True)
    script = (
        "import llama_cpp, sys; model = llama_cpp.Llama(sys.argv[1], verbose=False, n_ctx=64);"
        "print(model.tokenize(b'hello', add_bos=False), model.detokenize([7, 8]));"
        "print(model([5, 6], max_tokens=4, temperature=0)['choices'][0]['text'])"
    )
    process = subprocess.run(
        [sys.executable, "-c", script, str(folder / "model.gguf")], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    first, second = process.stdout.splitlines()
    assert first == "[] b'[7][8]'"
    assert re.fullmatch(r"(\[\d+\]){1,4}", second)
