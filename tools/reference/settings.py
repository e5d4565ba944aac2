"""Page of all settings, from their schema."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from contnorm.bench.config.schema import json_schema
from contnorm.bench.models.user_norms import own_norm_settings
from contnorm.bench.strategies import STRATEGIES, strategy_class
from contnorm.registry import NORMS
from tools.reference.markdown import code, notice, table

__all__ = ["page"]

INTRODUCTION = """\
Settings identify a run: runs with equal settings have the same hash. Set one with `--set KEY=VALUE`, several in a TOML
file for `--config`, or by the same keys in Python. A stream and a strategy have defaults of their own, which replace
those below; `contnorm show` lists what a run changes from them. Text must not have control characters.

A strategy, memory, network or norm may have further settings of its own, such as `norm.kappa` of
[AdaB2N](../concepts/rivals.md#adab2n). A wrong key is answered with all keys of the group."""


def page() -> str:
    """All settings with type, default, allowed values and meaning."""
    schema = json_schema()
    lines = ["# Settings", "", INTRODUCTION, "", notice("the schema of the settings")]
    for group, reference in schema["properties"].items():
        definition = schema["$defs"][reference["$ref"].rpartition("/")[2]]
        lines += ["", f"## {group}", "", definition["description"], ""]
        rows = [_row(f"{group}.{name}", prop) for name, prop in definition["properties"].items()]
        lines += table(("setting", "type", "default", "allowed values", "meaning"), rows)
    lines += ["", "## Own settings of components", "", _OWN, ""]
    lines += table(("setting", "of", "default", "meaning"), _own_strategy_settings())
    lines += ["", _NORMS, ""]
    lines += table(("norm", "own settings with their defaults"), _own_norm_settings())
    return "\n".join(lines) + "\n"


_OWN = """\
These strategies declare settings of their own, which are set like the others: `--set strategy.strength=5`. Those of a
[strategy of yours](../howto/bring-your-own-strategy.md) or a
[memory](../howto/bring-your-own-strategy.md#bring-your-own-memory) are set in the same way."""
_NORMS = """\
A norm takes the arguments of its layer as settings, such as `--set norm.eps=0.001`, and so does a
[norm of yours](../howto/bring-your-own-norm.md)."""


def _own_strategy_settings() -> Iterator[tuple[str, ...]]:
    for name, spec in STRATEGIES.items():
        if spec.own_settings:
            meanings = _attributes(inspect.getdoc(getattr(strategy_class(name), "Settings", None)) or "")
            for setting, default in spec.own_settings.items():
                yield code(f"strategy.{setting}"), code(name), code(default), meanings[setting]


def _attributes(doc: str) -> dict[str, str]:
    """Meanings of attributes by name, from a docstring."""
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", doc.partition("Attributes:\n")[2], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _own_norm_settings() -> Iterator[tuple[str, ...]]:
    for name, spec in NORMS.items():
        own = own_norm_settings(spec)
        yield code(name), ", ".join(code(f"norm.{key}={_toml(value)}") for key, value in own.items()) or "none"


def _toml(value: object) -> str:
    return json.dumps(value).strip('"') if value is not None else "none"


def _row(key: str, prop: dict[str, Any]) -> tuple[str, ...]:
    default = "none" if prop["default"] is None else json.dumps(prop["default"]).strip('"')
    allowed = _allowed(prop).replace("text without control characters", "text").replace("'", "`")
    return code(key), _type(prop), code(default), allowed, prop["description"]


def _type(prop: dict[str, Any]) -> str:
    """Type of a setting in TOML; a setting that may be none has the type of its other values."""
    if "anyOf" in prop:
        return " or ".join(dict.fromkeys(_type(choice) for choice in prop["anyOf"] if choice.get("type") != "null"))
    names = {"integer": "int", "number": "float", "boolean": "bool", "string": "str"}
    return names[prop.get("type", "string")]


def _allowed(schema: Mapping[str, Any]) -> str:
    """Describe the allowed values of a setting by its JSON schema."""
    if "anyOf" in schema:
        return " or ".join(_allowed(choice) for choice in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return " or ".join(map(repr, schema.get("enum", [schema.get("const")])))
    if "exclusiveMaximum" in schema:
        return f"a number above {schema['exclusiveMinimum']:g} and below {schema['exclusiveMaximum']:g}"
    if "maximum" not in schema:
        return {"string": "text without control characters", "boolean": "true or false", "null": "none"}[schema["type"]]
    noun = "a whole number" if schema["type"] == "integer" else "a finite number"
    maximum = _format_limit(schema["maximum"])
    if "exclusiveMinimum" in schema:
        return f"{noun} above {_format_limit(schema['exclusiveMinimum'])}, up to {maximum}"
    return f"{noun} from {_format_limit(schema['minimum'])} to {maximum}"


def _format_limit(limit: float) -> str:
    return f"{limit:,}" if isinstance(limit, int) else f"{limit:g}"
