"""Runs tools and environments: a small process that forks one child per environment.

Tools and environments are trusted code called with untrusted arguments, so they may hang, raise,
crash, use too much memory or return too much. Memory and output are limited here; the client kills
a child that exceeds the time limit. The file is run by path and imports only the tools' modules,
not its own package, so that a fork takes a millisecond.

Standard input is a control socket. `+` with a file descriptor starts a child that serves requests
on that descriptor; `-` with a child's process id kills the child and its descendants.
Requests and replies of children are JSON with an 8-byte little-endian length prefix.
"""

import contextlib
import importlib
import importlib.util
import inspect
import json
import os
import random
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from typing import Any

COMMAND = struct.Struct("<ci")
PREFIX_BYTES = 8
MESSAGE_CHARACTERS = 300
FILE = "file "
"""Prefix of a module that is a script, run as `__main__` by the client."""


class RefusedError(Exception):
    """A request that cannot be served, with a message for the model."""


def load(target: str) -> Any:
    """Import `module:name`, where the module may be `file PATH`."""
    module_name, _, name = target.rpartition(":")
    if module_name.startswith(FILE):
        path = module_name.removeprefix(FILE)
        module = sys.modules.get("__script__")
        if module is None:
            spec = importlib.util.spec_from_file_location("__script__", path)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules["__script__"] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    else:
        module = importlib.import_module(module_name)
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value


def name_of(target: str) -> str:
    """Return the name by which the model calls a tool."""
    return target.rpartition(":")[2].rpartition(".")[2]


class Child:
    """Request handler of a child process: all tools and one environment."""

    def __init__(self, tools: Mapping[str, Callable[..., Any]], environment: Any) -> None:
        self.tools = tools
        self.environment_class = environment
        self.environment: Any = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Serve a request: `call` a tool, `reset` or `step` the environment, or run an `agent`."""
        # So that tools with random numbers give the same results in a resumed run.
        random.seed(request["seed"])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(request["seed"] % 2**32)
        if request["do"] == "call":
            return {"text": self._call(request["name"], request["arguments"])}
        if request["do"] == "agent":
            agent = self.environment_class
            reward = agent(request["row"], base_url=request["base_url"], api_key=request["api_key"])
            return {"text": None, "reward": None if reward is None else float(reward)}
        if request["do"] == "reset":
            self.environment = self.environment_class()
            observation = self.environment.reset(request["row"], seed=request["seed"])
            return {"text": None if observation is None else as_text(observation)}
        observation, reward, done = self.environment.step(request["response"])
        return {
            "text": None if observation is None else as_text(observation),
            "reward": float(reward),
            "done": bool(done),
        }

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        tool = self.tools.get(name)
        if tool is None:
            raise RefusedError(f"no tool {name[:50]!r}; use {', '.join(self.tools)}")
        try:
            bound = inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            raise RefusedError(f"{name}: {error}") from error
        for key, value in bound.arguments.items():
            check_type(name, key, value, inspect.signature(tool).parameters[key].annotation)
        return as_text(tool(**arguments))


def check_type(tool: str, name: str, value: Any, annotation: Any) -> None:
    """Check an argument annotated as int, float, str, bool, list or dict."""
    types: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,)}
    types |= {"bool": (bool,), "list": (list,), "dict": (dict,)}
    expected = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    if expected not in types:
        return
    is_number_for_bool = isinstance(value, bool) and expected in ("int", "float")
    if is_number_for_bool or not isinstance(value, types[expected]):
        raise RefusedError(f"{tool}: {name} must be {expected}, got {type(value).__name__}")


def as_text(result: Any) -> str:
    """Return a result as text: strings unchanged, other values as JSON."""
    text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()  # tokenizers reject lone surrogates


def describe(error: BaseException) -> str:
    """Describe an exception in one short line."""
    text = " ".join(str(error).split())[:MESSAGE_CHARACTERS]
    if isinstance(error, RefusedError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def serve(connection: socket.socket, child: Child, *, memory_bytes: int, output_bytes: int) -> None:
    """Answer requests until the client closes the connection."""
    # The limit is on memory on top of the imported modules.
    with open("/proc/self/statm", "rb") as statm:
        used_bytes = int(statm.read().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + memory_bytes, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    file = connection.makefile("rwb")
    while prefix := file.read(PREFIX_BYTES):
        request = json.loads(file.read(int.from_bytes(prefix, "little")))
        try:
            reply = json.dumps(child.answer(request)).encode()
            # Checked after serialization, which is itself within the memory limit.
            if len(reply) > output_bytes:
                raise RefusedError(f"the result exceeds {output_bytes >> 10} KiB")
        except MemoryError:
            reply = json.dumps({"error": f"needs more than {memory_bytes >> 20} MiB"}).encode()
        except BaseException as error:  # tools may raise anything, SystemExit too
            reply = json.dumps({"error": describe(error)}).encode()
        file.write(len(reply).to_bytes(PREFIX_BYTES, "little") + reply)
        file.flush()


def main() -> None:
    """Import the tools, then start and kill children until the client exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client gets it too, and closes the socket
    settings = json.loads(sys.argv[1])
    sys.path[:] = settings["path"]
    control = socket.socket(fileno=os.dup(0))
    # Tools must not read commands from standard input.
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)  # a tool's print must not mix with the output of the run
    try:
        tools = {name_of(target): load(target) for target in settings["tools"]}
        environment = load(settings["environment"]) if settings["environment"] else None
    except BaseException as error:  # importing a module may raise anything
        control.sendall(json.dumps({"error": describe(error)}).encode() + b"\n")
        return
    control.sendall(b"{}\n")
    os.dup2(nothing, 2)
    children: set[int] = set()
    while True:
        command, descriptors, _, _ = socket.recv_fds(control, COMMAND.size, 1)
        if len(command) < COMMAND.size:
            break
        action, pid = COMMAND.unpack(command)
        if action == b"-":
            kill(pid, children)
            continue
        # Single-threaded here, so a fork is safe.
        pid = os.fork()
        if pid == 0:
            os.setsid()  # so that descendants are killed too
            control.close()
            with socket.socket(fileno=descriptors[0]) as connection:
                serve(
                    connection,
                    Child(tools, environment),
                    memory_bytes=settings["memory_bytes"],
                    output_bytes=settings["output_bytes"],
                )
            os._exit(0)
        os.close(descriptors[0])
        children.add(pid)
        control.sendall(COMMAND.pack(b"+", pid))
    for pid in list(children):
        kill(pid, children)


def kill(pid: int, children: set[int]) -> None:
    """Kill a child and its process group, and reap it."""
    if pid not in children:
        return
    children.discard(pid)
    for send in (os.killpg, os.kill):  # the child may not have made its group yet
        with contextlib.suppress(ProcessLookupError, PermissionError):
            send(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
