"""Foreign and damaged files: each is read completely or refused with a one-line error."""

import ctypes
import hashlib
import json
import os
import random
import re
import subprocess

import pytest
import torch

from ms_kernels import BackendError, KernelError, TableError
from ms_kernels.aot import load
from ms_kernels.aot.files import file_of
from ms_kernels.aot.loading import Library
from ms_kernels.aot.manifest import Manifest, read_manifest
from ms_kernels.cli import main
from ms_kernels.core import tables
from ms_kernels.core.tables import Table, read_table

MUTANTS = int(os.environ.get("MS_MUTANTS", "400"))

DEEP = b"[" * 200_000
FOREIGN_FILES = {
    "nothing": b"",
    "deep lists": DEEP,
    "deep objects": b'{"a":' * 200_000,
    "a field nested deeply": b'{"format":"ms-kernels.1","kernels":' + DEEP,
    "no text": b"\xff\xfe\x00{",
    "half a character": b'{"chip":"\xc3"}',
    "a lone surrogate": b'{"chip":"\\ud800"}',
    "a huge number": b'{"format":"ms-kernels-tuning-1","chip":"x","torch":"","entries":'
    + b"9" * 9999,
    "a huge number deep down": b"[" * 200_000 + b"9" * 50,
    "a float without end": b'{"version":1e999}',
    "null bytes": b"\0" * 4096,
    "a number": b"7",
}
WORDS = [b"null", b"-1", b"1e999", b"9" * 30, b"{}", b"[]", b'""', b'"../x"', b"true", b"\xff"]


def mutants(content, count):
    """Yield damaged versions of a file: truncated, bits flipped, values or ranges replaced."""
    chance = random.Random(0)
    for _ in range(count):
        damaged = bytearray(content)
        damage = chance.randrange(5)
        start = chance.randrange(len(damaged))
        end = min(start + chance.randrange(1, 40), len(damaged))
        if damage == 0:
            del damaged[start:]
        elif damage == 1:
            damaged[start] ^= 1 << chance.randrange(8)
        elif damage == 2:
            del damaged[start:end]
        elif damage == 3:
            damaged[start:end] = chance.choice(WORDS)
        else:
            value_starts = [position for position, char in enumerate(damaged) if char in b":,"]
            position = chance.choice(value_starts) + 1
            value_end = min(
                damaged.find(char, position) for char in b",}]" if damaged.find(char, position) > 0
            )
            damaged[position:value_end] = chance.choice(WORDS)
        yield bytes(damaged)


def is_refused(read, error):
    """Return whether reading is refused with a one-line error; any other error is a defect."""
    message = None
    try:
        read()
    except error as caught:
        message = str(caught)
    if message is None:
        return False
    assert message.isprintable()  # so no newline either
    assert len(message) < 1500
    return True


def table_bytes():
    """Return the largest committed table, with entries and configurations."""
    return (tables._folder() / "sm_90.json").read_bytes()


@pytest.fixture
def library(tmp_path):
    """Return the folder of a library with one kernel that does nothing."""
    folder = tmp_path / "lib"
    folder.mkdir()
    (folder / "lib.c").write_text(
        'const char *ms_last_error(void) { return ""; }\n'
        'const char *ms_status_text(int s) { return "bad"; }\n'
        "int ms_copy(void *stream, void *p, long i, long n, float f) { return 0; }\n"
    )
    command = ["cc", "-shared", "-fPIC", "-o", "lib.so", "lib.c"]
    subprocess.run(command, cwd=folder, check=True)
    kinds = {"X": "pointer", "i": "i32", "n": "i64", "f": "f32"}
    kernel = {
        "name": "copy",
        "dtype": "fp32",
        "parameters": [{"name": name, "kind": kind} for name, kind in kinds.items()],
        "tiles": "n",
        "limits": {},
        "constants": {"BLOCK": 4},
        **dict.fromkeys(
            ("registers", "spilled_bytes", "shared_bytes", "matrix_instructions", "vector_bits"), 0
        ),
    }
    file = file_of(folder, "lib.so")
    manifest = {
        "format": "ms-kernels.1",
        "target": "sm_90",
        "library": "lib.so",
        "version": "0.1.0",
        "compiler": "cc",
        "kernels": [kernel],
        "files": [{"path": "lib.so", "size_bytes": file.size_bytes, "sha256": file.sha256}],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def test_the_undamaged_library_opens(library):
    """The mutants below start from a valid library."""
    opened = load(library)
    assert isinstance(opened, Library)
    opened.launch("copy", X=0, i=1, n=2, f=1.5)


@pytest.mark.parametrize("content", FOREIGN_FILES.values(), ids=FOREIGN_FILES)
def test_a_foreign_file_is_refused_as_table_and_as_manifest(tmp_path, library, content):
    """Deep nesting, binary data, huge numbers."""
    table = tmp_path / "x.json"
    table.write_bytes(content)
    assert is_refused(lambda: read_table(table), TableError)
    (library / "manifest.json").write_bytes(content)
    assert is_refused(lambda: load(library), BackendError)


def test_damaged_tables_are_refused_or_valid(tmp_path):
    """Damage that leaves valid JSON of the right types gives a valid table."""
    path = tmp_path / "sm_90.json"
    accepted = 0
    for damaged in mutants(table_bytes(), MUTANTS):
        path.write_bytes(damaged)
        tables_read = []
        if not is_refused(lambda: tables_read.append(read_table(path)), TableError):  # noqa: B023
            assert isinstance(tables_read[0], Table)
            accepted += 1
    assert 0 < accepted < MUTANTS


def test_damaged_manifests_are_refused_or_valid(library):
    """A library never opens files other than its own and never fails in another way."""
    path = library / "manifest.json"
    content = path.read_bytes()
    accepted = 0
    for damaged in mutants(content, MUTANTS):
        path.write_bytes(damaged)
        manifests = []
        if not is_refused(lambda: manifests.append(read_manifest(library)), BackendError):  # noqa: B023
            assert isinstance(manifests[0], Manifest)
            accepted += 1
            is_refused(lambda: load(library), BackendError)
    assert 0 < accepted < MUTANTS


def test_damaged_library_files_are_refused(library):
    """A single flipped bit no longer matches the checksum."""
    binary = library / "lib.so"
    damaged = bytearray(binary.read_bytes())
    damaged[len(damaged) // 2] ^= 4
    binary.write_bytes(damaged)
    assert is_refused(lambda: load(library), BackendError)


def test_a_library_without_the_functions_of_its_manifest_is_refused(library):
    """A kernel that is not exported, or a file that is not a shared library."""
    manifest = json.loads((library / "manifest.json").read_text())
    manifest["kernels"][0]["name"] = "other"
    (library / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BackendError, match="has no ms_other"):
        load(library)
    (library / "lib.so").unlink()  # the open library keeps its mapping
    (library / "lib.so").write_bytes(b"no library")
    manifest["files"][0] |= {
        "size_bytes": 10,
        "sha256": hashlib.sha256(b"no library").hexdigest(),
    }
    (library / "manifest.json").write_text(json.dumps(manifest))
    assert is_refused(lambda: load(library), BackendError)


@pytest.mark.parametrize("value", [10**400, -(10**400), None, "1", [], 1.5, True])
@pytest.mark.parametrize("name", ["X", "i", "n"])
def test_a_launch_rejects_numbers_that_do_not_fit(library, name, value):
    """Plain ctypes would silently drop the upper bits."""
    args = {"X": 0, "i": 1, "n": 2, "f": 1.5}
    with pytest.raises(KernelError, match=f"copy: {name} is"):
        load(library).launch("copy", **{**args, name: value})


PATHS = {
    "a null byte": "a\0b",
    "a name without end": "x" * 5000,
    "a path without end": "x/" * 500_000,
    "a circle of links": "circle/x",
    "a file taken for a folder": "file/x",
    "no such folder": "nowhere/x",
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_an_unusable_path_is_refused(tmp_path, monkeypatch, capsys, path):
    """For reading and writing: one line and exit code 2."""
    monkeypatch.chdir(tmp_path)
    os.symlink("circle", tmp_path / "circle")
    (tmp_path / "file").write_text("")
    assert is_refused(lambda: read_table(tmp_path / f"{path}.json"), TableError)
    assert is_refused(lambda: load(tmp_path / path), BackendError)
    for command in (
        ["bench", "--tune", "--operator", "swiglu", "--out", path],
        ["build", "--target", "cpu", "--only", "nothing", "--out", path],
    ):
        if path.startswith("nowhere") and command[0] == "build":
            continue  # build creates missing folders
        assert exit_code_of(command) == 2
        error = capsys.readouterr().err
        assert re.match(rf"ms-kernels( {command[0]})?: ", error)
        assert (error.count("\n"), len(error) < 1500) == (1, True)


def exit_code_of(command):
    """Return the command's exit code, also when argparse raises it."""
    try:
        return main(command)
    except SystemExit as ended:
        return ended.code


@pytest.mark.parametrize(
    "detail",
    [
        "H=" + "9" * 5000,
        "eps=" + "(" * 5000,
        "eps=" + "9" * 5000,
        "eps=1e999",
        "\ud800=1",
        "eps=nan",
    ],
    ids=lambda it: it[:6].encode("ascii", "replace").decode(),
)
def test_an_invalid_detail_is_refused(capsys, detail):
    """Endless digits, nesting, invalid text."""
    assert exit_code_of(["explain", "rms_norm", detail]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ms-kernels: ")
    assert (error.count("\n"), len(error) < 1500) == (1, True)


def test_cached_pieces_of_an_interrupted_build_are_sealed(tmp_path):
    """A piece with one flipped bit is compiled again."""
    from ms_kernels.aot.cpu_library import _is_kept, _sealed

    package, library, seal = (tmp_path / name for name in ("x.pt2", "x.so", "x.key"))
    package.write_bytes(b"package")
    library.write_bytes(b"library")
    assert not _is_kept(seal, "key", package, library)
    seal.write_text(_sealed("key", package, library))
    assert _is_kept(seal, "key", package, library)
    assert not _is_kept(seal, "other", package, library)
    library.write_bytes(b"librarx")
    assert not _is_kept(seal, "key", package, library)


def test_ctypes_integers_hold_64_bits():
    """The ctypes that a launch passes keep all bits."""
    assert ctypes.c_int64(2**40).value == 2**40
    assert torch.iinfo(torch.int64).max == 2**63 - 1
