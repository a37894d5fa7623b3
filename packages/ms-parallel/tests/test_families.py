"""Every family in `families/`: logits, gradients, folders, documents and layouts."""

import importlib
import json
import pkgutil
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from hf_models import InFloat64, expected_gradient, folder_gradients, random_model
from processes import run_processes
from safetensors.torch import load_file
from torch import Tensor

from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ParallelError
from ms_parallel.models import KeyValueCache, families
from ms_parallel.models.registry import architectures, from_document
from ms_parallel.weights import load_model, save_model

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

FAMILIES_FOLDER = Path(__file__).parent / "families"
FAMILIES: dict[str, ModuleType] = {
    name: importlib.import_module(f"families.{name}")
    for _, name, _ in pkgutil.iter_modules([str(FAMILIES_FOLDER)])
}
TIED = ("model.embed_tokens.weight", "lm_head.weight")
CHILD = Path(__file__).with_name("family_runs.py")
DRAWS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))]
# Logits reach about 10 here, so one rounding is 1e-6, and about 50 roundings add up.
TOLERANCE = 1e-4

every_family = pytest.mark.parametrize("family", FAMILIES)
every_draw = pytest.mark.parametrize("seed", DRAWS)


def tokens(count: int = 40) -> Tensor:
    """Rows longer than any window here, without padding tokens, which have no gradient."""
    return torch.randint(1, 96, (2, count), generator=torch.Generator().manual_seed(1))


def check_equal(grads: dict[str, Any], expected_grads: dict[str, Tensor]) -> None:
    """Check gradients by their norms.

    The bias of keys without rotation does not affect a softmax, so its gradient is pure rounding
    error. The minimum norm is therefore a thousandth of the norm of all gradients.
    """
    total_norm = torch.stack([expected.norm() for expected in expected_grads.values()]).norm()
    for name, gradient in grads.items():
        error, norm = (gradient - expected_grads[name]).norm(), expected_grads[name].norm()
        assert error <= 1e-12 * max(norm, 1e-3 * total_norm), name


def files_of(folder: Path) -> dict[str, bytes]:
    """Content of each file in a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@every_family
@every_draw
@torch.no_grad()
def test_folders_of_transformers_give_equal_logits_and_survive_a_save(
    family: str, seed: int, tmp_path: Path
) -> None:
    """Equal logits, tensors and config, and a second save writes the same bytes."""
    reference = random_model(FAMILIES[family], seed)
    reference.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    expected = reference(tokens()).logits
    torch.testing.assert_close(ours(tokens()), expected, atol=TOLERANCE, rtol=0)
    save_model(ours, tmp_path / "ours")
    before, after = (load_file(tmp_path / at / "model.safetensors") for at in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    reloaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", experts_implementation="eager"
    ).eval()
    assert torch.equal(reloaded(tokens()).logits, expected)
    reloaded_ours = load_model(tmp_path / "ours")
    assert reloaded_ours.config == ours.config
    save_model(reloaded_ours, tmp_path / "again")
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "again")


@every_family
@every_draw
def test_gradients_equal_those_of_transformers_in_float64(
    family: str, seed: int, tmp_path: Path
) -> None:
    """Within 1e-12 of their norm: sums of about 10,000 roundings of 1e-16."""
    reference = random_model(FAMILIES[family], seed)
    reference.save_pretrained(tmp_path / "weights")
    ours = load_model(tmp_path / "weights", dtype=torch.float64)
    weight = torch.randn(2, 20, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with InFloat64(reference.double()):
        expected = reference(tokens(20)).logits
    (expected * weight).sum().backward()
    logits = ours(tokens(20))
    (logits * weight).sum().backward()
    torch.testing.assert_close(logits, expected, atol=1e-11, rtol=1e-12)
    folder_grads = folder_gradients(reference, tmp_path / "gradients")
    expected_grads = {
        name: expected_gradient(ours.config, name, parameter, folder_grads)
        for name, parameter in ours.named_parameters()
    }
    check_equal({name: p.grad for name, p in ours.named_parameters()}, expected_grads)


@every_family
@every_draw
@torch.no_grad()
def test_packed_documents_and_caches_do_not_change_logits(
    family: str, seed: int, tmp_path: Path
) -> None:
    """Packed documents equal separate ones, and decoding in chunks equals a full forward."""
    random_model(FAMILIES[family], seed).save_pretrained(tmp_path)
    model, lengths, row = load_model(tmp_path), (7, 1, 24, 8), tokens()[:1]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None].int()
    packed = model(row, positions=positions, documents=documents)
    separate = torch.cat([model(part) for part in row.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, separate, atol=TOLERANCE, rtol=0)
    rows, cache = tokens(16), KeyValueCache()
    cuts = [0, 6, 11, *range(12, 17)]
    parts = [model(rows[:, a:b], cache=cache) for a, b in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(parts, 1), model(rows), atol=TOLERANCE, rtol=0)


@cache
def layout_results(layout: str, *families: str) -> list[dict[str, Any]]:
    """Results of each process of a layout for these families, in one set of processes."""
    names = {name: FAMILIES[name].MODEL_TYPE for name in families}
    return run_processes(
        Layout.parse(layout).world_size, CHILD, "gradients_and_text", layout=layout, families=names
    )


OVER_ROWS = ("gemma2", "granite")
"""Families tested over data ranks by default: rows are split the same way for all."""
TESTED_ELSEWHERE = {
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    *("deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen3_moe"),
}
"""Families whose layouts other tests cover by default."""
TESTED_HERE = tuple(name for name in FAMILIES if name not in TESTED_ELSEWHERE)
SPLITS = {"data=2": OVER_ROWS, "tensor=2": TESTED_HERE, "pipeline=2": TESTED_HERE}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(name, layout, marks=() if name in names else (pytest.mark.slow,))
        for layout, names in SPLITS.items()
        for name in FAMILIES
    ],
)
def test_every_layout_gives_the_gradients_and_the_text_of_one_process(
    family: str, layout: str
) -> None:
    """In float64, gradients within 1e-12 of their norm and the same greedy tokens."""
    (single,) = layout_results("data=1", *FAMILIES)
    group = SPLITS[layout] if family in SPLITS[layout] else tuple(FAMILIES)
    for process in layout_results(layout, *group):
        result = process[family]
        assert result["text"] == single[family]["text"]
        assert result["gradients"]
        expected, gradients = (
            {name: torch.tensor(values, dtype=torch.float64) for name, values in grads.items()}
            for grads in (single[family]["gradients"], result["gradients"])
        )
        if TIED[1] in gradients.keys() - expected.keys():  # the last stage's copy of a tied weight
            gradients[TIED[0]] = gradients.pop(TIED[1])
        check_equal(gradients, expected)


def test_a_family_is_one_short_file() -> None:
    """Each has fewer than 200 lines and is registered by its `model_type`.

    The family of models built by transformers has no name and is not counted.
    """
    files = [path for path in Path(families.__file__).parent.rglob("*.py") if path.stem[0] != "_"]
    named = [path for path in files if path.stem != "transformers"]
    assert len(named) == len(architectures()) == len(files) - 1
    lengths = {path.name: len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length >= 200} == {}


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [(name, *bad) for name, module in FAMILIES.items() for bad in module.BAD],
)
def test_unsupported_settings_of_a_family_are_refused_in_one_line(
    family: str, change: dict[str, object], message: str
) -> None:
    """Instead of computing something else."""
    document = json.loads(random_model(FAMILIES[family], 0).config.to_json_string())
    with pytest.raises(ParallelError) as caught:
        from_document({**document, **change})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
