"""Optional packages of a run, imported on demand."""

from types import ModuleType

from ms_parallel.errors import ConfigError
from ms_parallel.operators.protocol import Ops


def data_package() -> ModuleType:
    """Import the package ms_data.

    Raises:
        ConfigError: it is not installed; names the extra.
    """
    try:
        import ms_data
    except ImportError as error:
        raise ConfigError(
            "training on a dataset needs ms-data; install it: pip install 'ms-parallel[data]'"
        ) from error
    return ms_data


def operators_of(name: str) -> Ops | None:
    """Import an operator set by name; None for plain torch.

    Raises:
        ConfigError: they are not installed; names the extra.
    """
    if name == "torch":
        return None
    try:
        import ms_kernels
    except ImportError as error:
        raise ConfigError(
            "ops='ms_kernels' needs ms-kernels; install it: pip install 'ms-parallel[kernels]'"
        ) from error
    return ms_kernels
