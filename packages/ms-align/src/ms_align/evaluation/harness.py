"""Adapter from `Scorer` to the model interface of lm-evaluation-harness, which it imports."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM

from ms_align.chat.template import render_chat
from ms_align.errors import ConfigError, DataError
from ms_align.evaluation.scorer import Row, Scorer
from ms_align.evaluation.texts import TextCodec
from ms_align.generation.sampling import Sampling

DEFAULT_CONTEXT = 2048
"""Context of a model that does not define one, as in the harness's `hf` model."""
DEFAULT_MAX_NEW_TOKENS = 256
"""Maximum answer length of a task that does not define one, as in the harness's `hf` model."""
SAMPLING_KEYS = {"temperature", "top_k", "top_p", "min_p"}
GENERATION_KEYS = {"do_sample", "until", "max_gen_toks", "max_new_tokens"}


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """Model that answers the requests of tasks: log-likelihoods and generated answers.

    Tokenization, truncation and stop handling are the same as in the harness's `hf` model, so that
    both give the same numbers for the same folder.

    Args:
        scorer: scores and generates.
        codec: converts between text and tokens.
        seed: seed for sampling.
    """

    backend = "causal"

    def __init__(self, scorer: Scorer, codec: TextCodec, *, seed: int = 0) -> None:
        super().__init__()
        self.scorer, self.codec, self.seed = scorer, codec, seed
        self.tokenizer = codec.inner
        self.batch_size = 1
        self.truncated = 0
        """Number of requests truncated at their beginning to fit the context."""

    @property
    def eot_token_id(self) -> int:
        """Token id of the end of text."""
        return self.codec.ends[0]

    @property
    def prefix_token_id(self) -> int:
        """Token id that precedes a text without context."""
        return self.codec.prefix

    @property
    def max_length(self) -> int:
        """Context length in tokens."""
        return self.scorer.context or DEFAULT_CONTEXT

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer in the harness's cache keys."""
        return str(getattr(self.tokenizer, "name_or_path", "")).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a chat with the model's chat template.

        Raises:
            ConfigError: the tokenizer has no chat template.
            DataError: the template rejects the chat or exceeds its limits.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError("the model's tokenizer has no chat template; remove chat")
        return render_chat(self.tokenizer, chat_history, continue_last=not add_generation_prompt)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        """Encode a text."""
        return self.codec.encode(string, add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        """Score (texts, context, continuation) requests, truncating long contexts on the left.

        Raises:
            DataError: a continuation alone exceeds the context.
        """
        rows = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise DataError(
                    f"a continuation of {len(continuation)} tokens exceeds the model's context of "
                    f"{self.max_length}; remove the task, or use a model with a longer context"
                )
            # The model reads all but the last token, so max_length + 1 tokens fit.
            tokens = (context or [self.prefix_token_id]) + continuation
            truncated = tuple(tokens[-(self.max_length + 1) :])
            self.truncated += len(truncated) < len(tokens)
            rows.append(Row(tokens=truncated, scored=len(continuation)))
        scores = [(score.logprob, score.greedy) for score in self.scorer.score(rows)]
        for (texts, _, _), score in zip(requests, scores, strict=True):
            # Windows have no texts; `loglikelihood_rolling` caches their sum.
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Compute log-likelihoods of entire texts, each token with as long a context as fits."""
        owners, windows = [], []
        for index, request in enumerate(requests):
            token_windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            # Disjoint, so that every token is scored in exactly one window.
            for window in map(utils.make_disjoint_window, token_windows):
                owners.append(index)
                windows.append((None, *window))
        sums = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Generate an answer to each request; requests with equal settings are batched.

        Raises:
            ConfigError: the task has an unsupported setting, or its answers exceed the context.
        """
        answers: dict[int, str] = {}
        # groupby needs equal settings to be adjacent; args are (context, settings).
        numbered = sorted(enumerate(requests), key=lambda pair: str(pair[1].args[1]))
        for _, group in groupby(numbered, key=lambda pair: str(pair[1].args[1])):
            members = list(group)
            settings = members[0][1].args[1]
            texts = [request.args[0] for _, request in members]
            for (number, request), answer in zip(
                members, self._generate(texts, settings), strict=True
            ):
                answers[number] = answer
                self.cache_hook.add_partial("generate_until", request.args, answer)
        return [answers[number] for number in range(len(requests))]  # as requested

    def _generate(self, texts: list[str], settings: Mapping[str, Any]) -> list[str]:
        until = settings.get("until") or []
        strings = [until] if isinstance(until, str) else list(until)
        sampling = self._sampling(settings, strings)
        max_prompt = self.max_length - sampling.max_new_tokens
        if max_prompt < 1:
            raise ConfigError(
                f"max_gen_toks of {sampling.max_new_tokens} leaves no room for a prompt in the "
                f"model's context of {self.max_length}; lower max_gen_toks in the task"
            )
        encoded = [self.tok_encode(text) for text in texts]
        self.truncated += sum(len(prompt) > max_prompt for prompt in encoded)
        prompts = [prompt[-max_prompt:] for prompt in encoded]
        generated = self.scorer.generate(prompts, sampling, seed=self.seed)
        # Cut in the text: a token may extend beyond a stop string.
        answers = [self.codec.decode(tokens) for tokens in generated]
        for string in filter(None, [*strings, self.codec.end_text]):
            answers = [answer.split(string)[0] for answer in answers]
        return answers

    def _sampling(self, settings: Mapping[str, Any], strings: list[str]) -> Sampling:
        unknown = set(settings) - SAMPLING_KEYS - GENERATION_KEYS
        if unknown:
            raise ConfigError(
                f"the task's generation_kwargs have {min(unknown)!r}, which is not supported; "
                f"supported keys: {', '.join(sorted(SAMPLING_KEYS | GENERATION_KEYS))}"
            )
        sampling = {
            name: settings[name] for name in SAMPLING_KEYS if settings.get(name) is not None
        }
        # Without do_sample, a temperature above 0 means sampling.
        do_sample = settings.get("do_sample", bool(sampling.get("temperature")))
        sampling["temperature"] = float(sampling.get("temperature", 1.0)) if do_sample else 0.0
        max_new_tokens = int(
            settings.get("max_gen_toks") or settings.get("max_new_tokens") or DEFAULT_MAX_NEW_TOKENS
        )
        # The end of text stops generation by its id and does not appear in decoded text.
        visible = [string for string in strings if string and string != self.codec.end_text]
        return Sampling(
            **sampling,
            max_new_tokens=max_new_tokens,
            stop_token_ids=self.codec.ends,
            stop_strings=tuple(visible),
        )
