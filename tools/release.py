"""Build what would be released of all six libraries, and check it as an index would.

    python tools/release.py --out dist      # needs build, hatchling and twine; see `nox -s release`
    python tools/release.py --out dist --try-with python3.11:2.11.0 --try-with python3.13:2.15.0
    python tools/release.py --out dist --address https://example.org/ms

Each library's sdist is built from the tree, and its wheel from that sdist; a wheel built from the
tree itself must hold the same bytes. Then its files, metadata and README are checked. `--try-with`
takes a Python and a release of torch: it installs each wheel alone and runs the library's own proof
that nothing else is needed, then all wheels together, asks for every public name and runs every
command's help. A Python that has torch already needs no release named. The tree knows no public
address of the project, so metadata names none but the one that `--address` gives. Exit code 0 when
all is in order, 1 with a line for each thing that is not.
"""

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from email import message_from_bytes
from pathlib import Path
from urllib.parse import urlsplit
from zipfile import ZipFile

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
TORCH = "2.13.0"
"""Installed where none is named."""
TORCH_FREE = {"ms-data", "ms-profile"}
TRIED = "torch.txt"
"""In an environment, the release of torch that its packages are tried with."""


def main() -> int:
    """Build and check every library."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python tools/release.py --out dist ms-data",
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder for sdists and wheels")
    parser.add_argument("packages", nargs="*", help="by default all")
    parser.add_argument("--try-with", action="append", default=[], metavar="PYTHON[:TORCH]")
    parser.add_argument(
        "--address", type=web_address, help="of the repository, for the metadata; by default none"
    )
    options = parser.parse_args()
    known = sorted(path.name for path in (ROOT / "packages").iterdir())
    names = options.packages or known
    if strange := sorted({*names} - {*known}):
        parser.error(f"there is no library {strange[0]!r}; there are {', '.join(known)}")
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    for name in names:
        found = check(name, out, options.address)
        wrong += [f"{name}: {line}" for line in found]
        sys.stdout.write(f"{name}: {len(found)} things to mend\n" if found else f"{name}: ready\n")
    for pair in options.try_with:
        found = try_with(pair, out, names)
        wrong += [f"{pair}: {line}" for line in found]
        sys.stdout.write(f"{pair}: {'does not hold' if found else 'holds'}\n")
    for line in wrong:
        sys.stderr.write(f"{line}\n")
    return 1 if wrong else 0


def web_address(text: str) -> str:
    """Take an address for the metadata."""
    parts = urlsplit(text)
    if parts.scheme != "https" or not parts.netloc or not text.isascii() or set(text) & set(' "\\'):
        raise argparse.ArgumentTypeError(f"{text!r} is no address; give one like https://host/path")
    return text.rstrip("/")


def check(name: str, out: Path, address: str | None = None) -> list[str]:
    """Build a library's sdist and wheel into a folder, and say what is not in order."""
    project = project_of(name)
    stem = stem_of(name, project)
    for path in out.glob(f"{stem}[-.]*"):
        path.unlink()
    sdist, wheel = out / f"{stem}.tar.gz", out / f"{stem}-py3-none-any.whl"
    with tempfile.TemporaryDirectory() as folder:
        source = source_of(name, address, Path(folder) / name)
        # No environment of its own: hatchling is here, and its version is the one that is checked.
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source))
        build = ("-m", "build", "--no-isolation", "--wheel", "--outdir", folder, str(source))
        run(sys.executable, *build)
        same = contents(wheel) == contents(Path(folder) / wheel.name)
    found = [] if same else ["the wheel built from the sdist is not the one built from the tree"]
    found += wrong_files(sdist, wheel, name) + wrong_metadata(wheel, project, address)
    done = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    return found + ([f"twine: {done.stdout.strip()}"] if done.returncode else [])


def source_of(name: str, address: str | None, copy: Path) -> Path:
    """Return a copy of a library's folder to build from.

    Its README has no relative links, which an index cannot follow, and its metadata names the
    repository's address if there is one.
    """
    source = ROOT / "packages" / name
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "dist", "build"))
    readme = copy / "README.md"
    readme.write_text(for_index(readme.read_text(), name, address))
    if address is not None:
        with (copy / "pyproject.toml").open("a") as file:
            file.write(f'\n[project.urls]\nRepository = "{address}"\n')
    return copy


def for_index(readme: str, name: str, address: str | None) -> str:
    """Make relative links of a README absolute, or plain text where there is no address.

    Pictures without an address are left out.
    """

    def absolute(match: re.Match[str]) -> str:
        bang, text, target = match.groups()
        if target.startswith(("https://", "#")):
            return match[0]
        if address is None:
            return "" if bang else text
        path = posixpath.normpath(f"packages/{name}/{target}")
        return f"{bang}[{text}]({address}/blob/HEAD/{path})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", absolute, readme)


def project_of(name: str) -> dict[str, object]:
    """What a library's pyproject.toml says of it."""
    text = (ROOT / "packages" / name / "pyproject.toml").read_text()
    found: dict[str, object] = tomllib.loads(text)["project"]
    return found


def stem_of(name: str, project: dict[str, object]) -> str:
    """How the names of a library's files begin."""
    return f"{name.replace('-', '_')}-{project['version']}"


def try_with(pair: str, out: Path, names: list[str]) -> list[str]:
    """Install the wheels for a Python and a torch, each alone and all together; say what fails."""
    python, _, torch = pair.partition(":")
    found: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        packages = torch_packages(python, torch, place / "torch")
        for name in names:
            own = environment(python, place / name, None if name in TORCH_FREE else packages)
            words = ("-I", str(ROOT / "packages" / name / "tests" / "alone.py"))
            failed = install(python, own, wheel_of(name, out)) or complaint(place, own, *words)
            found += [f"{name} alone: {line}" for line in failed]
        own = environment(python, place / "together", packages)
        failed = install(python, own, *(wheel_of(name, out) for name in names))
        found += [f"together: {line}" for line in failed]
        for module in (name.replace("-", "_") for name in names if not failed):
            ask = f"import {module} as m; [getattr(m, name) for name in m.__all__]"
            for words in (("-I", "-c", ask), ("-I", "-m", module, "--help")):
                found += [
                    f"{' '.join(words[1:])}: {line}" for line in complaint(place, own, *words)
                ]
    return found


def torch_packages(python: str, torch: str, folder: Path) -> Path:
    """Give the folder of packages that holds torch: the Python's own, or one made here."""
    known = "import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])"
    done = subprocess.run((python, "-c", known), capture_output=True, text=True, check=False)
    if done.returncode == 0 and not torch:
        return Path(done.stdout.strip())
    run(python, "-m", "venv", str(folder))
    own = str(folder / "bin" / "python")
    run(own, "-m", "pip", "install", "--quiet", "--no-compile", f"torch=={torch or TORCH}")
    (site,) = folder.glob("lib/python*/site-packages")
    return site


def environment(python: str, folder: Path, packages: Path | None) -> str:
    """Make an empty environment that sees a folder of packages, and give its Python."""
    run(python, "-m", "venv", "--without-pip", str(folder))
    if packages:
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "torch.pth").write_text(f"{packages}\n")
        # Without it, pip may take another torch than the one that is to be tried.
        (folder / TRIED).write_text(f"torch=={version_of('torch', packages)}\n")
    return str(folder / "bin" / "python")


def version_of(name: str, packages: Path) -> str:
    """Which release of a library a folder of packages holds."""
    (found,) = packages.glob(f"{name}-*.dist-info")
    return found.name.removesuffix(".dist-info").partition("-")[2]


def install(python: str, own: str, *wheels: str) -> list[str]:
    """Install wheels, with what they declare, into an environment without pip; say what fails."""
    place = Path(own).parents[1]
    held = ("--constraint", str(place / TRIED)) if (place / TRIED).exists() else ()
    pip = (python, "-m", "pip", "--python", own, "install", "--quiet", "--no-compile", *held)
    return complaint(place, *pip, *wheels)


def wheel_of(name: str, out: Path) -> str:
    """Where a library's wheel lies."""
    return str(out / f"{stem_of(name, project_of(name))}-py3-none-any.whl")


def complaint(place: Path, *words: str) -> list[str]:
    """Run a command in a folder that holds nothing of ours; its last words where it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=place)
    return [(done.stdout + done.stderr).strip()[-800:]] if done.returncode else []


def run(*words: str) -> None:
    """Run a command quietly; what it printed is shown where it fails."""
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stdout}{done.stderr}")


def contents(wheel: Path) -> dict[str, int]:
    """Names and checksums of a wheel's files."""
    with ZipFile(wheel) as archive:
        return {each.filename: each.CRC for each in archive.infolist()}


def wrong_files(sdist: Path, wheel: Path, name: str) -> list[str]:
    """Say which files are missing, or do not belong."""
    module = name.replace("-", "_")
    shipped = set(contents(wheel))
    tree = ROOT / "packages" / name / "src"
    ours = {
        path.relative_to(tree).as_posix()
        for path in (tree / module).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with tarfile.open(sdist) as archive:
        packed = {each.name.partition("/")[2] for each in archive if each.isfile()}
        links = sorted(each.name for each in archive if not each.isfile())
    found = [f"the wheel lacks {path}" for path in sorted(ours - shipped)]
    strange = {path for path in shipped - ours if ".dist-info/" not in path}
    found += [f"the wheel holds {path}" for path in sorted(strange)]
    needed = ("README.md", "LICENSE", "pyproject.toml", f"src/{module}/py.typed")
    found += [f"the sdist lacks {path}" for path in needed if path not in packed]
    found += [f"the sdist lacks src/{path}" for path in sorted(ours) if f"src/{path}" not in packed]
    found += [f"{path} in the sdist is not a regular file" for path in links]
    licensed = any(path.endswith("/licenses/LICENSE") for path in shipped)
    return found if licensed else [*found, "the wheel lacks its licence"]


def wrong_metadata(
    wheel: Path, project: dict[str, object], address: str | None = None
) -> list[str]:
    """Say what the wheel's metadata lacks, or says otherwise than pyproject.toml."""
    with ZipFile(wheel) as archive:
        name = next(path for path in archive.namelist() if path.endswith(".dist-info/METADATA"))
        told = message_from_bytes(archive.read(name))
    found = []
    if told["Version"] != project["version"]:
        found.append(f"the wheel says version {told['Version']}")
    if told["License-Expression"] != "Apache-2.0":
        found.append(f"its licence is {told['License-Expression']}")
    if told["Description-Content-Type"] != "text/markdown":
        found.append("its README is not said to be Markdown")
    links = told.get_all("Project-URL") or []
    if [link.partition(", ")[2] for link in links] != ([address] if address else []):
        found.append(f"it names {links or 'no address'}, and the address given is {address}")
    classifiers = told.get_all("Classifier") or []
    wanted = [*(f"Programming Language :: Python :: {python}" for python in PYTHONS)]
    wanted += ["Typing :: Typed", "Operating System :: POSIX :: Linux"]
    found += [f"no classifier says {each}" for each in wanted if each not in classifiers]
    found += [
        f"it needs {need}, which has no lower bound"
        for need in told.get_all("Requires-Dist") or []
        if ">" not in need and "=" not in need.partition(";")[0]
    ]
    return found


if __name__ == "__main__":
    sys.exit(main())
