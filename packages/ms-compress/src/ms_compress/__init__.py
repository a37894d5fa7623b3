"""Quantisation-aware training, sparsity, distillation and export: what was trained is deployed."""

from ms_compress.deploy import export
from ms_compress.errors import (
    CalibrationError,
    CompressError,
    ConfigError,
    DataError,
    ExportError,
    LayerError,
    OrderError,
    SchemeError,
    VerifyError,
)
from ms_compress.qat import FloatThenQuantised, qat
from ms_compress.scheme import Scheme, scheme
from ms_compress.verify import Agreement, verify

__version__ = "0.1.0"

__all__ = [
    "Agreement",
    "CalibrationError",
    "CompressError",
    "ConfigError",
    "DataError",
    "ExportError",
    "FloatThenQuantised",
    "LayerError",
    "OrderError",
    "Scheme",
    "SchemeError",
    "VerifyError",
    "__version__",
    "export",
    "qat",
    "scheme",
    "verify",
]
