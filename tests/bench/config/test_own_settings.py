"""Settings that a component declares itself."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import cloudpickle
import pytest
from pydantic import Field

from contnorm.bench.config.own_settings import make_settings, resolve_options
from contnorm.bench.config.schema import StrategyConfig
from contnorm.errors import UserError


class Component:
    @dataclass(frozen=True)
    class Settings:
        temperature: float = 2.0
        steps: int = 3
        mode: Literal["soft", "hard"] = "soft"
        strength: Annotated[float, Field(gt=0)] = 1.0

        def __post_init__(self) -> None:
            if self.steps > 100:
                raise ValueError("steps must be at most 100")


def resolve(**options: object) -> dict[str, object]:
    config = StrategyConfig("mine.py:Component", options=tuple(options.items()))  # type: ignore[arg-type]
    return dict(resolve_options("strategy", config, Component))


def test_defaults_are_added_and_integers_become_floats() -> None:
    values = resolve(temperature=4)
    assert values == {"mode": "soft", "steps": 3, "strength": 1.0, "temperature": 4.0}
    assert isinstance(values["temperature"], float) and list(values) == sorted(values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperatur": 1.0}, r"unknown key 'strategy\.temperatur'\. Did you mean 'strategy\.temperature'"),
        ({"temperature": "hot"}, r"strategy\.temperature='hot': .*number"),
        ({"steps": True}, r"strategy\.steps=True: .*integer"),
        ({"steps": 1.5}, r"strategy\.steps=1\.5: .*integer"),
        ({"mode": "warm"}, r"strategy\.mode='warm': .*'soft' or 'hard'"),
        ({"strength": 0}, r"strategy\.strength=0: .*greater than 0"),
        ({"steps": 101}, r"strategy.*steps must be at most 100"),
    ],
)
def test_bad_values_give_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        resolve(**options)
    assert "\n" not in str(error.value)


def test_unusable_declarations() -> None:
    class Plain:
        class Settings:
            temperature = 2.0

    class Clash:
        @dataclass
        class Settings:
            alpha: float = 1.0

    class Required:
        @dataclass
        class Settings:
            temperature: float

    class Compound:
        @dataclass
        class Settings:
            sizes: tuple[int, ...] = (1, 2)

    class Doubling:
        @dataclass
        class Settings:
            temperature: float = 1.0

            def __post_init__(self) -> None:
                self.temperature *= 2

    class WrongDefault:
        @dataclass
        class Settings:
            temperature: float = "hot"  # type: ignore[assignment]

    for component, message in (
        (Doubling, r"strategy\.temperature: __post_init__ of Settings changes the value 2\.0 again to 4\.0"),
        (WrongDefault, r"strategy\.temperature='hot': input should be a valid number"),
        (Plain, "must be a dataclass"),
        (Clash, r"strategy\.alpha is a setting of every strategy"),
        (Required, r"strategy\.temperature: must be set"),
        (Compound, r"strategy\.sizes=\(1, 2\): its default must be a number"),
    ):
        with pytest.raises(UserError, match=message):
            resolve_options("strategy", StrategyConfig("mine.py:Component"), component)


def test_dataclass_with_slots_and_computed_fields_is_usable() -> None:
    class Component:
        @dataclass(frozen=True, slots=True)
        class Settings:
            temperature: float = 2
            double: float = field(default=4.0, init=False)

    config = StrategyConfig("mine.py:Component")
    assert resolve_options("strategy", config, Component) == (("temperature", 2.0),)
    assert make_settings(Component, {"temperature": 3.0}).temperature == 3.0
    with pytest.raises(UserError, match=r"unknown key 'strategy.double'"):
        resolve_options("strategy", StrategyConfig("mine.py:Component", options=(("double", 1.0),)), Component)


def test_annotations_of_a_script_are_known_in_a_worker_process(tmp_path: Path) -> None:
    """They are text with ``from __future__ import annotations``, and a worker does not have the script's names."""
    code = """
from __future__ import annotations
import sys
from dataclasses import dataclass
from typing import Literal as OneOf
import cloudpickle
from contnorm.bench.config.own_settings import resolve_options
from contnorm.bench.config.schema import StrategyConfig

class Component:
    @dataclass(frozen=True)
    class Settings:
        kind: OneOf["soft", "hard"] = "soft"

resolve_options("strategy", StrategyConfig("python:Component"), Component)
open(sys.argv[1], "wb").write(cloudpickle.dumps(Component))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "sent")], check=True)
    component = cloudpickle.loads((tmp_path / "sent").read_bytes())
    assert resolve_options("strategy", StrategyConfig("python:Component"), component) == (("kind", "soft"),)
    with pytest.raises(UserError, match=r"strategy\.kind='x': input should be 'soft' or 'hard'"):
        resolve_options("strategy", StrategyConfig("python:Component", options=(("kind", "x"),)), component)


def test_settings_that_were_sent_to_a_worker_process_are_usable(tmp_path: Path) -> None:
    """cloudpickle sends a class of a script by value, with copies of the markers in its dataclass fields."""
    code = """
import sys
from dataclasses import dataclass, field
import cloudpickle

class Component:
    @dataclass(frozen=True)
    class Settings:
        temperature: float
        strength: float = 1.0

open(sys.argv[1], "wb").write(cloudpickle.dumps(Component))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "sent")], check=True)
    component = cloudpickle.loads((tmp_path / "sent").read_bytes())
    config = StrategyConfig("python:Component", options=(("temperature", 2),))
    assert resolve_options("strategy", config, component) == (("strength", 1.0), ("temperature", 2.0))
    with pytest.raises(UserError, match=r"strategy\.temperature: must be set"):
        resolve_options("strategy", StrategyConfig("python:Component"), component)
