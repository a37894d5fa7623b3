from .deploy import export
from .distil import distillation_loss
from .errors import (
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
from .gptq_rounding import gptq
from .preparation import FloatThenQuantised, fit_scales, qat
from .pruning import (
    GradualPruning,
    keep_zeros,
    mask_zeros,
    masks,
    prune,
    set_masks,
    sparsity,
)
from .schemes import Scheme, scheme
from .student import cut_student
from .text_loss import perplexity
from .tuning import tune
from .tuning_options import Tuning
from .verification import Agreement, verify
from .wanda_pruning import wanda

__version__: str

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
