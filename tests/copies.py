"""Copy the code that several packages need, and no package may share, from its one source.

`python tests/copies.py` writes the copies; `tests/test_copies.py` holds them equal to the source.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "shared_source"
COPIES = {
    "chat/process.py": ("align", "data"),
    "chat/worker.py": ("align", "data"),
    "events.py": ("align", "parallel"),
    "files/durable.py": ("align", "compress", "data", "parallel"),
    "entry.py": ("align", "compress", "data", "kernels", "parallel", "profile"),
    "files/model_name.py": ("align", "compress", "parallel"),
    "files/run_folder.py": ("align", "compress", "parallel"),
    "files/safetensors_file.py": ("compress", "parallel"),
    "files/tokenizer_source.py": ("align", "compress", "parallel"),
    "files/untrusted.py": ("align", "compress", "data", "kernels", "parallel", "profile"),
    "interruption.py": ("align", "parallel"),
    "progress.py": ("align", "parallel"),
    "secret_text.py": ("align", "compress", "data", "kernels", "parallel", "profile"),
    "settings/__init__.py": ("align", "compress", "data", "parallel"),
    "settings/keys.py": ("align", "compress", "data", "parallel"),
    "settings/run_file.py": ("align", "compress", "data", "parallel"),
    "settings/template.py": ("align", "compress", "data", "parallel"),
    "settings/validators.py": ("align", "compress", "data", "parallel"),
    "tests/nursery.py": ("align", "compress", "parallel", "profile"),
    "tests/processes.py": ("align", "compress", "parallel", "profile"),
}
"""Which packages hold a copy of each source; rooms are those of shared_source/, and
`tests` is a package's own."""

HEAD = "# A copy of shared_source/{name}, made by `nox -s copies`; change it there.\n"


def wanted() -> dict[Path, str]:
    """Give each copy's path and what it must hold."""
    copies = {}
    for name, packages in COPIES.items():
        text = HEAD.format(name=name) + (SOURCE / name).read_text()
        for package in packages:
            folder = ROOT / "packages" / f"ms-{package}"
            if not name.startswith("tests/"):
                folder = folder / "src" / f"ms_{package}"
            copies[folder / name] = text
    return copies


def main() -> int:
    """Write every copy that differs."""
    for path, text in wanted().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
