"""Every family of `families/`: transformers' logits and gradients, folders, documents, layouts."""

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
from hf_models import InFloat64, drawn_model, expected_gradient, folder_gradients
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

ROOM = Path(__file__).parent / "families"
FAMILIES: dict[str, ModuleType] = {
    name: importlib.import_module(f"families.{name}")
    for _, name, _ in pkgutil.iter_modules([str(ROOM)])
}
TIED = ("model.embed_tokens.weight", "lm_head.weight")
CHILD = Path(__file__).with_name("family_runs.py")
DRAWS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))]
# Logits reach about 10 here, so one rounding is 1e-6; some 50 of them are passed.
TOLERANCE = 1e-4

every_family = pytest.mark.parametrize("family", FAMILIES)
every_draw = pytest.mark.parametrize("seed", DRAWS)


def tokens(count: int = 40) -> Tensor:
    """Rows longer than any window here, without the padding, which has no gradient there."""
    return torch.randint(1, 96, (2, count), generator=torch.Generator().manual_seed(1))


def check_equal(found: dict[str, Any], truths: dict[str, Tensor]) -> None:
    """Check gradients by their norms.

    A bias of keys that do not turn changes no softmax, so that its gradient is rounding alone: the
    smallest size that counts is a thousandth of the whole gradient's.
    """
    whole = torch.stack([truth.norm() for truth in truths.values()]).norm()
    for name, gradient in found.items():
        error, size = (gradient - truths[name]).norm(), truths[name].norm()
        assert error <= 1e-12 * max(size, 1e-3 * whole), name


def files_of(folder: Path) -> dict[str, bytes]:
    """The content of each file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@every_family
@every_draw
@torch.no_grad()
def test_folders_of_transformers_compute_alike_and_survive_a_save(
    family: str, seed: int, tmp_path: Path
) -> None:
    """Logits, names and values of tensors, the configuration, and each byte of a second save."""
    reference = drawn_model(FAMILIES[family], seed)
    reference.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    expected = reference(tokens()).logits
    torch.testing.assert_close(ours(tokens()), expected, atol=TOLERANCE, rtol=0)
    save_model(ours, tmp_path / "ours")
    before, after = (load_file(tmp_path / one / "model.safetensors") for one in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", experts_implementation="eager"
    ).eval()
    assert torch.equal(again(tokens()).logits, expected)
    read = load_model(tmp_path / "ours")
    assert read.config == ours.config
    save_model(read, tmp_path / "again")
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "again")


@every_family
@every_draw
def test_gradients_equal_those_of_transformers_in_float64(
    family: str, seed: int, tmp_path: Path
) -> None:
    """Gradients agree within 1e-12 of their size: sums of some 10,000 roundings of 1e-16."""
    reference = drawn_model(FAMILIES[family], seed)
    reference.save_pretrained(tmp_path / "weights")
    ours = load_model(tmp_path / "weights", dtype=torch.float64)
    weight = torch.randn(2, 20, 96, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with InFloat64(reference.double()):
        expected = reference(tokens(20)).logits
    (expected * weight).sum().backward()
    found = ours(tokens(20))
    (found * weight).sum().backward()
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-12)
    theirs = folder_gradients(reference, tmp_path / "gradients")
    truths = {
        name: expected_gradient(ours.config, name, parameter, theirs)
        for name, parameter in ours.named_parameters()
    }
    check_equal({name: p.grad for name, p in ours.named_parameters()}, truths)


@every_family
@every_draw
@torch.no_grad()
def test_documents_and_caches_change_nothing(family: str, seed: int, tmp_path: Path) -> None:
    """Packed documents give the logits of each alone, and tokens in parts those of the whole."""
    drawn_model(FAMILIES[family], seed).save_pretrained(tmp_path)
    model, lengths, row = load_model(tmp_path), (7, 1, 24, 8), tokens()[:1]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None].int()
    packed = model(row, positions=positions, documents=documents)
    alone = torch.cat([model(part) for part in row.split(lengths, 1)], 1)
    torch.testing.assert_close(packed, alone, atol=TOLERANCE, rtol=0)
    rows, cache = tokens(16), KeyValueCache()
    cuts = [0, 6, 11, *range(12, 17)]
    parts = [model(rows[:, a:b], cache=cache) for a, b in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(parts, 1), model(rows), atol=TOLERANCE, rtol=0)


@cache
def ran(layout: str, *families: str) -> list[dict[str, Any]]:
    """What each process of a layout found, of these families in one start."""
    names = {name: FAMILIES[name].MODEL_TYPE for name in families}
    return run_processes(
        Layout.parse(layout).world_size, CHILD, "everything", layout=layout, families=names
    )


OVER_ROWS = ("gemma2", "granite")
"""What is split over data ranks by default: rows are cut alike for all families."""
ELSEWHERE = {
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    *("deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe", "qwen3_moe"),
}
"""Families whose splits other tests hold by default: layouts, experts, latent attention."""
OWN = tuple(name for name in FAMILIES if name not in ELSEWHERE)
SPLITS = {"data=2": OVER_ROWS, "tensor=2": OWN, "pipeline=2": OWN}


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
    """In float64 within 1e-12 of each gradient's size; and the same tokens by greedy choice."""
    (alone,) = ran("data=1", *FAMILIES)
    together = SPLITS[layout] if family in SPLITS[layout] else tuple(FAMILIES)
    for process in ran(layout, *together):
        found = process[family]
        assert found["text"] == alone[family]["text"]
        assert found["gradients"]
        truths, gradients = (
            {name: torch.tensor(each, dtype=torch.float64) for name, each in one.items()}
            for one in (alone[family]["gradients"], found["gradients"])
        )
        if TIED[1] in gradients.keys() - truths.keys():  # the last stage's copy of a tied weight
            gradients[TIED[0]] = gradients.pop(TIED[1])
        check_equal(gradients, truths)


def test_a_family_is_one_short_file() -> None:
    """Fewer than 200 lines, and each is known by the `model_type` that it is called by.

    But for the one that takes whatever transformers builds, which has no name of its own.
    """
    files = [path for path in Path(families.__file__).parent.rglob("*.py") if path.stem[0] != "_"]
    named = [path for path in files if path.stem != "transformers"]
    assert len(named) == len(architectures()) == len(files) - 1
    lengths = {path.name: len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length >= 200} == {}


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [(name, *bad) for name, room in FAMILIES.items() for bad in room.BAD],
)
def test_what_a_family_does_not_do_is_refused_in_one_line(
    family: str, change: dict[str, object], message: str
) -> None:
    """Rather than computed otherwise."""
    document = json.loads(drawn_model(FAMILIES[family], 0).config.to_json_string())
    with pytest.raises(ParallelError) as caught:
        from_document({**document, **change})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
