"""A vLLM server that this process starts, restarts after a failure, and stops at the end."""

import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from ms_align.errors import ServerError
from ms_align.files.durable import writing
from ms_align.rollouts.vllm.connection import Connection, ConnectionLostError
from ms_align.rollouts.vllm.options import VllmOptions
from ms_align.rollouts.vllm.server import POLL_S, Server
from ms_align.secret_text import without_secrets

# vLLM's engine is a child of its API server, and outlives it if that is killed. The guard puts both
# into one process group and kills the group when its standard input closes, which happens however
# this process ends.
GUARD = """
import os, signal, subprocess, sys, threading
def kill(): os.killpg(0, signal.SIGKILL)
threading.Thread(target=lambda: (sys.stdin.buffer.read(), kill()), daemon=True).start()
print("exit code", subprocess.call(sys.argv[1:], stdin=subprocess.DEVNULL), flush=True)
kill()
"""


class LocalServer(Server):
    """A server in its own process group, on a free port of this machine.

    Args:
        options: Python, arguments and time limits.
        vocabulary: vocabulary size of the policy; None skips the check of token ids.
        log_path: file to which the server's output is appended.
    """

    def __init__(self, options: VllmOptions, *, vocabulary: int | None, log_path: Path) -> None:
        super().__init__(
            Connection("http://127.0.0.1:0", key_variable="", timeout_s=options.timeout_s),
            name=options.model or "policy",
            vocabulary=vocabulary,
            max_restarts=options.restarts,
            start_timeout_s=options.start_timeout_s,
        )
        self.options = options
        self.log_path = log_path
        self._guard: subprocess.Popen[bytes] | None = None

    def load_weights(self, folder: Path, version: int) -> None:
        """Load weights from a folder; the first call starts the server with them.

        With `weight_update = "restart"`, every call does.
        """
        if self._guard is None or self.options.weight_update == "restart":
            self.stop()
            self.start(folder)
            self.connection.post("/update_weight_version", {"new_version": str(version)}, dict)
            self.newest = self.version = version
            return
        super().load_weights(folder, version)

    def start(self, model_folder: Path) -> None:
        """Start the server with the model in a folder and wait until it answers.

        Raises:
            ServerError: it ends, or does not answer within `start_timeout_s`.
        """
        self.model_folder = model_folder
        port = _free_port()
        self.connection.close()
        self.connection = Connection(
            f"http://127.0.0.1:{port}",
            key_variable=self.options.api_key_env,
            timeout_s=self.options.timeout_s,
        )
        command = [
            *(sys.executable, "-I", "-S", "-c", GUARD),
            *(str(self.options.python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model_folder.absolute()), "--served-model-name", str(self.name)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--enable-scale-out", "--skip-tokenizer-init"),
            # Log-probabilities at the sampling temperature rather than at temperature 1.
            *("--logprobs-mode", "processed_logprobs"),
            *(["--enable-return-routed-experts"] if self.routed_layers is not None else []),
            *self.options.arguments,
        ]
        with writing(self.log_path):
            self.log_path.parent.mkdir(parents=True, exist_ok=True)
            with self.log_path.open("ab") as log:
                self._guard = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=_environment(),
                    start_new_session=True,
                )
        deadline = time.monotonic() + self.options.start_timeout_s
        while True:
            with suppress(ConnectionLostError):
                self.open()
                return
            if self._closed:  # by another thread, after its last retry failed
                raise ServerError("the vLLM server was stopped while it started; rerun the command")
            if self._guard.poll() is not None:
                raise ServerError(
                    f"the vLLM server ended while it started ({self._last_line()}); see "
                    f"{self.log_path}, and correct vllm.python or vllm.arguments"
                )
            if time.monotonic() > deadline:
                self.stop()
                raise ServerError(
                    f"the vLLM server must start within {self.options.start_timeout_s:g} s and did "
                    f"not; see {self.log_path}, or raise vllm.start_timeout_s"
                )
            time.sleep(POLL_S)

    def recover(self) -> None:
        """Restart the server with its newest weights, unless it is healthy.

        Raises:
            ServerError: it does not start, or no restart is left.
        """
        with self._lock:  # several requests fail at once, and one restart is enough
            if self._guard is None or self.model_folder is None or self._is_healthy():
                return
            self._count_restart(f"{self._last_line()}, see {self.log_path}")
            self.stop()
            self.start(self.model_folder)
            if self.version is not None:
                body = {"new_version": str(self.version)}
                self.connection.post("/update_weight_version", body, dict)

    def close(self) -> None:
        """Abort the requests in progress and stop the server."""
        super().close()
        self.stop()

    def stop(self) -> None:
        """Kill the server and all its processes."""
        if self._guard is not None:
            assert self._guard.stdin is not None
            self._guard.stdin.close()  # the guard kills the group
            self._guard.wait()

    def _is_healthy(self) -> bool:
        return self._guard is not None and self._guard.poll() is None and super()._is_healthy()

    def _last_line(self) -> str:
        """Return the last error line of the server's output, or its last line."""
        with suppress(OSError):
            lines = self.log_path.read_bytes()[-8192:].decode(errors="replace").splitlines()
            texts = [line.strip() for line in lines if line.strip()]
            messages = [text for text in texts if "Error" in text] or texts
            if messages:
                return without_secrets(messages[-1])[:200]
        return "no output"


def _environment() -> dict[str, str]:
    """Return the environment of the server, without the packages of this process's Python."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # Weight updates are among vLLM's development endpoints.
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return {**environment, **settings}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
