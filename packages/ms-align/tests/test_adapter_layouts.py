"""Adapters under every axis of a layout give the losses and files of a single process."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from processes import Command
from safetensors.torch import load_file

from ms_align import ConfigError, LoraOptions
from ms_align.engines.assembly import start_engine
from ms_parallel import save_model

from .small_models import decoder
from .test_expert_adapters import DOWN, FAMILIES, GATE_UP

SCRIPT = Path(__file__).with_name("adapter_layout_run.py")
EXPERTS: dict[str, Any] = {"rank": 4, "target_parameters": [GATE_UP, DOWN]}
CASES: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("qwen3_moe", {"data": 2, "expert": 2}, {**EXPERTS, "init_lora_weights": "pissa"}),
    ("llama", {"data": 2}, {"rank": 4}),
    ("llama", {"data": 2}, {"rank": 4, "use_dora": True}),
    ("llama", {"data": 2}, {"rank": 4, "quantize_base": "nf4"}),
    ("llama", {"tensor": 2}, {"rank": 4, "target_modules": "all-linear"}),
    ("llama", {"context": 2}, {"rank": 4, "quantize_base": "fp8", "use_rslora": True}),
    ("llama", {"pipeline": 2}, {"rank": 4, "quantize_base": "nf4", "use_dora": True}),
    ("qwen3_moe", {"data": 2}, {**EXPERTS, "quantize_base": "int8"}),
    ("qwen3_moe", {"tensor": 2}, EXPERTS),
    ("qwen3_moe", {"context": 2}, EXPERTS),
    ("qwen3_moe", {"pipeline": 2}, EXPERTS),
    ("qwen3_moe", {"data": 2, "tensor": 2, "expert": 2}, EXPERTS),
    ("gpt_oss", {"tensor": 2}, {**EXPERTS, "init_lora_weights": "pissa"}),
    ("deepseek_v3", {"tensor": 2}, {**EXPERTS, "target_modules": "all-linear"}),
]


def run_under(model: Path, out: Path, layout: dict[str, int], lora: Any, **options: Any) -> Any:
    """Run the script in the processes of a layout; return the losses and norms."""
    count = 1
    for axis, size in layout.items():
        count *= 1 if axis == "expert" else size  # expert ranks are data ranks
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    settings = json.dumps({"layout": layout, "lora": lora, "options": options})
    processes = [
        Command(
            [str(SCRIPT), str(model), str(out), settings],
            environment={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            imports=("ms_align.trainers.sft", "ms_parallel.engine.engine"),
        )
        for rank in range(count)
    ]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert not any(p.returncode for p in processes), "".join(error for _, error in outputs)
    return json.loads(outputs[0][0].splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("family", "layout", "lora"), CASES, ids=str)
def test_layouts_train_the_adapters_of_a_single_process(
    family: str, layout: dict[str, int], lora: Any, tmp_path: Path
) -> None:
    """Losses and norms, the adapter's files and the merged model; resumed bit for bit."""
    save_model(decoder(family, **FAMILIES.get(family, {})), tmp_path / "model")  # type: ignore[arg-type]
    single = run_under(tmp_path / "model", tmp_path / "single", {"data": 1}, lora)
    split = run_under(tmp_path / "model", tmp_path / "split", layout, lora, recompute="full")
    for (loss, norm), (expected_loss, expected_norm) in zip(split, single, strict=True):
        assert loss == pytest.approx(expected_loss, abs=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    for part in ("adapter", "model"):
        tensors = [
            {
                name: tensor
                for path in sorted((tmp_path / run / part).glob("*.safetensors"))
                for name, tensor in load_file(path).items()
            }
            for run in ("single", "split")
        ]
        assert tensors[0].keys() == tensors[1].keys()
        for name, tensor in tensors[0].items():
            # Adam's first steps have the size of the learning rate, 1e-2, despite rounding.
            assert (tensor - tensors[1][name]).abs().max() < 1e-4, name
    configs = [tmp_path / run / "adapter/adapter_config.json" for run in ("single", "split")]
    assert configs[0].read_bytes() == configs[1].read_bytes()


def test_what_a_layout_does_not_support_is_refused_in_one_line(tmp_path: Path) -> None:
    """The error is raised before any process connects."""
    save_model(decoder(), tmp_path)  # type: ignore[arg-type]
    for lora, message in (
        (LoraOptions(dropout=0.1), "needs a single process; remove layout or lora.dropout"),
        (LoraOptions(use_dora=True), "needs whole rows of the weights"),
    ):
        with pytest.raises(ConfigError, match=message):
            start_engine(tmp_path, layout={"tensor": 2}, lora=lora)
