"""From a model, wherever it runs, to a model of lm-evaluation-harness."""

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
from ms_align.evaluation.texts import Texts
from ms_align.generation.stops import beside
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
    """Make a model that `lm_eval.simple_evaluate(model=...)` takes, of any model here.

    Under a layout every process evaluates; the harness gives the first one of a host the results.

    Args:
        model: a folder, a module, an engine, or an exported model in its runtime.
        tokenizer: a folder, a `tokenizer.json`, `"bytes"` or a tokenizer; by default the one
            that lies in the model's folder.
        layout: how processes split a folder's model; None for this process alone.
        context: tokens that the model reads at most; by default what the model says.
        batch_size: rows of a forward, of all processes together.
        seed: of answers that are drawn.
        options: precision, operators and device.

    Raises:
        ConfigError: lm-eval is not installed, or there is no tokenizer.
        ModelError: the folder's model cannot be read.
    """
    try:
        from ms_align.evaluation.harness import HarnessModel
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("lm_eval"):
            raise
        raise ConfigError(
            "evaluation needs lm-evaluation-harness; pip install 'ms-align[evaluation]' brings it"
        ) from error
    texts = _texts(model, tokenizer)
    scorer: Scorer
    if isinstance(model, ExportedModel) and not isinstance(model, nn.Module | Engine):
        scorer = ExportedScorer(model, context=context, batch_size=batch_size, decode=texts.decode)
    else:
        engine = start_engine(model, layout=layout, options=options)
        made = EngineScorer(engine, batch_size=batch_size, decode=texts.decode)
        made.context = context or made.context
        scorer = made
    return HarnessModel(scorer, texts, seed=seed)


def _texts(model: Any, given: Tokenizer | str | Path | None) -> Texts:
    place = beside(given, model)
    if place is None:
        raise ConfigError("there is no tokenizer beside the model; give tokenizer=")
    tokenizer = load_tokenizer(place) if isinstance(place, str | Path) else place
    files = files_of(place, tokenizer) if isinstance(place, str | Path) else None
    folder = folder_of(model)
    if given is not None and folder is not None:
        remedy = "leave `tokenizer` out"
        own, name = files_of(folder), f"the model {folder}"
        check_same_tokenizer(own, name, files_of(given, tokenizer), "`tokenizer`", remedy=remedy)
    return Texts(tokenizer, files.ends if files else ())
