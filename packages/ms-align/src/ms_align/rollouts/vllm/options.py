"""Settings of vLLM servers. This module does not import torch, so that run files check quickly."""

import os
import re
import shutil
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from attrs import Attribute, field, frozen

from ms_align.errors import ConfigError
from ms_align.settings import as_path, flag, integer, number, one_of, short_repr, text, valid_path
from ms_align.settings.run_file import table_of
from ms_align.used_settings import UsedIf, check_used


def check_url(name: str, url: object) -> None:
    """Check that a setting is the address of a server, without a path or a password.

    Raises:
        ConfigError: it is something else.
    """
    try:
        parts = urlsplit(url if isinstance(url, str) else "")
        valid = parts.scheme in ("http", "https") and bool(parts.hostname)
        valid = valid and (parts.port is None or parts.port > 0)
    except ValueError:  # an invalid port
        valid = False
    if not valid:
        raise ConfigError(
            f"{name} must be an address such as 'http://localhost:8000', got {short_repr(url)}; "
            "correct it"
        )
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigError(
            f"{name} must not contain a user, password or query, as it is shown in messages; put "
            "the server's key into an environment variable and name it in vllm.api_key_env"
        )
    if parts.path.rstrip("/"):
        raise ConfigError(
            f"{name} must end after the port, got {url!r}; remove the path {parts.path!r}"
        )


def _url(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    if value is not None:
        check_url("vllm.url", value)


def _urls(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    if not isinstance(value, tuple):
        raise ConfigError(
            f"vllm.urls must be a list of addresses, got {short_repr(value)}; use vllm.url for one"
        )
    for url in value:
        check_url("vllm.urls", url)
    if len(set(value)) < len(value):
        raise ConfigError(f"vllm.urls must be different servers, got {list(value)}; remove one")


def _python(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    valid_path(optional=True)(instance, attribute, value)
    if value is not None and shutil.which(os.fspath(value)) is None:  # type: ignore[call-overload]
        raise ConfigError(
            f"vllm.python must be the Python of an environment with vLLM, and {str(value)!r} is "
            "not executable; correct the path"
        )


def _arguments(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(
            f"vllm.arguments must be a list of strings such as ['--dtype', 'float32'], got "
            f"{short_repr(value)}; correct it"
        )


def _variable(instance: object, attribute: "Attribute[Any]", value: object) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", value):
        # The value is not repeated, as it may be the key itself.
        raise ConfigError(
            "vllm.api_key_env must be the name of an environment variable; put the key into a "
            "variable and name it here"
        )


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@frozen(kw_only=True)
class VllmOptions:
    """Servers and weight updates."""

    url: str | None = field(default=None, validator=_url)
    """Address of a running server, such as `http://localhost:8000`."""
    urls: tuple[str, ...] = field(default=(), converter=_as_tuple, validator=_urls)
    """Addresses of several running servers; prompts are spread evenly over them."""
    python: Path | None = field(default=None, converter=as_path, validator=_python)
    """Python of an environment with vLLM. The run starts a server on this machine with it, restarts
    the server if it fails, up to `max_restarts` times, and stops it at the end."""
    arguments: tuple[str, ...] = field(default=(), converter=_as_tuple, validator=_arguments)
    """Additional arguments of the started server, such as `["--dtype", "float32"]`."""
    model: str | None = field(default=None, validator=text(optional=True))
    """Name under which the servers offer the model. Default: the only model that they offer."""
    weight_update: Literal["folder", "restart"] = field(
        default="folder", validator=one_of("folder", "restart")
    )
    """Transfer of new weights, which are saved where the servers can read them: `folder` loads them
    into the running servers; `restart` starts the server of `python` again with them, for models
    that vLLM does not reload completely."""
    in_flight_weight_updates: bool = field(default=False, validator=flag)
    """With max_staleness above 0, load new weights while responses are in progress, which continue
    with the new weights. Default: wait for responses in progress."""
    weights_dir: Path | None = field(
        default=None, converter=as_path, validator=valid_path(optional=True, written="folder")
    )
    """Folder for new weights, under the same path on every server. Default: `vllm` in
    `output_dir`."""
    timeout_s: float = field(default=600.0, validator=number(minimum=0.1, maximum=1e6))
    """Time limit of a request."""
    start_timeout_s: float = field(default=600.0, validator=number(minimum=0.1, maximum=1e6))
    """Time limit for starting a server, and for waiting until a failed one is back."""
    max_restarts: int | None = field(
        default=None, validator=integer(minimum=0, maximum=10**6, optional=True)
    )
    """Restarts of a failed server per run. A server that the run started is started again; for a
    running one, the run waits up to `start_timeout_s` until it is back, and loads the newest
    weights again. Default: 10 with `python`, otherwise 0."""
    retries: int = field(default=5, validator=integer(minimum=0, maximum=100))
    """Number of retries of a request whose connection failed; the wait doubles each time."""
    retry_wait_s: float = field(default=1.0, validator=number(maximum=3600.0))
    """Wait before the first retry."""
    api_key_env: str = field(default="VLLM_API_KEY", validator=_variable)
    """Environment variable with the servers' API key, if they need one."""

    def __attrs_post_init__(self) -> None:
        sources = [name for name in ("url", "urls", "python") if getattr(self, name)]
        if len(sources) != 1:
            raise ConfigError(
                "vllm needs exactly one of url, urls and python, got "
                f"{' and '.join(sources) or 'none'}; set `url` for a running server or `python` to "
                "start one"
            )
        rule = UsedIf(
            "start_timeout_s",
            "with vllm.python or vllm.max_restarts",
            lambda vllm: vllm.python or vllm.max_restarts,
        )
        check_used(self, (rule,), error=ConfigError, prefix="vllm.")
        if self.arguments and not self.python:
            raise ConfigError(
                "vllm.arguments are for a server that is started with vllm.python; remove them, "
                "and pass them where you start the server"
            )

        if self.weight_update == "restart" and not self.python:
            raise ConfigError(
                "vllm.weight_update = 'restart' needs a server that the run starts; set vllm.python"
                " or weight_update = 'folder'"
            )
        if self.weight_update == "restart" and self.in_flight_weight_updates:
            raise ConfigError(
                "vllm.in_flight_weight_updates needs weight_update = 'folder', as a restart ends "
                "the responses in progress; remove one"
            )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses of the running servers; empty for a server that is started here."""
        return (self.url,) if self.url else self.urls

    @property
    def restarts(self) -> int:
        """Permitted restarts of each server."""
        if self.max_restarts is not None:
            return self.max_restarts
        return 10 if self.python is not None else 0


def vllm_options(value: Any) -> VllmOptions | None:
    """Convert a `vllm` setting: options, a table of them, or None.

    Raises:
        ConfigError: the value has another type.
    """
    return None if value is None else table_of(VllmOptions, "vllm")(value)


def check_generator(instance: Any, attribute: "Attribute[Any]", value: VllmOptions | None) -> None:
    """Check that `vllm` is set if and only if `generator` is "vllm".

    Raises:
        ConfigError: one is set without the other.
    """
    if instance.generator == "vllm" and value is None:
        raise ConfigError(
            "generator = 'vllm' needs the address of a server; set vllm.url, or vllm.python to "
            "start one"
        )
    runs_ahead = getattr(instance, "max_staleness", 0) > 0
    if value is not None and value.in_flight_weight_updates and not runs_ahead:
        raise ConfigError(
            "vllm.in_flight_weight_updates needs max_staleness of at least 1, as no response is in "
            "progress otherwise; set max_staleness or remove it"
        )
    if instance.generator != "vllm" and value is not None:
        raise ConfigError(
            f"vllm is set and generator is {short_repr(instance.generator)}; set generator = "
            "'vllm', or remove vllm"
        )
