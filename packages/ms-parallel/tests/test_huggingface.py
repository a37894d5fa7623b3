"""Model folders in the Hugging Face format, exchanged with transformers under every layout."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from kills import killed_at
from processes import run_processes
from safetensors.torch import load_file, save_file
from torch import Tensor

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ModelError, ParallelError
from ms_parallel.files.durable import restore_folder
from ms_parallel.models import architecture
from ms_parallel.models.registry import build_model, from_document
from ms_parallel.weights import initialize, load_model, load_weights, save_model

transformers.utils.logging.disable_progress_bar()

CHILD = Path(__file__).with_name("model_folders.py")
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-all-heads": ("llama", {"num_key_value_heads": 4}),
    "llama-one-key-head-tied": ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama-wide-heads": ("llama", {"head_dim": 16}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-3": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3-tied-biases": (
        "qwen3",
        {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral-sliding": ("mistral", {"sliding_window": 5, "head_dim": 16}),
}
# Logits reach about 10 here, so one rounding is 1e-6; the two implementations differ by a few.
TOLERANCE = 1e-5


def hf_model(case: str, seed: int = 0) -> Any:
    """A transformers model with random weights, biases and norms."""
    family, settings = CASES[case]
    config = transformers.AutoConfig.for_model(family, **{**SIZES, **settings})
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def tokens() -> Tensor:
    """Rows longer than any sliding window here."""
    return torch.randint(96, (2, 40), generator=torch.Generator().manual_seed(1))


def weights_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, across its files."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    assert sum(map(len, files)) == len({name for file in files for name in file})
    return {name: tensor for file in files for name, tensor in file.items()}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Load a folder that transformers saved in several files."""
    reference = hf_model(case)
    reference.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    ours = load_model(tmp_path)
    expected = reference(tokens()).logits
    torch.testing.assert_close(ours(tokens()), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("file_size_bytes", [1 << 30, 10_000])
@torch.no_grad()
def test_transformers_reads_what_we_save(case: str, file_size_bytes: int, tmp_path: Path) -> None:
    """Names, values, config and logits survive, in one file or in many with an index."""
    reference = hf_model(case)
    reference.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    save_model(ours, tmp_path / "ours", file_size_bytes=file_size_bytes)
    assert (tmp_path / "ours/model.safetensors").exists() == (file_size_bytes > 10_000)
    before, after = weights_of(tmp_path / "theirs"), weights_of(tmp_path / "ours")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(reloaded(tokens()).logits, reference(tokens()).logits)
    assert load_model(tmp_path / "ours").config == ours.config
    assert not (tmp_path / "ours/.saving").exists()


@torch.no_grad()
def test_packed_documents_give_the_logits_of_transformers_for_each_alone(tmp_path: Path) -> None:
    """Two packed documents give the logits of transformers for each document alone."""
    reference = hf_model("llama-3")
    reference.save_pretrained(tmp_path)
    row = tokens()[:1]
    documents = torch.tensor([[0] * 15 + [1] * 25]).int()
    positions = torch.cat((torch.arange(15), torch.arange(25)))[None]
    packed = load_model(tmp_path)(row, positions=positions, documents=documents)
    alone = [reference(row[:, :15]).logits, reference(row[:, 15:]).logits]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=TOLERANCE, rtol=0)


LAYOUTS = [
    "tensor=2",
    "pipeline=2",
    "data=3",  # divides no dimension: uneven and empty shards
    pytest.param("data=2,tensor=2", marks=pytest.mark.slow),
    pytest.param("tensor=2,pipeline=2", marks=pytest.mark.slow),
]
COPIED = ["llama-3", "llama-biases", "qwen3"]  # the first is tied
INITIALIZED = ["llama", "qwen3", "qwen3_moe", "transformer-xl"]
SEED = 11


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models saved by transformers, and models initialized in one process."""
    root = tmp_path_factory.mktemp("folders")
    for case in COPIED:
        hf_model(case).save_pretrained(root / case, max_shard_size="30KB")
    for model_type in INITIALIZED:
        sizes = {k: v for k, v in SIZES.items() if k != "max_position_embeddings"}
        if model_type == "transformer-xl":
            del sizes["num_key_value_heads"]
        model = build_model(architecture(model_type, sizes))
        initialize(model, SEED)
        save_model(model, root / f"fresh-{model_type}")
    (root / "taken").write_text("a file, not a folder")
    return root


@pytest.fixture(scope="module")
def ran(folders: Path) -> Callable[[str], list[dict[str, Any]]]:
    """Start the processes of a layout once, for all tests that need their results."""

    @cache
    def run(layout: str) -> list[dict[str, Any]]:
        return run_processes(
            Layout.parse(layout).world_size,
            CHILD,
            "load_and_save_all",
            layout=layout,
            copies={str(folders / case): str(folders / layout / case) for case in COPIED},
            fresh={
                str(folders / f"fresh-{model_type}"): str(folders / layout / f"fresh-{model_type}")
                for model_type in INITIALIZED
            },
            seed=SEED,
            no_folder="/proc/taken",  # no folder can be created in /proc
        )

    return run


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_each_layout_loads_its_shards_and_saves_the_full_model(
    layout: str, folders: Path, ran: Callable[[str], list[dict[str, Any]]]
) -> None:
    """The saved folder equals the loaded one bit for bit; each process holds only its shards."""
    sizes_by_case = zip(*(result["sizes"] for result in ran(layout)), strict=True)
    for case, sizes in zip(COPIED, sizes_by_case, strict=True):
        before, after = weights_of(folders / case), weights_of(folders / layout / case)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        reference = hf_model(case)
        reloaded = transformers.AutoModelForCausalLM.from_pretrained(folders / layout / case).eval()
        assert torch.equal(reloaded(tokens()).logits, reference(tokens()).logits)
        total = sum(parameter.numel() for parameter in reference.parameters())
        tied_across = "pipeline" in layout and reference.config.tie_word_embeddings
        # Every tensor rank has full norms and full biases of row-parallel projections.
        replicated = 9 * 32 + 8 * 16 + 8 * 32
        assert max(sizes) < 0.8 * total
        assert total <= sum(sizes) <= total + 96 * 32 * tied_across + replicated * len(sizes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_starts_from_the_same_model(
    layout: str, folders: Path, ran: Callable[[str], list[dict[str, Any]]]
) -> None:
    """Initial weights equal one process's bit for bit, including split and tied ones."""
    ran(layout)
    for model_type in INITIALIZED:
        expected = weights_of(folders / f"fresh-{model_type}")
        actual = weights_of(folders / layout / f"fresh-{model_type}")
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[name], actual[name]) for name in expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_save_that_fails_on_one_process_fails_on_all(
    layout: str, ran: Callable[[str], list[dict[str, Any]]]
) -> None:
    """Every process reports the error, and none waits forever."""
    errors = [result["error"] for result in ran(layout)]
    assert all("cannot save a model to" in error and "taken" in error for error in errors)


def test_transformer_xl_folders_round_trip(tmp_path: Path) -> None:
    """Configuration and weights are equal after a save and a load."""
    model = build_model(architecture("transformer-xl", {"num_hidden_layers": 2}))
    initialize(model, 1)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.config == model.config
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, loaded.get_parameter(name))


def test_a_save_that_runs_out_of_space_leaves_the_old_model(tmp_path: Path) -> None:
    """The error names the cause, the old files are intact, and the unfinished ones are removed."""
    hf_model("llama", seed=1).save_pretrained(tmp_path)
    before = weights_of(tmp_path)
    model = load_model(tmp_path)
    initialize(model, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(ModelError, match=r"cannot save a model .* free space"):
            save_model(model, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    after = weights_of(tmp_path)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not (tmp_path / ".saving").exists()


def test_saving_again_replaces_the_model_and_leaves_other_files(tmp_path: Path) -> None:
    """Old weight files go, a tokenizer stays, and leftovers of an interrupted save do no harm."""
    hf_model("llama", seed=1).save_pretrained(tmp_path, max_shard_size="20KB")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / ".saving").mkdir()
    (tmp_path / ".saving/model.safetensors").write_text("half")
    hf_model("qwen3", seed=2).save_pretrained(tmp_path / "other")
    save_model(load_model(tmp_path / "other"), tmp_path)
    names = {path.name for path in tmp_path.iterdir()} - {"other"}
    assert names == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert load_model(tmp_path).config.model_type == "qwen3"


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_a_save_killed_at_any_file_operation_leaves_the_old_or_the_new_model(
    exchange: bool, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other files of the folder stay; without an atomic exchange, `restore_folder` repairs it.

    By default every fourth operation is tried.
    """
    if not exchange:
        monkeypatch.setattr("ms_parallel.files.durable._exchange", lambda *_: False)
    for model_type, seed in (("llama", 1), ("qwen3", 2)):
        hf_model(model_type, seed=seed).save_pretrained(
            tmp_path / model_type, max_shard_size="20KB"
        )
    model, folder, operation, outcomes = load_model(tmp_path / "qwen3"), tmp_path / "model", 0, []
    expected = {model_type: weights_of(tmp_path / model_type) for model_type in ("llama", "qwen3")}
    killed = True
    while killed:
        operation += step
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "llama", folder)
        (folder / "tokenizer.json").write_text("{}")
        killed = killed_at(operation, lambda: save_model(model, folder))
        if not exchange:
            restore_folder(folder)
        model_type = load_model(folder).config.model_type
        outcomes.append(model_type)
        saved = weights_of(folder)
        assert saved.keys() == expected[model_type].keys(), operation
        assert all(torch.equal(saved[name], expected[model_type][name]) for name in saved), (
            operation
        )
        assert (folder / "tokenizer.json").read_text() == "{}"
    assert operation > 20
    assert {"llama", "qwen3"} == set(outcomes[:-1]), "kills came before and after the exchange"
    save_model(model, folder)
    assert {path.name for path in tmp_path.iterdir()} == {"llama", "qwen3", "model"}


def test_a_model_in_the_working_directory_or_behind_a_symlink_is_replaced_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory keeps its inode, and the link stays a link."""
    hf_model("llama", seed=1).save_pretrained(tmp_path / "model")
    (tmp_path / "link").symlink_to("model")
    model = load_model(tmp_path / "model")
    initialize(model, 0)
    save_model(model, tmp_path / "link")
    assert (tmp_path / "link").readlink() == Path("model")
    assert weights_of(tmp_path / "link").keys() == weights_of(tmp_path / "model").keys()
    monkeypatch.chdir(tmp_path / "model")
    save_model(model, ".")
    assert Path.cwd() == tmp_path / "model"
    assert load_model(".").config.model_type == "llama"


@torch.no_grad()
def test_weights_can_be_saved_in_half_the_bytes(tmp_path: Path) -> None:
    """In bfloat16: the files hold rounded values, and config.json has the dtype."""
    hf_model("llama").save_pretrained(tmp_path / "theirs")
    model = load_model(tmp_path / "theirs")
    save_model(model, tmp_path / "half", dtype=torch.bfloat16)
    for name, tensor in weights_of(tmp_path / "half").items():
        assert torch.equal(tensor, model.get_parameter(name).bfloat16())
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert reloaded.dtype == torch.bfloat16


def test_the_old_spelling_of_rotary_settings_is_read(tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling` are equivalent to `rope_parameters`."""
    hf_model("llama-3").save_pretrained(tmp_path)
    new = load_model(tmp_path).config
    document = json.loads((tmp_path / "config.json").read_text())
    rope = document.pop("rope_parameters")
    document["rope_theta"] = rope.pop("rope_theta")
    document["rope_scaling"] = rope
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert load_model(tmp_path).config == new


def test_a_null_window_means_no_window_in_every_family(tmp_path: Path) -> None:
    """As in transformers, also for layers configured to slide."""
    hf_model("qwen2").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    document = json.loads(path.read_text()) | {"use_sliding_window": True, "sliding_window": None}
    document.pop("layer_types", None)
    path.write_text(json.dumps(document | {"max_window_layers": 0}))
    assert load_model(tmp_path).config.window(0) is None


REFUSED: list[tuple[dict[str, object], str]] = [
    (
        {"model_type": "t5"},
        "'t5' is not supported; supported: .*llama, .*and all causal models of transformers",
    ),
    ({"model_type": None}, "model_type None is not supported"),
    ({"num_local_experts": 8}, "num_local_experts=8 is not supported"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; only 'silu'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config="),
    ({"rope_parameters": {"rope_type": "ntk", "factor": 2.0}}, "rope_type 'ntk'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "'full_attention'"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "needs 'low_freq_factor'"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1.0"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, "and rope_scaling must be equal"),
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 10000, got 1000000000"),
    ({"num_hidden_layers": 5}, "no tensor of layer 4"),
    (
        {"num_hidden_layers": "four"},
        "num_hidden_layers must be an integer of at least 1, got 'four'",
    ),
    ({"num_hidden_layers": 3}, "has 'model.layers.3.input_layernorm.weight'"),
    ({"intermediate_size": 48}, r"with shape \(44, 32\), but .* needs \(48, 32\)"),
    ({"vocab_size": 10**8}, r"shape \(96, 32\)"),  # refused before memory is allocated
    ({"vocab_size": 10**12}, r"vocab_size must be at most 134217728, got 1000000000000"),
    ({"attention_bias": True}, "lacks 16 of"),
    ({"num_key_value_heads": 3}, "num_key_value_heads must divide .*, got 3"),
]


@pytest.mark.parametrize(("change", "message"), REFUSED)
def test_unsupported_settings_are_refused_by_name(
    change: dict[str, object], message: str, tmp_path: Path
) -> None:
    """Unsupported or inconsistent settings in config.json give a one-line error."""
    hf_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ParallelError, match=message) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["vocab_size", "num_attention_heads"])
def test_a_missing_size_is_named(key: str, tmp_path: Path) -> None:
    """Sizes have no defaults."""
    hf_model("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    del document[key]
    path.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=f"must have '{key}'"):
        load_model(tmp_path)


@given(
    key=st.sampled_from(
        sorted({**vars(transformers.LlamaConfig()), **vars(transformers.Qwen2Config())})
    ),
    family=st.sampled_from(["llama", "mistral", "qwen2", "qwen3"]),
    value=st.sampled_from([None, "x", "", -1, 0, 1.5, 10**12, True, [], ["x"], {}, {"x": 1}]),
)
def test_any_value_in_config_json_is_accepted_or_gives_a_one_line_error(
    key: str, family: str, value: object
) -> None:
    """A configuration is accepted or refused with our one-line error, and raises nothing else."""
    document = {**transformers.AutoConfig.for_model(family, **SIZES).to_dict(), key: value}
    try:
        from_document(document)
    except ParallelError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message


def damage(folder: Path, damage_kind: str) -> None:
    """Damage a folder of several files in one way."""
    index = folder / "model.safetensors.index.json"
    first = min(folder.glob("*.safetensors"))
    document = json.loads(index.read_text())
    names = document["weight_map"]
    match damage_kind:
        case "no config":
            (folder / "config.json").unlink()
        case "config cut":
            (folder / "config.json").write_text('{"model_type": "lla')
        case "no weights":
            index.unlink()
        case "index cut":
            index.write_text(index.read_text()[:-30])
        case "file missing":
            first.unlink()
        case "file cut":
            os.truncate(first, first.stat().st_size - 1)
        case "file empty":
            os.truncate(first, 0)
        case "long header":
            first.write_bytes((1 << 60).to_bytes(8, "little") + first.read_bytes()[8:])
        case "tensor missing":
            tensors = load_file(first)
            tensors.popitem()
            save_file(tensors, first, metadata={"format": "pt"})
        case "outside":
            names[next(iter(names))] = "../theirs/model.safetensors"
            index.write_text(json.dumps(document))
        case "not in index":
            del names["model.norm.weight"]
            index.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("damage_kind", "message"),
    [
        ("no config", "config.json does not exist"),
        ("config cut", r"config.json: .*truncated; copy it again"),
        ("no weights", "neither model.safetensors nor"),
        ("index cut", r"index.json: .*truncated; copy it again"),
        ("file missing", "of-.* is missing"),
        ("file cut", "of-.* is damaged"),
        ("file empty", "of-.* is damaged"),
        ("long header", "of-.* is damaged"),
        ("tensor missing", "although the index says so"),
        ("outside", "'../theirs/model.safetensors', which is not a safetensors file in the folder"),
        ("not in index", "lacks 1 of .* tensors, first 'model.norm.weight'"),
    ],
)
def test_a_damaged_folder_is_refused_with_the_cause(
    damage_kind: str, message: str, tmp_path: Path
) -> None:
    """The one-line error names the file or tensor."""
    hf_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    damage(tmp_path, damage_kind)
    with pytest.raises(ModelError, match=message) as caught:
        load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    """`load_weights` compares names and shapes with the model's."""
    hf_model("llama").save_pretrained(tmp_path)
    other = build_model(architecture("llama"))
    with pytest.raises(ModelError, match=r"lacks .* of .* tensors|shape"):
        load_weights(other, tmp_path)


def test_reading_folders_does_not_need_transformers() -> None:
    """The package does not import it."""
    code = "import sys, ms_parallel.models; sys.exit('transformers' in sys.modules)"
    path = os.pathsep.join(part for part in sys.path if part)
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})
