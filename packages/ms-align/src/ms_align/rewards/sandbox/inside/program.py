"""Roles of sandboxed processes: run a program, serve a response, or run its tests."""

import ast
import builtins
import importlib
import linecache
import os
import sys
import traceback
from types import ModuleType
from typing import Any

from .peer import Peer, PeerExited

PROGRAM, READING, WRITING, VERDICT = 3, 4, 5, 6
"""File descriptors: program text, messages to read, messages to write, verdict."""
END = 4
"""File descriptor on which a program without tests reports its completion."""
PASSED, RESPONSE_GONE = b"passed", b"gone"


def run_program() -> None:
    """Run the program and report completion. The program could do so itself; see `run_python`."""
    code = compile(_text(), "<program>", "exec")
    exec(code, _main_module().__dict__)
    os.write(END, PASSED)


def offer_response() -> None:
    """Run the response, then serve the requests of its tests."""
    peer = Peer(os.fdopen(READING, "rb"), os.fdopen(WRITING, "wb"), only_calls=False)
    names = _main_module().__dict__
    code = compile(_text(), "<response>", "exec")
    exec(code, names)
    peer.offer(names)
    peer.serve()


def run_tests() -> None:
    """Run the tests against a response in another process, and write the verdict.

    Names that are used in the tests and not defined in Python are requested from the response;
    built-in names are never taken from it.
    """
    source = _text()
    tree = ast.parse(source, "<tests>")
    names = _main_module().__dict__
    peer = Peer(os.fdopen(READING, "rb"), os.fdopen(WRITING, "wb"), only_calls=True)
    names_needed, modules = names_used(tree)
    for name in modules:
        names[name] = importlib.import_module(name)
    code = compile(tree, "<tests>", "exec")
    # Lets tracebacks show the lines of the tests.
    linecache.cache["<tests>"] = (len(source), None, source.splitlines(True), "<tests>")
    try:
        # The response runs to its end before it answers; if it fails, this raises PeerExited.
        provided = peer.ask("names", names_needed)
        names.update({name: provided[name] for name in names_needed if name in provided})
        exec(code, names)
    except PeerExited:
        os.write(VERDICT, RESPONSE_GONE)
        raise
    os.write(VERDICT, PASSED)


ROLES = {"program": run_program, "response": offer_response, "tests": run_tests}


def names_used(tree: ast.AST) -> tuple[list[str], list[str]]:
    """List the undefined names that a program uses, and the standard modules that it uses.

    `math.isclose` is the standard library's, even if the tests rely on the response's import.
    """
    names, owners, assigned = set(), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
            if isinstance(node.ctx, ast.Store):
                assigned.add(node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owners.add(node.value.id)
    # A variable of the tests may have the name of a module.
    modules = (owners & sys.stdlib_module_names) - assigned
    builtin_names = {name for name in names if hasattr(builtins, name) or name.startswith("__")}
    return sorted(names - builtin_names - modules), sorted(modules)


def _text() -> str:
    with os.fdopen(PROGRAM, "rb") as file:
        return file.read().decode()


def _main_module() -> ModuleType:
    module = ModuleType("__main__")
    sys.modules["__main__"] = module
    return module


def perform(role: str) -> int:
    """Run a role and return the exit code as the interpreter would."""
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
        return (code or 0) & 0xFF  # the kernel passes on 8 bits
    sys.stderr.write(f"{code}\n")
    return 1
