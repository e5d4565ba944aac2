"""Running moments in Flower: what its server can do with the batch norms of the clients' networks.

Ten clients in Flower's simulation train a small network on two digits each (the clients, network and data of
`federated_moments.py`). Their states are averaged by a strategy that extends Flower's FedAvg. In training mode a
network does not use running moments. All rules for them are therefore evaluated on the same averaged weights: to send
parameters only, to take the moments of the first client, Flower's average of all buffers, to pool, or to re-estimate.

    python examples/flower_moments.py --record mine.json    # minutes
    python examples/flower_moments.py --quick               # one seed and one round, to see that it runs

It needs `pip install ".[bench]" "flwr[simulation]"`, in an environment of its own: it pins versions of other packages.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

import contnorm as cn
from federated_moments import accuracies, load_digits, network, split, train_client

CLIENTS = 10
RULES = ("parameters only", "first client", "averaged by Flower", "pooled", "re-estimated")


class PooledMoments(FedAvg):
    """Average the clients' states as FedAvg does, with pooled moments."""

    states: list[dict[str, Any]]
    by_flower: ArrayRecord | None

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        replies = list(replies)
        self.by_flower, metrics = super().aggregate_train(server_round, replies)
        contents = [reply.content for reply in replies if reply.has_content()]
        self.states = [dict(content["arrays"].to_torch_state_dict()) for content in contents]
        sizes = [content["metrics"]["num-examples"] for content in contents]
        return ArrayRecord(cn.average_state_dicts(self.states, sizes)), metrics


def client_app() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        config = message.content["config"]
        torch.set_num_threads(1)
        seed, partition = int(config["seed"]), int(context.node_config["partition-id"])
        data = split(load_digits()[0], False, torch.Generator().manual_seed(seed))[partition]
        model = network("bn")
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        generator = torch.Generator().manual_seed(1000 * seed + int(config["server-round"]))
        state = train_client(model, data, generator)
        content = {"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": len(data.y)})}
        return Message(RecordDict(content), reply_to=message)

    return app


def federate(seed: int, rounds: int) -> dict[str, float]:
    """Run the rounds in Flower's simulation, and return the accuracy on all digits with each rule."""
    strategy, train = PooledMoments(fraction_evaluate=0.0), ConfigRecord({"seed": seed})
    torch.manual_seed(seed)
    model, server = network("bn"), ServerApp()
    finished: list[ArrayRecord] = []

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds, train_config=train)
        finished.append(result.arrays)

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client_app(), num_supernodes=CLIENTS, backend_config=resources)
    data, test = load_digits()
    clients = split(data, False, torch.Generator().manual_seed(seed))
    pooled, first = finished[0].to_torch_state_dict(), strategy.states[0]
    assert strategy.by_flower is not None
    moments = {
        "parameters only": dict(model.state_dict()),
        "first client": first,
        "averaged by Flower": strategy.by_flower.to_torch_state_dict(),
        "pooled": pooled,
    }
    scores = {}
    for rule, state in moments.items():
        buffers = {name: value for name, value in state.items() if "running" in name}
        evaluated = network("bn")
        evaluated.load_state_dict({**pooled, **buffers})
        scores[rule] = accuracies(evaluated, clients, test)[0]
    cn.reestimate(evaluated, [client.x for client in clients])
    scores["re-estimated"] = accuracies(evaluated, clients, test)[0]
    return scores


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Running moments in Flower.")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of federated averaging")
    parser.add_argument("--record", type=Path, help="JSON file for all numbers")
    parser.add_argument("--quick", action="store_true", help="one seed and one round, to see that it runs")
    options = parser.parse_args(arguments)
    seeds, rounds = (1, 1) if options.quick else (options.seeds, options.rounds)
    runs = [federate(seed, rounds) for seed in range(seeds)]
    results = {rule: [round(run[rule], 2) for run in runs] for rule in RULES}
    for rule, values in results.items():
        print(f"{rule:20} {fmean(values):5.1f} ± {stdev(values) if seeds > 1 else 0.0:4.1f}", flush=True)
    versions = {name: version(name) for name in ("flwr", "ray", "torch", "contnorm")}
    record: dict[str, Any] = {
        "device": "cpu",
        "machine": platform.machine(),
        "python": platform.python_version(),
        **versions,
    }
    if options.record is not None:
        record |= {**versions, "clients": CLIENTS, "rounds": rounds, "seeds": seeds, "results": results}
        options.record.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
