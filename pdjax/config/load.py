"""From a YAML file and `section.field=value` words to a checked `Config`; every mistake becomes one readable line.

Scalars follow YAML 1.2: only `true` and `false` are booleans, `010` is ten, `1e-3` is a number, `12:30` is text.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types
import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from pdjax.config.schema import Config
from pdjax.errors import PdjaxError

PACKAGE = Path(__file__).parent.parent
DEFAULT_FILE = PACKAGE / "configs" / "quickstart.yaml"
"""Reached through the symlink pdjax/configs in a checkout and an editable install; a plain folder in a wheel."""

COMMAND_LINE = "command line"

FieldKey = tuple[str, str]  # (section, field)


class ConfigError(PdjaxError, ValueError):
    """A configuration that cannot be used. `problems` holds one line for each thing to mend."""

    def __init__(self, problems: Sequence[str]):
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class FieldDescription(NamedTuple):
    """One field of the schema in words. `name` is dotted; `default` is written as in YAML."""

    name: str
    type: str
    default: str
    description: str


def load_config(path: str | Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """The configuration in `path` with `overrides` (`section.field=value`, values in YAML, later ones win) laid over it.

    None means the quickstart; a relative path that does not exist here is also looked up among the packaged files, so that
    `configs/notebook.yaml` works from any directory. Raises ConfigError with every problem that was found.
    """
    file = find_file(path)
    document = read_document(file)
    collector = _Collector(str(path) if path is not None else "quickstart")
    collector.add_document(document)
    collector.add_overrides(overrides)
    return collector.build()


def find_file(path: str | Path | None) -> Path:
    """Where `path` is. Raises ConfigError naming the places that were tried."""
    if path is None:
        return DEFAULT_FILE
    here = Path(path).expanduser()
    if here.exists():
        return here
    packaged = PACKAGE / here
    if not here.is_absolute() and here.parts[0] == "configs" and packaged.exists():
        return packaged
    raise ConfigError([f"there is no configuration file {path}"])


def dump_config(config: Config) -> str:
    """`config` as YAML that loads to an equal one; a comment says what each null stands for."""
    lines = []
    for section, fields in config.model_dump(mode="json").items():
        lines.append(f"{section}:")
        descriptions = type(getattr(config, section)).model_fields
        for name, value in fields.items():
            remark = f"  # {descriptions[name].description}" if value is None else ""
            lines.append(f"  {name}: {_yaml_inline(value)}{remark}")
    return "\n".join(lines) + "\n"


def describe_fields() -> Iterator[FieldDescription]:
    """Every field that a file or `--set` can give, in the order of the schema."""
    for section, section_field in Config.model_fields.items():
        for name, field in _section_type(section_field).model_fields.items():
            default = field.get_default()
            yield FieldDescription(
                name=f"{section}.{name}",
                type=_type_in_words(field),
                default=_yaml_inline(list(default) if isinstance(default, tuple) else default),
                description=field.description or "",
            )


class _Collector:
    """Gathers values and problems from file and command line. Values that cannot be placed are problems, not values."""

    def __init__(self, file_label: str):
        self._file_label = file_label
        self._values: dict[str, dict[str, Any]] = {section: {} for section in Config.model_fields}
        self._origins: dict[FieldKey, str] = {}
        self._problems: list[str] = []

    def add_document(self, document: Any) -> None:
        if document is None:  # an empty file, or one of comments only
            return
        if not isinstance(document, dict):
            self._problems.append(f"{self._file_label}: must hold sections with fields, got {_shown(document)}")
            return
        for section, fields in document.items():
            if section not in self._values:
                self._problems.append(f"{self._file_label}: {_unknown_section(section)}")
            elif isinstance(fields, dict):
                for name, value in fields.items():
                    self._place(self._file_label, section, name, value)
            elif fields is not None:  # a section whose fields are all commented out is null
                self._problems.append(f"{self._file_label}: {section} must hold fields, got {_shown(fields)}")

    def add_overrides(self, overrides: Sequence[str]) -> None:
        for override in overrides:
            name, separator, text = override.partition("=")
            section, dot, field = name.strip().partition(".")
            if not (separator and dot and section and field):
                self._problems.append(f"{COMMAND_LINE}: expected SECTION.FIELD=VALUE, got {override!r}")
            elif section not in self._values:
                self._problems.append(f"{COMMAND_LINE}: {_unknown_section(section)}")
            else:
                self._place_text(section, field, text)

    def build(self) -> Config:
        """The checked configuration. Raises ConfigError where anything was wrong, values that did not fit included."""
        try:
            # Strict JSON rules: lists become tuples and whole numbers floats, but no text becomes a number.
            config = Config.model_validate_json(json.dumps(self._values, default=str), strict=True)
        except ValidationError as error:
            self._problems += [self._reword(detail) for detail in error.errors(include_url=False)]
            raise ConfigError(self._problems) from None
        if self._problems:
            raise ConfigError(self._problems)
        return config

    def _place_text(self, section: str, field: str, text: str) -> None:
        try:
            value = yaml.load(text, _Loader)
        except (yaml.YAMLError, ValueError) as error:
            self._problems.append(f"{COMMAND_LINE}: {section}.{field}: {text!r} is not valid YAML: {_yaml_problem(error)}")
        else:
            self._place(COMMAND_LINE, section, field, value)

    def _place(self, origin: str, section: str, name: Any, value: Any) -> None:
        if name not in _section_type(Config.model_fields[section]).model_fields:
            self._problems.append(f"{origin}: {_unknown_field(section, str(name))}")
        else:
            self._values[section][name] = value
            self._origins[section, name] = origin

    def _reword(self, detail: Mapping[str, Any]) -> str:
        location = detail["loc"]
        wording = _WORDINGS.get(detail["type"])
        if len(location) < 2 or wording is None:
            return f"{self._origin_of(location)}: {_plain_message(location, detail)}"
        name = ".".join(location[:2]) + "".join(f"[{index}]" for index in location[2:])
        limits = {key: _without_point_zero(limit) for key, limit in detail.get("ctx", {}).items()}
        return f"{self._origin_of(location)}: {name} {wording.format(**limits)}, got {_shown(detail['input'])}"

    def _origin_of(self, location: tuple[Any, ...]) -> str:
        """The place to mend. For a rule between several fields: the command line if any of its words took part in the outcome."""
        if len(location) >= 2:
            return self._origins.get((location[0], location[1]), self._file_label)
        concerned = [origin for (section, _), origin in self._origins.items() if not location or section == location[0]]
        return COMMAND_LINE if COMMAND_LINE in concerned else self._file_label


_WORDINGS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be text (write numbers and the like in quotes)",
    "tuple_type": "must be a list",
    "literal_error": "must be one of {expected}",
}


def _without_point_zero(limit: Any) -> Any:
    return int(limit) if isinstance(limit, float) and limit.is_integer() else limit


def _plain_message(location: tuple[Any, ...], detail: Mapping[str, Any]) -> str:
    message = str(detail["msg"]).removeprefix("Value error, ")
    return f"{'.'.join(map(str, location))}: {message}" if len(location) >= 2 else message


class _Loader(yaml.SafeLoader):
    """Safe YAML with the scalars of YAML 1.2 and without duplicate keys."""

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(None, None, f"a key must be text, got {key!r}", key_node.start_mark)
            line = key_node.start_mark.line + 1
            if key in lines:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key!r} is given twice, in line {lines[key]} and again", key_node.start_mark
                )
            lines[key] = line
        return super().construct_mapping(node, deep)


_INT = r"[-+]?[0-9]+"
_FLOAT = r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
_INFINITE = r"[-+]?\.(?:inf|Inf|INF)|\.nan|\.NaN|\.NAN"
for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", [*"~nN", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", _INT, list("-+0123456789")),
    ("float", f"{_FLOAT}|{_INFINITE}", list("-+.0123456789")),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(loader.construct_scalar(node)))


def read_document(file: Path) -> Any:
    """What a YAML file holds. Raises ConfigError where it cannot be read, is no YAML, or names a key twice."""
    try:
        return yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise ConfigError([f"{file}: cannot be read: {error.strerror}"]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([f"{file}: {_yaml_problem(error)}"]) from None


def _yaml_problem(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem or error.context}"
    return str(error).splitlines()[0]


def _unknown_section(section: Any) -> str:
    near = difflib.get_close_matches(str(section), list(Config.model_fields), n=1)
    hint = f"did you mean {near[0]}?" if near else f"the sections are {', '.join(Config.model_fields)}"
    return f"unknown section {section}; {hint}"


def _unknown_field(section: str, name: str) -> str:
    """Names of the same section that contain it or look like it come first, then the same name elsewhere, then anything alike."""
    own = list(_section_type(Config.model_fields[section]).model_fields)
    everywhere = [field.name for field in describe_fields()]
    near = [f"{section}.{full}" for full in own if len(name) > 2 and name in full]
    near += [f"{section}.{match}" for match in difflib.get_close_matches(name, own, n=1)]
    near += [full for full in everywhere if full.endswith(f".{name}")]
    near += difflib.get_close_matches(f"{section}.{name}", everywhere, n=1)
    hint = f"did you mean {near[0]}?" if near else f"{section} has {', '.join(own)}"
    return f"unknown field {section}.{name}; {hint}"


def _section_type(field: FieldInfo) -> type[BaseModel]:
    annotation = field.annotation
    assert isinstance(annotation, type) and issubclass(annotation, BaseModel), f"every field of Config is a section, got {annotation}"
    return annotation


def _type_in_words(field: FieldInfo) -> str:
    limits = []
    for limit in field.metadata:
        match limit:
            case annotated_types.Ge(ge=bound):
                limits.append(f">= {bound}")
            case annotated_types.Gt(gt=bound):
                limits.append(f"> {bound}")
            case annotated_types.Le(le=bound):
                limits.append(f"<= {bound}")
            case annotated_types.Lt(lt=bound):
                limits.append(f"< {bound}")
    first, *others = _annotation_in_words(field.annotation).split(" or ")
    return " or ".join([" ".join([first, *limits]), *others])


def _annotation_in_words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(map(str, arguments))
    if origin in (Union, UnionType):
        return " or ".join(_annotation_in_words(argument) for argument in arguments)
    if origin is tuple:
        return f"list of {_annotation_in_words(arguments[0])}"
    return {int: "int", float: "float", bool: "bool", str: "text", type(None): "null"}[annotation]


def _yaml_inline(value: Any) -> str:
    """`value` on one line; text is quoted wherever this module's reader would take it for something else."""
    if isinstance(value, str) and yaml.load(value or "''", _Loader) != value:
        return json.dumps(value, ensure_ascii=False)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _shown(value: Any) -> str:
    """A value as the user would write it, shortened."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
