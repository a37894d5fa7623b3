"""Package structure: adding a target without changes elsewhere, and unambiguous names."""

import ast
import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

import pytest
from folders import write_run

import ms_compress

SOURCE = Path(ms_compress.__file__).parent
MODULES = [
    module.name for module in iter_modules(ms_compress.__path__) if module.name != "__main__"
]

RULES = """
\"\"\"Eight bits per weight, one scale per row.\"\"\"

from ms_compress.quantization.scheme import Scheme

SCHEMES = (
    Scheme(
        name="npz.int8", target="npz", num_bits=8, low=-127, high=127, signed_peak=False,
        rounding="even", by_inverse=False, exact_step=False, scale_dtype="float32",
    ),
)
GROUPED: dict[str, Scheme] = {}
"""
TARGET = """
\"\"\"Codes and scales in one NumPy file.\"\"\"

import json
from tempfile import TemporaryDirectory
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from ms_compress.quantization.rounding import QuantizedWeight
from ms_compress.targets.float.runtime import TorchRuntime
from ms_compress.targets.target import Contents, Target


def write(model, folder, assets, accuracy_level):
    arrays = {"config": np.array(json.dumps(model.config))}
    for name in model.tensors:
        value = model.read(name)
        if isinstance(value, QuantizedWeight):
            arrays |= {f"{name}.codes": value.codes, f"{name}.scales": value.scales}
        else:
            arrays[name] = value
    np.savez(folder / "model.npz", **arrays)


def reader(folder, document):
    arrays = np.load(folder / "model.npz")

    def read(name):
        if name in arrays:
            return torch.from_numpy(arrays[name]).float()
        return torch.from_numpy(arrays[f"{name}.codes"] * arrays[f"{name}.scales"])

    return read


def contents(folder):
    arrays = np.load(folder / "model.npz")
    stored = [name for name in arrays if name != "config" and not name.endswith(".scales")]
    weights = sum(arrays[name].size for name in stored)
    return Contents(scheme="8-bit rows", weights=weights, vocabulary=None, positions=None)


class NumpyRuntime(TorchRuntime):
    name = "numpy"

    def __init__(self, folder):
        arrays = np.load(folder / "model.npz")
        names = {name.removesuffix(".codes").removesuffix(".scales") for name in arrays}
        read = reader(folder, {})
        with TemporaryDirectory() as plain:
            (Path(plain) / "config.json").write_text(str(arrays["config"]))
            tensors = {name: read(name) for name in names - {"config"}}
            save_file(tensors, f"{plain}/model.safetensors", metadata={"format": "pt"})
            super().__init__(Path(plain))


TARGET = Target(
    name="npz",
    one_file=True,
    holds=lambda folder: (folder / "model.npz").is_file(),
    weight_files=("*.npz",),
    contents=contents,
    check=lambda model, assets: None,
    write=write,
    reader=reader,
    opens=lambda folder, *, threads, strict: NumpyRuntime(folder),
    runtime="numpy",
    libraries=("numpy",),
    extra="parallel",
)
"""
PROGRAM = """
import sys
import ms_compress.targets
ms_compress.targets.__path__.append(sys.argv[1])
from ms_compress.cli import main
for command in ("qat", "quantize"):
    place = ["--set", f"output_dir={sys.argv[3]}/{command}"]
    code = main([command, sys.argv[2], *place, "--set", "scheme=npz.int8", "--verify"])
    assert code == 0
from ms_compress.targets.footprint import footprint
print(footprint(f"{sys.argv[3]}/qat"))
"""


def test_a_deployment_target_needs_only_its_folder(tmp_path: Path) -> None:
    """Commands train for it, export to it and verify it without a change to the package."""
    folder = tmp_path / "more" / "npz"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "rules.py").write_text(RULES)
    (folder / "target.py").write_text(TARGET)
    run_file = write_run(tmp_path)
    command = [sys.executable, "-c", PROGRAM, str(folder.parent), str(run_file), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("npz.int8") == 2
    assert run.stdout.count("verified in its runtime") == 2
    assert "target='npz'" in run.stdout


def test_no_code_outside_a_target_compares_target_names() -> None:
    """Targets are used only through their interface."""
    names = {path.parent.name for path in SOURCE.glob("targets/*/target.py")}
    assert names >= {"ct", "gguf", "ort"}
    comparisons = [
        f"{path.relative_to(SOURCE)}:{node.lineno}"
        for path in SOURCE.rglob("*.py")
        if not names & set(path.relative_to(SOURCE).parts)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare | ast.Dict | ast.match_case)
        for literal in ast.walk(node)
        if isinstance(literal, ast.Constant) and literal.value in names
    ]
    assert comparisons == []


def test_head_tying_is_decided_in_one_file() -> None:
    """Other modules ask it; only the exported config.json repeats it."""
    files = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if "tie_word_embeddings" in path.read_text()
    }
    # The last one writes the config.json of a model that it imports.
    assert files == {"models/head.py", "models/whole_model.py", "targets/gguf/convert.py"}


def test_no_public_name_is_also_a_module() -> None:
    """Otherwise `import ms_compress.export as m` would depend on the import order."""
    assert [name for name in ms_compress.__all__ if find_spec(f"ms_compress.{name}")] == []


@pytest.mark.parametrize("name", MODULES)
def test_importing_a_module_gives_the_module(name: str) -> None:
    """Also after all public names of the package were accessed."""
    for public in ms_compress.__all__:
        getattr(ms_compress, public)
    assert importlib.import_module(f"ms_compress.{name}") is getattr(ms_compress, name)
    assert isinstance(getattr(ms_compress, name), ModuleType)
