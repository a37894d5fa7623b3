"""Write tokenizers as GGUF metadata: byte-level BPE, which llama.cpp calls `gpt2`."""

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
    # The same pattern; under the first name llama.cpp keeps words of the vocabulary unsplit.
    (LLAMA_3, True): "llama-bpe",
    (LLAMA_3, False): "smaug-bpe",
    (LLAMA_3.replace("\\p{N}{1,3}", "\\p{N}"), False): "qwen2",
}
"""llama.cpp's names of pre-tokenizers, by regular expression and `ignore_merges`."""
NO_MERGES = ["\u0120 \u0120"]
"""llama.cpp requires at least one merge; the result of merging two spaces is not a token."""
UNSUPPORTED_FLAGS = ("lstrip", "rstrip", "single_word")
"""Flags of added tokens that llama.cpp does not support."""
END_KEYS = ("eos", "eot", "eom")
"""Keys under which llama.cpp stores tokens that end a text."""


def add_tokenizer(
    writer: Any, gguf: Any, files: TokenizerSource, ends: TextEnds, vocabulary: int
) -> None:
    """Add a tokenizer, the special tokens, and the chat template.

    Args:
        writer: a GGUFWriter.
        gguf: the library.
        files: tokenizer files.
        ends: special tokens of the model's text.
        vocabulary: vocabulary size of the model.

    Raises:
        ExportError: see `check_tokenizer`.
    """
    check_tokenizer(files, ends, vocabulary)
    document = files.document
    _add_tokens(writer, gguf, files, vocabulary)
    writer.add_tokenizer_pre(_pre_tokenizer_name(files))
    merges = document["model"].get("merges") or []
    pairs = [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]
    writer.add_token_merges(pairs or NO_MERGES)
    _add_ends(writer, ends)
    first_added, last_added = _added_around(files)
    writer.add_add_bos_token(ends.begin is not None and first_added == ends.begin)
    writer.add_add_eos_token(last_added is not None and last_added in ends.ends)
    if files.templates:
        # The writer stores the default template under the plain key, others under their names.
        templates = [{"name": name, "template": text} for name, text in files.templates.items()]
        writer.add_chat_template(templates)


def add_placeholders(writer: Any, gguf: Any, ends: TextEnds, vocabulary: int) -> None:
    """Add tokens without text, for a model exported without a tokenizer.

    llama.cpp aborts the process if a file without any tokenizer is used with text, and uses token
    11 as the end of text if none is set.
    """
    if not ends.ends:
        logger.warning(
            "the model's end-of-text token is unknown; llama.cpp needs one, so token %d is used",
            vocabulary - 1,
        )
        ends = TextEnds(begin=ends.begin, ends=(vocabulary - 1,), pad=ends.pad)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"[{token}]" for token in range(vocabulary)])
    writer.add_token_types([gguf.TokenType.NORMAL] * vocabulary)
    writer.add_token_merges(NO_MERGES)
    _add_ends(writer, ends)
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)


def check_tokenizer(files: TokenizerSource, ends: TextEnds, vocabulary: int) -> None:
    """Check that llama.cpp supports a tokenizer.

    Raises:
        ExportError: it is not byte-level BPE, llama.cpp has no equivalent of its normalizer or
            pre-tokenizer, it belongs to another model, or the end of text is unknown.
    """
    model = files.document["model"]
    if model.get("type") != "BPE":
        raise ExportError(
            f"{files.path}: the tokenizer must be byte-level BPE, got type {model.get('type')!r};"
            " use a ct or ort scheme"
        )
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ExportError(
                f"{files.path}: {key} is {model[key]!r}, which llama.cpp does not support; use a"
                " ct or ort scheme"
            )
    normalizer = _part(files, "normalizer", _Normalizer)
    # Qwen models use NFC, which llama.cpp leaves to the caller.
    if normalizer.type != "NFC":
        raise ExportError(
            f"{files.path}: its normalizer {normalizer.type!r} changes text before splitting,"
            " which llama.cpp does not support; train a tokenizer without it"
        )
    for token in files.document.get("added_tokens") or []:
        # llama.cpp matches added tokens anywhere and keeps the spaces next to them.
        if flag := next((name for name in UNSUPPORTED_FLAGS if token.get(name)), None):
            raise ExportError(
                f"{files.path}: the added token {token['content']!r} has {flag}=true, which a GGUF"
                " file cannot store, so llama.cpp would tokenize differently; set it to false, or"
                " use a ct or ort scheme"
            )
    check_tokenizer_fits(files, vocabulary)
    _pre_tokenizer_name(files)
    if not 0 < len(ends.ends) <= len(END_KEYS):
        problem = (
            f"{len(ends.ends)} tokens end a text"
            if ends.ends
            else "the end-of-text token is unknown"
        )
        raise ExportError(
            f"{files.path}: {problem}, and llama.cpp needs 1 to {len(END_KEYS)}; set eos_token_id"
            " in the generation_config.json next to it"
        )


def _add_tokens(writer: Any, gguf: Any, files: TokenizerSource, vocabulary: int) -> None:
    types = gguf.TokenType
    tokens, token_types = [], []
    for token in range(vocabulary):
        # A model may have more rows than its tokenizer has tokens; each needs a unique text.
        tokens.append(files.texts.get(token, f"[PAD{token}]"))
        if token in files.added:
            special = files.added[token].special
            token_types.append(types.CONTROL if special else types.USER_DEFINED)
        else:
            token_types.append(types.NORMAL if token in files.texts else types.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(token_types)


def _add_ends(writer: Any, ends: TextEnds) -> None:
    for name, token in zip(END_KEYS, ends.ends, strict=False):
        getattr(writer, f"add_{name}_token_id")(token)
    # Without this key, llama.cpp would use an arbitrary default id.
    writer.add_bos_token_id(ends.ends[0] if ends.begin is None else ends.begin)
    if ends.pad is not None:
        writer.add_pad_token_id(ends.pad)


def _added_around(files: TokenizerSource) -> tuple[int | None, int | None]:
    """Return the tokens added before and after each text, if any."""
    processor = _part(files, "post_processor", _Processor)
    steps = processor.processors or [processor]
    template = next((step for step in steps if step.type == "TemplateProcessing"), None)
    if template is None or not template.single:
        return None, None
    ids_by_name = {
        name: special.ids[0] for name, special in template.special_tokens.items() if special.ids
    }
    names = [template.single[index].get("SpecialToken", {}).get("id", "") for index in (0, -1)]
    first, last = (ids_by_name.get(str(name)) for name in names)
    return first, last


def _pre_tokenizer_name(files: TokenizerSource) -> str:
    """Return llama.cpp's name of the pre-tokenizer."""
    pre_tokenizer = _part(files, "pre_tokenizer", _PreTokenizer)
    steps = pre_tokenizer.pretokenizers or [pre_tokenizer]
    byte_level = next((step for step in steps if step.type == "ByteLevel"), None)
    patterns = [step.pattern.get("Regex") for step in steps if step.type == "Split"]
    whole_words = bool(files.document["model"].get("ignore_merges"))
    if byte_level is not None and not byte_level.add_prefix_space and len(steps) <= 2:
        if byte_level.use_regex and len(steps) == 1 and not whole_words:
            return "gpt-2"
        if len(patterns) == 1 and (name := SPLITS.get((str(patterns[0]), whole_words))):
            return name
    raise ExportError(
        f"{files.path}: llama.cpp has no equivalent of its pre-tokenizer; train a tokenizer with"
        " ms-data tokenizer, or use a ct or ort scheme, whose runtimes read tokenizer.json"
    )


class _PreTokenizer(msgspec.Struct):
    """A pre-tokenizer, or a sequence of pre-tokenizers."""

    type: str = ""
    pattern: dict[str, str] = {}
    use_regex: bool = True
    add_prefix_space: bool = False
    pretokenizers: "list[_PreTokenizer]" = []


class _Special(msgspec.Struct):
    ids: list[int] = []


class _Processor(msgspec.Struct):
    """A post-processor, or a sequence of post-processors."""

    type: str = ""
    single: list[dict[str, dict[str, Any]]] = []
    special_tokens: dict[str, _Special] = {}
    processors: "list[_Processor]" = []


class _Normalizer(msgspec.Struct):
    type: str = "NFC"


def _part(files: TokenizerSource, name: str, struct: type[T]) -> T:
    """Read a part of tokenizer.json with the fields needed here."""
    try:
        return msgspec.convert(files.document.get(name) or {}, struct)
    except msgspec.ValidationError as error:
        raise ExportError(f"{files.path}: {name} is damaged ({error}); fetch it again") from error
