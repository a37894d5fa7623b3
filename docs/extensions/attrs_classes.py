"""Show attrs classes on the API pages as calls with parameters.

The pages are generated from the source, where a field of such a class is `field(default=1,
validator=ge(1))` with a docstring below. This extension gives each class the signature that attrs
generates, inherited fields included, and turns the fields into documented parameters with types
and defaults. Mistakes, such as documentation of a missing parameter, are then warnings, which stop
the build.
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
    """A field of a class as a parameter of its `__init__`."""

    parameter: griffe.Parameter
    text: str
    """Docstring of the field."""


class AttrsClasses(griffe.Extension):
    """Give every attrs class of a package its signature and documented parameters."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Describe the classes of a package after it is loaded."""
        classes = [cls for cls in classes_of(pkg) if decorator_of(cls) is not None]
        fields = {cls.path: settings_of(cls) for cls in classes}  # before any class is changed
        for cls in classes:
            describe(cls, fields[cls.path])
        for cls in classes_of(pkg):
            settings = forwarded_settings(cls, fields)
            if settings:
                describe(cls, settings)


def classes_of(scope: griffe.Module | griffe.Class) -> Iterator[griffe.Class]:
    """Classes in a module or class, at any depth."""
    for member in list(scope.members.values()):
        if member.is_alias or not (member.is_module or member.is_class):
            continue
        if isinstance(member, griffe.Class):
            yield member
        yield from classes_of(member)  # type: ignore[arg-type]


def decorator_of(cls: griffe.Class) -> griffe.Expr | None:
    """The attrs decorator of a class, or None."""
    for decorator in cls.decorators:
        value = decorator.value
        if isinstance(value, griffe.Expr) and value.canonical_path in DECORATORS:
            return value
    return None


def settings_of(cls: griffe.Class) -> list[Setting]:
    """Parameters of a class in order, base classes first."""
    settings: dict[str, Setting] = {}
    try:
        bases = [base for base in reversed(cls.mro()) if decorator_of(base) is not None]
    except ValueError:
        bases = []
    for base in (*bases, cls):
        by_name = arguments_of(decorator_of(base)).get("kw_only") == "True"
        for attribute in init_fields(base):
            settings.pop(attribute.name, None)  # a redefined field moves to its new position
            settings[attribute.name] = setting_of(attribute, by_name=by_name)
    annotated = [s for s in settings.values() if s.parameter.annotation is not None]
    return sorted(annotated, key=lambda s: s.parameter.kind is griffe.ParameterKind.keyword_only)


def forwarded_settings(cls: griffe.Class, fields: dict[str, list[Setting]]) -> list[Setting]:
    """Fields of the attrs class to which `__init__` passes its `**settings`.

    They replace `**settings` in the signature, after the named parameters.
    """
    init = cls.members.get("__init__")
    if not isinstance(init, griffe.Function) or init.source == "":
        return []
    var_keyword = [p for p in init.parameters if p.kind is griffe.ParameterKind.var_keyword]
    calls = (
        node for node in ast.walk(ast.parse(dedent(init.source))) if isinstance(node, ast.Call)
    )
    for call in calls if var_keyword else ():
        passed = (ast.unparse(word.value) for word in call.keywords if word.arg is None)
        if var_keyword[0].name not in passed or not isinstance(call.func, ast.Name):
            continue
        settings = fields.get(cls.module.resolve(call.func.id), [])
        named = {parameter.name for parameter in init.parameters}
        settings = [setting for setting in settings if setting.parameter.name not in named]
        del init.parameters[var_keyword[0].name]
        for setting in settings:
            setting.parameter.kind = griffe.ParameterKind.keyword_only
            init.parameters.add(setting.parameter)
        return settings
    return []


def init_fields(cls: griffe.Class) -> Iterator[griffe.Attribute]:
    """Annotated fields of a class that are arguments of its `__init__`."""
    for member in cls.members.values():
        if not isinstance(member, griffe.Attribute) or member.annotation is None:
            continue
        if "property" in member.labels or str(member.annotation).startswith("ClassVar"):
            continue
        if arguments_of(field_of(member)).get("init") != "False":
            yield member


def setting_of(attribute: griffe.Attribute, *, by_name: bool) -> Setting:
    """Convert a field to a parameter."""
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
    """Default of a field; None if it is required."""
    call = field_of(attribute)
    if call is None:
        return attribute.value
    arguments = arguments_of(call)
    if (factory := arguments.get("factory")) is not None:
        return "..." if str(factory).startswith("lambda") else f"{factory}()"
    return arguments.get("default")


def field_of(attribute: griffe.Attribute) -> griffe.ExprCall | None:
    """The `attrs.field` call of a field, or None."""
    value = attribute.value
    if isinstance(value, griffe.ExprCall) and value.canonical_path in FIELDS:
        return value
    return None


def arguments_of(call: griffe.Expr | None) -> dict[str, Any]:
    """Keyword arguments of a call; empty for other expressions."""
    if not isinstance(call, griffe.ExprCall):
        return {}
    keywords = [word for word in call.arguments if isinstance(word, griffe.ExprKeyword)]
    return {w.name: w.value if is_compound(w.value) else str(w.value) for w in keywords}


def is_compound(value: Any) -> bool:
    """Return True for an expression of several names, which may become links."""
    return isinstance(value, griffe.Expr) and not isinstance(value, griffe.ExprName)


def describe(cls: griffe.Class, settings: list[Setting]) -> None:
    """Replace the fields of a class by a signature and documented parameters."""
    first = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    if "__init__" not in cls.members:
        parameters = griffe.Parameters(first, *(setting.parameter for setting in settings))
        cls.set_member("__init__", griffe.Function("__init__", parameters=parameters, parent=cls))
    names = {attribute.name for attribute in init_fields(cls)}
    for member in cls.members.values():
        if not isinstance(member, griffe.Attribute):
            continue
        if member.name in names:
            member.docstring = None  # moved to the parameter; fields without one are not shown
        if field_of(member) is not None:
            member.value = None
    texts = {setting.parameter.name: setting.text for setting in settings if setting.text}
    if texts:
        old = cls.docstring.value if cls.docstring else ""
        line = cls.docstring.lineno if cls.docstring else cls.lineno
        parser = cls.docstring.parser if cls.docstring else None
        value = with_parameters(old, texts)
        cls.docstring = griffe.Docstring(value, lineno=line, parent=cls, parser=parser)


def with_parameters(docstring: str, texts: dict[str, str]) -> str:
    """Add these parameters to the `Args` section of a docstring."""
    section = SECTION.search(docstring)
    head, body, tail = docstring.rstrip(), "", ""
    if section:
        lines = docstring[section.end() :].lstrip("\n").splitlines()
        inside = next((n for n, line in enumerate(lines) if line[:1].strip()), len(lines))
        head = docstring[: section.start()].rstrip()
        body, tail = "\n".join(lines[:inside]).rstrip(), "\n".join(lines[inside:])
    documented = set(re.findall(r"^ {4}\*{0,2}(\w+)\b.*?:", body, re.MULTILINE))
    added = [
        f"    {name}: " + text.strip().replace("\n", "\n        ")
        for name, text in texts.items()
        if name not in documented
    ]
    body = "\n".join(part for part in (body, *added) if part)
    return "\n\n".join(part for part in (head, f"Args:\n{body}", tail) if part) + "\n"
