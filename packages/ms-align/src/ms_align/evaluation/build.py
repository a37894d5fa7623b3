"""Builds models for lm-evaluation-harness."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ms_align.engines.assembly import start_engine
from ms_align.engines.options import ComputeOptions
from ms_align.engines.protocol import Engine
from ms_align.errors import ConfigError
from ms_align.evaluation.engine_scorer import EngineScorer
from ms_align.evaluation.exported_scorer import ExportedScorer
from ms_align.evaluation.scorer import ExportedModel, Scorer
from ms_align.evaluation.texts import TextCodec
from ms_align.generation.stops import resolve_tokenizer
from ms_align.models.folder import folder_of
from ms_align.tokenizer import Tokenizer, load_tokenizer
from ms_align.tokenizer_files import check_same_tokenizer, files_of

if TYPE_CHECKING:
    from ms_align.evaluation.harness import HarnessModel
    from ms_parallel import Layout


def harness_model(
    model: nn.Module | Engine | ExportedModel | str | Path,
    tokenizer: Tokenizer | str | Path | None = None,
    *,
    layout: "Layout | Mapping[str, int] | None" = None,
    context: int | None = None,
    batch_size: int = 16,
    seed: int = 0,
    options: ComputeOptions | None = None,
) -> "HarnessModel":
    """Build a model for `lm_eval.simple_evaluate(model=...)`.

    Under a layout every process takes part; the harness returns results on the first process of
    each host only.

    Args:
        model: a folder, a module, an engine, or an exported model in its runtime.
        tokenizer: a folder, a `tokenizer.json`, `"bytes"` or a tokenizer. Default: the tokenizer in
            the model's folder.
        layout: ms-parallel layout that shards a folder's model. None: one process.
        context: maximum number of tokens per request. Default: the model's context length.
        batch_size: rows per forward pass, over all processes.
        seed: seed for sampling.
        options: precision, operators and device.

    Raises:
        ConfigError: lm-eval is not installed, or the model has no tokenizer.
        ModelError: the model cannot be loaded.
    """
    try:
        from ms_align.evaluation.harness import HarnessModel
    except ModuleNotFoundError as error:
        # With lm-eval installed, another missing module is a different problem.
        if not str(error.name).startswith("lm_eval"):
            raise
        raise ConfigError(
            "evaluation needs lm-evaluation-harness; install it with "
            "`pip install 'ms-align[evaluation]'`"
        ) from error
    codec = _codec(model, tokenizer)
    scorer: Scorer
    # `ExportedModel` is a protocol, whose methods a module or an engine may have as well.
    if isinstance(model, ExportedModel) and not isinstance(model, nn.Module | Engine):
        scorer = ExportedScorer(model, context=context, batch_size=batch_size, decode=codec.decode)
    else:
        engine = start_engine(model, layout=layout, options=options)
        engine_scorer = EngineScorer(engine, batch_size=batch_size, decode=codec.decode)
        engine_scorer.context = context or engine_scorer.context
        scorer = engine_scorer
    return HarnessModel(scorer, codec, seed=seed)


def _codec(model: Any, setting: Tokenizer | str | Path | None) -> TextCodec:
    source = resolve_tokenizer(setting, model)
    if source is None:
        raise ConfigError("the model has no tokenizer in its folder; pass tokenizer=")
    tokenizer = load_tokenizer(source) if isinstance(source, str | Path) else source
    files = files_of(source, tokenizer) if isinstance(source, str | Path) else None
    folder = folder_of(model)
    if setting is not None and folder is not None:
        remedy = "remove `tokenizer`"
        model_files, name = files_of(folder), f"the model {folder}"
        check_same_tokenizer(
            model_files, name, files_of(setting, tokenizer), "`tokenizer`", remedy=remedy
        )
    return TextCodec(tokenizer, files.ends if files else ())
