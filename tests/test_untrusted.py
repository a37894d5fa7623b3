"""What all packages' reader of untrusted files promises; each has the same copy of it."""

import ast
from pathlib import Path
from typing import Any

import pytest

from ms_profile.files.untrusted import decode_json, read_toml

DIGITS = "9" * 400
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", [Any, dict[str, float], dict[str, list[int]]])
@pytest.mark.parametrize("text", [f'{{"a": [1, {DIGITS}]}}', f'{{"a": [-{DIGITS}]}}'])
def test_no_whole_number_is_longer_than_128_bits(kind: Any, text: str) -> None:
    """It would end as an OverflowError wherever it is first made a float."""
    for content in (text, text.encode()):
        with pytest.raises(
            KeyError, match=r"a file: a\.\d is a whole number of more than 128 bits"
        ):
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
    with pytest.raises(KeyError, match=r"RUN\.toml: a\.b\.0\.c is a whole number of more than 128"):
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
