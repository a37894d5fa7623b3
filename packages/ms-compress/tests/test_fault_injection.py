"""Randomly damaged folders through `verify` and through the loading of `evaluate`.

A damaged copy ends in one of our errors, in one line; and what `verify` accepts holds the very
weights of the model that was exported.
"""

import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import onnx
import pytest
import torch
from models import decoder
from safetensors.torch import load_file
from torch import nn

from ms_compress import CompressError, export, qat, verify
from ms_compress.deployment.verification import check_weights
from ms_compress.evaluation.perplexity import perplexity
from ms_compress.jobs.loading import load
from ms_compress.targets.footprint import footprint
from ms_compress.targets.target import open_runtime
from ms_parallel.weights import save_model

SCHEMES = {"ct": "ct.int4_g32", "w8a8": "ct.w8a8", "ort": "ort.matmulnbits", "gguf": "gguf.q4_0"}
ROTARY = ("cos", "sin", "rope")
TEXT = torch.arange(18).view(2, 9)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain folder; exports of the same model lie next to it."""
    folder = tmp_path_factory.mktemp("work")
    save_model(decoder(1), folder / "float")
    return folder


@pytest.fixture(scope="module")
def models(work: Path) -> dict[str, nn.Module]:
    """The model of each export, by the folder's name."""
    prepared = {name: qat(decoder(1), scheme) for name, scheme in SCHEMES.items()}
    for name, model in prepared.items():
        export(model, work / name)
    return prepared


def damage(path: Path, rng: random.Random) -> str:
    """Flip a bit, cut the file off, make some bytes zero, or swap two parts of it."""
    data = bytearray(path.read_bytes())
    # Half of all places are near the beginning, where lengths, shapes and offsets are.
    at = int(len(data) * (rng.random() if rng.random() < 0.5 else rng.random() ** 4))
    kind = rng.choice(("flip", "truncate", "zero", "swap"))
    if kind == "flip":
        data[at] ^= 1 << rng.randrange(8)
    elif kind == "truncate":
        del data[at:]
    elif kind == "zero":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    else:
        size = min(32, len(data) // 4)
        first, second = sorted(rng.sample(range(0, len(data) - size, size), 2))
        data[first : first + size], data[second : second + size] = (
            data[second : second + size],
            data[first : first + size],
        )
    path.write_bytes(data)
    return kind


def weights(folder: Path, name: str) -> dict[str, np.ndarray]:
    """What each format's own library reads of a folder's weights, codes as they are stored."""
    if name == "ort":
        graph = onnx.load(folder / "model.onnx").graph
        values = {each.name: onnx.numpy_helper.to_array(each) for each in graph.initializer}
        return {key: value for key, value in values.items() if "." in key}
    if name == "gguf":
        read = gguf.GGUFReader(folder / "model.gguf").tensors
        return {each.name: np.array(each.data) for each in read}
    return {key: value.numpy() for key, value in load_file(folder / "model.safetensors").items()}


def complaint(act: Callable[[], object]) -> str | None:
    """The one line of our error, or None; any other exception fails the test."""
    try:
        act()
    except CompressError as error:
        message = str(error)
    else:
        return None
    assert "\n" not in message
    return message


def measured(folder: Path) -> None:
    """Load a folder and compute with it as `evaluate` does."""
    found = footprint(folder)
    perplexity(open_runtime(folder, found.target), TEXT)


def checked(model: nn.Module | None, folder: Path, name: str) -> None:
    """Compare a folder with its model; load a plain one."""
    if model is None:
        load(folder)
    elif name == "gguf":
        check_weights(model, folder, name)
    else:
        verify(model, folder, SCHEMES[name].partition(".")[0])


def inject(work: Path, models: dict[str, nn.Module], place: Path, seed: int) -> tuple[str, bool]:
    """Damage a file of a copied folder; return the kind, and whether `verify` refused it."""
    rng = random.Random(seed)
    name = rng.choice((*SCHEMES, "float"))
    folder = shutil.copytree(work / name, place / str(seed))
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.stat().st_size > 64)
    # Weights three times in four.
    large = max(files, key=lambda path: path.stat().st_size)
    path = large if rng.random() < 0.75 else rng.choice(files)
    kind = damage(path, rng)
    unchanged = path.read_bytes() == (work / name / path.name).read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, such as of numbers too large for a dtype
        # llama.cpp needs a build of its own: a GGUF file is read by the gguf library alone.
        complaint(lambda: footprint(folder) if name == "gguf" else measured(folder))
        refused = complaint(lambda: checked(models.get(name), folder, name)) is not None
    if unchanged:
        assert not refused, (seed, name, path.name, kind)
    elif not refused and name != "float":
        before, after = weights(work / name, name), weights(folder, name)
        assert before.keys() <= after.keys()
        for key, value in before.items():
            if not any(word in key for word in ROTARY):
                assert np.array_equal(value, after[key]), (seed, name, path.name, kind, key)
    shutil.rmtree(folder)
    return kind, refused


@pytest.mark.parametrize(
    "seeds",
    [range(16), pytest.param(range(16, 400), marks=pytest.mark.slow, id="many")],
    ids=lambda seeds: f"{len(seeds)}",
)
def test_random_damage_ends_in_one_line_or_changes_no_weight(
    seeds: range, work: Path, models: dict[str, nn.Module], tmp_path: Path
) -> None:
    """Bits flipped, files cut off, bytes made zero and parts swapped, all in one process."""
    refused: Counter[str] = Counter()
    for seed in seeds:
        kind, was_refused = inject(work, models, tmp_path, seed)
        refused[kind] += was_refused
    assert sum(refused.values()) > len(seeds) / 3
    assert all(refused[kind] for kind in ("flip", "truncate", "zero", "swap"))
