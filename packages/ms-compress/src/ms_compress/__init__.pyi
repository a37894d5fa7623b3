from .deployment.export import export
from .deployment.verification import Agreement, verify
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
from .evaluation.perplexity import perplexity
from .methods.autoround import autoround
from .methods.awq import awq, smoothquant
from .methods.calibration import calibrate_inputs
from .methods.data_ranks import DataRanks
from .methods.gptq import gptq
from .methods.importance import input_importance
from .methods.kv_cache import calibrate_kv_cache
from .methods.pruning import (
    GradualPruning,
    keep_zeros,
    mask_zeros,
    masks,
    prune,
    set_masks,
    sparsity,
)
from .methods.qat import FloatThenQuantized, fit_scales, qat
from .methods.reap import reap_scores, remove_experts
from .methods.student import cut_student
from .methods.wanda import wanda
from .models.experts import separate_experts
from .quantization.scheme import Scheme
from .targets.gguf.convert import import_gguf
from .targets.rules import scheme
from .targets.target import open_runtime
from .training.distillation import distillation_loss
from .training.loop import tune
from .training.options import Tuning

__version__: str

__all__ = [
    "Agreement",
    "CalibrationError",
    "CompressError",
    "ConfigError",
    "DataError",
    "DataRanks",
    "ExportError",
    "FloatThenQuantized",
    "GradualPruning",
    "LayerError",
    "OrderError",
    "Scheme",
    "SchemeError",
    "Tuning",
    "VerifyError",
    "__version__",
    "autoround",
    "awq",
    "calibrate_inputs",
    "calibrate_kv_cache",
    "cut_student",
    "distillation_loss",
    "export",
    "fit_scales",
    "gptq",
    "import_gguf",
    "input_importance",
    "keep_zeros",
    "mask_zeros",
    "masks",
    "open_runtime",
    "perplexity",
    "prune",
    "qat",
    "reap_scores",
    "remove_experts",
    "scheme",
    "separate_experts",
    "set_masks",
    "smoothquant",
    "sparsity",
    "tune",
    "verify",
    "wanda",
]
