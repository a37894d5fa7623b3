"""Quantisation-aware training, sparsity, distillation and export: what was trained is deployed."""

from ms_compress.deploy import export
from ms_compress.distil import distillation_loss
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
from ms_compress.gptq_rounding import gptq
from ms_compress.preparation import FloatThenQuantised, fit_scales, qat
from ms_compress.pruning import (
    GradualPruning,
    keep_zeros,
    mask_zeros,
    masks,
    prune,
    set_masks,
    sparsity,
)
from ms_compress.schemes import Scheme, scheme
from ms_compress.student import cut_student
from ms_compress.text_loss import perplexity
from ms_compress.tuning import Tuning, tune
from ms_compress.verification import Agreement, verify
from ms_compress.wanda_pruning import wanda

__version__ = "0.1.0"

__all__ = [
    "Agreement",
    "CalibrationError",
    "CompressError",
    "ConfigError",
    "DataError",
    "ExportError",
    "FloatThenQuantised",
    "GradualPruning",
    "LayerError",
    "OrderError",
    "Scheme",
    "SchemeError",
    "Tuning",
    "VerifyError",
    "__version__",
    "cut_student",
    "distillation_loss",
    "export",
    "fit_scales",
    "gptq",
    "keep_zeros",
    "mask_zeros",
    "masks",
    "perplexity",
    "prune",
    "qat",
    "scheme",
    "set_masks",
    "sparsity",
    "tune",
    "verify",
    "wanda",
]
