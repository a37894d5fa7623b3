"""Build the sdists and wheels of all six libraries and check them as a package index would.

    python tools/release.py --out dist      # needs build, hatchling and twine; see `nox -s release`
    python tools/release.py --out dist --try-with python3.11:2.11.0 --try-with python3.13:2.15.0
    python tools/release.py --out dist --address https://example.org/ms

Each library's sdist is built from the tree and its wheel from that sdist; a wheel built directly
from the tree must have identical contents. Then files, metadata and README are checked.
`--try-with` takes a Python and a torch version (optional if that Python has torch): it installs
each wheel alone and runs the library's isolation check, then installs all wheels together, imports
every public name and runs `--help` of every command. The repository does not contain its public
address, so the metadata has one only with `--address`. Exit code 0 if everything is in order, 1
with one line per problem.
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
"""Default torch version for `--try-with`."""
TORCH_FREE = {"ms-data", "ms-profile"}
CONSTRAINTS = "torch.txt"
"""Constraints file of a test environment; it pins the torch version."""


def main() -> int:
    """Build and check the libraries."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python tools/release.py --out dist ms-data",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="output folder for sdists and wheels"
    )
    parser.add_argument("packages", nargs="*", help="libraries; default: all")
    parser.add_argument("--try-with", action="append", default=[], metavar="PYTHON[:TORCH]")
    parser.add_argument(
        "--address", type=web_address, help="URL of the repository for the metadata; default: none"
    )
    options = parser.parse_args()
    available = sorted(path.name for path in (ROOT / "packages").iterdir())
    names = options.packages or available
    if unknown := sorted({*names} - {*available}):
        parser.error(f"no library {unknown[0]!r}; the libraries are {', '.join(available)}")
    out: Path = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    problems: list[str] = []
    for name in names:
        package_problems = check(name, out, options.address)
        problems += [f"{name}: {line}" for line in package_problems]
        sys.stdout.write(
            f"{name}: {len(package_problems)} problems\n"
            if package_problems
            else f"{name}: ready\n"
        )
    for pair in options.try_with:
        package_problems = try_with(pair, out, names)
        problems += [f"{pair}: {line}" for line in package_problems]
        sys.stdout.write(f"{pair}: {'failed' if package_problems else 'passed'}\n")
    for line in problems:
        sys.stderr.write(f"{line}\n")
    return 1 if problems else 0


def web_address(text: str) -> str:
    """Parse a URL for the metadata."""
    parts = urlsplit(text)
    if parts.scheme != "https" or not parts.netloc or not text.isascii() or set(text) & set(' "\\'):
        raise argparse.ArgumentTypeError(f"{text!r} is not an https URL such as https://host/path")
    return text.rstrip("/")


def check(name: str, out: Path, address: str | None = None) -> list[str]:
    """Build a library's sdist and wheel into a folder and return the problems."""
    project = read_project(name)
    stem = file_stem(name, project)
    for path in out.glob(f"{stem}[-.]*"):
        path.unlink()
    sdist, wheel = out / f"{stem}.tar.gz", out / f"{stem}-py3-none-any.whl"
    with tempfile.TemporaryDirectory() as folder:
        source = copy_source(name, address, Path(folder) / name)
        # --no-isolation: build with the installed hatchling, so that the checks cover its version.
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source))
        build = ("-m", "build", "--no-isolation", "--wheel", "--outdir", folder, str(source))
        run(sys.executable, *build)
        reproducible = contents(wheel) == contents(Path(folder) / wheel.name)
    problems = [] if reproducible else ["the wheels built from the sdist and from the tree differ"]
    problems += file_problems(sdist, wheel, name) + metadata_problems(wheel, project, address)
    twine = subprocess.run(
        [sys.executable, "-m", "twine", "check", "--strict", str(sdist), str(wheel)],
        capture_output=True,
        text=True,
        check=False,
    )
    return problems + ([f"twine: {twine.stdout.strip()}"] if twine.returncode else [])


def copy_source(name: str, address: str | None, copy: Path) -> Path:
    """Copy a library's folder to build from.

    The copy's README has no relative links, which an index cannot follow, and its metadata has the
    repository's address if one is given.
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
    """Make the relative links of a README absolute, or plain text without an address.

    Without an address, images with relative links are removed.
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


def read_project(name: str) -> dict[str, object]:
    """Project table of a library's pyproject.toml."""
    text = (ROOT / "packages" / name / "pyproject.toml").read_text()
    project: dict[str, object] = tomllib.loads(text)["project"]
    return project


def file_stem(name: str, project: dict[str, object]) -> str:
    """Common stem of the names of a library's sdist and wheel."""
    return f"{name.replace('-', '_')}-{project['version']}"


def try_with(pair: str, out: Path, names: list[str]) -> list[str]:
    """Install the wheels, each alone and all together, and return the failures."""
    python, _, torch = pair.partition(":")
    failures: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder)
        packages = torch_packages(python, torch, workdir / "torch")
        for name in names:
            env_python = create_environment(
                python, workdir / name, None if name in TORCH_FREE else packages
            )
            arguments = ("-I", str(ROOT / "packages" / name / "tests" / "alone.py"))
            errors = install(python, env_python, wheel_path(name, out)) or failure_output(
                workdir, env_python, *arguments
            )
            failures += [f"{name} alone: {line}" for line in errors]
        env_python = create_environment(python, workdir / "together", packages)
        errors = install(python, env_python, *(wheel_path(name, out) for name in names))
        failures += [f"together: {line}" for line in errors]
        for module in (name.replace("-", "_") for name in names if not errors):
            code = f"import {module} as m; [getattr(m, name) for name in m.__all__]"
            for arguments in (("-I", "-c", code), ("-I", "-m", module, "--help")):
                failures += [
                    f"{' '.join(arguments[1:])}: {line}"
                    for line in failure_output(workdir, env_python, *arguments)
                ]
    return failures


def torch_packages(python: str, torch: str, folder: Path) -> Path:
    """Return site-packages with torch: of the interpreter, or of a new environment."""
    code = "import torch, pathlib; print(pathlib.Path(torch.__file__).parents[1])"
    result = subprocess.run((python, "-c", code), capture_output=True, text=True, check=False)
    if result.returncode == 0 and not torch:
        return Path(result.stdout.strip())
    run(python, "-m", "venv", str(folder))
    env_python = str(folder / "bin" / "python")
    run(env_python, "-m", "pip", "install", "--quiet", "--no-compile", f"torch=={torch or TORCH}")
    (site,) = folder.glob("lib/python*/site-packages")
    return site


def create_environment(python: str, folder: Path, packages: Path | None) -> str:
    """Make an empty environment without pip that can import `packages`; return its interpreter."""
    run(python, "-m", "venv", "--without-pip", str(folder))
    if packages:
        (site,) = folder.glob("lib/python*/site-packages")
        (site / "torch.pth").write_text(f"{packages}\n")
        # Keeps pip from installing a different torch.
        (folder / CONSTRAINTS).write_text(f"torch=={installed_version('torch', packages)}\n")
    return str(folder / "bin" / "python")


def installed_version(name: str, packages: Path) -> str:
    """Version of a library in a site-packages folder."""
    (metadata,) = packages.glob(f"{name}-*.dist-info")
    return metadata.name.removesuffix(".dist-info").partition("-")[2]


def install(python: str, env_python: str, *wheels: str) -> list[str]:
    """Install wheels and their dependencies into an environment without pip; return failures."""
    env_folder = Path(env_python).parents[1]
    constraint = (
        ("--constraint", str(env_folder / CONSTRAINTS))
        if (env_folder / CONSTRAINTS).exists()
        else ()
    )
    pip = (
        python,
        "-m",
        "pip",
        "--python",
        env_python,
        "install",
        "--quiet",
        "--no-compile",
        *constraint,
    )
    return failure_output(env_folder, *pip, *wheels)


def wheel_path(name: str, out: Path) -> str:
    """Path of a library's wheel."""
    return str(out / f"{file_stem(name, read_project(name))}-py3-none-any.whl")


def failure_output(workdir: Path, *command: str) -> list[str]:
    """Run a command in `workdir`, outside the repository; return its last output if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=workdir)
    return [(result.stdout + result.stderr).strip()[-800:]] if result.returncode else []


def run(*command: str) -> None:
    """Run a command quietly; exit with its output if it fails."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        sys.exit(f"{' '.join(command)}\n{result.stdout}{result.stderr}")


def contents(wheel: Path) -> dict[str, int]:
    """Map the names of a wheel's files to their CRC-32."""
    with ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def file_problems(sdist: Path, wheel: Path, name: str) -> list[str]:
    """List missing and unexpected files of an sdist and a wheel."""
    module = name.replace("-", "_")
    shipped = set(contents(wheel))
    tree = ROOT / "packages" / name / "src"
    expected = {
        path.relative_to(tree).as_posix()
        for path in (tree / module).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with tarfile.open(sdist) as archive:
        packed = {member.name.partition("/")[2] for member in archive if member.isfile()}
        links = sorted(member.name for member in archive if not member.isfile())
    problems = [f"the wheel lacks {path}" for path in sorted(expected - shipped)]
    unexpected = {path for path in shipped - expected if ".dist-info/" not in path}
    problems += [f"the wheel holds {path}" for path in sorted(unexpected)]
    required = ("README.md", "LICENSE", "pyproject.toml", f"src/{module}/py.typed")
    problems += [f"the sdist lacks {path}" for path in required if path not in packed]
    problems += [
        f"the sdist lacks src/{path}" for path in sorted(expected) if f"src/{path}" not in packed
    ]
    problems += [f"{path} in the sdist is not a regular file" for path in links]
    licensed = any(path.endswith("/licenses/LICENSE") for path in shipped)
    return problems if licensed else [*problems, "the wheel lacks its license"]


def metadata_problems(
    wheel: Path, project: dict[str, object], address: str | None = None
) -> list[str]:
    """List metadata of a wheel that is missing or disagrees with pyproject.toml."""
    with ZipFile(wheel) as archive:
        name = next(path for path in archive.namelist() if path.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    problems = []
    if metadata["Version"] != project["version"]:
        problems.append(f"the wheel says version {metadata['Version']}")
    if metadata["License-Expression"] != "Apache-2.0":
        problems.append(f"its license is {metadata['License-Expression']}")
    if metadata["Description-Content-Type"] != "text/markdown":
        problems.append("its README is not declared as Markdown")
    links = metadata.get_all("Project-URL") or []
    if [link.partition(", ")[2] for link in links] != ([address] if address else []):
        problems.append(f"it has {links or 'no address'}, but the expected address is {address}")
    classifiers = metadata.get_all("Classifier") or []
    expected = [*(f"Programming Language :: Python :: {python}" for python in PYTHONS)]
    expected += ["Typing :: Typed", "Operating System :: POSIX :: Linux"]
    problems += [
        f"the classifier {classifier} is missing"
        for classifier in expected
        if classifier not in classifiers
    ]
    problems += [
        f"its requirement {requirement} has no lower bound"
        for requirement in metadata.get_all("Requires-Dist") or []
        if ">" not in requirement and "=" not in requirement.partition(";")[0]
    ]
    return problems


if __name__ == "__main__":
    sys.exit(main())
