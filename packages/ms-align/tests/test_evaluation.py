"""Scores of continuations against plain torch, for any order, length and batch of rows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import decoder
from torch import Tensor, nn

from ms_align import ConfigError, DataError, LocalEngine, Sampling
from ms_align.evaluation.engine_scorer import EngineScorer
from ms_align.evaluation.exported_scorer import ExportedScorer
from ms_align.evaluation.scorer import ContinuationScore, Row, Scorer
from ms_align.evaluation.tasks import _numeric_metrics
from ms_align.evaluation.texts import TextCodec
from ms_align.tokenizer import ByteTokenizer

MODEL = decoder(seed=3)
"""Over 258 tokens, sharpened so that a wrong position shows."""
BYTES = ByteTokenizer()


class Runtime:
    """The model with the interface of exported models."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.widths: list[int] = []

    @torch.no_grad()
    def logits(self, tokens: Tensor, /) -> Tensor:
        """Return the logits (B, S, V)."""
        self.widths.append(tokens.shape[1])
        logits: Tensor = self.model(tokens)
        return logits

    def generate(self, tokens: list[int], max_new_tokens: int, /) -> list[int]:
        """Generate greedily."""
        generated: list[int] = []
        while len(generated) < max_new_tokens:
            generated.append(int(self.logits(torch.tensor([tokens + generated]))[0, -1].argmax()))
        return generated


@torch.no_grad()
def score_directly(row: Row) -> ContinuationScore:
    """Score a single row with torch functions."""
    tokens = torch.tensor(row.tokens)
    logprobs = MODEL(tokens[None, :-1])[0].log_softmax(-1)[-row.scored :]
    targets = tokens[-row.scored :]
    chosen = logprobs.gather(1, targets[:, None]).sum()
    return ContinuationScore(float(chosen), bool((logprobs.argmax(-1) == targets).all()))


ROWS = st.lists(st.integers(0, 257), min_size=2, max_size=24).flatmap(
    lambda tokens: st.builds(
        Row, tokens=st.just(tuple(tokens)), scored=st.integers(1, len(tokens) - 1)
    )
)


@settings(max_examples=25, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=9), st.integers(1, 5))
def test_scores_do_not_depend_on_the_batch(rows: list[Row], batch_size: int) -> None:
    """Padding and order change a score only by the rounding of 24 float32 sums."""
    scorers: list[Scorer] = [
        EngineScorer(LocalEngine(MODEL), batch_size=batch_size, decode=BYTES.decode),
        ExportedScorer(Runtime(MODEL), context=None, batch_size=batch_size, decode=BYTES.decode),
    ]
    for scorer in scorers:
        for actual, expected in zip(scorer.score(rows), map(score_directly, rows), strict=True):
            assert actual.logprob == pytest.approx(expected.logprob, abs=2e-4)
            assert actual.greedy == expected.greedy


def test_the_greedy_answer_is_recognized() -> None:
    """The model's greedy answer is recognized; one changed token makes it not greedy."""
    scorer = EngineScorer(LocalEngine(MODEL), decode=BYTES.decode)
    prompt = [72, 101, 108]
    (answer,) = scorer.generate([prompt], Sampling(max_new_tokens=6, temperature=0.0), seed=0)
    other = [*answer[:3], (answer[3] + 1) % 256, *answer[4:]]
    rows = [Row(tokens=(*prompt, *response), scored=len(response)) for response in (answer, other)]
    greedy, changed = scorer.score(rows)
    assert (greedy.greedy, changed.greedy) == (True, False)
    assert greedy.logprob > changed.logprob


def test_engines_and_exported_models_generate_the_same() -> None:
    """Both stop at the first stop token, which is included."""
    engine = EngineScorer(LocalEngine(MODEL), decode=BYTES.decode)
    exported = ExportedScorer(Runtime(MODEL), context=None, decode=BYTES.decode)
    prompts = [[1, 2, 3], [200], [5, 5, 5, 5]]
    free = Sampling(max_new_tokens=12, temperature=0.0)
    full = engine.generate(prompts, free, seed=0)
    assert exported.generate(prompts, free, seed=0) == full
    stop = Sampling(max_new_tokens=12, temperature=0.0, stop_token_ids=(full[0][4],))
    stopped = engine.generate(prompts, stop, seed=0)
    assert stopped == exported.generate(prompts, stop, seed=0)
    assert stopped[0] == full[0][: full[0].index(full[0][4]) + 1]
    with pytest.raises(ConfigError, match="temperature: 0"):
        exported.generate(prompts, Sampling(), seed=0)


def test_byte_texts_get_no_special_tokens() -> None:
    """The byte tokenizer has only an end of text."""
    texts = TextCodec(BYTES)
    assert texts.encode("ab") == texts.encode("ab", True) == [97, 98]
    assert (texts.prefix, texts.ends, texts.end_text) == (256, (256,), "")
    assert texts.decode([97, 256]) == "a"

    class Endless:
        def encode(self, text: str) -> list[int]:
            return [0]

        def decode(self, tokens: object) -> str:
            return ""

    with pytest.raises(ConfigError, match="eos_token"):
        TextCodec(Endless())


def test_a_continuation_longer_than_the_context_is_rejected() -> None:
    """At the context length it is scored; one more token is a one-line error."""
    pytest.importorskip("lm_eval")
    from ms_align.evaluation.harness import HarnessModel

    scorer = ExportedScorer(Runtime(MODEL), context=4, decode=BYTES.decode)
    model = HarnessModel(scorer, TextCodec(BYTES))
    assert len(model._loglikelihood_tokens([(None, [1], [2] * 4)])) == 1
    with pytest.raises(DataError, match="continuation of 5 tokens"):
        model._loglikelihood_tokens([(None, [1], [2] * 5)])


def test_only_numbers_of_a_task_are_reported() -> None:
    """A standard error of `N/A` is left out."""
    metrics = {"alias": "a", "acc,none": 0.5, "acc_stderr,none": "N/A", "f1_stderr,strict": 0.25}
    assert _numeric_metrics(metrics) == {"acc": 0.5, "f1,strict,stderr": 0.25}
