"""Shows attrs classes on the API pages as what they are: a call with parameters.

The pages are made from the source, where a setting of such a class is `field(default=1,
validator=ge(1))` with a docstring under it. Here each class gets the signature that attrs writes
for it, inherited settings included, and its settings become described parameters with their types
and defaults. The mistakes that a page would show (a documented parameter that is none) are then
warnings again, which stop the build.
"""

import ast
import re
from collections.abc import Iterator
from textwrap import dedent
from typing import Any, NamedTuple

import griffe

DECORATORS = {
    f"{module}.{name}"
    for module, names in {
        "attrs": ("define", "frozen", "mutable"),
        "attr": ("define", "frozen", "mutable", "s", "attrs"),
    }.items()
    for name in names
}
FIELDS = {"attrs.field", "attr.field", "attr.ib", "attr.attrib"}
SECTION = re.compile(r"^Args:\s*$", re.MULTILINE)


class Setting(NamedTuple):
    """One field of a class, as a parameter of its making."""

    parameter: griffe.Parameter
    text: str
    """Its docstring."""


class AttrsClasses(griffe.Extension):
    """Gives every attrs class of a package its signature and its described parameters."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Is told of a package once it is loaded."""
        classes = [cls for cls in classes_of(pkg) if decorator_of(cls) is not None]
        found = {cls.path: settings_of(cls) for cls in classes}  # before any class is changed
        for cls in classes:
            describe(cls, found[cls.path])
        for cls in classes_of(pkg):
            settings = forwarded_settings(cls, found)
            if settings:
                describe(cls, settings)


def classes_of(place: griffe.Module | griffe.Class) -> Iterator[griffe.Class]:
    """Every class that stands in a module or class, however deep."""
    for member in list(place.members.values()):
        if member.is_alias or not (member.is_module or member.is_class):
            continue
        if isinstance(member, griffe.Class):
            yield member
        yield from classes_of(member)  # type: ignore[arg-type]


def decorator_of(cls: griffe.Class) -> griffe.Expr | None:
    """What makes a class one of attrs, or None."""
    for decorator in cls.decorators:
        value = decorator.value
        if isinstance(value, griffe.Expr) and value.canonical_path in DECORATORS:
            return value
    return None


def settings_of(cls: griffe.Class) -> list[Setting]:
    """The parameters of a class in their order, those of its bases first."""
    found: dict[str, Setting] = {}
    try:
        bases = [base for base in reversed(cls.mro()) if decorator_of(base) is not None]
    except ValueError:
        bases = []
    for one in (*bases, cls):
        by_name = arguments_of(decorator_of(one)).get("kw_only") == "True"
        for attribute in own_fields(one):
            found.pop(attribute.name, None)  # what is defined again comes where it is then
            found[attribute.name] = setting_of(attribute, by_name=by_name)
    kept = [found[name] for name in found if found[name].parameter.annotation is not None]
    return sorted(kept, key=lambda one: one.parameter.kind is griffe.ParameterKind.keyword_only)


def forwarded_settings(cls: griffe.Class, found: dict[str, list[Setting]]) -> list[Setting]:
    """What `**settings` of a class's `__init__` takes: the fields of the attrs class it goes to.

    They take the place of `**settings` in the signature, behind those that it names itself.
    """
    made = cls.members.get("__init__")
    if not isinstance(made, griffe.Function) or made.source == "":
        return []
    rest = [each for each in made.parameters if each.kind is griffe.ParameterKind.var_keyword]
    calls = (
        node for node in ast.walk(ast.parse(dedent(made.source))) if isinstance(node, ast.Call)
    )
    for call in calls if rest else ():
        passed = (ast.unparse(each.value) for each in call.keywords if each.arg is None)
        if rest[0].name not in passed or not isinstance(call.func, ast.Name):
            continue
        settings = found.get(cls.module.resolve(call.func.id), [])
        named = {each.name for each in made.parameters}
        settings = [each for each in settings if each.parameter.name not in named]
        del made.parameters[rest[0].name]
        for each in settings:
            each.parameter.kind = griffe.ParameterKind.keyword_only
            made.parameters.add(each.parameter)
        return settings
    return []


def own_fields(cls: griffe.Class) -> Iterator[griffe.Attribute]:
    """The annotated fields that are given when a class is made."""
    for member in cls.members.values():
        if not isinstance(member, griffe.Attribute) or member.annotation is None:
            continue
        if "property" in member.labels or str(member.annotation).startswith("ClassVar"):
            continue
        if arguments_of(field_of(member)).get("init") != "False":
            yield member


def setting_of(attribute: griffe.Attribute, *, by_name: bool) -> Setting:
    """A field as a parameter."""
    arguments = arguments_of(field_of(attribute))
    by_name = by_name or arguments.get("kw_only") == "True"
    kind = griffe.ParameterKind
    name = str(arguments.get("alias", attribute.name)).strip("'\"").lstrip("_")
    parameter = griffe.Parameter(
        name,
        annotation=attribute.annotation,
        kind=kind.keyword_only if by_name else kind.positional_or_keyword,
        default=default_of(attribute),
    )
    return Setting(parameter, attribute.docstring.value if attribute.docstring else "")


def default_of(attribute: griffe.Attribute) -> str | griffe.Expr | None:
    """What a field is when it is not given; None where it must be."""
    call = field_of(attribute)
    if call is None:
        return attribute.value
    arguments = arguments_of(call)
    if (factory := arguments.get("factory")) is not None:
        return "..." if str(factory).startswith("lambda") else f"{factory}()"
    return arguments.get("default")


def field_of(attribute: griffe.Attribute) -> griffe.ExprCall | None:
    """The call of `attrs.field` that a field is assigned, or None."""
    value = attribute.value
    if isinstance(value, griffe.ExprCall) and value.canonical_path in FIELDS:
        return value
    return None


def arguments_of(call: griffe.Expr | None) -> dict[str, Any]:
    """The named arguments of a call; none where it is not called."""
    if not isinstance(call, griffe.ExprCall):
        return {}
    named = [one for one in call.arguments if isinstance(one, griffe.ExprKeyword)]
    return {one.name: one.value if is_long(one.value) else str(one.value) for one in named}


def is_long(value: Any) -> bool:
    """Whether a value is more than a word, so that its names may become links."""
    return isinstance(value, griffe.Expr) and not isinstance(value, griffe.ExprName)


def describe(cls: griffe.Class, settings: list[Setting]) -> None:
    """Writes a class's signature and parameters, in the place of its fields."""
    first = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    if "__init__" not in cls.members:
        parameters = griffe.Parameters(first, *(one.parameter for one in settings))
        cls.set_member("__init__", griffe.Function("__init__", parameters=parameters, parent=cls))
    own = {attribute.name for attribute in own_fields(cls)}
    for member in cls.members.values():
        if not isinstance(member, griffe.Attribute):
            continue
        if member.name in own:
            member.docstring = None  # it is a parameter's now, and undescribed fields are not shown
        if field_of(member) is not None:
            member.value = None
    texts = {one.parameter.name: one.text for one in settings if one.text}
    if texts:
        old = cls.docstring.value if cls.docstring else ""
        line = cls.docstring.lineno if cls.docstring else cls.lineno
        parser = cls.docstring.parser if cls.docstring else None
        value = with_parameters(old, texts)
        cls.docstring = griffe.Docstring(value, lineno=line, parent=cls, parser=parser)


def with_parameters(docstring: str, texts: dict[str, str]) -> str:
    """A docstring whose section `Args` describes these parameters too."""
    section = SECTION.search(docstring)
    head, body, tail = docstring.rstrip(), "", ""
    if section:
        lines = docstring[section.end() :].lstrip("\n").splitlines()
        inside = next((at for at, line in enumerate(lines) if line[:1].strip()), len(lines))
        head = docstring[: section.start()].rstrip()
        body, tail = "\n".join(lines[:inside]).rstrip(), "\n".join(lines[inside:])
    told = set(re.findall(r"^ {4}\*{0,2}(\w+)\b.*?:", body, re.MULTILINE))
    more = [
        f"    {name}: " + text.strip().replace("\n", "\n        ")
        for name, text in texts.items()
        if name not in told
    ]
    body = "\n".join(part for part in (body, *more) if part)
    return "\n\n".join(part for part in (head, f"Args:\n{body}", tail) if part) + "\n"
