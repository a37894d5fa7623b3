"""llama.cpp computes what training computed. Run by `nox -s deploy`, which builds its package."""

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
from chats import ANSWER, END, QUESTION, write_conversations, write_taught, write_tokenizer
from folders import model as small_model
from models import VOCABULARY, decoder, llama, qwen3, tokens
from mutants import GGUF, mutate_gguf
from page_blocks import printed

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
def test_one_layer_agrees(name: str, model: str, tmp_path: Path) -> None:
    """With inputs rounded in training as llama.cpp rounds them: 1e-4 on average at most.

    Sums are of other orders, so now and then an input falls on the other side of a border between
    two codes; such a one moves a logit by about one code of it, 1/127 of a block's largest.
    """
    prepared = qat(MODELS[model](1), name)
    folder = export(prepared, tmp_path / "out", target=name, verify=True)
    text = tokens(2, 100)
    found = compare(model_logits(prepared, text), open_runtime(folder, "gguf").logits(text))
    assert found.mean <= 1e-4
    assert found.argmax == 1.0


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers that have read half of a module of the standard library, byte by byte.

    The logits of fresh weights are near ties wherever one looks; these have learnt to differ.
    """
    model = decoder(6)
    how = Tuning(steps=150, batch_size=8, sequence_length=64, learning_rate=2e-3)
    tune(model, source_bytes()[: 8 * 65 * 40].view(-1, 65), how)
    folder = tmp_path_factory.mktemp("taught") / "model"
    save_model(model, folder)
    return folder


def source_bytes() -> torch.Tensor:
    """Characters of argparse.py, which has some 98,000."""
    text = Path(argparse.__file__).read_bytes()
    return torch.tensor([byte for byte in text if byte < VOCABULARY])


@pytest.mark.parametrize("name", SCHEMES)
def test_six_layers_agree_better_with_inputs_rounded_in_training(
    name: str, taught: Path, tmp_path: Path
) -> None:
    """At 99% of positions of a text; weight-only training is farther from llama.cpp by a factor."""
    prepared = qat(load_model(taught), name)
    folder = export(prepared, tmp_path / "out")
    text = source_bytes()[-1600:].view(-1, 100)
    there = open_runtime(folder, "gguf").logits(text)
    simulated = compare(model_logits(prepared, text), there)
    weights_alone = qat(load_model(taught), name, activations=False)
    assert simulated.mean < 0.7 * compare(model_logits(weights_alone, text), there).mean
    assert simulated.argmax >= 0.99


@pytest.mark.parametrize("name", SCHEMES)
def test_embedding_and_head_of_one_weight_are_quantized_once(name: str, tmp_path: Path) -> None:
    """The tied weight is rounded where tokens are looked up, and where logits are made."""
    prepared = qat(decoder(1), name, embeddings=True, head=True, learned_scales=True)
    folder = export(prepared, tmp_path / "out")
    text = tokens(2, 100)
    found = compare(model_logits(prepared, text), open_runtime(folder, "gguf").logits(text))
    assert found.mean <= 1e-3  # the head's input is rounded too: a border moves a whole row


@pytest.mark.parametrize("mutant", GGUF)
def test_a_wrong_file_is_refused(mutant: str, tmp_path: Path) -> None:
    """llama.cpp loads each of these without complaint."""
    prepared = qat(decoder(), "gguf.q4_0")
    folder = export(prepared, tmp_path / "out", verify=True)
    mutate_gguf(str(folder / "model.gguf"), GGUF[mutant])
    with pytest.raises(VerifyError, match="differs from the model"):
        verify(prepared, folder, "gguf")


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF folder of a model that was taught to answer, verified by the command."""
    folder = tmp_path_factory.mktemp("chatting")
    taught = write_taught(folder / "model", write_conversations(folder / "chats.jsonl"))
    run = folder / "run.toml"
    run.write_text(
        f'model = "{taught}"\noutput_dir = "{folder}/out"\nscheme = "gguf.q8_0"\nverify = true\n'
    )
    assert main(["quantize", str(run)]) == 0
    return folder / "out"


def test_chat_completion_answers_and_stops(chatting: Path) -> None:
    """llama.cpp takes template and end from the file alone: no setting is given."""
    model = llama_cpp.Llama(str(chatting / "model.gguf"), n_ctx=128, verbose=False)
    reply = model.create_chat_completion(
        [{"role": "user", "content": QUESTION}], max_tokens=40, temperature=0.0
    )
    (choice,) = reply["choices"]
    assert choice["message"]["content"] == ANSWER
    assert choice["finish_reason"] == "stop"
    assert model.token_eos() == 0


def test_the_page_shows_how_to_run_a_file(
    chatting: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of docs/compress/runtimes.md prints the answer."""
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "gguf").symlink_to(chatting)
    monkeypatch.chdir(tmp_path)
    assert printed("llama_cpp") == f"{ANSWER}\n"


def test_llama_cpp_reads_texts_as_the_tokenizer_does(chatting: Path) -> None:
    """Its own splitting and merging of spaces, digits, other scripts and special tokens."""
    runtime = open_runtime(chatting, "gguf")
    for text in (*TEXTS, f"one{END}two", "can't  won't\t12345\n\n ünïcode"):
        assert runtime.encode(text) == encoder(chatting)(text)
    assert runtime.ends() == {0}


@pytest.mark.parametrize("whole_words", [True, False])
def test_a_split_of_llama_3_is_read_as_the_tokenizer_does(
    whole_words: bool, tmp_path: Path
) -> None:
    """Whether words of the vocabulary are taken whole, or are merged from their letters."""
    folder = write_tokenizer(tmp_path / "tokenizer")
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text())
    split = {"type": "Split", "pattern": {"Regex": LLAMA_3}, "behavior": "Isolated"}
    bytes_alone = {**document["pre_tokenizer"], "use_regex": False}
    steps = [{**split, "invert": False}, bytes_alone]
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    document["model"]["ignore_merges"] = whole_words
    document["model"]["vocab"]["Zq"] = 287  # no merge makes it
    path.write_text(json.dumps(document))
    prepared = qat(small_model(), "gguf.q8_0")
    out = export(prepared, tmp_path / "out", tokenizer=folder, verify=True)
    assert (287 in open_runtime(out, "gguf").encode("Zq")) == whole_words


def test_a_file_without_a_tokenizer_does_not_end_the_process(tmp_path: Path) -> None:
    """It has tokens without texts: a text is no token, and tokens are shown as numbers."""
    folder = export(qat(decoder(1), "gguf.q4_0"), tmp_path / "out", verify=True)
    script = (
        "import llama_cpp, sys; model = llama_cpp.Llama(sys.argv[1], verbose=False, n_ctx=64);"
        "print(model.tokenize(b'hello', add_bos=False), model.detokenize([7, 8]));"
        "print(model([5, 6], max_tokens=4, temperature=0)['choices'][0]['text'])"
    )
    made = subprocess.run(
        [sys.executable, "-c", script, str(folder / "model.gguf")], capture_output=True, text=True
    )
    assert made.returncode == 0, made.stderr
    first, second = made.stdout.splitlines()
    assert first == "[] b'[7][8]'"
    assert re.fullmatch(r"(\[\d+\]){1,4}", second)
