"""What lies beside a model's weights so that its texts begin, end and are chatted with as trained.

Where a text ends is said in up to four places: generation_config.json, which `generate` heeds, the
config.json, the tokenizer's settings, and the name of a token of the tokenizer. The first of them
that says anything holds, and every export says it in each place that its runtime looks at.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from attrs import field, frozen

from ms_compress.errors import ExportError
from ms_compress.files.untrusted import read_json, read_text

__all__ = ["TextEnds", "TokenizerFiles", "read_tokenizer", "text_ends", "without_tokenizer"]

KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>")
"""Special tokens that end a text where nothing else says which does, most telling first."""
LIMIT_BYTES = 2**28
"""What a tokenizer.json is never larger than."""
Document = dict[str, Any]


@frozen(kw_only=True)
class TextEnds:
    """Numbers of the tokens that begin, end and fill a text."""

    begin: int | None
    ends: tuple[int, ...]
    """Each of them ends a text; the one that ends a document comes first. Empty: none is known."""
    pad: int | None

    def ids(self) -> dict[str, int | list[int]]:
        """`bos_token_id`, `eos_token_id` and `pad_token_id`, those that are known."""
        found: dict[str, int | list[int]] = {}
        if self.begin is not None:
            found["bos_token_id"] = self.begin
        if self.ends:
            found["eos_token_id"] = self.ends[0] if len(self.ends) == 1 else list(self.ends)
        if self.pad is not None:
            found["pad_token_id"] = self.pad
        return found


@frozen(kw_only=True, eq=False)
class TokenizerFiles:
    """A tokenizer.json, and what lies beside it."""

    path: Path
    document: Document
    """Of tokenizer.json."""
    settings: Document
    """Of tokenizer_config.json; empty if there is none."""
    generation: Document
    """Of generation_config.json; empty if there is none."""
    template: str | None
    """The text of chat_template.jinja."""
    texts: dict[int, str] = field(init=False)
    """Each token's text by its number, the added ones included."""
    added: dict[int, Document] = field(init=False)

    def __attrs_post_init__(self) -> None:
        added = {each["id"]: each for each in self.document.get("added_tokens") or []}
        texts = {number: text for text, number in _vocabulary(self.document).items()}
        texts |= {number: each["content"] for number, each in added.items()}
        object.__setattr__(self, "texts", texts)
        object.__setattr__(self, "added", added)

    @property
    def chat_template(self) -> str | list[dict[str, str]] | None:
        """The template, or several by name, as tokenizer_config.json holds them."""
        found: str | list[dict[str, str]] | None = self.settings.get("chat_template")
        return self.template if self.template is not None else found

    def named(self, key: str) -> int | None:
        """The number of a token that the settings name, such as `eos_token`."""
        said = self.settings.get(key)
        text = said.get("content") if isinstance(said, dict) else said
        return next((number for number, each in self.texts.items() if each == text), None)

    def files(self, ends: TextEnds) -> dict[str, bytes]:
        """What an exported folder holds of it, by name, with the ends filled in where unsaid."""
        settings = dict(self.settings)
        settings.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
        numbers = {"bos_token": ends.begin, "eos_token": _first(ends.ends), "pad_token": ends.pad}
        for key, number in numbers.items():
            if settings.get(key) is None and number in self.texts:
                settings[key] = self.texts[number]
        found = {
            "tokenizer.json": self.path.read_bytes(),
            "tokenizer_config.json": _encoded(settings),
            **generation_file(ends, self.generation),
        }
        if self.template is not None:
            found["chat_template.jinja"] = self.template.encode()
        more = self.path.parent / "special_tokens_map.json"
        if more.is_file():
            found[more.name] = more.read_bytes()
        return found

    def check_fits(self, vocabulary: int) -> None:
        """Refuse a tokenizer of another model.

        Raises:
            ExportError: it has tokens that the model's vocabulary has not.
        """
        if self.texts and max(self.texts) >= vocabulary:
            raise ExportError(
                f"{self.path}: token {max(self.texts)} is beyond the model's vocabulary of"
                f" {vocabulary}; is it this model's tokenizer?"
            )


def read_tokenizer(given: str | Path) -> TokenizerFiles:
    """A tokenizer.json, or a folder's, with the files beside it.

    Raises:
        ExportError: there is none, or one of the files is damaged.
    """
    path = Path(given)
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        raise ExportError(f"{path}: there is no such tokenizer; give a tokenizer.json")
    document = read_json(path, Document, error=ExportError, limit_bytes=LIMIT_BYTES)
    _check(path, document)
    template = path.parent / "chat_template.jinja"
    settings = _beside(path, "tokenizer_config.json")
    _check_template(path.parent / "tokenizer_config.json", settings)
    return TokenizerFiles(
        path=path,
        document=document,
        settings=settings,
        generation=_beside(path, "generation_config.json"),
        template=read_text(template, error=ExportError) if template.is_file() else None,
    )


def text_ends(files: TokenizerFiles | None, config: Mapping[str, Any], vocabulary: int) -> TextEnds:
    """How a model's texts begin and end, from its tokenizer's files and its config.json.

    Raises:
        ExportError: a number is no token of the vocabulary.
    """
    places: list[Mapping[str, Any]] = [config]
    if files is not None:
        places.insert(0, files.generation)
        named = {
            f"{each}_id": files.named(each) for each in ("bos_token", "eos_token", "pad_token")
        }
        places.append(named)
        places.append({"eos_token_id": _known_end(files)})

    def said(key: str) -> tuple[int, ...]:
        found = next((place[key] for place in places if place.get(key) not in (None, [])), ())
        numbers = found if isinstance(found, list | tuple) else (found,)
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int):
                raise ExportError(f"{key} is {found!r}; give the number of a token")
            if not 0 <= number < vocabulary and key == "eos_token_id":
                raise ExportError(
                    f"{key} is {number}, which is no token of the model's vocabulary of"
                    f" {vocabulary}; correct config.json, or generation_config.json"
                )
        return tuple(number for number in numbers if 0 <= number < vocabulary)

    ends = said("eos_token_id")
    last = None if files is None else files.named("eos_token")
    if last is not None and last in ends:  # of several, the tokenizer's own comes first
        ends = tuple(dict.fromkeys((last, *ends)))
    return TextEnds(
        begin=_first(said("bos_token_id")),
        ends=ends,
        pad=_first(said("pad_token_id") or ends),
    )


def without_tokenizer(ends: TextEnds) -> dict[str, bytes]:
    """What a folder without a tokenizer holds beside its weights."""
    return generation_file(ends, {})


def generation_file(ends: TextEnds, known: Mapping[str, Any]) -> dict[str, bytes]:
    """generation_config.json by its name; nothing where no end of a text is known."""
    if not ends.ends and not known:
        return {}
    return {"generation_config.json": _encoded({**known, **ends.ids()})}


def _vocabulary(document: Document) -> dict[str, int]:
    found = document["model"]["vocab"]
    return dict(found) if isinstance(found, dict) else {each[0]: n for n, each in enumerate(found)}


def _check(path: Path, document: Document) -> None:
    """Refuse what has not the shape that is relied on here."""
    model = document.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict | list):
        raise ExportError(f"{path}: it holds no tokenizer; give a tokenizer.json")
    try:
        if isinstance(vocabulary, dict):
            msgspec.convert(vocabulary, dict[str, int])
        else:  # of Unigram: pairs of a text and its score
            msgspec.convert(vocabulary, list[tuple[str, float]])
        msgspec.convert(document.get("added_tokens") or [], list[_Added])
    except msgspec.ValidationError as error:
        raise ExportError(f"{path}: its vocabulary is damaged ({error}); fetch it again") from error


class _Added(msgspec.Struct):
    id: int
    content: str


def _check_template(path: Path, settings: Document) -> None:
    try:
        msgspec.convert(settings.get("chat_template"), str | list[dict[str, str]] | None)
    except msgspec.ValidationError as error:
        raise ExportError(f"{path}: chat_template is no text ({error}); fetch it again") from error


def _beside(path: Path, name: str) -> Document:
    there = path.parent / name
    return read_json(there, Document, error=ExportError) if there.is_file() else {}


def _known_end(files: TokenizerFiles) -> int | None:
    special = {each["content"]: n for n, each in files.added.items() if each.get("special")}
    return next((special[name] for name in KNOWN_ENDS if name in special), None)


def _encoded(document: Mapping[str, Any]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def _first(values: tuple[int, ...]) -> int | None:
    return values[0] if values else None
