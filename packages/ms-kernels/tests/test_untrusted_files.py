"""Files that somebody else wrote or damaged: each is read whole, or refused in one line."""

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
WHOLE_FILES = {
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
    """Yield damaged versions of a file: cut, bits flipped, values and pieces exchanged."""
    chance = random.Random(0)
    for _ in range(count):
        made = bytearray(content)
        how = chance.randrange(5)
        start = chance.randrange(len(made))
        end = min(start + chance.randrange(1, 40), len(made))
        if how == 0:
            del made[start:]
        elif how == 1:
            made[start] ^= 1 << chance.randrange(8)
        elif how == 2:
            del made[start:end]
        elif how == 3:
            made[start:end] = chance.choice(WORDS)
        else:
            values = [place for place, each in enumerate(made) if each in b":,"]
            place = chance.choice(values) + 1
            stop = min(made.find(each, place) for each in b",}]" if made.find(each, place) > 0)
            made[place:stop] = chance.choice(WORDS)
        yield bytes(made)


def refused(read, error):
    """Say whether reading is refused, in one line; any other error is a defect."""
    told = None
    try:
        read()
    except error as caught:
        told = str(caught)
    if told is None:
        return False
    assert told.isprintable()  # no line end either
    assert len(told) < 1500
    return True


def table_bytes():
    """Return the largest table that is committed, of entries and configurations."""
    return (tables._folder() / "sm_90.json").read_bytes()


@pytest.fixture
def library(tmp_path):
    """Return the folder of a library of one kernel that returns what it is given."""
    place = tmp_path / "lib"
    place.mkdir()
    (place / "lib.c").write_text(
        'const char *ms_last_error(void) { return ""; }\n'
        'const char *ms_status_text(int s) { return "bad"; }\n'
        "int ms_copy(void *stream, void *p, long i, long n, float f) { return 0; }\n"
    )
    command = ["cc", "-shared", "-fPIC", "-o", "lib.so", "lib.c"]
    subprocess.run(command, cwd=place, check=True)
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
    file = file_of(place, "lib.so")
    manifest = {
        "format": "ms-kernels.1",
        "target": "sm_90",
        "library": "lib.so",
        "version": "0.1.0",
        "compiler": "cc",
        "kernels": [kernel],
        "files": [{"path": "lib.so", "size_bytes": file.size_bytes, "sha256": file.sha256}],
    }
    (place / "manifest.json").write_text(json.dumps(manifest))
    return place


def test_the_library_of_these_tests_opens(library):
    """What the mutants are made of is sound."""
    opened = load(library)
    assert isinstance(opened, Library)
    opened.launch("copy", X=0, i=1, n=2, f=1.5)


@pytest.mark.parametrize("content", WHOLE_FILES.values(), ids=WHOLE_FILES)
def test_a_file_that_is_nothing_of_the_kind_is_refused(tmp_path, library, content):
    """Deep nesting, no text, huge numbers: as a table and as a manifest."""
    table = tmp_path / "x.json"
    table.write_bytes(content)
    assert refused(lambda: read_table(table), TableError)
    (library / "manifest.json").write_bytes(content)
    assert refused(lambda: load(library), BackendError)


def test_damaged_tables_are_refused_or_are_tables(tmp_path):
    """Whatever of the damage is no damage to JSON and its types gives a table that holds."""
    path = tmp_path / "sm_90.json"
    taken = 0
    for made in mutants(table_bytes(), MUTANTS):
        path.write_bytes(made)
        found = []
        if not refused(lambda: found.append(read_table(path)), TableError):  # noqa: B023
            assert isinstance(found[0], Table)
            taken += 1
    assert 0 < taken < MUTANTS


def test_damaged_manifests_are_refused_or_open(library):
    """A library never opens other files than its own, and never fails otherwise."""
    path = library / "manifest.json"
    sound = path.read_bytes()
    taken = 0
    for made in mutants(sound, MUTANTS):
        path.write_bytes(made)
        found = []
        if not refused(lambda: found.append(read_manifest(library)), BackendError):  # noqa: B023
            assert isinstance(found[0], Manifest)
            taken += 1
            refused(lambda: load(library), BackendError)
    assert 0 < taken < MUTANTS


def test_damaged_library_files_are_refused(library):
    """One bit of the library that differs from its checksum."""
    binary = library / "lib.so"
    made = bytearray(binary.read_bytes())
    made[len(made) // 2] ^= 4
    binary.write_bytes(made)
    assert refused(lambda: load(library), BackendError)


def test_a_library_without_the_functions_of_its_manifest_is_refused(library):
    """A name that is not exported, or no shared library at all."""
    manifest = json.loads((library / "manifest.json").read_text())
    manifest["kernels"][0]["name"] = "other"
    (library / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(BackendError, match="has no ms_other"):
        load(library)
    (library / "lib.so").unlink()  # what is open stays as it is
    (library / "lib.so").write_bytes(b"no library")
    manifest["files"][0] |= {
        "size_bytes": 10,
        "sha256": hashlib.sha256(b"no library").hexdigest(),
    }
    (library / "manifest.json").write_text(json.dumps(manifest))
    assert refused(lambda: load(library), BackendError)


@pytest.mark.parametrize("value", [10**400, -(10**400), None, "1", [], 1.5, True])
@pytest.mark.parametrize("name", ["X", "i", "n"])
def test_a_launch_takes_numbers_that_fit_alone(library, name, value):
    """Plain ctypes would cut the upper bits off in silence."""
    given = {"X": 0, "i": 1, "n": 2, "f": 1.5}
    with pytest.raises(KernelError, match=f"copy: {name} is"):
        load(library).launch("copy", **{**given, name: value})


PATHS = {
    "a null byte": "a\0b",
    "a name without end": "x" * 5000,
    "a path without end": "x/" * 500_000,
    "a circle of links": "circle/x",
    "a file taken for a folder": "file/x",
    "no such folder": "nowhere/x",
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_path_that_no_system_takes_is_refused(tmp_path, monkeypatch, capsys, path):
    """Read or written: one line, exit code 2."""
    monkeypatch.chdir(tmp_path)
    os.symlink("circle", tmp_path / "circle")
    (tmp_path / "file").write_text("")
    assert refused(lambda: read_table(tmp_path / f"{path}.json"), TableError)
    assert refused(lambda: load(tmp_path / path), BackendError)
    for command in (
        ["bench", "--tune", "--operator", "swiglu", "--out", path],
        ["build", "--target", "cpu", "--only", "nothing", "--out", path],
    ):
        if path.startswith("nowhere") and command[0] == "build":
            continue  # its folders are made
        assert code_of(command) == 2
        told = capsys.readouterr().err
        assert re.match(rf"ms-kernels( {command[0]})?: ", told)
        assert (told.count("\n"), len(told) < 1500) == (1, True)


def code_of(command):
    """The exit code, which argparse raises."""
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
def test_a_detail_that_is_no_value_is_refused(capsys, detail):
    """Digits without end, nesting, what is no text."""
    assert code_of(["explain", "rms_norm", detail]) == 2
    told = capsys.readouterr().err
    assert told.startswith("ms-kernels: ")
    assert (told.count("\n"), len(told) < 1500) == (1, True)


def test_kept_pieces_of_a_stopped_build_are_sealed(tmp_path):
    """A piece of which one bit flipped is compiled anew."""
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


def test_a_number_of_c_is_what_was_given():
    """The types that a launch passes hold the numbers whole."""
    assert ctypes.c_int64(2**40).value == 2**40
    assert torch.iinfo(torch.int64).max == 2**63 - 1
