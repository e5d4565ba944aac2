"""User code that keeps state in Python: a run that was stopped ends in the numbers of one that was not."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from contnorm.bench.config.schema import RunConfig
from contnorm.bench.engine.checkpoint import weights_path
from contnorm.bench.engine.events import Finished, Steps, Stopped
from contnorm.bench.engine.run_dir import RunDir
from contnorm.bench.engine.scheduler import Job, RunEnvironment, execute, resolve
from contnorm.bench.records import Store
from tests.datasets import small_mnist

CPU = torch.device("cpu")
HEAD = """
import copy
import functools
import itertools
import random
import sys
from pathlib import Path
import numpy as np
import torch
from torch import nn
from contnorm.bench import Strategy

COUNT = [0]

def scaled(model, head, stream, factor):
    return head.cross_entropy(model(stream.x), stream).mean() * (1 + 0.5 * factor), None

@functools.cache
def cached(mean):
    return mean
"""
DISTILLING = """
class Mine(Strategy):
    \"\"\"Keeps the network as it was before the task, and stays near to it.\"\"\"
    def __init__(self, config):
        super().__init__(config)
        self.task, self.old = None, None

    def loss(self, model, head, stream, replay):
        task = int(stream.task[0])
        if self.task not in (None, task):
            self.old = copy.deepcopy(model).eval()
        if self.old is not None or task:
            self.task = task
        logits = model(stream.x)
        loss = head.cross_entropy(logits, stream).mean()
        if task and self.old is None:
            self.old = copy.deepcopy(model).eval()
        if self.old is not None:
            with torch.no_grad():
                target = self.old(stream.x)
            loss = loss + (logits - target).square().mean()
        return loss, None
"""
SAVED = {"attribute", "late attribute", "nested"}  # kinds of state that checkpoints contain
COUNTING = {
    "attribute": "def __init__(self, c):\n        super().__init__(c)\n        self.n = 0\n"
    "    def loss(self, m, h, s, r):\n        self.n += 1\n        return scaled(m, h, s, self.n)\n",
    "late attribute": "def loss(self, m, h, s, r):\n        self.n = getattr(self, 'n', 0) + 1\n"
    "        return scaled(m, h, s, self.n)\n",
    "nested": "def __init__(self, c):\n        super().__init__(c)\n        self.n = {'a': [torch.zeros(2)]}\n"
    "    def loss(self, m, h, s, r):\n        self.n['a'][0].add_(1)\n"
    "        return scaled(m, h, s, float(self.n['a'][0][1]))\n",
    "class": "n = 0\n    def loss(self, m, h, s, r):\n        Mine.n += 1\n        return scaled(m, h, s, Mine.n)\n",
    "variable": "def loss(self, m, h, s, r):\n        COUNT[0] += 1\n        return scaled(m, h, s, COUNT[0])\n",
    "default": "def loss(self, m, h, s, r, n=[0]):\n        n[0] += 1\n        return scaled(m, h, s, n[0])\n",
    "random": "def __init__(self, c):\n        super().__init__(c)\n        self.chance = torch.Generator()\n"
    "    def loss(self, m, h, s, r):\n        f = float(torch.rand(1, generator=self.chance))\n"
    "        return scaled(m, h, s, f)\n",
    "iterator": "def __init__(self, c):\n        super().__init__(c)\n        self.n = (i for i in range(10**9))\n"
    "    def loss(self, m, h, s, r):\n        return scaled(m, h, s, next(self.n))\n",
    "count": "n = itertools.count()\n    def loss(self, m, h, s, r):\n        return scaled(m, h, s, next(self.n))\n",
    "slot": "__slots__ = ('n',)\n    def loss(self, m, h, s, r):\n        self.n = getattr(self, 'n', 0) + 1\n"
    "        return scaled(m, h, s, self.n)\n",
    "cache": "def loss(self, m, h, s, r):\n        f = cached(float(s.x.mean()))\n        return scaled(m, h, s, f)\n",
    "model attribute": "def loss(self, m, h, s, r):\n        m.n = getattr(m, 'n', 0) + 1\n"
    "        return scaled(m, h, s, m.n)\n",
    "layer attribute": "def loss(self, m, h, s, r):\n        m.norm1.eps *= 1.5\n        return scaled(m, h, s, 0)\n",
    "hook": "def loss(self, m, h, s, r):\n        m.register_forward_hook(lambda m, i, o: o * 0.9)\n"
    "        return scaled(m, h, s, 0)\n",
    "freeze": "def loss(self, m, h, s, r):\n        learned = [p for p in m.parameters() if p.requires_grad]\n"
    "        learned[0].requires_grad_(len(learned) < 3)\n        return scaled(m, h, s, 0)\n",
    "submodule": "def loss(self, m, h, s, r):\n        if not hasattr(m, 'old'):\n"
    "            m.old = copy.deepcopy(m)\n        return scaled(m, h, s, m.old(s.x).mean().detach())\n",
    "head": "def loss(self, m, h, s, r):\n        h.n = getattr(h, 'n', 0) + 1\n        return scaled(m, h, s, h.n)\n",
}
DRAWING = {
    "strategy": "class Mine(Strategy):\n    def __init__(self, c):\n        super().__init__(c)\n"
    "        self.f = torch.rand(1)\n    def loss(self, m, h, s, r):\n"
    "        f = torch.rand(1) + random.random() + np.random.rand() + self.f\n"
    "        return scaled(m, h, s, f.mean())\n",
    "network": "def make(shape, outputs, norm):\n    linear = nn.Linear(784, outputs)\n"
    "    linear.weight.data *= np.random.rand() + random.random()\n"
    "    return nn.Sequential(norm(1), nn.Flatten(), nn.Dropout(), linear)\n",
}
NETWORKS = """
class Net(nn.Module):
    def __init__(self, outputs, norm):
        super().__init__()
        self.norm, self.linear, self.calls = norm(1), nn.Linear(784, outputs), 0
        self.register_buffer("scale", torch.ones(1), persistent=False)
    def forward(self, x):
        return self.linear(self.norm(x).flatten(1))

class Calls(Net):
    def forward(self, x):
        if self.training:
            self.calls += 1
        return super().forward(x) * (1 + 0.1 * self.calls)

class Buffer(Net):
    def forward(self, x):
        if self.training:
            self.scale.add_(0.1)
        return super().forward(x) * self.scale.clone()

def plain(shape, outputs, norm):
    return Net(outputs, norm)
def calls(shape, outputs, norm):
    return Calls(outputs, norm)
def buffer(shape, outputs, norm):
    return Buffer(outputs, norm)
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_mnist(tmp_path_factory.mktemp("data"), train=400, test=100)


def settings(root: Path, **groups: dict[str, Any]) -> RunConfig:
    stream = {"name": "permuted-mnist", "train_per_task": 60, "tasks": 3}
    return resolve({"stream": stream, "norm": {"name": "bn"}, **groups}, root)


def stopped_at(config: RunConfig, place: RunEnvironment, report: int) -> Stopped:
    """Stop a run at a report; there is one at the end of each task, after 6, 12 and 18 steps."""
    events: list[object] = []

    def stop() -> bool:
        return sum(isinstance(event, Steps) for event in events) >= report

    for event in execute([Job(config, 0)], place, stop=stop):
        events.append(event.what)
    assert isinstance(events[-1], Stopped)
    return events[-1]


def weights(config: RunConfig, place: RunEnvironment) -> bytes:
    """What a run ends in, to the bit."""
    *_, last = execute([Job(config, 0)], place)
    assert isinstance(last.what, Finished)
    return weights_path(last.path).read_bytes()


def check_stops(config: RunConfig, root: Path, folder: Path, *reports: int) -> list[Stopped]:
    """Stop and resume at some reports; gives the stops."""
    whole = weights(config, RunEnvironment(folder / "whole", root, CPU, keep_weights=True))
    place = RunEnvironment(folder / "runs", root, CPU, keep_weights=True)
    stops = [stopped_at(config, place, report) for report in reports]
    assert weights(config, place) == whole
    return stops


@pytest.mark.slow
def test_distilling_strategy_resumes_bit_exactly(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + DISTILLING)
    config = settings(root, strategy={"name": f"{file}:Mine"})
    stops = check_stops(config, root, tmp_path, 1, 1, 2)
    assert [stop.saved for stop in stops] == [6, 6, 6], "until the second task begins there is no state"
    (message,) = {message for message in caplog.messages if "setup() does not create" in message}
    assert f"strategy '{file}:Mine'" in message and "self.old" in message


@pytest.mark.slow
@pytest.mark.parametrize("kind", COUNTING)
def test_strategy_state_is_never_lost(root: Path, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{HEAD}\nclass Mine(Strategy):\n    {COUNTING[kind]}")
    reports = (1, 1, 1) if kind in SAVED else (1, 2, 2)
    stops = check_stops(settings(root, strategy={"name": f"{file}:Mine"}), root, tmp_path, *reports)
    assert [stop.saved for stop in stops] == ([6, 12, 18] if kind in SAVED else [0, 0, 0])


@pytest.mark.parametrize(("kind", "resumable"), [("plain", True), ("calls", False), ("buffer", False)])
def test_network_state_outside_checkpoints_is_never_lost(
    root: Path, tmp_path: Path, kind: str, resumable: bool
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + NETWORKS)
    stops = check_stops(settings(root, model={"name": f"{file}:{kind}"}), root, tmp_path, 1, 1, 1)
    assert [stop.saved for stop in stops] == ([6, 12, 18] if resumable else [0, 0, 0])


@pytest.mark.parametrize("kind", DRAWING)
def test_random_numbers_of_user_code_depend_on_seed_and_step_only(root: Path, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{HEAD}\n{DRAWING[kind]}")
    own = {"strategy": {"name": f"{file}:Mine"}} if kind == "strategy" else {"model": {"name": f"{file}:make"}}
    config = settings(root, **own)
    generators = (random.getstate(), torch.random.get_rng_state())
    stops = check_stops(config, root, tmp_path, 1, 1)
    assert [stop.saved for stop in stops] == [6, 12]
    assert generators[0] == random.getstate() and torch.equal(generators[1], torch.random.get_rng_state())


def importing(folder: Path) -> Path:
    """A strategy that counts its steps in a module it imports."""
    (folder / "counting_helper.py").write_text("COUNT = [0]\n")
    body = "def loss(self, m, h, s, r):\n        C.COUNT[0] += 1\n        return scaled(m, h, s, C.COUNT[0])\n"
    inserted = "sys.path.insert(0, str(Path(__file__).parent))\nimport counting_helper as C\n"
    (folder / "mine.py").write_text(f"{HEAD}\n{inserted}class Mine(Strategy):\n    {body}")
    return folder / "mine.py"


def test_state_of_imported_modules_is_detected(root: Path, tmp_path: Path) -> None:
    config = settings(root, strategy={"name": f"{importing(tmp_path)}:Mine"})
    assert {stop.saved for stop in check_stops(config, root, tmp_path, 1, 2)} == {0}


def test_runs_in_one_process_do_not_share_module_state(root: Path, tmp_path: Path) -> None:
    config = settings(root, strategy={"name": f"{importing(tmp_path)}:Mine"})
    places = [RunEnvironment(tmp_path / name, root, CPU, keep_weights=True) for name in ("a", "b")]
    assert weights(config, places[0]) == weights(config, places[1])


def test_moved_run_folder_is_resumed(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mine.py").write_text(
        f"{HEAD}\nclass Mine(Strategy):\n    def loss(self, m, h, s, r):\n        return scaled(m, h, s, 0)\n"
    )
    for name in ("here", "there"):
        if name == "there":
            (tmp_path / "here").rename(tmp_path / "there")
        monkeypatch.chdir(tmp_path / name)
        config = settings(root, strategy={"name": "mine.py:Mine"})
        assert stopped_at(config, RunEnvironment(Path("runs"), root, CPU), 1).saved == {"here": 6, "there": 12}[name]


def test_checkpoint_without_code_state_is_not_used(
    root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a strategy whose attributes differ each time that it is made, or of an older version."""
    file = tmp_path / "mine.py"
    body = "def loss(self, m, h, s, r):\n        return scaled(m, h, s, 0)\n"
    file.write_text(
        f"{HEAD}\nimport os\nclass Mine(Strategy):\n    def __init__(self, c):\n        super().__init__(c)\n"
        f"        self.drawn = os.urandom(8)\n    {body}"
    )
    config, place = settings(root, strategy={"name": f"{file}:Mine"}), RunEnvironment(tmp_path / "runs", root, CPU)
    assert stopped_at(config, place, 1).saved == 6
    events = list(execute([Job(config, 0)], place))
    steps = [event.what.done for event in events if isinstance(event.what, Steps)]
    assert steps[0] == 6 and isinstance(events[-1].what, Finished)
    left = RunDir.of(Job(config, 0), Store(place.runs))
    assert any(f"{left.folder}: its checkpoint after 6 steps" in message for message in caplog.messages)


@pytest.mark.slow
def test_digests_are_equal_across_processes(tmp_path: Path) -> None:
    code = """
import sys, json, enum, functools, collections, logging, types, re
import numpy as np, torch
from torch import nn
from pathlib import Path
from contnorm.bench.engine.code_state import strategy_state, UNREADABLE
class Kind(enum.Enum):
    A = 1
def helper(x, y=(1, 2)):
    return x
class Thing:
    def __init__(self):
        self.words, self.kind, self.path = {"a", "b", "c"}, Kind.A, Path("x")
        self.array, self.dtype, self.device = np.arange(3), torch.float32, torch.device("cpu")
        self.half, self.part = torch.ones(2, dtype=torch.bfloat16), functools.partial(helper, 1)
        self.queue, self.counts = collections.deque([1]), collections.Counter("ab")
        self.log, self.me, self.fn, self.out = logging.getLogger("x"), self, torch.relu, sys.stderr
        self.net, self.range, self.pattern = nn.Linear(2, 2).requires_grad_(False), range(3), re.compile("a")
        nn.init.ones_(self.net.weight); nn.init.ones_(self.net.bias)
        self.empty, self.cached = torch.zeros(0, 3), functools.lru_cache(helper)
state = strategy_state(Thing(), {"__main__": sys.modules["__main__"]})
assert UNREADABLE not in state.values(), [k for k, v in state.items() if v == UNREADABLE]
print(json.dumps(state))
"""
    outputs = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        assert done.returncode == 0, done.stderr
        outputs.append(json.loads(done.stdout))
    assert outputs[0] == outputs[1] and len(outputs[0]) > 20
