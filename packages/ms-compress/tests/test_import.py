"""GGUF files as bases and teachers: values to the bit, and damaged files in one line."""

import random
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from chats import write_tokenizer
from folders import model as byte_model
from models import llama, qwen2, qwen3, tokens
from test_experts import mixtral, qwen3_moe
from test_k_quants import decoder
from torch import nn

from ms_compress import CompressError, ExportError, export, import_gguf, qat
from ms_compress.cli import main
from ms_compress.deployment.verification import TEXTS
from ms_compress.models.experts import separate_experts
from ms_compress.models.logits import model_logits
from ms_compress.quantization.layers import prepared_layers
from ms_parallel import load_model


def qwen2_full() -> nn.Module:
    """A Qwen 2, whose attention has biases."""
    return qwen2("full_attention", "full_attention")


@pytest.mark.slow
@pytest.mark.parametrize("build", [decoder, llama, mixtral, qwen2_full, qwen3, qwen3_moe])
def test_imported_model_has_the_weights_of_the_file(
    build: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """The logits match the quantized model with float inputs, in both libraries."""
    model = qat(separate_experts(build()), "gguf.q4_k", activations=False)
    file = export(model, tmp_path / "out") / "model.gguf"
    folder = import_gguf(file, tmp_path / "base")
    text = tokens()
    expected = model_logits(model, text)
    opened, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert not any(info.values())
    torch.testing.assert_close(model_logits(opened.eval(), text), expected, rtol=0, atol=1e-5)
    loaded = load_model(folder)
    torch.testing.assert_close(model_logits(loaded, text), expected, rtol=0, atol=1e-5)


def test_imported_weights_are_equal_to_the_bit(tmp_path: Path) -> None:
    """Weights of linear layers equal the dequantized weights."""
    model = qat(decoder(), "gguf.q6_k")
    folder = import_gguf(export(model, tmp_path / "out") / "model.gguf", tmp_path / "base")
    loaded = load_model(folder)
    for name, layer in prepared_layers(model):
        assert torch.equal(loaded.get_parameter(f"{name}.weight"), layer.effective_weight())


def test_the_command_imports_model_and_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer reads texts as before; the folder can be exported again."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    folder = export(qat(byte_model(), "gguf.q8_0"), tmp_path / "out", tokenizer=tokenizer)
    base = tmp_path / "base"
    arguments = ["import", str(folder / "model.gguf"), "--out", str(base), "--dtype", "float16"]
    assert main(arguments) == 0
    assert "with its tokenizer" in capsys.readouterr().out
    before, after = (transformers.AutoTokenizer.from_pretrained(path) for path in (tokenizer, base))
    for text in TEXTS:
        assert after(text)["input_ids"] == before(text)["input_ids"]
    assert main(["export", str(base), "--scheme", "gguf.q8_0", "--out", str(tmp_path / "x")]) == 0


def test_damaged_files_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Cut short, or with changed bytes: exit code 2, or a model of the right shape; no folder."""
    data = (export(qat(decoder(), "gguf.q4_k"), tmp_path / "out") / "model.gguf").read_bytes()
    rng, refused = random.Random(0), 0
    header = 6000  # metadata and names of tensors
    for number in range(9):
        damaged = bytearray(data)
        if number % 3 == 0:
            damaged = damaged[: rng.randrange(len(data))]
        elif number % 3 == 1:
            damaged[rng.randrange(header)] ^= 1 << rng.randrange(8)
        else:
            start = rng.randrange(header)
            damaged[start : start + 8] = rng.randbytes(8)
        path, folder = tmp_path / f"{number}.gguf", tmp_path / f"base{number}"
        path.write_bytes(damaged)
        code = main(["import", str(path), "--out", str(folder)])
        error = capsys.readouterr().err
        assert code in (0, 2), error
        assert folder.exists() == (code == 0)
        if code == 2:
            refused += 1
            lines = [line for line in error.splitlines() if line.startswith("ms-compress: ")]
            assert len(lines) == 1
    assert refused >= 4
    assert not list(tmp_path.glob("*.partial*"))


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    """Unknown and missing tensors, sizes beyond reason, NaN, other architectures, no GGUF."""
    path = tmp_path / "x.gguf"

    def write(
        architecture: str = "llama", *, extra: str = "", layers: int = 1, nan: bool = False
    ) -> None:
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(layers)
        writer.add_embedding_length(32)
        writer.add_head_count(2)
        writer.add_feed_forward_length(64)
        writer.add_context_length(64)
        writer.add_layer_norm_rms_eps(1e-5)
        shapes = {"token_embd": (8, 32), "output_norm": (32,)}
        block = {"attn_norm": (32,), "ffn_norm": (32,), "ffn_down": (32, 64)}
        block |= dict.fromkeys(("ffn_gate", "ffn_up"), (64, 32))
        block |= dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (32, 32))
        shapes |= {f"blk.0.{name}": shape for name, shape in block.items()}
        for name, shape in shapes.items():
            value = np.zeros(shape, np.float32)
            if nan and name == "output_norm":
                value[3] = np.nan
            writer.add_tensor(f"{name}.weight", value)
        if extra:
            writer.add_tensor(extra, np.zeros(4, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

    def refused() -> str:
        with pytest.raises(CompressError) as caught:
            import_gguf(path, tmp_path / "base")
        assert not (tmp_path / "base").exists()
        return str(caught.value)

    write("falcon")
    assert "architecture must be llama, qwen2, qwen3 or qwen3moe, got 'falcon'" in refused()
    write(extra="secret.weight")
    assert "it has 'secret.weight'" in refused()
    write(layers=2)
    assert "must have the tensor 'blk.1.attn_norm.weight'" in refused()
    write(layers=10**9)
    assert "sizes must be plausible, got 1000000000 layers" in refused()
    write(nan=True)
    assert "1 values of model.norm.weight are NaN" in refused()
    path.write_bytes(b"PK\x03\x04")
    assert "must be a GGUF file" in refused()
    write()
    assert import_gguf(path, tmp_path / "base").is_dir()
    with pytest.raises(ExportError, match="dtype must be float32, float16 or bfloat16"):
        import_gguf(path, tmp_path / "again", dtype=torch.int8)
