"""transformers as the runtime for compressed-tensors folders."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from ms_compress.errors import CompressError, ExportError
from ms_compress.models.config_file import quantization, read_config
from ms_compress.quantization.layers import K_SCALE, V_SCALE
from ms_compress.targets.ct.cpu import warn_without_vnni
from ms_compress.targets.ct.write import BFLOAT16_FORMATS
from ms_compress.targets.libraries import import_library, library_errors
from ms_compress.targets.target import LayerRun, LayerVisit

PURPOSE = "reading compressed-tensors needs transformers and compressed-tensors"


class TransformersRuntime:
    """A model folder run by transformers, in its own dtype."""

    name = "transformers"

    def __init__(self, folder: Path, *, strict: bool = True) -> None:
        self._library = import_library("transformers", extra="ct", purpose=PURPOSE)
        import_library("compressed_tensors", extra="ct", purpose=PURPOSE)
        self._folder = folder
        if _rounds_inputs(quantization(folder)):
            warn_without_vnni()
        settings = quantization(folder) or {}
        # Exact in bfloat16, these weights are computed in float32 here, as all others are.
        is_bfloat16 = settings.get("format") in BFLOAT16_FORMATS
        dtype = torch.float32 if is_bfloat16 else _dtype(folder)
        options: dict[str, Any] = {}
        if not _is_symmetric(settings):
            # The library cannot load packed zero points into a model, but dequantizes them.
            options["quantization_config"] = self._library.CompressedTensorsConfig(dequantize=True)
        if settings.get("kv_cache_scheme") is not None:
            # Computed with a float cache, as in training; only vLLM reads its scales.
            options["config"] = self._library.AutoConfig.from_pretrained(
                folder, local_files_only=True
            )
            options["config"].quantization_config["kv_cache_scheme"] = None
        with library_errors(folder, "transformers"), _quiet():
            self.model, loading_info = self._library.AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # reported in the loading info instead
                output_loading_info=True,
                **options,
            )
            _check_loaded(folder, loading_info, strict)
            self.model.train(False)
            # The first forward decompresses the weights, and later hooks run after that.
            widen = self.model.register_forward_pre_hook(lambda model, args: _widen(model, dtype))
            self.logits(torch.zeros(1, 1, dtype=torch.int64))
            widen.remove()

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """Return logits (B, S, V) float32 for tokens (B, S) int64."""
        with library_errors(self._folder, "transformers", "run it"):
            logits: Tensor = self.model(tokens, use_cache=False).logits
        return logits.float()

    @torch.no_grad()
    def visit_layers(self, tokens: Tensor, visit: LayerVisit) -> None:
        """Call `visit` for each linear layer in a forward; see `TextRuntime`."""
        # `logits` converts errors of the forward, so the hook's own error is raised again below.
        errors: list[Exception] = []

        def hook_for(name: str) -> Callable[..., None]:
            def hook(layer: nn.Module, inputs: tuple[Tensor, ...], out: Any) -> None:
                if not isinstance(out, Tensor):  # Llama 4's router returns a tuple
                    return
                try:
                    visit(LayerRun(name=name, x=inputs[0].float(), out=out.float()))
                except CompressError as error:
                    errors.append(error)
                    raise

            return hook

        with ExitStack() as hooks:
            for name, layer in self.model.named_modules():
                if isinstance(layer, nn.Linear):
                    hooks.enter_context(layer.register_forward_hook(hook_for(name)))
            try:
                self.logits(tokens)
            except ExportError:
                if errors:
                    raise errors[0] from None
                raise

    @torch.no_grad()
    def decode(self, tokens: list[int], steps: int) -> tuple[float, float]:
        """Return the seconds for a prefill of `tokens`, and for `steps` greedy tokens after it."""
        start_s = perf_counter()
        # As in generation, the head runs on the last position only.
        out = self.model(torch.tensor([tokens]), use_cache=True, logits_to_keep=1)
        prefilled_s = perf_counter()
        for _ in range(steps):
            token = out.logits[:, -1:].argmax(-1)
            out = self.model(token, past_key_values=out.past_key_values, use_cache=True)
        return prefilled_s - start_s, perf_counter() - prefilled_s

    def encode(self, text: str) -> list[int]:
        """Tokenize a text; special tokens in it are recognized, and none is added."""
        with library_errors(self._folder, "transformers", "read its tokenizer"), _quiet():
            tokenizer = self._library.AutoTokenizer.from_pretrained(
                self._folder, local_files_only=True
            )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def ends(self) -> frozenset[int]:
        """Return the tokens at which the runtime ends a text."""
        eos = self.model.generation_config.eos_token_id
        with library_errors(self._folder / "generation_config.json", "transformers"):
            return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])

    @torch.no_grad()
    def generate(self, tokens: list[int], max_tokens: int) -> list[int]:
        """Return greedily decoded tokens up to an end token, at most `max_tokens`."""
        prompt = torch.tensor([tokens])
        with library_errors(self._folder, "transformers", "generate"), _quiet():
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                num_beams=1,
                max_new_tokens=max_tokens,
            )
        return [int(token) for token in out[0, len(tokens) :]]


def _widen(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert decompressed weights to the dtype of the other parameters."""
    model.to(dtype)


def _check_loaded(folder: Path, loading_info: Mapping[str, Any], strict: bool) -> None:
    """Raise for missing tensors, which transformers initializes randomly, and unused ones."""
    for problem in ("mismatched", "missing", *(("unexpected",) if strict else ())):
        names = sorted(
            key if isinstance(key, str) else key[0] for key in loading_info[f"{problem}_keys"]
        )
        names = [name for name in names if not name.endswith((f".{K_SCALE}", f".{V_SCALE}"))]
        if names:
            others = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
            raise ExportError(f"{folder}: {names[0]}{others} {problem}; export it again")


def _rounds_inputs(settings: Mapping[str, Any] | None) -> bool:
    groups = (settings or {}).get("config_groups")
    values = groups.values() if isinstance(groups, Mapping) else ()
    return any(isinstance(group, Mapping) and group.get("input_activations") for group in values)


def _is_symmetric(settings: Mapping[str, Any]) -> bool:
    groups = settings.get("config_groups")
    values = groups.values() if isinstance(groups, Mapping) else ()
    weights = [group.get("weights") for group in values if isinstance(group, Mapping)]
    return all(args.get("symmetric", True) for args in weights if isinstance(args, Mapping))


def _dtype(folder: Path) -> torch.dtype:
    config = read_config(folder)
    name = config.get("dtype") or config.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ExportError(
            f"{folder}/config.json: dtype must be a torch dtype, got {name!r}; float32 was exported"
        )
    return dtype


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress transformers' warnings about loading, and its progress bars."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with redirect_stderr(StringIO()):
            yield
    finally:
        log.setLevel(level)
