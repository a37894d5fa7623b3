"""Error classes declare their exit code, so packages need not import each other's errors."""

from importlib import import_module
from inspect import getmembers, isclass

import pytest

from packages import PACKAGES, module_of

BASES = {
    "ms-align": "AlignError",
    "ms-compress": "CompressError",
    "ms-data": "DataError",
    "ms-kernels": "KernelError",
    "ms-parallel": "ParallelError",
    "ms-profile": "ProfileError",
}


class ExitedError(Exception):
    """Like torch's error for a failed process: `exit_code` is that process's exit code."""

    __slots__ = ("exit_code",)

    def __init__(self, exit_code: int) -> None:
        super().__init__(f"process 1 ended with exit code {exit_code}")
        self.exit_code = exit_code


def exit_code_of(package: str, error: Exception) -> int:
    """Exit code of a command of `package` that raises `error`."""

    def run() -> int:
        raise error

    return int(import_module(f"{module_of(package)}.entry").perform("command", run))


@pytest.mark.parametrize("owner", PACKAGES)
@pytest.mark.parametrize("package", PACKAGES)
def test_a_siblings_error_is_one_line_and_exit_code_2(
    package: str, owner: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Commands of every package report the declared errors of all packages."""
    base = getattr(import_module(module_of(owner)), BASES[owner])
    assert exit_code_of(package, base("rows is -1;\ngive 1 or more")) == 2
    assert capsys.readouterr().err == "command: rows is -1; give 1 or more\n"


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("error", [ValueError("a bug"), ExitedError(3)])
def test_an_error_that_declares_no_exit_code_keeps_its_traceback(
    package: str, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bugs are not disguised as bad input; another process's exit code is not the command's."""
    with pytest.raises(type(error)):
        exit_code_of(package, error)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("package", PACKAGES)
def test_every_error_of_a_package_declares_its_exit_code(package: str) -> None:
    """2 for errors that the user can fix (most), 1 for a failed run."""
    errors = import_module(f"{module_of(package)}.errors")
    base = getattr(errors, BASES[package])
    codes = {
        name: error.exit_code
        for name, error in getmembers(errors, isclass)
        if issubclass(error, base)
    }
    assert codes[BASES[package]] == 2
    assert set(codes.values()) <= {1, 2}
