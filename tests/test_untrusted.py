"""What all packages' reader of untrusted files promises; each has the same copy of it."""

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
from ms_compress.training.sealed_file import opened
from ms_data import DataError, build, train_tokenizer
from ms_data.disk.split import read_index
from ms_data.disk.verification import verify
from ms_data.engine.array_jobs import ArrayShard
from ms_data.exchange.megatron import MegatronReader, write_megatron
from ms_kernels.aot.files import write as write_library_file
from ms_profile import ProfileError
from ms_profile.files.untrusted import decode_json, read_toml
from ms_profile.log.json_lines import read_json_lines
from ms_profile.log.manifest import write_whole
from ms_profile.log.ring import read_ring
from ms_profile.trace.json_chunks import TraceText

DIGITS = "9" * 400
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", [Any, dict[str, float], dict[str, list[int]]])
@pytest.mark.parametrize("text", [f'{{"a": [1, {DIGITS}]}}', f'{{"a": [-{DIGITS}]}}'])
def test_no_whole_number_is_longer_than_128_bits(kind: Any, text: str) -> None:
    """It would end as an OverflowError wherever it is first made a float."""
    for content in (text, text.encode()):
        with pytest.raises(KeyError, match=r"a file: a\.\d is an integer of more than 128 bits"):
            decode_json(content, kind, where="a file", error=KeyError)


def test_texts_and_fractions_may_have_as_many_digits_as_they_like() -> None:
    """Only whole numbers are without an end in Python."""
    text = f'{{"a": "{DIGITS}", "b": {2**128 - 1}, "c": 0.{DIGITS}}}'
    found: dict[str, Any] = decode_json(text, dict, where="a file", error=KeyError)
    assert found == {"a": DIGITS, "b": 2**128 - 1, "c": 1.0}


def test_run_files_hold_no_longer_ones(tmp_path: Path) -> None:
    """In a table of a table too."""
    path = tmp_path / "RUN.toml"
    path.write_text(f'[a]\nb = [{{c = {DIGITS}}}]\nd = "{DIGITS}"\n')
    with pytest.raises(KeyError, match=r"RUN\.toml: a\.b\.0\.c is an integer of more than 128"):
        read_toml(path, error=KeyError)


PICKLING = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib")
"""Modules that make of bytes whatever these say."""
ONLY_WRITES = {"packages/ms-parallel/src/ms_parallel/cluster/agreement.py"}
"""Asks beforehand whether torch will be able to send a result to the other ranks; reads none."""


def pickling(path: str, source: str) -> list[str]:
    """The lines of a source file that could unpickle, each as `path:line`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                bad = any(each.name.partition(".")[0] in PICKLING for each in names)
                bad = bad and path not in ONLY_WRITES
            case ast.ImportFrom(module=str(module)):
                bad = module.partition(".")[0] in PICKLING
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr=name)):
                bad = (module in PICKLING and name != "dumps") or _loads(module, name, node)
            case _:
                bad = False
        if bad:
            found.append(f"{path}:{node.lineno}")  # type: ignore[attr-defined]  # all of them have one
    return found


def _loads(module: str, name: str, call: ast.Call) -> bool:
    """Whether a call of torch or numpy reads a file that may hold pickles."""
    given = {each.arg: each.value for each in call.keywords}
    if (module, name) == ("torch", "load"):
        return getattr(given.get("weights_only"), "value", None) is not True
    if (module, name) in (("np", "load"), ("numpy", "load")):
        return getattr(given.get("allow_pickle"), "value", False) is not False
    return False


def test_no_package_unpickles() -> None:
    """Whatever comes from a file or out of a pipe is checked against a type; a test has its own."""
    sources = sorted(ROOT.glob("packages/*/src/**/*.py")) + sorted(
        ROOT.glob("shared_source/**/*.py")
    )
    found = {str(each.relative_to(ROOT)): each.read_text() for each in sources}
    assert len(found) > 500
    assert [line for path, text in found.items() for line in pickling(path, text)] == []


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
def test_what_unpickles_is_found(line: str) -> None:
    """Also within a function; what only writes is let be where it is known."""
    assert pickling("a.py", f"def read():\n    {line}\n") == ["a.py:2"]
    for known in ONLY_WRITES:
        assert pickling(known, "import pickle\nfound = pickle.dumps(1)\n") == []
        assert pickling(known, "import pickle\npickle.loads(content)\n") == [f"{known}:2"]
    right = "torch.load(path, weights_only=True)\nnp.load(path)\njson.load(file)\n"
    assert pickling("a.py", right) == []


def shards_with_a_pipe(folder: Path, name: str) -> Path:
    """A small dataset, one of whose files is a pipe without a writer."""
    (folder / "corpus").mkdir()
    (folder / "corpus" / "a.txt").write_text("one two three " * 100)
    train_tokenizer(folder / "corpus", vocab_size=260, out=folder / "tokenizer.json")
    build(folder / "corpus", tokenizer=folder / "tokenizer.json", out=folder / "shards")
    return piped(folder / "shards", name)


def piped(folder: Path, name: str) -> Path:
    """Put a pipe in the place of a file."""
    folder.mkdir(exist_ok=True)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    return folder


def megatron_without_tokens(folder: Path) -> Path:
    """A Megatron dataset whose .bin is a pipe."""
    write_megatron(folder / "x", iter([np.array([1, 2])]), [2], vocabulary_size=10)
    return piped(folder, "x.bin")


OPENERS: dict[str, Callable[[Path], object]] = {
    "shards' index": lambda p: read_index(shards_with_a_pipe(p, "index.json")),
    "shards' build.json": lambda p: verify(shards_with_a_pipe(p, "build.json")).faults[0],
    "shards' tokenizer": lambda p: verify(shards_with_a_pipe(p, "tokenizer.json")).faults[0],
    "shard": lambda p: verify(shards_with_a_pipe(p, "shard-00000.msd")).faults[0],
    "Megatron's index": lambda p: MegatronReader(piped(p, "x.idx") / "x"),
    "Megatron's tokens": lambda p: MegatronReader(megatron_without_tokens(p) / "x"),
    "compressed weights": lambda p: contents(piped(p, "model.safetensors")),
    "sealed file": lambda p: opened(piped(p, "state") / "state").__enter__(),
    "model's weights": lambda p: stored_dtype(piped(p, "model.safetensors")),
    "trace": lambda p: next(TraceText(piped(p, "t.json") / "t.json").records()),
    "events": lambda p: next(read_json_lines(piped(p, "e.jsonl") / "e.jsonl")),
    "ring": lambda p: read_ring(piped(p, "ring") / "ring"),
}
"""Readers of files that users name, each given a pipe that nobody writes to."""


@pytest.mark.parametrize("name", OPENERS)
def test_a_pipe_in_place_of_a_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    """A plain open would wait forever for somebody to write; the alarm ends the test then."""
    signal.alarm(60)
    try:
        found = OPENERS[name](tmp_path)
    except (AlignError, CompressError, DataError, ProfileError) as error:
        found = error
    finally:
        signal.alarm(0)
    assert "not a file" in str(found) or "has 0 bytes" in str(found)


def test_planted_links_under_temporary_names_are_not_followed(tmp_path: Path) -> None:
    """What a link under a predictable name points to is neither overwritten nor cut off."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "library.new").symlink_to(victim)
    write_library_file(tmp_path / "library", b"new")
    (tmp_path / f".manifest.{os.getpid()}.partial").symlink_to(victim)
    write_whole(tmp_path / "manifest", b"new")
    (tmp_path / "OUT.shards").mkdir()
    (tmp_path / "OUT.shards" / "1-of-2.answers.partial").symlink_to(victim)
    job = ArrayShard(tmp_path / "OUT.shards", 1, 2)
    with pytest.raises(DataError, match="symbolic links"), job.writing(bytes(16)):
        pass
    assert (tmp_path / "library").read_bytes() == (tmp_path / "manifest").read_bytes() == b"new"
    assert victim.read_text() == "precious"
