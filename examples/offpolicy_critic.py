"""Batch renormalization in the critic of an off-policy agent without target networks, on a pendulum swing-up.

CrossQ (Bhatt et al., ICLR 2024) removes the target networks of soft actor-critic (SAC): the critic has batch norms, and
one forward pass joins the pairs (s, a) of the replay memory with the pairs (s', a') of the current policy, so that both
are normalized with the same batch. As in CrossQ, the input has a norm too, norms follow the ReLUs, Adam has a first
coefficient of 0.5, and policies are updated every third time. This script compares norms of that critic; all else is
the same for all. The pendulum is defined here, so nothing needs to be downloaded.

All seeds of a variant are trained side by side, as one network of independent members: batch norms are independent in
each feature, so a norm of the features of all members is one norm for each member.

    python examples/offpolicy_critic.py                 # all variants, five seeds: minutes on one core
    python examples/offpolicy_critic.py --quick         # a few steps of each variant: seconds, numbers without meaning
    python examples/offpolicy_critic.py --variants brn,none --seeds 2 --steps 3000 --record mine.json
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

import contnorm as cn

HIDDEN, BATCH, DISCOUNT, TEMPERATURE, LEARNING_RATE, POLYAK = 128, 64, 0.99, 0.02, 1e-3, 0.01
BETAS, DELAY = (0.5, 0.999), 3  # as in CrossQ: Adam's coefficients, and updates of the critics for one of the policies
REWARD_SCALE = 0.1  # costs of a step go up to 16
MOMENTUM = 0.01  # of all norms, as in CrossQ
RANDOM_STEPS, EPISODE, EVALUATION_EPISODES, EVALUATIONS = 400, 200, 20, 12


class Pendulums:
    """Pendulums to be swung up and held upright: angle 0 is up, the torque is too small to lift them directly.

    Observations are (cos, sin, angular velocity). Actions from -1 to 1 are scaled to the largest torque. The cost of a
    step is angle^2 + 0.1 velocity^2 + 0.001 torque^2. Episodes have 200 steps and no terminal state.
    """

    def __init__(self, shape: tuple[int, ...], generator: torch.Generator) -> None:
        self.angle = (torch.rand(shape, generator=generator) * 2 - 1) * math.pi
        self.velocity = torch.rand(shape, generator=generator) * 2 - 1

    def observe(self) -> Tensor:
        return torch.stack([self.angle.cos(), self.angle.sin(), self.velocity], -1)

    def step(self, action: Tensor) -> Tensor:
        """Apply actions, with one more dimension of size 1, for 0.05 s, and return the rewards."""
        torque = 2 * action.squeeze(-1).clamp(-1, 1)
        wrapped = torch.remainder(self.angle + math.pi, 2 * math.pi) - math.pi
        cost = wrapped**2 + 0.1 * self.velocity**2 + 0.001 * torque**2
        self.velocity = (self.velocity + 0.05 * (15 * self.angle.sin() + 3 * torque)).clamp(-8, 8)
        self.angle = self.angle + 0.05 * self.velocity
        return -cost


Norm = Callable[[int, int, int], nn.Module]


def continual_norm(members: int, features: int, updates: int) -> nn.Module:
    """CN with 8 groups for each member; BN for the input, whose four quantities must not be mixed."""
    if features < HIDDEN:
        return nn.BatchNorm1d(members * features, momentum=MOMENTUM)
    return cn.ContinualNorm1d(members * features, num_groups=members * 8, momentum=MOMENTUM)


@dataclass(frozen=True)
class Variant:
    """A critic: its norm for numbers of members, features and updates, and whether the agent has target networks."""

    title: str
    norm: Norm
    targets: bool = False


VARIANTS = {
    "target": Variant("no norm, target networks", lambda members, features, updates: nn.Identity(), targets=True),
    "none": Variant("no norm", lambda members, features, updates: nn.Identity()),
    "bn": Variant(
        "batch norm", lambda members, features, updates: nn.BatchNorm1d(members * features, momentum=MOMENTUM)
    ),
    "brn": Variant(
        "batch renorm, default ramps",
        lambda members, features, updates: cn.BatchRenorm1d(members * features, momentum=MOMENTUM),
    ),
    "brn_steps": Variant(
        "batch renorm, total_steps",
        lambda members, features, updates: cn.BatchRenorm1d(members * features, momentum=MOMENTUM, total_steps=updates),
    ),
    "cn": Variant("continual norm, 8 groups", continual_norm),
}


class Linears(nn.Module):
    """Independent linear layers on input of shape (N, members, features)."""

    def __init__(self, inputs: int, outputs: int, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        bound = inputs**-0.5
        weights = [torch.rand(inputs, outputs, generator=g) * 2 * bound - bound for g in generators]
        self.weight, self.bias = nn.Parameter(torch.stack(weights)), nn.Parameter(torch.zeros(len(weights), outputs))

    def forward(self, input: Tensor) -> Tensor:
        return torch.einsum("nmi,mio->nmo", input, self.weight) + self.bias


class SideBySide(nn.Module):
    """A norm of (N, C) input, on the features of all members as channels."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self.norm(input.flatten(1))
        return output.view_as(input)


class Agents:
    """SAC agents with a fixed temperature, one for each generator; without target networks they learn as in CrossQ."""

    def __init__(self, variant: Variant, generators: Sequence[torch.Generator], updates: int) -> None:
        def body(inputs: int, outputs: int, copies: int, norm: Norm) -> nn.Sequential:
            members = [g for g in generators for _ in range(copies)]
            layers: list[nn.Module] = [SideBySide(norm(len(members), inputs, updates))]
            for size in ((inputs, HIDDEN), (HIDDEN, HIDDEN)):
                layers += [Linears(*size, members), nn.ReLU(), SideBySide(norm(len(members), HIDDEN, updates))]
            return nn.Sequential(*layers, Linears(HIDDEN, outputs, members))

        self.generators = generators
        self.actor = body(3, 2, 1, VARIANTS["none"].norm)
        self.critics = body(4, 1, 2, variant.norm)
        self.target = copy.deepcopy(self.critics) if variant.targets else None
        self.critic_optimizer = torch.optim.Adam(self.critics.parameters(), LEARNING_RATE, betas=BETAS, fused=True)
        self.actor_optimizer = torch.optim.Adam(self.actor.parameters(), LEARNING_RATE, betas=BETAS, fused=True)
        self.updates = 0

    def normal(self, count: int) -> Tensor:
        return torch.stack([torch.randn(count, 1, generator=g) for g in self.generators], 1)

    def act(self, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return random actions of the policies and the logarithms of their densities."""
        mean, log_std = self.actor(state).split(1, -1)
        log_std = log_std.clamp(-5, 1)
        noise = self.normal(len(state))
        raw = mean + log_std.exp() * noise
        action = raw.tanh()
        squash = 2 * (math.log(2) - raw - nn.functional.softplus(-2 * raw))  # log(1 - tanh^2)
        return action, -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi) - squash

    def values(self, critics: nn.Module, state: Tensor, action: Tensor) -> Tensor:
        """Return the values of both critics of each agent, (N, agents, 2)."""
        pair = torch.cat([state, action], -1).repeat_interleave(2, 1)
        values: Tensor = critics(pair)
        return values.view(len(state), -1, 2)

    def update(self, state: Tensor, action: Tensor, reward: Tensor, next_state: Tensor) -> None:
        with torch.no_grad():
            next_action, log_density = self.act(next_state)
        if self.target is None:  # one forward pass for both pairs, so that one batch normalizes both
            both = self.values(self.critics, torch.cat([state, next_state]), torch.cat([action, next_action]))
            value, next_value = both[: len(state)], both[len(state) :].detach()
        else:
            with torch.no_grad():
                next_value = self.values(self.target, next_state, next_action)
            value = self.values(self.critics, state, action)
        soft = next_value.min(-1, keepdim=True).values - TEMPERATURE * log_density
        loss = (value - (reward + DISCOUNT * soft)).square().mean((0, 2)).sum()
        self.critic_optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.critic_optimizer.step()
        self.updates += 1
        if self.updates % DELAY == 0:
            self._update_actor(state)
        if self.target is not None:
            with torch.no_grad():
                for old, new in zip(self.target.parameters(), self.critics.parameters(), strict=True):
                    old.lerp_(new, POLYAK)

    def _update_actor(self, state: Tensor) -> None:
        """Train the policies on the critics in evaluation mode: with running moments, which (s, a) don't change."""
        self.critics.eval().requires_grad_(False)
        action, log_density = self.act(state)
        value = self.values(self.critics, state, action).min(-1, keepdim=True).values
        loss = (TEMPERATURE * log_density - value).mean((0, 2)).sum()
        self.actor_optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.actor_optimizer.step()
        self.critics.train().requires_grad_(True)


def evaluate(agents: Agents) -> list[float]:
    """Return the mean return of each policy without noise, over episodes that are the same for all."""
    start = Pendulums((EVALUATION_EPISODES, 1), torch.Generator().manual_seed(10_000))
    start.angle, start.velocity = (s.expand(-1, len(agents.generators)).clone() for s in (start.angle, start.velocity))
    total = torch.zeros(len(agents.generators))
    with torch.no_grad():
        for _ in range(EPISODE):
            total += start.step(agents.actor(start.observe())[..., :1].tanh()).mean(0)
    return [round(value, 2) for value in total.tolist()]


def train(variant: Variant, seeds: range, steps: int, evaluations: int) -> dict[str, Any]:
    """Train one agent for each seed, with one update for each step of its pendulum after the first random ones."""
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    first = min(RANDOM_STEPS, steps // 2)
    agents = Agents(variant, generators, steps - first)
    memory = torch.zeros(steps, len(seeds), 3 + 1 + 1 + 3)
    marks = {first + (steps - first) * (number + 1) // evaluations for number in range(evaluations)}
    each = torch.arange(len(seeds))
    returns = []
    for step in range(steps):
        if step % EPISODE == 0:
            starts = [Pendulums((), g) for g in generators]
            pendulums = copy.copy(starts[0])
            pendulums.angle = torch.stack([start.angle for start in starts])
            pendulums.velocity = torch.stack([start.velocity for start in starts])
        state = pendulums.observe()
        with torch.no_grad():
            action = agents.act(state[None])[0][0] if step >= first else agents.normal(1)[0].tanh()
        reward = pendulums.step(action)
        memory[step] = torch.cat([state, action, REWARD_SCALE * reward[:, None], pendulums.observe()], -1)
        if step >= first:
            chosen = torch.stack([torch.randint(step + 1, (BATCH,), generator=g) for g in generators], 1)
            agents.update(*torch.split(memory[chosen, each], [3, 1, 1, 3], -1))
        if step + 1 in marks:
            returns.append(evaluate(agents))
    record: dict[str, Any] = {
        "title": variant.title,
        "returns": [list(column) for column in zip(*returns, strict=True)],
    }
    layers = [layer for layer in agents.critics.modules() if isinstance(layer, cn.BatchRenorm1d)]
    if layers:
        record |= {"r_limit": round(float(layers[0].r_limit), 4), "d_limit": round(float(layers[0].d_limit), 4)}
    return record


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Mean and standard deviation over seeds."""
    return {"mean": round(fmean(values), 1), "sd": round(stdev(values) if len(values) > 1 else 0.0, 1)}


def run(names: Sequence[str], seeds: range, steps: int, evaluations: int) -> dict[str, Any]:
    """Train all variants with all seeds, print a line for each variant, and return the record."""
    results = {}
    print(
        f"Return of an episode of {EPISODE} steps after {steps} steps, mean ± standard deviation of {len(seeds)} seeds:"
    )
    for name in names:
        started = time.process_time()
        result = train(VARIANTS[name], seeds, steps, evaluations)
        end, half = (summarize([curve[i] for curve in result["returns"]]) for i in (-1, evaluations // 2 - 1))
        results[name] = {**result, "end": end, "half": half, "cpu_seconds": round(time.process_time() - started)}
        cells = f"{end['mean']:8.1f} ± {end['sd']:6.1f}    halfway {half['mean']:8.1f} ± {half['sd']:6.1f}"
        print(f"{VARIANTS[name].title:30} {cells}    {results[name]['cpu_seconds']} s", flush=True)
    settings = {"hidden": HIDDEN, "batch": BATCH, "lr": LEARNING_RATE, "beta1": BETAS[0], "delay": DELAY}
    settings |= {"discount": DISCOUNT, "momentum": MOMENTUM}
    updates = steps - min(RANDOM_STEPS, steps // 2)
    return {
        "steps": steps,
        "updates": updates,
        "seeds": len(seeds),
        "first_seed": seeds.start,
        **settings,
        "results": results,
    }


def environment() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "contnorm": cn.__version__}
    return {"device": "cpu", "machine": platform.machine(), **versions}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Norms of a critic without target networks, on a pendulum.")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"some of {', '.join(VARIANTS)}")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--first-seed", type=int, default=0, help="the smallest of the seeds")
    parser.add_argument("--steps", type=int, default=3500, help="steps of the pendulum in each run")
    parser.add_argument("--record", type=Path, help="JSON file for all numbers")
    parser.add_argument("--quick", action="store_true", help="two seeds and 40 steps, to see that it runs")
    options = parser.parse_args(arguments)
    names = options.variants.split(",")
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        parser.error(f"unknown variant {unknown[0]!r}. There are {', '.join(VARIANTS)}.")
    seeds, steps, evaluations = (2, 40, 2) if options.quick else (options.seeds, options.steps, EVALUATIONS)
    if options.first_seed < 0:
        parser.error("--first-seed must be at least 0.")
    if seeds < 1 or steps < 2 * evaluations:
        parser.error(f"--seeds must be at least 1 and --steps at least {2 * evaluations}.")
    chosen = range(options.first_seed, options.first_seed + seeds)
    record = {**environment(), **run(names, chosen, steps, evaluations)}
    if options.record is not None:
        options.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
