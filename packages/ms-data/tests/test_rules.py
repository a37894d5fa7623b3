# ruff: noqa: RUF001 - Chinese punctuation is what is tested
"""Each rule decides by what it says, held against a slow truth where it is fast."""

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
    """What one rule makes of a text."""
    return make_rule(name, values, where="test").apply(Text(text, plain_words))


def dropped(name: str, text: str, **values: object) -> str:
    """The setting by which a rule drops a text; empty where it is kept."""
    found = apply(name, text, **values)
    return found.setting if isinstance(found, Drop) else ""


def changed(name: str, text: str, **values: object) -> str:
    """What a rule leaves of a text."""
    found = apply(name, text, **values)
    assert not isinstance(found, Drop)
    return text if found is None else found.text


def prose(seed: int, sentences: int = 12) -> str:
    """Sentences of different words, a paragraph each few."""
    rng = random.Random(seed)
    words = [f"{a}{b}" for a in ("mar", "ten", "sol", "vid", "lor") for b in ("ine", "or", "ally")]
    made = []
    for _ in range(sentences):
        body = [rng.choice(words) + rng.choice("aeiou") * rng.randint(0, 2) for _ in range(9)]
        made.append("The " + " ".join(body) + " and that is it.")
    return "\n".join(made)


def slow_top(words: list[str], n: int) -> int:
    """Characters that the commonest n-gram fills, by texts."""
    ngrams = [" ".join(words[at : at + n]) for at in range(len(words) - n + 1)]
    if not ngrams:
        return 0
    text, count = Counter(ngrams).most_common(1)[0]
    return len(text) * count


def slow_repeated(words: list[str], n: int) -> int:
    """Characters of n-grams that stood before, by texts."""
    seen, found, at = set(), 0, 0
    while at + n <= len(words):
        ngram = tuple(words[at : at + n])
        if ngram in seen:
            found += len("".join(ngram))
            at += n
        else:
            seen.add(ngram)
            at += 1
    return found


@settings(max_examples=150, deadline=None)
@given(st.lists(st.sampled_from(["a", "bb", "ccc", "dddd", "e"]), max_size=60))
def test_repeated_words_are_those_of_the_slow_truth(words: list[str]) -> None:
    """Sorted hashes find what comparing the n-grams as texts finds, for every n."""
    ngrams = Ngrams(words)
    for n in range(2, 11):
        ngrams.grow()
        assert ngrams.top_characters() == slow_top(words, n)
        assert ngrams.repeated_characters() == slow_repeated(words, n)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=80))
def test_words_lose_no_character_but_white_space(text: str) -> None:
    """All else stands in some word."""
    assert "".join(plain_words(text)) == "".join(text.split())


def test_words_are_split_as_people_read_them() -> None:
    """Signs stand alone, apostrophes stay, and each Chinese character is a word."""
    assert plain_words("Don't stop... 你好 x_1!") == (
        ["Don't", "stop", "...", "你", "好", "x_1", "!"]
    )


@pytest.mark.parametrize(
    ("text", "count"),
    [("", 0), ("No end", 1), ("One. Two! Three?", 3), ("Wait... what?!", 2), ("你好。再见！", 2)],
)
def test_sentences_end_behind_their_signs(text: str, count: int) -> None:
    """A row of signs ends one sentence, in any script."""
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
def test_a_rule_drops_by_the_setting_that_it_names(rule: str, text: str, setting: str) -> None:
    """Each measure of the published rules drops the text that is made for it, and no other."""
    assert dropped(rule, text) == setting


def test_c4_cuts_lines_and_counts_what_it_cut() -> None:
    """Lines without an end, of few words, or about scripts and cookies go; citations too."""
    cut = "Menu\nPlease enable Javascript now.\nTwo words.\nWe use cookies here."
    text = f"{GOOD}\n{cut}\nSo it is.[3]"
    found = apply("c4_quality", text)
    assert isinstance(found, Change)
    assert found.text == f"{GOOD}\nSo it is."
    cuts = {cut.setting: cut.times for cut in found.cuts}
    assert cuts == {"ended_lines": 1, "javascript": 1, "min_words_a_line": 1, "policies": 1}


def test_unicode_is_repaired_and_composed() -> None:
    """A wrong decoding is undone, a letter and its accent are one, and quotes stay."""
    assert changed("unicode", "cafÃ© “e\u0301”") == "café “é”"
    assert changed("unicode", "ﬁ", form="NFKC") == "fi"


def test_control_characters_go_and_line_ends_are_one() -> None:
    """Escapes of terminals, bold by typing twice, marks of order and bells go; joiners stay."""
    text = "a\r\nb\rc\x1b[31mred\x1b[0m N\bNA\bA \ufeff\u200bx\x07 👩\u200d🚀\tt"
    assert changed("control_characters", text) == "a\nb\ncred NA x 👩\u200d🚀\tt"


def test_chinese_is_written_one_way() -> None:
    """Wide letters are narrow, punctuation behind a character is wide, spaces between go."""
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
def test_languages_are_told_by_script_and_letters(text: str, language: str) -> None:
    """Chinese, Japanese and Korean need no model."""
    assert identify(text) == language


def test_scripts_of_chinese_are_told_without_a_table() -> None:
    """Characters that one old encoding alone holds decide; common ones say nothing."""
    assert chinese_script("这个软件的设计很简单") == "simplified"
    assert chinese_script("這個軟體的設計很簡單") == "traditional"
    assert chinese_script("你好") == "unknown"


def identity(body: str) -> str:
    """An identity number with its check digit."""
    return next(body + last for last in "0123456789X" if is_chinese_identity(body + last))


CARD = next(one for one in (f"453201511283036{n}" for n in range(10)) if passes_luhn(one))


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
        (f"身份证{identity('11010519491231002')}。", "身份证<identity_number>。"),
        (f"card {CARD[:4]} {CARD[4:8]} {CARD[8:12]} {CARD[12:]}!", "card <card_number>!"),
        ("SSN 078-05-1120", "SSN <identity_number>"),
        ("version 1.2.3.4.5 of 2024-01-31 has 1234567890123456 rows", None),
        ("pi is 3.14159265358979, and 10000000000000000", None),
        ("ISBN 978-3-16-148410-0", None),
    ],
)  # fmt: skip
def test_personal_data_is_masked_by_its_kind(text: str, masked: str | None) -> None:
    """Forms and check digits decide; versions, dates and counts stay."""
    assert changed("personal_data", text) == (masked or text)


def test_a_wrong_check_digit_is_no_identity_and_no_card() -> None:
    """One changed digit of a number makes it a plain number."""
    number = identity("11010519491231002")
    wrong = [number[:at] + str((int(number[at]) + 1) % 10) + number[at + 1 :] for at in range(17)]
    assert not any(map(is_chinese_identity, wrong))
    for at in range(1, 15):
        digits = CARD[:at] + str((int(CARD[at]) + 1) % 10) + CARD[at + 1 :]
        assert find_personal_data(digits, frozenset(PERSONAL_DATA_TYPES)) == []


def test_dropping_says_what_kind_was_found_and_never_the_data() -> None:
    """The ledger holds a count."""
    found = apply("personal_data", "me@example.org", action="drop")
    assert found == Drop("mail", 1, 0)


def test_documents_that_share_a_row_of_words_with_a_benchmark_are_dropped(tmp_path: Path) -> None:
    """Case and signs do not count; a short text is looked for whole; Chinese goes by characters."""
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


def test_every_rule_is_in_the_template_and_says_its_source() -> None:
    """What `init clean` writes reads back as rules, and names all settings of all rules."""
    text = rules_template()
    for name, kind in RULES.items():
        assert f"[{name}]" in text
        assert (kind.__doc__ or "").partition("\n")[0] in text
    path_free = text.replace("# [c4_paragraphs]", "[c4_paragraphs]")
    import tomllib

    tables = tomllib.loads(path_free)
    rules = read_rules(tables)
    assert [rule.name for rule in rules.rules] == [name for name in tables if name != "words"]


@pytest.mark.parametrize(
    ("tables", "words"),
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
def test_settings_that_cannot_be_used_are_one_line(tables: dict[str, object], words: str) -> None:
    """The error names the rule, what is wrong and the remedy."""
    with pytest.raises(ConfigError, match=words) as raised:
        read_rules(tables)
    assert "\n" not in str(raised.value)
