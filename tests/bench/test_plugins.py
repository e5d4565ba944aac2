"""Plugins: an installed package adds components, which are listed with their origin, run, recorded and resumed."""

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from torch import nn

from contnorm import bench
from contnorm.bench.components import remove_component
from contnorm.errors import UserError
from contnorm.registry import Origin, register_norm, unregister_norm

PACKAGE = {
    "__init__.py": "",
    "plugin.py": """
        from contnorm import bench

        def register():
            bench.register("strategy", "half", "sample_plugin.parts:Half", summary="half of the loss")
            bench.register("memory", "newest", "sample_plugin.parts:Newest", summary="the newest samples")
            bench.register("model", "line", "sample_plugin.parts:line", summary="one layer")
            bench.register("dataset", "blobs", "sample_plugin.parts:blobs", summary="Gaussian blobs")
    """,
    "parts.py": """
        import numpy as np
        from torch import nn
        from contnorm import bench

        class Half(bench.ER):
            def loss(self, *arguments):
                loss, logits = super().loss(*arguments)
                return loss / 2, logits

        class Newest(bench.Memory):
            def setup(self):
                self.seen = 0

            def offer(self, labels, task):
                self.seen += len(labels)
                return np.arange(self.seen - len(labels), self.seen) % self.capacity

        def line(shape, outputs, norm):
            return nn.Sequential(nn.Unflatten(1, (8, 1, 1)), norm(8), nn.Flatten(), nn.Linear(8, outputs))

        def blobs(root, tasks=2, **settings):
            y = np.arange(80) % 4
            x = np.random.default_rng(0).normal(size=(80, 8)) + y[:, None]
            return bench.Stream.from_arrays(x, y, x + 1, y, tasks=tasks, name="blobs", **settings)
    """,
}


def install(folder: Path, entries: str, package: dict[str, str] = PACKAGE, name: str = "sample_plugin") -> None:
    """Install a distribution into a folder, as pip does: the package, and its metadata in ``*.dist-info``."""
    (folder / name).mkdir(parents=True)
    for file, content in package.items():
        (folder / name / file).write_text(textwrap.dedent(content))
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[contnorm.plugins]\n{entries}\n")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    install(folder, "sample = sample_plugin.plugin:register")
    return folder


def contnorm(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.path.append({str(site)!r}); from contnorm.__main__ import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=site.parent, capture_output=True, text=True, check=False
    )


def test_listing_names_the_package_of_each_component(site: Path) -> None:
    """Without torch, and with the built-in ones as they are."""
    code = (
        f"import sys; sys.modules['torch'] = None; sys.path.append({str(site)!r})\n"
        "from contnorm import bench\n"
        "listed = bench.available()\n"
        "print(*listed['strategies']['half'], *listed['memories']['newest'], *listed['models']['line'], sep='; ')\n"
        "print(*listed['streams']['blobs'], listed['norms']['cn'].origin, sep='; ')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "half of the loss; sample-plugin 1.2; the newest samples; sample-plugin 1.2; one layer; sample-plugin 1.2",
        "Gaussian blobs; sample-plugin 1.2; contnorm",
    ], done.stderr


RUN = ("run", "--stream", "blobs", "--strategy", "half", "--memory", "newest", "--norm", "bn")


@pytest.mark.slow
def test_run_with_components_of_a_plugin_is_recorded(site: Path) -> None:
    """In worker processes; the record has the hashes of the code and the version of the package."""
    done = contnorm(site, *RUN, "--set", "model.name=line", "--seeds", "2", "--lanes", "2")
    assert done.returncode == 0, done.stderr
    records = [json.loads(path.read_text()) for path in sorted((site.parent / "runs").glob("*/*.json"))]
    assert len(records) == 2
    for record in records:
        config = record["config"]
        names = config["strategy"]["name"], config["memory"]["kind"], config["model"]["name"]
        assert names == ("half", "newest", "line")
        assert config["strategy"]["code"] == config["memory"]["code"] == config["model"]["code"] is not None
        assert record["versions"]["sample-plugin"] == "1.2"


def test_broken_plugin_is_one_warning_and_others_work(site: Path) -> None:
    install(
        site, "broken = broken_plugin:register", {"__init__.py": "raise RuntimeError('two\\nlines')"}, "broken_plugin"
    )
    install(
        site,
        "clash = clash_plugin:register",
        {"__init__.py": "from contnorm import bench\ndef register(): bench.register('memory', 'ring', 'a:B')"},
        "clash_plugin",
    )
    code = (
        f"import sys, logging; sys.path.append({str(site)!r})\n"
        "logging.basicConfig(format='%(message)s')\n"
        "from contnorm import bench\n"
        "for _ in range(2): listed = bench.available()\n"
        "memories = listed['memories']\n"
        "print(memories['ring'].origin, 'newest' in memories)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split("\n")[0] == "contnorm True", done.stderr
    warnings = sorted(line for line in done.stderr.splitlines() if line.startswith("plugin "))
    assert len(warnings) == 2 == len(done.stderr.splitlines())
    assert "'broken' of broken-plugin 1.2: can't be loaded (RuntimeError: two lines)" in warnings[0]
    assert "'clash' of clash-plugin 1.2" in warnings[1] and "'ring'" in warnings[1]


def test_built_in_run_loads_no_plugin(site: Path) -> None:
    (site / "sample_plugin" / "plugin.py").write_text("raise RuntimeError('loaded')")
    code = (
        f"import sys; sys.path.append({str(site)!r})\n"
        "import numpy as np\nfrom contnorm import bench, create_norm\n"
        "y = np.arange(40) % 4\nx = np.random.default_rng(0).normal(size=(40, 4))\n"
        "stream = bench.Stream.from_arrays(x, y, x, y, tasks=2)\n"
        "bench.run(stream, memory='reservoir', strategy='er', norm='cn', replay=5)\n"
        "from contnorm import registry; print(registry._is_loaded)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.slow
def test_stopped_run_of_a_plugin_is_resumed_by_command(site: Path) -> None:
    """The command loads the plugin; without the package it says what is missing."""
    stop = (
        f"import sys; sys.path.append({str(site)!r})\n"
        "from contnorm import bench\nfrom contnorm.bench.engine.trainer import Trainer\n"
        "real = Trainer.step\n"
        "def step(trainer):\n"
        "    if trainer.done == 5: raise RuntimeError('stop')\n"
        "    return real(trainer)\n"
        "if RUNS == 'stopped': Trainer.step = step\n"
        "print(bench.run('blobs', strategy='half', memory='newest', runs=RUNS).accuracy.tolist())\n"
    )
    for runs in ("whole", "stopped"):
        code = f"RUNS = {runs!r}\n{stop}"
        subprocess.run([sys.executable, "-c", code], cwd=site.parent, capture_output=True, text=True, check=False)
    assert list((site.parent / "stopped").glob("*/*.unfinished/*"))
    missing = contnorm(site.parent / "nowhere", "resume", "--runs", "stopped")
    assert missing.returncode == 2
    done = contnorm(site, "resume", "--runs", "stopped")
    assert done.returncode == 0, done.stderr
    (whole,), (resumed,) = (
        [json.loads(path.read_text()) for path in (site.parent / runs).glob("*/*.json")]
        for runs in ("whole", "stopped")
    )
    assert whole["matrix"] == resumed["matrix"] and whole["config"] == resumed["config"]


class Newest(bench.Memory):
    """The newest samples."""

    def offer(self, labels: np.ndarray, task: int) -> np.ndarray:
        return np.arange(len(labels)) % self.capacity


def test_registration_is_checked() -> None:
    bench.register("memory", "latest", Newest)
    try:
        assert bench.available()["memories"]["latest"] == ("The newest samples.", "this process")
        with pytest.raises(UserError, match=r"'latest': is registered already, by this process.*exist_ok=True"):
            bench.register("memory", "latest", Newest)
        bench.register("memory", "latest", Newest, exist_ok=True, summary="again")
        assert bench.available()["memories"]["latest"].summary == "again"
    finally:
        remove_component("memory", "latest")
    for name in ("Ring", "mlp", "cn"):
        with pytest.raises(UserError, match="built-in component"):
            bench.register("memory", name, Newest)
    for name in ("", "a b", "mine.py:Mine"):
        with pytest.raises(UserError, match="letters, digits"):
            bench.register("memory", name, Newest)
    for target in (Newest(3), "no target", None, 3):
        with pytest.raises(UserError, match="can't be registered"):
            bench.register("memory", "fine", target)  # type: ignore[arg-type]


def test_class_that_is_no_memory_is_refused_when_it_is_used() -> None:
    x, y = np.zeros((8, 3)), np.arange(8) % 2
    bench.register("memory", "strange", dict)
    bench.register("memory", "missing", "no_such_package.module:Name")
    try:
        for name, words in (("strange", "is not a subclass of"), ("missing", "No module named 'no_such_package'")):
            with pytest.raises(UserError, match=words):
                bench.run(bench.Stream.from_arrays(x, y, x, y, tasks=1), memory=name)
    finally:
        remove_component("memory", "strange")
        remove_component("memory", "missing")


def test_norm_of_a_plugin_has_its_origin_in_listings_and_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contnorm.registry._origin", Origin("their-norms", "0.3"))
    register_norm("theirs", lambda channels: nn.GroupNorm(1, channels))
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    try:
        assert bench.available()["norms"]["theirs"].origin == "their-norms 0.3"
        (record,) = bench.run(bench.Stream.from_arrays(x, y, x, y, tasks=1), norm="theirs", strategy="single").records
    finally:
        unregister_norm("theirs")
    assert record.raw["versions"]["their-norms"] == "0.3"
    (record,) = bench.run(bench.Stream.from_arrays(x, y, x, y, tasks=1), norm="bn", strategy="single").records
    assert set(record.raw["versions"]) == {"contnorm", "torch", "python", "cuda"}
