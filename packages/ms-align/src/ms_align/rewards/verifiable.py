"""Rewards that can be checked: an exact answer, a number, Python that parses or passes tests.

Each is a callable on samples, as PPO and its kin take them; the known answer is `sample.answer`.
"""

import ast
import math
import os
import re
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

from attrs import field, frozen

from ms_align.errors import RewardError
from ms_align.rewards.sandbox import Limits, judge
from ms_align.rewards.scoring import Sample
from ms_align.settings import flag, number, text

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?:/\d+)?")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


@frozen(kw_only=True)
class _Judgement:
    """A reward of one of two numbers."""

    reward: float = field(default=1.0)
    otherwise: float = field(default=0.0)

    def __call__(self, samples: Sequence[Sample], /) -> list[float]:
        """Give one number a sample."""
        return [
            self.reward if self.passes(sample, index) else self.otherwise
            for index, sample in enumerate(samples)
        ]

    @abstractmethod
    def passes(self, sample: Sample, index: int) -> bool:
        """Return whether a sample gets the reward; `index` is its place, for messages."""


@frozen(kw_only=True)
class ExactMatch(_Judgement):
    """`reward` where the response is the answer, else `otherwise`."""

    strip: bool = field(default=True, validator=flag)
    """Leave out white space around both."""
    fold_case: bool = field(default=False, validator=flag)
    """Take capitals and small letters for the same."""

    def passes(self, sample: Sample, index: int) -> bool:
        """Return whether the response is the answer."""
        return self._form(sample.response) == self._form(_answer(sample, index))

    def _form(self, value: str) -> str:
        value = value.strip() if self.strip else value
        return value.casefold() if self.fold_case else value


@frozen(kw_only=True)
class Numeric(_Judgement):
    """`reward` where the response's last number is the answer's, else `otherwise`."""

    tolerance: float = field(default=1e-6, validator=number())
    """How far it may be off, relative to the answer, or absolutely near 0."""

    def passes(self, sample: Sample, index: int) -> bool:
        """Return whether the response's last number is the answer's."""
        wanted, found = last_number(_answer(sample, index)), last_number(sample.response)
        if wanted is None:
            raise RewardError(
                f"the answer {sample.answer!r} of sample {index} holds no number; use ExactMatch"
            )
        if found is None:
            return False
        return math.isclose(found, wanted, rel_tol=self.tolerance, abs_tol=self.tolerance)


@frozen(kw_only=True)
class PythonParses(_Judgement):
    """`reward` where the response's code parses and does something, else `otherwise`."""

    least_statements: int = 1
    """Fewest statements that count as code: the empty text parses too."""

    def passes(self, sample: Sample, index: int) -> bool:
        """Return whether the response's code parses and does something."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(code_of(sample.response))
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
        return len(tree.body) >= self.least_statements


@frozen(kw_only=True)
class PythonTests:
    """The sample's tests, on the functions of the response's code, which run elsewhere.

    `reward` where the tests run to their end, else `otherwise`. Code and tests are two processes;
    plain values cross between them, and only the tests' process speaks the verdict. See
    `ms_align.rewards.sandbox` for what is promised.
    """

    tests_key: str = field(default="tests", validator=text())
    """The prompt's column with the tests, as Python; `answer` is read where there is none."""
    limits: Limits = field(factory=Limits, metadata={"table": Limits})
    reward: float = field(default=1.0)
    otherwise: float = field(default=0.0)

    def __call__(self, samples: Sequence[Sample], /) -> list[float]:
        """Score each sample by running its code against its tests, side by side, one a core."""
        tests = [
            sample.extra.get(self.tests_key) or _answer(sample, index)
            for index, sample in enumerate(samples)
        ]
        codes = [code_of(sample.response) for sample in samples]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            outcomes = pool.map(lambda code, test: judge(code, test, self.limits), codes, tests)
            return [self.reward if one.passed else self.otherwise for one in outcomes]


def code_of(response: str) -> str:
    """Find the first fenced block of Python; return the whole response where there is none."""
    found = _FENCE.search(response)
    return found[1] if found else response


def last_number(value: str) -> float | None:
    """Read the last number in a text: with a sign, commas, an exponent, or as a fraction."""
    found = _NUMBER.findall(value)
    if not found:
        return None
    digits = found[-1].replace(",", "")
    try:
        return float(Fraction(digits)) if "/" in digits else float(digits)
    except (ValueError, ZeroDivisionError, OverflowError):
        return None


def _answer(sample: Sample, index: int) -> str:
    if sample.answer is None:
        raise RewardError(
            f"sample {index} has no answer to check its response against; add `answer` to its "
            "prompt, or give a response_dataset"
        )
    return sample.answer
