"""What would be released is checked, and a wheel that is not in order is found."""

import argparse
import shutil
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
import release

pytest.importorskip("build")
pytest.importorskip("hatchling")

ROOT = Path(__file__).resolve().parents[1]
NAME = "ms-profile"
PROJECT = tomllib.loads((ROOT / "packages" / NAME / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist of a package, and its wheel built from that."""
    out = tmp_path_factory.mktemp("dist")
    source = ROOT / "packages" / NAME
    release.run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source))
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def without(wheel: Path, ending: str, folder: Path) -> Path:
    """A wheel that lacks the files of this ending, and holds one of no package's."""
    copy = folder / wheel.name
    with ZipFile(wheel) as old, ZipFile(copy, "w") as new:
        for each in old.infolist():
            if not each.filename.endswith(ending):
                new.writestr(each, old.read(each))
        new.writestr("tests/stray.py", "")
    return copy


def test_a_wheel_holds_the_package_and_nothing_else(built: tuple[Path, Path]) -> None:
    """Every file of the source folder, the licence, and no tests."""
    assert release.wrong_files(*built, NAME) == []
    assert release.wrong_metadata(built[1], PROJECT) == []


def test_a_missing_and_a_stray_file_are_found(built: tuple[Path, Path], tmp_path: Path) -> None:
    """By name."""
    wheel = without(built[1], "/py.typed", tmp_path)
    found = release.wrong_files(built[0], wheel, NAME)
    assert found == ["the wheel lacks ms_profile/py.typed", "the wheel holds tests/stray.py"]


def test_a_library_that_is_not_there_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit code 2, and nothing is written."""
    monkeypatch.setattr(sys, "argv", ["release", "--out", str(tmp_path / "dist"), "ms-nothing"])
    with pytest.raises(SystemExit, match="2"):
        release.main()
    assert "no library 'ms-nothing'" in capsys.readouterr().err
    assert not (tmp_path / "dist").exists()


def test_metadata_names_the_address_that_is_given_and_else_none(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    """The tree's own files stay as they are."""
    before = (ROOT / "packages" / NAME / "pyproject.toml").read_bytes()
    address = release.web_address("https://example.org/ms/")
    copy = release.source_of(NAME, address, tmp_path / "copy")
    build = ("-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(copy))
    release.run(sys.executable, *build)
    (wheel,) = tmp_path.glob("*.whl")
    assert release.wrong_metadata(wheel, PROJECT, "https://example.org/ms") == []
    assert (
        "names ['Repository, https://example.org/ms'" in release.wrong_metadata(wheel, PROJECT)[0]
    )
    assert "names no address" in release.wrong_metadata(built[1], PROJECT, address)[0]
    assert (ROOT / "packages" / NAME / "pyproject.toml").read_bytes() == before


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (None, "see optimizers, [PyTorch](https://pytorch.org) and [above](#limits) "),
        (
            "https://example.org/ms",
            "see [optimizers](https://example.org/ms/blob/HEAD/docs/a.md#b), "
            "[PyTorch](https://pytorch.org) and [above](#limits) "
            "![plot](https://example.org/ms/blob/HEAD/docs/a.svg)",
        ),
    ],
)
def test_a_released_readme_has_no_relative_link(address: str | None, expected: str) -> None:
    """A package index shows the README alone."""
    readme = (
        "see [optimizers](../../docs/a.md#b), [PyTorch](https://pytorch.org) and [above](#limits) "
        "![plot](../../docs/a.svg)"
    )
    assert release.for_index(readme, NAME, address) == expected


@pytest.mark.parametrize("text", ["", "ms", "http://example.org", "https://", 'https://a/"\n[x]'])
def test_an_address_that_is_none_is_refused(text: str) -> None:
    """Before anything is built."""
    with pytest.raises(argparse.ArgumentTypeError, match="is no address"):
        release.web_address(text)


def test_metadata_that_says_otherwise_is_found(built: tuple[Path, Path], tmp_path: Path) -> None:
    """A version that is not the project's, and a licence that is not ours."""
    wheel = tmp_path / built[1].name
    shutil.copy(built[1], wheel)
    assert release.wrong_metadata(wheel, {**PROJECT, "version": "9.9.9"}) == [
        f"the wheel says version {PROJECT['version']}"
    ]


def test_no_other_torch_is_tried_than_the_one_that_was_asked_for(
    built: tuple[Path, Path], tmp_path: Path
) -> None:
    """One that the wheels do not admit is told, where pip alone would fetch another beside it."""
    packages = tmp_path / "packages"
    metadata = packages / "torch-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    own = release.environment(sys.executable, tmp_path / "own", packages)
    (told,) = release.install(sys.executable, own, f"{built[1]}[torch]")
    assert "conflict" in told
    assert release.version_of("torch", packages) == "1.0"
