"""Tokenizers as GGUF metadata: byte-level BPE, which llama.cpp calls `gpt2`."""

import logging
from typing import Any, TypeVar

import msgspec

from ms_compress.errors import ExportError
from ms_compress.files.tokenizer_source import TokenizerSource
from ms_compress.text_ends import TextEnds, check_tokenizer_fits

T = TypeVar("T")

logger = logging.getLogger(__name__)

LLAMA_3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
    " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
SPLITS = {
    # The same expression; llama.cpp takes words of the vocabulary whole under the first name.
    (LLAMA_3, True): "llama-bpe",
    (LLAMA_3, False): "smaug-bpe",
    (LLAMA_3.replace("\\p{N}{1,3}", "\\p{N}"), False): "qwen2",
}
"""Names that llama.cpp has for the regular expression of a pre-tokenizer, and `ignore_merges`."""
NO_MERGES = ["\u0120 \u0120"]
"""llama.cpp wants one at least; what two spaces would be merged to is no token."""
STRIPS = ("lstrip", "rstrip", "single_word")
"""Settings of an added token that llama.cpp does not have."""
ENDS = ("eos", "eot", "eom")
"""The keys under which llama.cpp takes tokens that end a text."""


def add_tokenizer(
    writer: Any, gguf: Any, files: TokenizerSource, ends: TextEnds, vocabulary: int
) -> None:
    """Add a tokenizer, where its texts begin and end, and its chat template.

    Args:
        writer: a GGUFWriter.
        gguf: the library.
        files: the tokenizer's.
        ends: of the model's texts.
        vocabulary: number of the model's tokens.

    Raises:
        ExportError: as of `check_tokenizer`.
    """
    check_tokenizer(files, ends, vocabulary)
    document = files.document
    _add_tokens(writer, gguf, files, vocabulary)
    writer.add_tokenizer_pre(_split(files))
    merges = document["model"].get("merges") or []
    pairs = [m if isinstance(m, str) else " ".join(m) for m in merges]
    writer.add_token_merges(pairs or NO_MERGES)
    _add_ends(writer, ends)
    first, last = _added_around(files)
    writer.add_add_bos_token(ends.begin is not None and first == ends.begin)
    writer.add_add_eos_token(last is not None and last in ends.ends)
    if files.templates:
        # The writer has the default under its plain key, and the others under their names.
        named = [{"name": name, "template": text} for name, text in files.templates.items()]
        writer.add_chat_template(named)


def add_placeholders(writer: Any, gguf: Any, ends: TextEnds, vocabulary: int) -> None:
    """Add tokens that have no text, for a model whose tokenizer nobody gave.

    llama.cpp ends the process where a file without any tokenizer is asked for text, and takes
    token 11 as the end of a text where none is named.
    """
    if not ends.ends:
        logger.warning(
            "nothing says which token ends a text; llama.cpp wants one, and takes the last, %d",
            vocabulary - 1,
        )
        ends = TextEnds(begin=ends.begin, ends=(vocabulary - 1,), pad=ends.pad)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"[{number}]" for number in range(vocabulary)])
    writer.add_token_types([gguf.TokenType.NORMAL] * vocabulary)
    writer.add_token_merges(NO_MERGES)
    _add_ends(writer, ends)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


def check_tokenizer(files: TokenizerSource, ends: TextEnds, vocabulary: int) -> None:
    """Refuse a tokenizer that llama.cpp does not have.

    Raises:
        ExportError: it is no byte-level BPE, its text is prepared or split in a way unknown to
            llama.cpp, it is another model's, or nothing says where a text ends.
    """
    model = files.document["model"]
    if model.get("type") != "BPE":
        raise ExportError(
            f"{files.path}: a tokenizer of type {model.get('type')!r}; only byte-level BPE is known"
        )
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ExportError(f"{files.path}: {key} is {model[key]!r}, which llama.cpp has not")
    normalizer = _part(files, "normalizer", _Normalizer)
    # Models of Qwen ask for NFC, which llama.cpp leaves to whoever writes the text.
    if normalizer.type != "NFC":
        raise ExportError(
            f"{files.path}: it changes text by {normalizer.type!r} before splitting it,"
            " which llama.cpp does not; train a tokenizer without"
        )
    for token in files.document.get("added_tokens") or []:
        # llama.cpp finds added tokens wherever they stand and keeps the spaces next to them.
        if flag := next((name for name in STRIPS if token.get(name)), None):
            raise ExportError(
                f"{files.path}: the added token {token['content']!r} has {flag}=true, which a GGUF"
                " file cannot hold, so llama.cpp would read texts otherwise; set it to false, or"
                " choose a ct or ort scheme"
            )
    check_tokenizer_fits(files, vocabulary)
    _split(files)
    if not 0 < len(ends.ends) <= len(ENDS):
        many = (
            f"{len(ends.ends)} tokens end a text" if ends.ends else "nothing says what ends a text"
        )
        raise ExportError(
            f"{files.path}: {many}, and llama.cpp takes one to {len(ENDS)}; name them as"
            " eos_token_id in generation_config.json beside it"
        )


def _add_tokens(writer: Any, gguf: Any, files: TokenizerSource, vocabulary: int) -> None:
    types = gguf.TokenType
    tokens, kinds = [], []
    for number in range(vocabulary):
        tokens.append(files.texts.get(number, f"[PAD{number}]"))
        if number in files.added:
            special = files.added[number].special
            kinds.append(types.CONTROL if special else types.USER_DEFINED)
        else:
            kinds.append(types.NORMAL if number in files.texts else types.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)


def _add_ends(writer: Any, ends: TextEnds) -> None:
    for name, number in zip(ENDS, ends.ends, strict=False):
        getattr(writer, f"add_{name}_token_id")(number)
    writer.add_bos_token_id(ends.ends[0] if ends.begin is None else ends.begin)
    if ends.pad is not None:
        writer.add_pad_token_id(ends.pad)


def _added_around(files: TokenizerSource) -> tuple[int | None, int | None]:
    """Return the tokens that are put before and after each text, if any."""
    processor = _part(files, "post_processor", _Processor)
    steps = processor.processors or [processor]
    template = next((each for each in steps if each.type == "TemplateProcessing"), None)
    if template is None or not template.single:
        return None, None
    numbers = {name: each.ids[0] for name, each in template.special_tokens.items() if each.ids}
    around = [template.single[at].get("SpecialToken", {}).get("id", "") for at in (0, -1)]
    first, last = (numbers.get(str(name)) for name in around)
    return first, last


def _split(files: TokenizerSource) -> str:
    """Return llama.cpp's name of how text is split before merging."""
    cutter = _part(files, "pre_tokenizer", _Cutter)
    steps = cutter.pretokenizers or [cutter]
    byte_level = next((step for step in steps if step.type == "ByteLevel"), None)
    patterns = [step.pattern.get("Regex") for step in steps if step.type == "Split"]
    whole_words = bool(files.document["model"].get("ignore_merges"))
    if byte_level is not None and not byte_level.add_prefix_space and len(steps) <= 2:
        if byte_level.use_regex and len(steps) == 1 and not whole_words:
            return "gpt-2"
        if len(patterns) == 1 and (name := SPLITS.get((str(patterns[0]), whole_words))):
            return name
    raise ExportError(
        f"{files.path}: llama.cpp has no name for how it splits text; train a tokenizer with"
        " ms-data tokenizer, or choose a ct or ort scheme, whose runtimes read tokenizer.json"
    )


class _Cutter(msgspec.Struct):
    """A pre-tokenizer, or a sequence of them."""

    type: str = ""
    pattern: dict[str, str] = {}
    use_regex: bool = True
    add_prefix_space: bool = False
    pretokenizers: "list[_Cutter]" = []


class _Special(msgspec.Struct):
    ids: list[int] = []


class _Processor(msgspec.Struct):
    """A post-processor, or a sequence of them."""

    type: str = ""
    single: list[dict[str, dict[str, Any]]] = []
    special_tokens: dict[str, _Special] = {}
    processors: "list[_Processor]" = []


class _Normalizer(msgspec.Struct):
    type: str = "NFC"


def _part(files: TokenizerSource, name: str, kind: type[T]) -> T:
    """Read a part of tokenizer.json, as far as it is needed here."""
    try:
        return msgspec.convert(files.document.get(name) or {}, kind)
    except msgspec.ValidationError as error:
        raise ExportError(f"{files.path}: {name} is damaged ({error}); fetch it again") from error
