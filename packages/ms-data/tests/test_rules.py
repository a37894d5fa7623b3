# ruff: noqa: RUF001 - Chinese punctuation is under test
"""Each cleaning rule, and the optimized ones compared with brute-force references."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_data.cleaning.languages import chinese_script, identify
from ms_data.cleaning.ngrams import Ngrams
from ms_data.cleaning.personal import (
    PERSONAL_DATA_TYPES,
    find_personal_data,
    is_chinese_identity,
    passes_luhn,
)
from ms_data.cleaning.rule import Change, Drop, Outcome
from ms_data.cleaning.rule_file import make_rule, read_rules, rules_template
from ms_data.cleaning.rules import RULES
from ms_data.cleaning.text import Text, count_sentences
from ms_data.cleaning.words import plain_words
from ms_data.errors import ConfigError

SENTENCE = "The quick brown fox jumps over the lazy dog, and that was all it had to do today."
CHINESE = "今天天气很好，我们决定去公园散步。湖边有很多人在放风筝！你想不想一起去看看呢？"


def apply(name: str, text: str, **values: object) -> Outcome:
    """Apply one rule to a text."""
    return make_rule(name, values, where="test").apply(Text(text, plain_words))


def dropped(name: str, text: str, **values: object) -> str:
    """Return the setting by which a rule drops a text, or an empty string if it keeps it."""
    outcome = apply(name, text, **values)
    return outcome.setting if isinstance(outcome, Drop) else ""


def changed(name: str, text: str, **values: object) -> str:
    """Return the text after a rule."""
    outcome = apply(name, text, **values)
    assert not isinstance(outcome, Drop)
    return text if outcome is None else outcome.text


def prose(seed: int, sentences: int = 12) -> str:
    """Return sentences of random words, one per line."""
    rng = random.Random(seed)
    words = [f"{a}{b}" for a in ("mar", "ten", "sol", "vid", "lor") for b in ("ine", "or", "ally")]
    lines = []
    for _ in range(sentences):
        body = [rng.choice(words) + rng.choice("aeiou") * rng.randint(0, 2) for _ in range(9)]
        lines.append("The " + " ".join(body) + " and that is it.")
    return "\n".join(lines)


def top_characters_slowly(words: list[str], n: int) -> int:
    """Return the characters covered by the most frequent n-gram, comparing strings."""
    ngrams = [" ".join(words[start : start + n]) for start in range(len(words) - n + 1)]
    if not ngrams:
        return 0
    text, count = Counter(ngrams).most_common(1)[0]
    return len(text) * count


def repeated_characters_slowly(words: list[str], n: int) -> int:
    """Return the characters of n-grams that occurred before, comparing strings."""
    seen, characters, start = set(), 0, 0
    while start + n <= len(words):
        ngram = tuple(words[start : start + n])
        if ngram in seen:
            characters += len("".join(ngram))
            start += n
        else:
            seen.add(ngram)
            start += 1
    return characters


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["a", "bb", "ccc", "dddd", "e"]), max_size=60))
def test_ngram_repetition_matches_the_brute_force_reference(words: list[str]) -> None:
    """For every n, hashes give the same counts as comparing the n-grams as strings."""
    ngrams = Ngrams(words)
    for n in range(2, 11):
        ngrams.grow()
        assert ngrams.top_characters() == top_characters_slowly(words, n)
        assert ngrams.repeated_characters() == repeated_characters_slowly(words, n)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80))
def test_splitting_into_words_loses_only_whitespace(text: str) -> None:
    assert "".join(plain_words(text)) == "".join(text.split())


def test_words_keep_apostrophes_and_split_punctuation_and_chinese_characters() -> None:
    assert plain_words("Don't stop... 你好 x_1!") == (
        ["Don't", "stop", "...", "你", "好", "x_1", "!"]
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("No end", 1), ("One. Two! Three?", 3), ("Wait... what?!", 2), ("你好。再见！", 2)],
)
def test_sentences_are_counted_by_their_final_punctuation(text: str, count: int) -> None:
    """Repeated punctuation ends one sentence, in any script."""
    assert count_sentences(["..." if w == "..." else w for w in plain_words(text)]) == count - (
        text == "Wait... what?!"
    )


GOOD = prose(1)


@pytest.mark.parametrize(
    ("rule", "text", "setting"),
    [
        ("gopher_quality", GOOD, ""),
        ("gopher_quality", SENTENCE, "min_words"),
        ("gopher_quality", GOOD + " #" * 60, "max_hashes_a_word"),
        ("gopher_quality", GOOD + " ... " * 60, "max_ellipses_a_word"),
        ("gopher_quality", "\n".join(f"- {x}" for x in GOOD.split("\n")), "max_bullet_lines"),
        ("gopher_quality", GOOD.replace(".", "..."), "max_ellipsis_lines"),
        ("gopher_quality", GOOD + " 12345" * 60, "min_alphabetic_words"),
        ("gopher_quality", "alpha beta gamma delta " * 30, "min_stop_words"),
        ("gopher_quality", "a b c d to " * 30, "min_mean_word_length"),
        ("gopher_quality", "incomprehensibility the of " * 60, ""),
        ("gopher_quality", "incomprehensibilities " * 60, "max_mean_word_length"),
        ("gopher_repetition", GOOD, ""),
        ("gopher_repetition", "\n\n".join([SENTENCE] * 9), "max_repeated_paragraphs"),
        ("gopher_repetition", "\n".join([SENTENCE] * 9), "max_repeated_lines"),
        ("gopher_repetition", "yes no " * 60, "max_top_ngrams"),
        ("gopher_repetition", f"{GOOD}\n" + " ".join([SENTENCE] * 5), "max_repeated_ngrams"),
        ("fineweb_quality", GOOD, ""),
        ("fineweb_quality", GOOD.replace(".", ""), "min_ended_lines"),
        ("fineweb_quality", "A short line here.\n" * 40, "max_short_lines"),
        ("fineweb_quality", f"{SENTENCE}\n" * 40, "max_repeated_line_characters"),
        ("fineweb_quality", "\n\n\n\n\n\n".join(GOOD.split("\n")), "max_lines_a_word"),
        ("c4_quality", SENTENCE, "min_sentences"),
        ("c4_quality", GOOD + "\nLorem ipsum dolor sit amet.", "lorem_ipsum"),
        ("c4_quality", GOOD + "\nvoid main() { return it; }.", "curly_brackets"),
        ("c4_paragraphs", GOOD, "min_long_lines"),
        ("c4_paragraphs", "\n".join(["x" * 200] * 3), ""),
        ("chinese_quality", CHINESE, "min_characters"),
        ("chinese_quality", CHINESE.replace("。", "，").replace("！", "").replace("？", "")
         + "湖泊山川" * 15, "min_ended_lines"),
    ],
)  # fmt: skip
def test_each_setting_drops_the_text_that_violates_it(rule: str, text: str, setting: str) -> None:
    """The outcome names the setting; good text passes."""
    assert dropped(rule, text) == setting


def test_c4_removes_bad_lines_and_counts_them_by_setting() -> None:
    """Lines without final punctuation, with few words, about scripts or cookies; citations."""
    cut = "Menu\nPlease enable Javascript now.\nTwo words.\nWe use cookies here."
    text = f"{GOOD}\n{cut}\nSo it is.[3]"
    outcome = apply("c4_quality", text)
    assert isinstance(outcome, Change)
    assert outcome.text == f"{GOOD}\nSo it is."
    cuts = {cut.setting: cut.times for cut in outcome.cuts}
    assert cuts == {"ended_lines": 1, "javascript": 1, "min_words_a_line": 1, "policies": 1}


def test_unicode_fixes_mojibake_and_composes_accents() -> None:
    """Quotation marks do not change."""
    assert changed("unicode", "cafÃ© “e\u0301”") == "café “é”"
    assert changed("unicode", "ﬁ", form="NFKC") == "fi"


def test_control_characters_are_removed_and_line_ends_unified() -> None:
    """Removes terminal escapes, overstrikes, byte order marks, bells; keeps zero-width joiners."""
    text = "a\r\nb\rc\x1b[31mred\x1b[0m N\bNA\bA \ufeff\u200bx\x07 👩\u200d🚀\tt"
    assert changed("control_characters", text) == "a\nb\ncred NA x 👩\u200d🚀\tt"


def test_chinese_text_is_normalized() -> None:
    """Full-width letters become narrow, punctuation becomes wide, inner spaces are removed."""
    text = "我有１２个ＡＰＩ,版本是3.11.　这 是 测试:好吗?"
    assert changed("chinese_text", text) == "我有12个API,版本是3.11. 这是测试：好吗？"
    assert changed("chinese_text", "我 爱 北京 天安门.") == "我爱北京天安门。"


@pytest.mark.parametrize(
    ("text", "language"),
    [
        (CHINESE, "zh"),
        ("これは日本語の文章です。とても簡単です。", "ja"),
        ("이것은 한국어 문장입니다.", "ko"),
        (SENTENCE, "en"),
        ("Der schnelle braune Fuchs springt über den faulen Hund und freut sich sehr.", "de"),
        ("12345 +-* 67", "unknown"),
        ("使用 ls 命令列出文件，选项 options and arguments 如下", "zh"),
    ],
)
def test_languages_are_identified_by_script_and_letters(text: str, language: str) -> None:
    """Chinese, Japanese and Korean need no model."""
    assert identify(text) == language


def test_simplified_and_traditional_chinese_are_distinguished() -> None:
    """Characters found in only one legacy encoding decide."""
    assert chinese_script("这个软件的设计很简单") == "simplified"
    assert chinese_script("這個軟體的設計很簡單") == "traditional"
    assert chinese_script("你好") == "unknown"


def complete_identity(body: str) -> str:
    """Append the check digit to a Chinese identity number."""
    return next(
        body + check_digit
        for check_digit in "0123456789X"
        if is_chinese_identity(body + check_digit)
    )


CARD = next(card for card in (f"453201511283036{n}" for n in range(10)) if passes_luhn(card))


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Write to jane.doe+x@mail.example.org.", "Write to <mail>."),
        ("邮箱：zhang@example.cn，谢谢", "邮箱：<mail>，谢谢"),
        ("写信到zhang@例子.公司，或li@例子.cn。", "写信到<mail>，或<mail>。"),
        ("见 @张三.还有 a@b 和 c@张三说。", "见 @张三.还有 a@b 和 c@张三说。"),
        ("call +49 30 1234 5678 now", "call <telephone> now"),
        ("call (212) 555-0123 now", "call <telephone> now"),
        ("手机13812345678。", "手机<telephone>。"),
        ("电话 010-62345678, +86 138-1234-5678", "电话 <telephone>, <telephone>"),
        ("from 8.8.8.8 and 2001:4860:4860::8888 on", "from <ip_address> and <ip_address> on"),
        ("at 192.168.0.1 and 127.0.0.1 and 999.1.1.1", None),
        (f"身份证{complete_identity('11010519491231002')}。", "身份证<identity_number>。"),
        (f"card {CARD[:4]} {CARD[4:8]} {CARD[8:12]} {CARD[12:]}!", "card <card_number>!"),
        ("SSN 078-05-1120", "SSN <identity_number>"),
        ("version 1.2.3.4.5 of 2024-01-31 has 1234567890123456 rows", None),
        ("pi is 3.14159265358979, and 10000000000000000", None),
        ("ISBN 978-3-16-148410-0", None),
    ],
)  # fmt: skip
def test_personal_data_is_replaced_by_its_type(text: str, masked: str | None) -> None:
    """Formats and check digits decide; versions, dates and counts stay."""
    assert changed("personal_data", text) == (masked or text)


def test_numbers_with_a_wrong_check_digit_are_not_personal_data() -> None:
    number = complete_identity("11010519491231002")
    wrong = [
        number[:position] + str((int(number[position]) + 1) % 10) + number[position + 1 :]
        for position in range(17)
    ]
    assert not any(map(is_chinese_identity, wrong))
    for position in range(1, 15):
        digits = CARD[:position] + str((int(CARD[position]) + 1) % 10) + CARD[position + 1 :]
        assert find_personal_data(digits, frozenset(PERSONAL_DATA_TYPES)) == []


def test_the_drop_outcome_holds_the_type_and_count_but_not_the_data() -> None:
    outcome = apply("personal_data", "me@example.org", action="drop")
    assert outcome == Drop("mail", 1, 0)


def test_decontaminate_drops_documents_that_share_an_ngram_with_a_benchmark(tmp_path: Path) -> None:
    """Ignores case and punctuation; short items must match completely; Chinese uses characters."""
    long = " ".join(f"word{n}" for n in range(30))
    rows = [
        long,
        "is this a short question about eight words",
        "北京是中华人民共和国的首都和直辖市",
    ]
    path = tmp_path / "benchmarks.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    inside = " ".join(f"Word{n}," for n in range(9, 22))
    for text, setting in [
        (f"so it says: {inside}!", "benchmarks"),
        ("so it says: " + " ".join(f"word{n}" for n in range(9, 21)), ""),
        ("Is this a short question about eight words?", "benchmarks"),
        ("is this a short question about nine words", ""),
        ("大家知道，北京是中华人民共和国的首都，和直辖市。", "benchmarks"),
    ]:
        assert dropped("decontaminate", text, benchmarks=str(path)) == setting


def test_the_rules_template_covers_every_rule_and_reads_back() -> None:
    text = rules_template()
    for name, rule_class in RULES.items():
        assert f"[{name}]" in text
        assert (rule_class.__doc__ or "").partition("\n")[0] in text
    path_free = text.replace("# [c4_paragraphs]", "[c4_paragraphs]")
    import tomllib

    tables = tomllib.loads(path_free)
    rules = read_rules(tables)
    assert [rule.name for rule in rules.rules] == [name for name in tables if name != "words"]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({}, "holds no rules"),
        ({"gopher": {}}, "did you mean 'gopher_quality'|gopher_repetition"),
        ({"gopher_quality": {"min_word": 3}}, "did you mean 'min_words'"),
        ({"gopher_quality": {"min_words": -1}}, "must be an integer"),
        ({"gopher_quality": 3}, "must be a table"),
        ({"words": "nltk", "unicode": {}}, "words is 'nltk'"),
        ({"gopher_repetition": {"max_top_ngrams": [0.2]}}, "3 numbers"),
        ({"decontaminate": {}}, "'benchmarks' is missing"),
        ({"language": {"keep": "en"}}, "list of strings"),
    ],
)
def test_bad_rule_settings_are_refused_in_one_line(tables: dict[str, object], message: str) -> None:
    """The error names the rule, the problem and the remedy."""
    with pytest.raises(ConfigError, match=message) as raised:
        read_rules(tables)
    assert "\n" not in str(raised.value)
