"""Engine settings in run files: supported, passed on, or rejected before the first step."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from small_models import decoder, gpt2, llama

from ms_align import ConfigError, DPOTrainer, GRPOTrainer, LoraOptions, RewardTrainer, SFTTrainer
from ms_align.cli import main
from ms_align.engines.options import HONORED
from ms_align.errors import ModelError
from ms_parallel import load_model, save_model

UNSUPPORTED_VALUES: dict[str, Any] = {
    "mixed_precision": True,
    "float8": "rowwise",
    "ops": "ms_kernels",
    "recompute": "full",
    "compile": True,
    "sharding": "zero3",
    "offload": "moments",
    "balance": "step",
    "balance_coefficient": 0.1,
}
"""A value of each setting that one process without a layout cannot honor."""


def events(folder: Path, event_kind: str) -> list[dict[str, Any]]:
    """Read the events of one kind."""
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["kind"] == event_kind]


def losses(model: object, sets: Path, out: Path, **options: Any) -> list[float]:
    """Return the losses of four steps of SFT."""
    SFTTrainer(
        model=model,
        steps=4,
        sequence_length=64,
        batch_size=4,
        learning_rate=1e-3,
        output_dir=out,
        progress=False,
        eval_samples=0,
        **options,
    ).train(sets / "copy")
    return [event["loss"] for event in events(out, "step")]


@pytest.mark.parametrize("name", HONORED)
def test_settings_that_need_a_layout_are_rejected_without_one(name: str) -> None:
    """All trainers reject them when they are built; defaults are accepted."""
    trainers = ((SFTTrainer, "model"), (DPOTrainer, "model"), (RewardTrainer, "model"))
    for trainer_class, model in (*trainers, (GRPOTrainer, "policy_model")):
        required = {"reward_model": len} if trainer_class is GRPOTrainer else {"steps": 1}
        remedy = "train in one process" if trainer_class is RewardTrainer else "data = 1"
        with pytest.raises(ConfigError, match=f"^{name} = .*{remedy}"):
            trainer_class(**{model: "folder"}, **required, **{name: UNSUPPORTED_VALUES[name]})
        trainer_class(**{model: "folder"}, **required, **{name: HONORED[name][-1]})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name == "compile" else [])
        for name in UNSUPPORTED_VALUES
        if not name.startswith("balance")
    ],
)
def test_every_setting_reaches_the_engine_of_a_layout(
    name: str, sets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Set in a run file; losses match the run without it, up to rounding."""
    if name == "compile" and shutil.which("c++") is None:
        pytest.skip("torch.compile needs a C++ compiler")
    run = tmp_path / "run.toml"
    text = f'model = "{sets / "model"}"\ndataset = "{sets / "copy"}"\nsequence_length = 64\n'
    text += "steps = 2\nprogress = false\neval_samples = 0\nlayout = { data = 1 }\n"
    run.write_text(f'{text}output_dir = "{tmp_path / "out"}"\n')
    value = json.dumps(UNSUPPORTED_VALUES[name])
    assert main(["sft", str(run), "--set", f"{name}={value}"]) == 0, capsys.readouterr().err
    plain = tmp_path / "plain"
    assert main(["sft", str(run), "--set", f"output_dir={plain}"]) == 0
    actual, expected = (
        [event["loss"] for event in events(folder, "step")] for folder in (tmp_path / "out", plain)
    )
    # bfloat16 keeps 8 bits: 0.4% of a logit of a few units, averaged over some hundred targets.
    is_rounded = name in ("mixed_precision", "float8")
    assert actual == pytest.approx(expected, abs=2e-2 if is_rounded else 1e-5)
    if is_rounded:
        assert actual != expected


@pytest.mark.parametrize("precision", [True, "float16"])
def test_adapters_train_in_mixed_precision(precision: Any, sets: Path, tmp_path: Path) -> None:
    """Losses equal those in float32 up to rounding, and change at each step."""
    settings: dict[str, Any] = {"layout": {"data": 1}, "lora": LoraOptions(rank=2)}
    expected = losses(sets / "model", sets, tmp_path / "plain", **settings)
    actual = losses(sets / "model", sets, tmp_path / "mixed", **settings, mixed_precision=precision)
    assert actual == pytest.approx(expected, abs=2e-2)  # as above
    assert actual != expected
    assert len(set(actual)) == len(actual)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a mixture-of-experts model with a large balance loss."""
    folder = tmp_path_factory.mktemp("experts") / "model"
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model = decoder("qwen3_moe", router_aux_loss_coef=1.0, **sizes)
    save_model(model, folder)  # type: ignore[arg-type]
    return folder


def test_experts_are_balanced_only_on_request(experts: Path, sets: Path, tmp_path: Path) -> None:
    """Equal losses in one process and under a layout; `balance = "step"` changes them."""
    single = losses(experts, sets, tmp_path / "alone")
    split = losses(experts, sets, tmp_path / "split", layout={"data": 1})
    assert single == pytest.approx(split, abs=1e-5)
    for name in ("alone", "split"):
        (event,) = events(tmp_path / name, "experts")
        assert (event["experts"], event["balance"]) == (4, "none")
    balanced = losses(experts, sets, tmp_path / "balanced", layout={"data": 1}, balance="step")
    assert max(abs(a - b) for a, b in zip(single, balanced, strict=True)) > 1e-3
    with pytest.raises(ConfigError, match="balance_coefficient is the weight"):
        losses(experts, sets, tmp_path / "c", layout={"data": 1}, balance_coefficient=0.1)


def test_policy_experts_are_balanced_next_to_a_dense_reference(
    experts: Path, sets: Path, tmp_path: Path
) -> None:
    """The reference is not trained, so it needs no experts."""
    save_model(decoder(), tmp_path / "dense")  # type: ignore[arg-type]
    DPOTrainer(
        model=str(experts),
        reference_model=str(tmp_path / "dense"),
        layout={"data": 1},
        balance="sequence",
        steps=1,
        sequence_length=64,
        batch_size=4,
        output_dir=tmp_path / "out",
        progress=False,
    ).train(sets / "pairs")
    assert len(events(tmp_path / "out", "step")) == 1


def dtypes(folder: Path) -> set[str]:
    """Return the dtypes of the tensors in a folder."""
    found = set()
    for path in folder.glob("**/model*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return found


@pytest.mark.parametrize("layout", [None, {"data": 1}])
@pytest.mark.parametrize("name", ["ours", "llama", "gpt2"])
def test_models_are_saved_in_the_dtype_of_the_loaded_folder(
    name: str, layout: Any, sets: Path, tmp_path: Path
) -> None:
    """bfloat16 stays bfloat16, in the files and in config.json; `save_dtype` changes it."""
    folder = tmp_path / "model"
    if name == "ours":
        save_model(load_model(sets / "model"), folder, dtype=torch.bfloat16)
    else:
        {"llama": llama, "gpt2": gpt2}[name]().to(torch.bfloat16).save_pretrained(folder)
    losses(str(folder), sets, tmp_path / "out", layout=layout)
    assert dtypes(tmp_path / "out/model") == {"BF16"}
    config = json.loads((tmp_path / "out/model/config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"
    losses(str(folder), sets, tmp_path / "wide", layout=layout, save_dtype="float32")
    assert dtypes(tmp_path / "wide/model") == {"F32"}


def test_a_reward_model_keeps_the_dtype_too(sets: Path, tmp_path: Path) -> None:
    """The dtype of the body; the head is float32."""
    folder = tmp_path / "model"
    save_model(load_model(sets / "model"), folder, dtype=torch.bfloat16)
    options = {"steps": 1, "sequence_length": 64, "progress": False, "eval_samples": 0}
    RewardTrainer(model=str(folder), output_dir=tmp_path / "out", **options).train(sets / "pairs")
    assert dtypes(tmp_path / "out/model/body") == {"BF16"}


@pytest.mark.parametrize("layout", [None, {"data": 1}])
def test_adapters_are_merged_under_a_layout_and_their_folder_is_a_model(
    layout: Any, sets: Path, tmp_path: Path
) -> None:
    """The merged model computes the same as the base with the adapter's folder."""
    base = tmp_path / "base"
    shutil.copytree(sets / "model", base)
    shutil.copy(sets / "tokenizer.json", base)
    options: dict[str, Any] = {"layout": layout, "lora": {"rank": 4}}
    losses(str(base), sets, tmp_path / "run", **options)
    merged = load_model(tmp_path / "run/model").state_dict()
    assert not torch.equal(
        merged["model.layers.0.self_attn.q_proj.weight"],
        load_model(base).state_dict()["model.layers.0.self_attn.q_proj.weight"],
    )
    adapter = tmp_path / "run/adapter"
    # A learning rate of 0 keeps the weights of the opened model.
    frozen_run = SFTTrainer(
        model=str(adapter),
        steps=1,
        sequence_length=64,
        learning_rate=0.0,
        output_dir=tmp_path / "again",
        progress=False,
    )
    frozen_run.train(sets / "copy")
    reopened = load_model(tmp_path / "again/model").state_dict()
    for name, weight in merged.items():
        torch.testing.assert_close(reopened[name], weight, rtol=0, atol=1e-6)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab"}\n')
    text = f'model = "{adapter}"\ndataset = "{tmp_path / "prompts.jsonl"}"\n'
    (tmp_path / "generate.toml").write_text(f'{text}output_path = "{tmp_path / "out.jsonl"}"\n')
    assert main(["generate", str(tmp_path / "generate.toml")]) == 0


def test_an_adapter_without_its_base_model_is_rejected(sets: Path, tmp_path: Path) -> None:
    """One line names the key."""
    losses(str(sets / "model"), sets, tmp_path / "run", lora=LoraOptions(rank=2))
    path = tmp_path / "run/adapter/adapter_config.json"
    path.write_text(path.read_text().replace(str(sets / "model"), "no/such/folder"))
    with pytest.raises(Exception, match="base_model_name_or_path must be the folder"):
        losses(str(tmp_path / "run/adapter"), sets, tmp_path / "again")


def test_an_adapter_that_refers_to_itself_is_rejected(sets: Path, tmp_path: Path) -> None:
    """A folder that names itself, and two that name each other."""
    for name, base in (("a", "../a"), ("b", "../c"), ("c", "../b")):
        (tmp_path / name).mkdir()
        text = json.dumps({"base_model_name_or_path": base})
        (tmp_path / name / "adapter_config.json").write_text(text)
    for name in ("a", "b"):
        with pytest.raises(ModelError, match="must lead to a model, and leads back"):
            losses(str(tmp_path / name), sets, tmp_path / "run")


@pytest.mark.parametrize("lora", [8, True, "rank", {"rang": 4}, {"rank": "x"}, [4]])
def test_lora_must_be_a_table(lora: Any) -> None:
    """In Python and in run files; a table of LoRA settings is accepted."""
    with pytest.raises(ConfigError):
        SFTTrainer(model="folder", steps=1, lora=lora)
    assert SFTTrainer(model="folder", steps=1, lora={"rank": 4}).lora == LoraOptions(rank=4)
