"""The table of strategies: names, aliases, and one line each for listings.

Free of torch, as the table of norms is, so that listing what there is costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALIASES", "STRATEGIES", "StrategySpec"]


@dataclass(frozen=True, slots=True)
class StrategySpec:
    """One row of the table.

    Attributes:
        name: The name typed after ``--strategy``.
        target: ``"module:Class"``.
        summary: One line for listings.
        aliases: What the field also calls it.
    """

    name: str
    target: str
    summary: str
    aliases: tuple[str, ...] = ()


STRATEGIES: dict[str, StrategySpec] = {
    spec.name: spec
    for spec in (
        StrategySpec(
            "single",
            "contnorm.strategies.base:Single",
            "learn from the stream alone",
            ("naive", "sgd", "finetune"),
        ),
        StrategySpec(
            "er",
            "contnorm.strategies.er:ER",
            "experience replay: the stream's batch and one from the memory",
        ),
        StrategySpec(
            "derpp",
            "contnorm.strategies.derpp:DERpp",
            "dark experience replay++: replay stored logits and labels",
            ("der++",),
        ),
    )
}

ALIASES = {alias: spec.name for spec in STRATEGIES.values() for alias in spec.aliases}
