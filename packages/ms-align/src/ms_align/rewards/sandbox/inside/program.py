"""What a sandboxed process does: run a program, offer a response's names, or run its tests."""

import ast
import builtins
import importlib
import linecache
import os
import sys
import traceback
from types import ModuleType
from typing import Any

from .peer import Gone, Peer

PROGRAM, READING, WRITING, VERDICT = 3, 4, 5, 6
"""Descriptors: the program's text, what the other side says, what is said to it, the verdict."""
END = 4
"""Where a program that has no other side says that it came to its end."""
PASSED, RESPONSE_GONE = b"passed", b"gone"


def run_program() -> None:
    """Run the program to its end, and say so. It could say so itself: this is no verdict."""
    code = compile(_text(), "<program>", "exec")
    exec(code, _main_module().__dict__)
    os.write(END, PASSED)


def offer_response() -> None:
    """Run the response's program, then do what the tests ask of its names."""
    peer = Peer(os.fdopen(READING, "rb"), os.fdopen(WRITING, "wb"), only_calls=False)
    names = _main_module().__dict__
    code = compile(_text(), "<response>", "exec")
    exec(code, names)
    peer.offer(names)
    peer.serve()


def run_tests() -> None:
    """Run the tests on a response that is elsewhere, and give the verdict.

    The names that the tests use and do not find in Python are asked of the response; a name of
    Python's own is never taken from it.
    """
    source = _text()
    tree = ast.parse(source, "<tests>")
    names = _main_module().__dict__
    peer = Peer(os.fdopen(READING, "rb"), os.fdopen(WRITING, "wb"), only_calls=True)
    wanted, modules = names_used(tree)
    for name in modules:
        names[name] = importlib.import_module(name)
    code = compile(tree, "<tests>", "exec")
    linecache.cache["<tests>"] = (len(source), None, source.splitlines(True), "<tests>")
    try:
        given = peer.ask("names", wanted)
        names.update({name: given[name] for name in wanted if name in given})
        exec(code, names)
    except Gone:
        os.write(VERDICT, RESPONSE_GONE)
        raise
    os.write(VERDICT, PASSED)


ROLES = {"program": run_program, "response": offer_response, "tests": run_tests}


def names_used(tree: ast.AST) -> tuple[list[str], list[str]]:
    """List the names that a program reads and Python lacks, and the modules of Python's it reads.

    `math.isclose` is Python's, even where the tests leave the import to the response.
    """
    names, owners, made_here = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
            if isinstance(node.ctx, ast.Store):
                made_here.add(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owners.add(node.value.id)
    modules = (owners & sys.stdlib_module_names) - made_here
    own = {name for name in names if hasattr(builtins, name) or name.startswith("__")}
    return sorted(names - own - modules), sorted(modules)


def _text() -> str:
    with os.fdopen(PROGRAM, "rb") as file:
        return file.read().decode()


def _main_module() -> ModuleType:
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    return module


def perform(role: str) -> int:
    """Play a role; return the exit code, as an interpreter of its own would."""
    try:
        ROLES[role]()
    except SystemExit as end:
        return _exit_code(end)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _exit_code(end: SystemExit) -> int:
    code: Any = end.code
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1
