"""Random damage to folders, through `verify` and through the loading of `evaluate`.

A damaged copy gives one of our errors, in one line; a copy that `verify` accepts has exactly the
weights of the exported model.
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
from ms_compress.run.model import load
from ms_compress.targets.footprint import footprint
from ms_compress.targets.target import open_runtime
from ms_parallel.weights import save_model

SCHEMES = {"ct": "ct.int4_g32", "w8a8": "ct.w8a8", "ort": "ort.matmulnbits", "gguf": "gguf.q4_0"}
ROTARY = ("cos", "sin", "rope")
TEXT = torch.arange(18).view(2, 9)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain folder; exports of the same model are next to it."""
    folder = tmp_path_factory.mktemp("work")
    save_model(decoder(1), folder / "float")
    return folder


@pytest.fixture(scope="module")
def models(work: Path) -> dict[str, nn.Module]:
    """The model of each export, by folder name."""
    prepared = {name: qat(decoder(1), scheme) for name, scheme in SCHEMES.items()}
    for name, model in prepared.items():
        export(model, work / name)
    return prepared


def damage(path: Path, rng: random.Random) -> str:
    """Flip a bit, truncate the file, zero some bytes, or swap two parts of it."""
    data = bytearray(path.read_bytes())
    # Half of the positions are near the start, where lengths, shapes and offsets are.
    position = int(len(data) * (rng.random() if rng.random() < 0.5 else rng.random() ** 4))
    damage_type = rng.choice(("flip", "truncate", "zero", "swap"))
    if damage_type == "flip":
        data[position] ^= 1 << rng.randrange(8)
    elif damage_type == "truncate":
        del data[position:]
    elif damage_type == "zero":
        data[position : position + 64] = bytes(len(data[position : position + 64]))
    else:
        size = min(32, len(data) // 4)
        first, second = sorted(rng.sample(range(0, len(data) - size, size), 2))
        data[first : first + size], data[second : second + size] = (
            data[second : second + size],
            data[first : first + size],
        )
    path.write_bytes(data)
    return damage_type


def weights(folder: Path, name: str) -> dict[str, np.ndarray]:
    """Return a folder's weights as read by the format's own library, as stored codes."""
    if name == "ort":
        graph = onnx.load(folder / "model.onnx").graph
        values = {
            constant.name: onnx.numpy_helper.to_array(constant) for constant in graph.initializer
        }
        return {key: value for key, value in values.items() if "." in key}
    if name == "gguf":
        read = gguf.GGUFReader(folder / "model.gguf").tensors
        return {tensor.name: np.array(tensor.data) for tensor in read}
    return {key: value.numpy() for key, value in load_file(folder / "model.safetensors").items()}


def error_of(act: Callable[[], object]) -> str | None:
    """Return our one-line error, or None; any other exception fails the test."""
    try:
        act()
    except CompressError as error:
        message = str(error)
    else:
        return None
    assert "\n" not in message
    return message


def load_and_compute(folder: Path) -> None:
    """Load a folder and compute with it as `evaluate` does."""
    facts = footprint(folder)
    perplexity(open_runtime(folder, facts.target), TEXT)


def check_folder(model: nn.Module | None, folder: Path, name: str) -> None:
    """Compare a folder with its model, or load a plain one."""
    if model is None:
        load(folder)
    elif name == "gguf":
        check_weights(model, folder, name)
    else:
        verify(model, folder, SCHEMES[name].partition(".")[0])


def inject(
    work: Path, models: dict[str, nn.Module], target_folder: Path, seed: int
) -> tuple[str, bool]:
    """Damage a file of a copied folder; return the damage type and whether `verify` refused it."""
    rng = random.Random(seed)
    name = rng.choice((*SCHEMES, "float"))
    folder = shutil.copytree(work / name, target_folder / str(seed))
    files = sorted(path for path in folder.iterdir() if path.is_file() and path.stat().st_size > 64)
    # A weight file in three of four cases.
    large = max(files, key=lambda path: path.stat().st_size)
    path = large if rng.random() < 0.75 else rng.choice(files)
    damage_type = damage(path, rng)
    unchanged = path.read_bytes() == (work / name / path.name).read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from libraries, for example about numeric overflow
        # llama.cpp needs a separate build, so GGUF files are only read with the gguf library.
        error_of(lambda: footprint(folder) if name == "gguf" else load_and_compute(folder))
        refused = error_of(lambda: check_folder(models.get(name), folder, name)) is not None
    if unchanged:
        assert not refused, (seed, name, path.name, damage_type)
    elif not refused and name != "float":
        original, current = weights(work / name, name), weights(folder, name)
        assert original.keys() <= current.keys()
        for key, value in original.items():
            if not any(fragment in key for fragment in ROTARY):
                assert np.array_equal(value, current[key]), (
                    seed,
                    name,
                    path.name,
                    damage_type,
                    key,
                )
    shutil.rmtree(folder)
    return damage_type, refused


@pytest.mark.parametrize(
    "seeds",
    [range(16), pytest.param(range(16, 400), marks=pytest.mark.slow, id="many")],
    ids=lambda seeds: f"{len(seeds)}",
)
def test_random_damage_gives_one_line_or_changes_no_weight(
    seeds: range, work: Path, models: dict[str, nn.Module], tmp_path: Path
) -> None:
    """Flipped bits, truncation, zeroed bytes and swapped parts, all in one process."""
    refused: Counter[str] = Counter()
    for seed in seeds:
        damage_type, was_refused = inject(work, models, tmp_path, seed)
        refused[damage_type] += was_refused
    assert sum(refused.values()) > len(seeds) / 3
    assert all(refused[damage_type] for damage_type in ("flip", "truncate", "zero", "swap"))
