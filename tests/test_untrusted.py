"""Guarantees of the shared readers of untrusted files."""

import ast
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ms_align import AlignError
from ms_align.models.folder import stored_dtype
from ms_compress import CompressError
from ms_compress.targets.safetensors_folder import contents
from ms_compress.training.checkpoint import opened
from ms_data import DataError, build, train_tokenizer
from ms_data.disk.split import read_index
from ms_data.disk.verification import verify
from ms_data.engine.array_jobs import ArrayShard
from ms_data.exchange.megatron import MegatronReader, write_megatron
from ms_kernels.aot.files import write as write_library_file
from ms_profile import ProfileError
from ms_profile.files.untrusted import decode_json, read_toml
from ms_profile.log.json_lines import read_json_lines
from ms_profile.log.manifest import write_atomically
from ms_profile.log.ring import read_ring
from ms_profile.trace.json_chunks import TraceText

DIGITS = "9" * 400
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("type_", [Any, dict[str, float], dict[str, list[int]]])
@pytest.mark.parametrize("text", [f'{{"a": [1, {DIGITS}]}}', f'{{"a": [-{DIGITS}]}}'])
def test_integers_of_more_than_128_bits_are_rejected(type_: Any, text: str) -> None:
    """They would raise OverflowError when converted to float."""
    for content in (text, text.encode()):
        with pytest.raises(KeyError, match=r"a file: a\.\d is an integer of more than 128 bits"):
            decode_json(content, type_, where="a file", error=KeyError)


def test_strings_and_fractions_may_have_any_number_of_digits() -> None:
    """Only integers are unbounded in Python."""
    text = f'{{"a": "{DIGITS}", "b": {2**128 - 1}, "c": 0.{DIGITS}}}'
    decoded: dict[str, Any] = decode_json(text, dict, where="a file", error=KeyError)
    assert decoded == {"a": DIGITS, "b": 2**128 - 1, "c": 1.0}


def test_run_files_with_longer_integers_are_rejected(tmp_path: Path) -> None:
    """In nested tables too."""
    path = tmp_path / "RUN.toml"
    path.write_text(f'[a]\nb = [{{c = {DIGITS}}}]\nd = "{DIGITS}"\n')
    with pytest.raises(KeyError, match=r"RUN\.toml: a\.b\.0\.c is an integer of more than 128"):
        read_toml(path, error=KeyError)


UNPICKLING_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
"""Modules whose loaders can execute code from the input."""
PICKLES_ONLY = {
    "packages/ms-parallel/src/ms_parallel/cluster/agreement.py",
    "packages/ms-parallel/src/ms_parallel/checkpoint/dcp_metadata.py",
}
"""Files that may import pickle: one checks whether torch can send a result to other ranks, the
other derives an unpickler that resolves no name of another module. Neither calls a loader."""


def unpickling_lines(path: str, source: str) -> list[str]:
    """Lines of a source file that could unpickle, as `path:line`."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                unsafe = any(alias.name.partition(".")[0] in UNPICKLING_MODULES for alias in names)
                unsafe = unsafe and path not in PICKLES_ONLY
            case ast.ImportFrom(module=str(module)):
                unsafe = module.partition(".")[0] in UNPICKLING_MODULES
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)):
                unsafe = (module in UNPICKLING_MODULES and name != "dumps") or _loads(
                    module, name, node
                )
            case _:
                unsafe = False
        if unsafe:
            lines.append(f"{path}:{node.lineno}")  # type: ignore[attr-defined]  # all have a line number
    return lines


def _loads(module: str, name: str, call: ast.Call) -> bool:
    """Whether a torch or numpy call may load pickles."""
    keywords = {keyword.arg: keyword.value for keyword in call.keywords}
    if (module, name) == ("torch", "load"):
        return getattr(keywords.get("weights_only"), "value", None) is not True
    if (module, name) in (("np", "load"), ("numpy", "load")):
        return getattr(keywords.get("allow_pickle"), "value", False) is not False
    return False


def test_no_package_unpickles() -> None:
    """Input from files and pipes is validated against a type instead."""
    sources = sorted(ROOT.glob("packages/*/src/**/*.py")) + sorted(
        ROOT.glob("shared_source/**/*.py")
    )
    texts = {str(source.relative_to(ROOT)): source.read_text() for source in sources}
    assert len(texts) > 500
    assert [line for path, text in texts.items() for line in unpickling_lines(path, text)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import os, marshal",
        "from cloudpickle.cloudpickle import load",
        "pickle.load(file)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=some)",
        "np.load(path, allow_pickle=True)",
    ],
)
def test_code_that_unpickles_is_reported(line: str) -> None:
    """Also inside functions; known modules may call `dumps`."""
    assert unpickling_lines("a.py", f"def read():\n    {line}\n") == ["a.py:2"]
    for path in PICKLES_ONLY:
        assert unpickling_lines(path, "import pickle\nfound = pickle.dumps(1)\n") == []
        assert unpickling_lines(path, "import pickle\npickle.loads(content)\n") == [f"{path}:2"]
    safe = "torch.load(path, weights_only=True)\nnp.load(path)\njson.load(file)\n"
    assert unpickling_lines("a.py", safe) == []


def shards_with_a_pipe(folder: Path, name: str) -> Path:
    """Build a small dataset and replace a file by a pipe without a writer."""
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("one two three " * 100)
    train_tokenizer(folder / "corpus", vocab_size=260, out=folder / "tokenizer.json")
    build(folder / "corpus", tokenizer=folder / "tokenizer.json", out=folder / "shards")
    return replace_by_pipe(folder / "shards", name)


def replace_by_pipe(folder: Path, name: str) -> Path:
    """Replace a file by a named pipe."""
    folder.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    return folder


def megatron_without_tokens(folder: Path) -> Path:
    """Write a Megatron dataset whose .bin is a pipe."""
    write_megatron(folder / "x", iter([np.array([1, 2])]), [2], vocabulary_size=10)
    return replace_by_pipe(folder, "x.bin")


OPENERS: dict[str, Callable[[Path], object]] = {
    "shards' index": lambda p: read_index(shards_with_a_pipe(p, "index.json")),
    "shards' build.json": lambda p: verify(shards_with_a_pipe(p, "build.json")).faults[0],
    "shards' tokenizer": lambda p: verify(shards_with_a_pipe(p, "tokenizer.json")).faults[0],
    "shard": lambda p: verify(shards_with_a_pipe(p, "shard-00000.msd")).faults[0],
    "Megatron's index": lambda p: MegatronReader(replace_by_pipe(p, "x.idx") / "x"),
    "Megatron's tokens": lambda p: MegatronReader(megatron_without_tokens(p) / "x"),
    "compressed weights": lambda p: contents(replace_by_pipe(p, "model.safetensors")),
    "sealed file": lambda p: opened(replace_by_pipe(p, "state") / "state").__enter__(),
    "model's weights": lambda p: stored_dtype(replace_by_pipe(p, "model.safetensors")),
    "trace": lambda p: next(TraceText(replace_by_pipe(p, "t.json") / "t.json").records()),
    "events": lambda p: next(read_json_lines(replace_by_pipe(p, "e.jsonl") / "e.jsonl")),
    "ring": lambda p: read_ring(replace_by_pipe(p, "ring") / "ring"),
}
"""Readers of user files, each called with a pipe without a writer."""


@pytest.mark.parametrize("name", OPENERS)
def test_a_pipe_instead_of_a_file_is_rejected_immediately(name: str, tmp_path: Path) -> None:
    """A plain open would block forever; the alarm then ends the test."""
    signal.alarm(60)
    try:
        result = OPENERS[name](tmp_path)
    except (AlignError, CompressError, DataError, ProfileError) as error:
        result = error
    finally:
        signal.alarm(0)
    assert "not a file" in str(result) or "has 0 bytes" in str(result)


def test_planted_links_under_temporary_names_are_not_followed(tmp_path: Path) -> None:
    """The target of a link with a predictable name is neither overwritten nor truncated."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "library.new").symlink_to(victim)
    write_library_file(tmp_path / "library", b"new")
    (tmp_path / f".manifest.{os.getpid()}.partial").symlink_to(victim)
    write_atomically(tmp_path / "manifest", b"new")
    (tmp_path / "OUT.shards").mkdir()
    (tmp_path / "OUT.shards" / "1-of-2.answers.partial").symlink_to(victim)
    job = ArrayShard(tmp_path / "OUT.shards", 1, 2)
    with pytest.raises(DataError, match="symbolic links"), job.writing(bytes(16)):
        pass
    assert (tmp_path / "library").read_bytes() == (tmp_path / "manifest").read_bytes() == b"new"
    assert victim.read_text() == "precious"
