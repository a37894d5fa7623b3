"""A `Scorer` as a model of lm-evaluation-harness (EleutherAI), which this module needs."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM

from ms_align.chat.template import render_chat
from ms_align.errors import ConfigError, DataError
from ms_align.evaluation.scorer import Row, Scorer
from ms_align.evaluation.texts import Texts
from ms_align.generation.sampling import Sampling

UNLIMITED = 2048
"""Tokens that a model is taken to read at most where it does not say, as `hf` has it."""
MOST_NEW = 256
"""Tokens of an answer at most where the task does not say, as `hf` has it."""
TAKEN = {"temperature", "top_k", "top_p", "min_p"}
OTHER = {"do_sample", "until", "max_gen_toks", "max_new_tokens"}


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """What tasks ask: log-likelihoods of continuations and of whole texts, and answers.

    Texts become tokens, contexts are cut and answers end as in the harness's own `hf` model, so
    that both give equal numbers for one folder.

    Args:
        scorer: what computes.
        texts: what reads and writes texts.
        seed: of answers that are drawn.
    """

    backend = "causal"

    def __init__(self, scorer: Scorer, texts: Texts, *, seed: int = 0) -> None:
        super().__init__()
        self.scorer, self.texts, self.seed = scorer, texts, seed
        self.tokenizer = texts.inner
        self.batch_size = 1
        self.truncated = 0
        """Requests that lost their beginning, as they are longer than what the model reads."""

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.texts.ends[0]

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without a context."""
        return self.texts.prefix

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at most."""
        return self.scorer.context or UNLIMITED

    @property
    def tokenizer_name(self) -> str:
        """Names the tokenizer in the keys of the harness's caches."""
        return str(getattr(self.tokenizer, "name_or_path", "")).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a chat as the text that the model was trained on.

        Raises:
            ConfigError: the tokenizer has no chat template.
            DataError: it refuses the chat, or takes more than any sound template.
        """
        if not getattr(self.tokenizer, "chat_template", None):
            raise ConfigError("the model's tokenizer has no chat template; leave out chat")
        return render_chat(self.tokenizer, chat_history, continue_last=not add_generation_prompt)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **options: Any
    ) -> list[int]:
        """Encode a text."""
        return self.texts.encode(string, add_special_tokens)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        """Score (texts, context, continuation) requests; what is too long loses its beginning.

        Raises:
            DataError: a continuation alone is longer than what the model reads.
        """
        rows = []
        for _, context, continuation in requests:
            if len(continuation) > self.max_length:
                raise DataError(
                    f"a continuation of {len(continuation)} tokens is more than the model's "
                    f"{self.max_length}; leave out the task, or take a model that reads more"
                )
            whole = (context or [self.prefix_token_id]) + continuation
            kept = tuple(whole[-(self.max_length + 1) :])
            self.truncated += len(kept) < len(whole)
            rows.append(Row(tokens=kept, scored=len(continuation)))
        scores = [(each.logprob, each.greedy) for each in self.scorer.score(rows)]
        for (texts, _, _), score in zip(requests, scores, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Compute log-likelihoods of whole texts, each token with as much context as fits."""
        owners, windows = [], []
        for number, request in enumerate(requests):
            found = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(utils.make_disjoint_window, found):
                owners.append(number)
                windows.append((None, *window))
        sums = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[owner] += logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Write an answer to each request; those that are asked for alike are written together.

        Raises:
            ConfigError: the task asks for a setting that there is not, or leaves no room.
        """
        answers: dict[int, str] = {}
        numbered = sorted(enumerate(requests), key=lambda pair: str(pair[1].args[1]))
        for _, group in groupby(numbered, key=lambda pair: str(pair[1].args[1])):
            members = list(group)
            asked = members[0][1].args[1]
            texts = [request.args[0] for _, request in members]
            for (number, request), answer in zip(members, self._write(texts, asked), strict=True):
                answers[number] = answer
                self.cache_hook.add_partial("generate_until", request.args, answer)
        return [answers[number] for number in range(len(requests))]

    def _write(self, texts: list[str], asked: Mapping[str, Any]) -> list[str]:
        until = asked.get("until") or []
        strings = [until] if isinstance(until, str) else list(until)
        sampling = self._sampling(asked, strings)
        room = self.max_length - sampling.max_new_tokens
        if room < 1:
            raise ConfigError(
                f"an answer of {sampling.max_new_tokens} tokens leaves no room in the model's "
                f"{self.max_length}; give the task a lower max_gen_toks"
            )
        whole = [self.tok_encode(text) for text in texts]
        self.truncated += sum(len(prompt) > room for prompt in whole)
        prompts = [prompt[-room:] for prompt in whole]
        written = self.scorer.generate(prompts, sampling, seed=self.seed)
        answers = [self.texts.decode(tokens) for tokens in written]
        for string in filter(None, [*strings, self.texts.end_text]):
            answers = [answer.split(string)[0] for answer in answers]
        return answers

    def _sampling(self, asked: Mapping[str, Any], strings: list[str]) -> Sampling:
        unknown = set(asked) - TAKEN - OTHER
        if unknown:
            raise ConfigError(
                f"the task's generation_kwargs have {min(unknown)!r}, which no engine here takes; "
                f"there are {', '.join(sorted(TAKEN | OTHER))}"
            )
        drawn = {name: asked[name] for name in TAKEN if asked.get(name) is not None}
        draws = asked.get("do_sample", bool(drawn.get("temperature")))
        drawn["temperature"] = float(drawn.get("temperature", 1.0)) if draws else 0.0
        most = int(asked.get("max_gen_toks") or asked.get("max_new_tokens") or MOST_NEW)
        seen = [string for string in strings if string and string != self.texts.end_text]
        return Sampling(
            **drawn,
            max_new_tokens=most,
            stop_tokens=self.texts.ends,
            stop_strings=tuple(seen),
        )
