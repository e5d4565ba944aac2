"""Running moments in federated averaging (FedAvg) of clients that have two digits each.

Ten clients train a small network on their own digits and send it to a server, which averages the weights. This script
compares what the server does with the running moments of batch norm and continual norm: average them, pool them
exactly, re-estimate them for the averaged weights, or leave them to the clients. In training mode, a network normalizes
with its batch and does not use running moments. All rules are therefore evaluated on the same trained networks.

    python examples/federated_moments.py              # three norms, five seeds: minutes on one core
    python examples/federated_moments.py --quick      # one round, to see that it runs
    python examples/federated_moments.py --norms bn --seeds 2 --rounds 10 --record mine.json

It uses the 5,000 digits that are included, with NumPy and more: `pip install "contnorm[bench]"`.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from torch import Tensor, nn

import contnorm as cn
from contnorm import bench

CLIENTS, CLASSES_PER_CLIENT, BATCH, LEARNING_RATE = 10, 2, 20, 0.05
NORMS = ("bn", "gn10", "cn10")  # batch norm; group norm and continual norm with 10 groups of 10 units
State = dict[str, Tensor]


@dataclass(frozen=True)
class Digits:
    """Images and labels."""

    x: Tensor
    y: Tensor

    def select(self, rows: Tensor) -> Digits:
        return Digits(self.x[rows], self.y[rows])


def load_digits() -> tuple[Digits, Digits]:
    """Return 400 training and 100 test digits of each class. They are sorted by class, and every fifth is for tests."""
    pixels, labels = bench.load_digits()
    x, y = torch.tensor(pixels, dtype=torch.float32).flatten(1) / 255, torch.tensor(labels)
    test = torch.arange(len(y)) % 5 == 0
    return Digits(x[~test], y[~test]), Digits(x[test], y[test])


def split(train: Digits, iid: bool, generator: torch.Generator) -> list[Digits]:
    """Split the training data over the clients: two halves of different classes for each, or at random."""
    if iid:
        return [train.select(rows) for rows in torch.randperm(len(train.y), generator=generator).chunk(CLIENTS)]
    # Each class has two halves. Client k has halves of the classes k and k + 1 of a random cycle.
    cycle = torch.randperm(10, generator=generator).tolist()
    halves = [torch.nonzero(train.y == label).squeeze(1).chunk(2) for label in cycle]
    return [train.select(torch.cat([halves[k][0], halves[(k + 1) % 10][1]])) for k in range(CLIENTS)]


def network(norm: str) -> nn.Module:
    model = nn.Sequential(
        *(nn.Linear(784, 100), nn.BatchNorm1d(100), nn.ReLU()),
        *(nn.Linear(100, 100), nn.BatchNorm1d(100), nn.ReLU()),
        nn.Linear(100, 10),
    )
    return cn.convert_norm(model, norm)


def train_client(model: nn.Module, data: Digits, generator: torch.Generator) -> State:
    """Train for one epoch, and return the client's state dict."""
    optimizer = torch.optim.SGD(model.train().parameters(), LEARNING_RATE)
    for rows in torch.split(torch.randperm(len(data.y), generator=generator), BATCH):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(data.x[rows]), data.y[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return copy.deepcopy(model.state_dict())


def correct(model: nn.Module, test: Digits) -> Tensor:
    with torch.no_grad():
        predicted: Tensor = model.eval()(test.x).argmax(1)
    return predicted == test.y


def accuracies(model: nn.Module, clients: Sequence[Digits], test: Digits) -> tuple[float, float]:
    """Return the accuracy on all digits, and the mean over clients of that on the digits of the client's classes."""
    right = correct(model, test).double()
    own = [right[torch.isin(test.y, client.y)].mean() for client in clients]
    return 100 * float(right.mean()), 100 * fmean(map(float, own))


def accuracies_of_local(
    model: nn.Module, states: Sequence[State], clients: Sequence[Digits], test: Digits
) -> tuple[float, float]:
    """Return the same for the averaged weights with the moments of each client: the mean over clients."""
    pairs = []
    for state, client in zip(states, clients, strict=True):
        model.load_state_dict({name: value for name, value in state.items() if "running" in name}, strict=False)
        pairs.append(accuracies(model, [client], test))
    return fmean(every for every, _ in pairs), fmean(own for _, own in pairs)


def evaluate(
    model: nn.Module, states: Sequence[State], clients: Sequence[Digits], test: Digits
) -> dict[str, tuple[float, float]]:
    """Average the clients' states, and evaluate with each rule for their moments."""
    sizes = [len(client.y) for client in clients]
    model.load_state_dict(cn.average_state_dicts(states, sizes, moments="average"))
    scores = {"averaged": accuracies(model, clients, test)}
    if not any("running_mean" in name for name in states[0]):
        return scores
    model.load_state_dict(cn.average_state_dicts(states, sizes, moments="pool"))
    scores["pooled"] = accuracies(model, clients, test)
    # The same numbers follow if each client sends the moments of its own data, once for each layer.
    with cn.reestimate(model, [client.x for client in clients]):
        scores["reestimated"] = accuracies(model, clients, test)
    scores["local"] = accuracies_of_local(model, states, clients, test)
    return scores


def federate(
    norm: str, data: tuple[Digits, Digits], seed: int, rounds: int, iid: bool
) -> dict[str, tuple[float, float]]:
    """Run federated averaging, and return the accuracies after the last round for each rule."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    train, test = data
    clients = split(train, iid, generator)
    model = network(norm)
    state = copy.deepcopy(model.state_dict())
    for _ in range(rounds):
        states = []
        for client in clients:
            model.load_state_dict(state)
            states.append(train_client(model, client, generator))
        state = cn.average_state_dicts(states, [len(client.y) for client in clients], moments="average")
    return evaluate(model, states, clients, test)


def summarize(values: Sequence[float]) -> dict[str, Any]:
    spread = stdev(values) if len(values) > 1 else 0.0
    return {"mean": round(fmean(values), 1), "sd": round(spread, 1), "seeds": [round(value, 2) for value in values]}


def run(norms: Sequence[str], seeds: int, rounds: int, digits: tuple[Digits, Digits]) -> dict[str, Any]:
    """Run all norms with all seeds, print a line for each norm and rule, and return the record."""
    results: dict[str, Any] = {}
    print(f"Accuracy in percent after {rounds} rounds, mean ± standard deviation of {seeds} seeds:")
    for iid in (False, True):
        data = "iid" if iid else "two digits"
        for norm in norms:
            started = time.process_time()
            scores = [federate(norm, digits, seed, rounds, iid) for seed in range(seeds)]
            took = round(time.process_time() - started)
            for rule in scores[0]:
                every, own = (summarize([score[rule][i] for score in scores]) for i in (0, 1))
                key = f"{norm} {data} {rule}"
                results[key] = {"all_digits": every, "own_digits": own, "cpu_seconds": took}
                cells = (f"{cell['mean']:5.1f} ± {cell['sd']:4.1f}" for cell in (every, own))
                print(f"{key:30} all digits {next(cells)}    own digits {next(cells)}", flush=True)
    settings = {"clients": CLIENTS, "classes_per_client": CLASSES_PER_CLIENT, "batch": BATCH, "lr": LEARNING_RATE}
    return {"rounds": rounds, "seeds": seeds, **settings, "results": results}


def environment() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__, "contnorm": cn.__version__}
    return {"device": "cpu", "machine": platform.machine(), **versions}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Running moments in federated averaging of clients with two digits.")
    parser.add_argument("--norms", default=",".join(NORMS), help=f"some of {', '.join(NORMS)}")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds")
    parser.add_argument("--rounds", "--steps", type=int, default=20, help="rounds of federated averaging")
    parser.add_argument("--record", type=Path, help="JSON file for all numbers")
    parser.add_argument("--quick", action="store_true", help="one seed, one round and 400 digits, to see that it runs")
    options = parser.parse_args(arguments)
    norms = options.norms.split(",")
    unknown = [norm for norm in norms if norm not in NORMS]
    if unknown:
        parser.error(f"unknown norm {unknown[0]!r}. There are {', '.join(NORMS)}.")
    seeds, rounds = (1, 1) if options.quick else (options.seeds, options.rounds)
    if seeds < 1 or rounds < 1:
        parser.error("--seeds and --rounds must be at least 1.")
    train, test = load_digits()
    digits = train.select(torch.arange(0, 4000, 10)) if options.quick else train, test
    record = {**environment(), **run(norms, seeds, rounds, digits)}
    if options.record is not None:
        options.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
