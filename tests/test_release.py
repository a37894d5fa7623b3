"""`tools/release.py` accepts our wheels and reports defective ones."""

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
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Sdist of a package and the wheel distributions from it."""
    out = tmp_path_factory.mktemp("dist")
    source = ROOT / "packages" / NAME
    release.run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source))
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def corrupt_wheel(wheel: Path, suffix: str, folder: Path) -> Path:
    """Copy a wheel without the files that end in `suffix` and with a stray file."""
    copy = folder / wheel.name
    with ZipFile(wheel) as source, ZipFile(copy, "w") as target:
        for entry in source.infolist():
            if not entry.filename.endswith(suffix):
                target.writestr(entry, source.read(entry))
        target.writestr("tests/stray.py", "")
    return copy


def test_a_wheel_contains_only_the_package(distributions: tuple[Path, Path]) -> None:
    """All files of the source folder and the license, but no tests."""
    assert release.file_problems(*distributions, NAME) == []
    assert release.metadata_problems(distributions[1], PROJECT) == []


def test_missing_and_stray_files_are_reported(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    """The problem names the file."""
    wheel = corrupt_wheel(distributions[1], "/py.typed", tmp_path)
    problems = release.file_problems(distributions[0], wheel, NAME)
    assert problems == ["the wheel lacks ms_profile/py.typed", "the wheel holds tests/stray.py"]


def test_an_unknown_library_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Exit code 2, and no files are written."""
    monkeypatch.setattr(sys, "argv", ["release", "--out", str(tmp_path / "dist"), "ms-nothing"])
    with pytest.raises(SystemExit, match="2"):
        release.main()
    assert "no library 'ms-nothing'" in capsys.readouterr().err
    assert not (tmp_path / "dist").exists()


def test_metadata_has_an_address_only_if_one_is_given(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    """The files in the tree do not change."""
    before = (ROOT / "packages" / NAME / "pyproject.toml").read_bytes()
    address = release.web_address("https://example.org/ms/")
    copy = release.copy_source(NAME, address, tmp_path / "copy")
    build = ("-m", "build", "--no-isolation", "--wheel", "--outdir", str(tmp_path), str(copy))
    release.run(sys.executable, *build)
    (wheel,) = tmp_path.glob("*.whl")
    assert release.metadata_problems(wheel, PROJECT, "https://example.org/ms") == []
    assert (
        "has ['Repository, https://example.org/ms'" in release.metadata_problems(wheel, PROJECT)[0]
    )
    assert "has no address" in release.metadata_problems(distributions[1], PROJECT, address)[0]
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
def test_a_released_readme_has_no_relative_links(address: str | None, expected: str) -> None:
    """A package index shows only the README."""
    readme = (
        "see [optimizers](../../docs/a.md#b), [PyTorch](https://pytorch.org) and [above](#limits) "
        "![plot](../../docs/a.svg)"
    )
    assert release.for_index(readme, NAME, address) == expected


@pytest.mark.parametrize("text", ["", "ms", "http://example.org", "https://", 'https://a/"\n[x]'])
def test_an_invalid_address_is_rejected(text: str) -> None:
    """The check runs before any build."""
    with pytest.raises(argparse.ArgumentTypeError, match="is not an https URL"):
        release.web_address(text)


def test_metadata_that_disagrees_is_reported(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    """The wheel's version is not the project's."""
    wheel = tmp_path / distributions[1].name
    shutil.copy(distributions[1], wheel)
    assert release.metadata_problems(wheel, {**PROJECT, "version": "9.9.9"}) == [
        f"the wheel says version {PROJECT['version']}"
    ]


def test_pip_installs_no_torch_but_the_requested_one(
    distributions: tuple[Path, Path], tmp_path: Path
) -> None:
    """A torch version that the wheels do not allow is a conflict; pip alone would add another."""
    packages = tmp_path / "packages"
    metadata = packages / "torch-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    env_python = release.create_environment(sys.executable, tmp_path / "own", packages)
    (failure,) = release.install(sys.executable, env_python, f"{distributions[1]}[torch]")
    assert "conflict" in failure
    assert release.installed_version("torch", packages) == "1.0"
