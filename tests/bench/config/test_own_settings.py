"""Settings that a component declares itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import Field

from contnorm.bench.config.own_settings import resolve_options
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

    for component, message in (
        (Plain, "must be a dataclass"),
        (Clash, r"strategy\.alpha is a setting of every strategy"),
        (Required, r"strategy\.temperature: must be set"),
        (Compound, r"strategy\.sizes=\(1, 2\): its default must be a number"),
    ):
        with pytest.raises(UserError, match=message):
            resolve_options("strategy", StrategyConfig("mine.py:Component"), component)
