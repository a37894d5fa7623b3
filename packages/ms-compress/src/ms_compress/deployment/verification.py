"""Verification: a folder, read by its own runtime, is the model that was exported.

1. Each tensor must equal the model's, bit for bit, as the format's own library reads it.
2. Each prepared layer must give what training gives for the very input that the runtime gave it:
   the same codes of the input, and so the same products. Only the order of their sum may differ,
   which bounds the difference (`sum_bound`). Rounding inputs by another rule exceeds it.
3. The logits of a probe must agree. Here a tolerance is needed: a value on the border between two
   codes may fall on either side and move all that follows.

A model of narrower weights is compared in float32, which runtimes compute in.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from attrs import asdict, evolve, frozen
from torch import Tensor, nn

from ms_compress.errors import ExportError, VerifyError
from ms_compress.files.tokenizer_source import TokenizerSource
from ms_compress.files.untrusted import check_path
from ms_compress.models.logits import model_logits, vocabulary_of
from ms_compress.models.whole_model import WholeModel
from ms_compress.models.wrappers import unwrapped
from ms_compress.quantisation.layers import prepared_layers
from ms_compress.quantisation.rounding import QuantizedWeight, round_activations
from ms_compress.quantisation.scheme import Activations
from ms_compress.targets.target import LayerRun, Reader, Target, TextRuntime, find_target
from ms_compress.targets.tokenizer_json import encoder
from ms_compress.text_ends import read_tokenizer, text_ends

PROMPT = 16
GENERATED = 24
"""Tokens of a text that a runtime is to write."""
TEXTS = (
    "The quick brown fox didn't jump over 12 lazy dogs; it's 3.14159 past 2026!",
    "  two  spaces,\ttabs\n\n\nand lines \r\n ",
    "Grüße, 你好世界, здравствуй, नमस्ते 🙂 ½ ²",
    "def f(x): return {'a': [x**2 for _ in range(10_000)]}  # <tag/> $5%",
)
"""Which tokenizers cut at different places; the first is written on."""
PROBE_ROWS = 2
PROBE_POSITIONS = 48
HEAD_EMBEDDING = "model.embed_tokens"
"""The layer whose weight a tied head multiplies with."""
EPS = torch.finfo(torch.float32).eps
HALF = (torch.bfloat16, torch.float16)
ROUNDED_INPUTS = 0.02
"""Tolerance of logits where inputs are rounded, in units of their spread."""
SUM_ERROR = 8.0
"""Standard deviations of a float32 sum's rounding error that are allowed."""


@frozen(kw_only=True)
class Agreement:
    """How far a runtime's logits are from the model's, and a text that it wrote."""

    mean: float
    """Mean of absolute differences."""
    largest: float
    spread: float
    """Standard deviation of the model's own logits."""
    argmax: float
    """Share of positions at which both find the same token likeliest."""
    layers: int = 0
    """Number of prepared layers compared one by one; 0 where the runtime does not show them."""
    prepared: int = 0
    """Number of prepared layers. Layers that the probe never reaches are not compared."""
    layer_error: float = 0.0
    """Largest difference of a layer's output, as a share of what the order of sums may cause."""
    rounds_inputs: bool = False
    """The runtime rounds inputs to 8 bits that training did not, as at accuracy_level=4."""
    generated: tuple[int, ...] = ()
    """Tokens of a text that the runtime wrote on by itself, the model's own likeliest; none where
    the folder has no tokenizer."""


def verify(
    model: nn.Module,
    folder: str | Path,
    target: str,
    *,
    tokens: Tensor | None = None,
) -> Agreement:
    """Compare a folder, its tensors and what its target's runtime computes, with its model.

    Where the folder has a tokenizer, the runtime must also read texts as that tokenizer does, end
    them where the folder says, and write on a text as the model would.

    Args:
        model: prepared; its evaluation mode is used. Weights narrower than float32 are wide while
            it is asked. If several processes hold it, all of them must call.
        folder: exported.
        target: `"ct"`, `"ort"` or `"gguf"`.
        tokens: (B, S) int64 to compare on; by default numbers spread over the vocabulary.

    Raises:
        VerifyError: they are not the same model.
        ExportError: the runtime is missing or cannot read the folder.
    """
    check_path("folder", folder, error=ExportError)
    folder, model = Path(folder), unwrapped(model)
    if tokens is None:
        tokens = probe(vocabulary_of(model))
    # What a runtime leaves out, such as a buffer of the model's own, its logits may do without.
    runtime = find_target(target).opens(folder, threads=1, strict=False)
    check_weights(model, folder, target)
    with _in_float32(model):
        expected = model_logits(model, tokens)
    found = compare(expected, runtime.logits(tokens))
    layers = check_layers(model, folder, runtime, tokens)
    found = evolve(found, **asdict(layers))
    limit = _limit(model, find_target(target))
    if found.rounds_inputs:
        limit = max(limit, ROUNDED_INPUTS)
    if not found.mean <= limit * found.spread:
        raise VerifyError(
            f"{folder}: its runtime's logits are off by {found.mean:.3g} on average, where the"
            f" model's own spread is {found.spread:.3g} and {limit * found.spread:.3g} is allowed;"
            " the file is not this model, export it again"
        )
    if not (folder / "tokenizer.json").is_file():
        return found
    margin = max(1e-3, 10 * limit) * found.spread
    return evolve(found, generated=check_text(model, folder, runtime, margin))


@frozen(kw_only=True)
class LayerAgreement:
    """Comparison of prepared layers one by one, in the terms of `Agreement`."""

    layers: int
    prepared: int
    layer_error: float
    rounds_inputs: bool


def check_layers(
    model: nn.Module, folder: str | Path, runtime: TextRuntime, tokens: Tensor
) -> LayerAgreement:
    """Compare what the runtime's linear layers computed with what training computes.

    Args:
        model: the one that was exported. If several processes hold it, all of them must call.
        folder: for messages.
        runtime: opened on it.
        tokens: (B, S) int64.

    Raises:
        VerifyError: a layer's output differs by more than another order of summing explains.
        ExportError: the runtime cannot run.
    """
    whole = WholeModel(model)
    prepared = {e.module for e in whole.tensors.values() if e.scheme is not None}
    prepared &= {e.module for e in whole.tensors.values() if e.kind == "linear"} | (
        {HEAD_EMBEDDING} if whole.is_tied else set()
    )
    seen: dict[str, float] = {}
    groups: set[int] = set()

    def visit(run: LayerRun) -> None:
        entry = whole.tensors.get(f"{run.name}.weight")
        if entry is None or run.name not in prepared:
            return
        if run.input_group is not None:
            groups.add(run.input_group)
        weight = whole.read(entry.name)
        bias = whole.read(f"{run.name}.bias") if f"{run.name}.bias" in whole.tensors else None
        if isinstance(weight, QuantizedWeight):  # the first process has it, and compares
            share = _layer_error(run, weight, bias, entry.activations)
            seen[run.name] = max(seen.get(run.name, 0.0), share)
            if not share <= 1.0:
                raise VerifyError(
                    f"{folder}: {runtime.name} computes {run.name} otherwise than training does:"
                    f" for its input of shape {tuple(run.x.shape)} the outputs are {share:.3g}"
                    " times as far apart as the order of sums explains; name the layer as an"
                    " exception and export again"
                )

    if hasattr(runtime, "visit_layers"):  # not every runtime can show its layers
        with whole.collective:
            runtime.visit_layers(tokens, visit)
    return LayerAgreement(
        layers=len(seen),
        prepared=len(prepared),
        layer_error=max(seen.values(), default=0.0),
        rounds_inputs=bool(groups),
    )


def _layer_error(
    run: LayerRun, weight: QuantizedWeight, bias: object, activations: Activations | None
) -> float:
    """Return the largest difference of a layer's output over what is allowed of it."""
    x, w = run.x, weight.weight().double()
    rounded = (x if activations is None else round_activations(x, activations)).double()
    expected = rounded @ w.T
    allowed = sum_bound(rounded, w)
    if isinstance(bias, Tensor) and run.has_bias:
        expected, allowed = expected + bias.double(), allowed + EPS * bias.double().abs()
    if run.input_group is not None:
        # Rounding to the nearest of 255 codes moves an input by half a step at most.
        groups = x.double().abs().view(*x.shape[:-1], -1, run.input_group)
        half_step = (groups.amax(-1, keepdim=True) / 127 / 2).expand_as(groups).flatten(-2)
        allowed = allowed + half_step @ w.T.abs()
    apart = (run.out.double() - expected).abs()
    return float((apart / allowed.clamp_min(torch.finfo(torch.float32).tiny)).max())


def sum_bound(x: Tensor, weight: Tensor) -> Tensor:
    """Return how far a float32 product x · weightᵀ may be from the exact one, (..., N).

    Rounding errors of K sums are nearly independent, so their total is within a few times
    sqrt(K) · u · Σ|x·w| (Higham and Mary 2019, doi:10.1137/18M1226312), far below the certain bound
    K · u · Σ|x·w|.

    Args:
        x: (..., K), as the layer multiplies it.
        weight: (N, K).
    """
    return SUM_ERROR * math.sqrt(x.shape[-1]) * EPS / 2 * (x.abs() @ weight.T.abs())


def check_text(
    model: nn.Module, folder: Path, runtime: TextRuntime, margin: float
) -> tuple[int, ...]:
    """Have a runtime read and write texts with the folder's own tokenizer.

    Args:
        model: the one that was exported.
        folder: with a tokenizer.json.
        runtime: opened on it.
        margin: how far below the model's likeliest token one may lie that the runtime chose.

    Returns:
        The tokens that it wrote.

    Raises:
        VerifyError: it reads or ends texts otherwise, or chose what the model would not.
    """
    files, reference = read_tokenizer(folder), encoder(folder)
    ends = text_ends(files, {}, vocabulary_of(model)).ends
    for text in (*TEXTS, *_around_added(files)):
        expected, got = reference(text), runtime.encode(text)
        if got != expected:
            raise VerifyError(
                f"{folder}: {runtime.name} reads {text!r} as tokens {got}, and its tokenizer.json"
                f" as {expected}; export it again with the tokenizer that the model was trained on"
            )
    if unknown := [token for token in ends if token not in runtime.ends()]:
        raise VerifyError(
            f"{folder}: token {unknown[0]} ends a text, and {runtime.name} writes on; export it"
            " again with a generation_config.json that names it"
        )
    prompt = reference(TEXTS[0])[:PROMPT] or [0]
    made = runtime.generate(prompt, GENERATED)
    with _in_float32(model):
        logits = model_logits(model, torch.tensor([prompt + made]))[0, len(prompt) - 1 : -1]
    behind = logits.max(-1).values - logits.gather(-1, torch.tensor(made)[:, None])[:, 0]
    if float(behind.max()) > margin:
        at = int(behind.argmax())
        raise VerifyError(
            f"{folder}: {runtime.name} wrote token {made[at]} as the text's {at + 1}th, where the"
            f" model's likeliest is {int(logits[at].argmax())}; the file is not this model, export"
            " it again"
        )
    return tuple(made)


def _around_added(files: TokenizerSource) -> Iterator[str]:
    """Yield texts with each added token inside a word and between spaces."""
    for each in files.added.values():
        yield f"a{each.content}b"
        yield f"a {each.content} b"


def check_weights(model: nn.Module, folder: str | Path, target: str) -> None:
    """Compare each tensor of a folder, as its format's own library reads it, with the model's.

    Raises:
        VerifyError: names the first tensor that differs by a bit.
        ExportError: the format's library is missing.
    """
    whole = WholeModel(model)
    with whole.collective:
        read = find_target(target).reader(Path(folder), whole.config)
        for name in whole.tensors:
            value = whole.read(name)
            if value is not None:  # the first process has it, and compares
                _check_weight(folder, name, value, read)


def _check_weight(
    folder: str | Path, name: str, value: QuantizedWeight | Tensor, read: Reader
) -> None:
    expected = value.weight() if isinstance(value, QuantizedWeight) else value.float()
    try:
        found = read(name)
    except KeyError as error:
        raise VerifyError(f"{folder}: {name} is not in it; export it again") from error
    if found.shape != expected.shape or not torch.equal(found, expected):
        raise VerifyError(
            f"{folder}: {name} is not this model's: {_difference(expected, found)}; export it again"
        )


def _difference(expected: Tensor, found: Tensor) -> str:
    if found.shape != expected.shape:
        return f"it is of shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    apart = (found - expected).abs()
    count = int((apart != 0).sum())
    return f"{count} of its {apart.numel()} values differ, by up to {float(apart.max()):.3g}"


def _limit(model: nn.Module, target: Target) -> float:
    """Return how far logits may be off on average, in units of their spread."""
    layers = [layer for _, layer in prepared_layers(model)]
    if any(layer.is_narrowed for layer in layers):
        return 0.05  # mixed precision: the model cannot be asked in float32
    if any(layer.activations is not None for layer in layers):
        return max(ROUNDED_INPUTS, target.tolerance)
    return target.tolerance


def compare(expected: Tensor, got: Tensor) -> Agreement:
    """Measure how far logits (B, S, V) are from those expected."""
    if expected.shape != got.shape:
        raise VerifyError(
            f"the runtime gives logits of shape {tuple(got.shape)}, the model"
            f" {tuple(expected.shape)}"
        )
    apart = (expected - got).abs()
    return Agreement(
        mean=float(apart.mean()),
        largest=float(apart.max()),
        spread=float(expected.std()),
        argmax=float((expected.argmax(-1) == got.argmax(-1)).float().mean()),
    )


def probe(vocabulary: int) -> Tensor:
    """Return tokens (2, 48) spread over a vocabulary, always the same."""
    count = PROBE_ROWS * PROBE_POSITIONS
    numbers = torch.arange(count, dtype=torch.int64) * 2654435761 % vocabulary
    return numbers.view(PROBE_ROWS, PROBE_POSITIONS)


@contextmanager
def _in_float32(model: nn.Module) -> Iterator[None]:
    """Widen a model in place, and narrow it again to the very values that it had."""
    tensors = [*model.parameters(), *model.buffers()]
    narrow = [(each, each.dtype) for each in tensors if each.dtype in HALF]
    for each, _ in narrow:
        each.data = each.data.float()
    try:
        yield
    finally:
        for each, dtype in narrow:
            each.data = each.data.to(dtype)
