"""Files other than weights are copied from the base folder to every derived folder."""

import json
from pathlib import Path

import pytest
import torch
from chats import write_tokenizer
from folders import model, write_run
from safetensors.torch import load_file, save_file

from ms_compress.cli import main
from ms_parallel.weights import save_model

COMMANDS = {
    "prune": "pattern=2:4",
    "distill": "layers=1",
    "qat": "scheme=ct.int4_g32",
    "quantize": "scheme=ort.matmulnbits",
    "export": "gguf.q4_0",
}
COPIED_FILES = {
    "LICENSE": "free\n",
    "NOTICE.txt": "notice\n",
    "special_tokens_map.json": '{"eos_token": "<|endoftext|>"}\n',
    "added_tokens.json": "{}\n",
    "chat_template.jinja": "{{ messages }}",
    "additional_chat_templates/rag.jinja": "{{ documents }}",
}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run file with a bfloat16 base folder that has all the usual files of a model."""
    file = write_run(tmp_path)
    base = tmp_path / "base"
    save_model(model(), base, dtype=torch.bfloat16)
    write_tokenizer(base)
    for name, text in COPIED_FILES.items():
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(text)
    settings = {"temperature": 0.6, "do_sample": True, "eos_token_id": 0}
    (base / "generation_config.json").write_text(json.dumps(settings))
    return file


@pytest.mark.parametrize("command", ["quantize", "qat"])
def test_tensors_that_stay_in_float_keep_the_dtype_of_the_base_folder(
    command: str, run_file: Path
) -> None:
    """Norms, embeddings and ignored layers; one float32 tensor among them stays float32."""
    base, out = run_file.parent / "base", run_file.parent / "out"
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"].float() + 1e-4
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    settings = ["scheme=ct.int4_g32", f"model={base}", "verify=true"]
    assert (
        main(
            [
                command,
                str(run_file),
                *(argument for setting in settings for argument in ("--set", setting)),
            ]
        )
        == 0
    )
    tensors = load_file(out / "model.safetensors")
    float_tensors = {name: tensors[name] for name in weights if name in tensors}
    assert len(float_tensors) > 3
    assert all(tensor.dtype == weights[name].dtype for name, tensor in float_tensors.items())
    if command == "quantize":
        assert all(torch.equal(tensor, weights[name]) for name, tensor in float_tensors.items())


@pytest.mark.parametrize("tokenizer", [True, False])
@pytest.mark.parametrize("command", COMMANDS)
def test_files_and_settings_of_the_base_folder_are_copied(
    command: str, tokenizer: bool, run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """License, tokenizer, chat template and generation settings; also without a tokenizer.json."""
    base, out = run_file.parent / "base", run_file.parent / "out"
    if not tokenizer:
        if command == "export":
            pytest.skip("llama.cpp needs a tokenizer.json")
        (base / "tokenizer.json").unlink()
    arguments = [str(run_file), COMMANDS[command], f"model={base}"]
    if command == "export":
        arguments = [str(base), "--scheme", COMMANDS[command], "--out", str(out)]
    assert main([command, *arguments, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    for name, text in COPIED_FILES.items():
        assert (out / name).read_text() == text, name
    settings = json.loads((out / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|endoftext|>"
    generation = json.loads((out / "generation_config.json").read_text())
    assert (generation["temperature"], generation["do_sample"]) == (0.6, True)
    if command in ("prune", "distill"):
        tensors = load_file(out / "model.safetensors")
        assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
        config = json.loads((out / "config.json").read_text())
        assert "bfloat16" in (config.get("dtype"), config.get("torch_dtype"))
    else:
        assert facts["float_layer_count"] == len(facts["float_layers"])
        assert all("head" in name for name in facts["float_layers"])


def test_layers_that_stay_in_float_are_named(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ignored layers, by their full names."""
    arguments = ["scheme=ct.int4_g32", 'ignore=["*.layers.1.mlp.*"]', "method=rtn"]
    options = [part for setting in arguments for part in ("--set", setting)]
    assert main(["quantize", str(run_file), *options, "--json"]) == 0
    names = json.loads(capsys.readouterr().out)["float_layers"]
    assert {name for name in names if "layers" in name} == {
        f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")
    }
