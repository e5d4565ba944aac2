"""Runs on a Ray cluster of three nodes, all on this machine: faults, stops, and records equal to local ones.

The strategy of the runs is slow while a file exists, so that faults happen in the middle of runs without assumptions
about the speed of the machine.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from contnorm import bench, paper
from contnorm.bench.engine.events import Finished, Started, TaskDone
from contnorm.bench.engine.run_dir import RunDir
from contnorm.bench.engine.scheduler import Job, RunEnvironment, execute, resolve
from contnorm.bench.launchers import ray_driver
from contnorm.bench.records import Store
from contnorm.errors import UserCodeError, UserError

ray = pytest.importorskip("ray")
cluster_utils = pytest.importorskip("ray.cluster_utils")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.filterwarnings("ignore"),  # of Ray, about itself
]

CPU = torch.device("cpu")
PATIENCE = 300.0  # seconds that a slow machine may need
STREAM = {"name": "split-mnist", "source": "digits", "tasks": 3, "train_per_task": 60, "test_per_task": 40}

SLOW = """
import os, time
from contnorm import bench

class Slow(bench.ER):
    def loss(self, model, head, stream, memory):
        if os.path.exists({hold!r}):
            time.sleep(0.8)
        return super().loss(model, head, stream, memory)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of three nodes with one core each; the driver is at the first one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise it depends on the token of an earlier cluster
        node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 80 * 2**20, "include_dashboard": False}
        started = cluster_utils.Cluster(initialize_head=True, head_node_args=node)
        started.node_options = {key: value for key, value in node.items() if key != "include_dashboard"}
        for _ in range(2):
            started.add_node(**started.node_options)
        ray.init(address=started.address, log_to_driver=False)
        try:
            yield started
        finally:
            ray.shutdown()
            started.shutdown()


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """A file: while it exists, steps are slow."""
    path = tmp_path / "hold"
    path.touch()
    return path


def slow_jobs(tmp_path: Path, hold: Path, norms: Sequence[str], seeds: int) -> list[Job]:
    code = tmp_path / "slow.py"
    code.write_text(SLOW.format(hold=str(hold)))
    settings = {"stream": STREAM, "strategy": {"name": f"{code}:Slow"}}
    configs = [resolve({**settings, "norm": {"name": norm}}, tmp_path) for norm in norms]
    return [Job(config, seed) for config in configs for seed in range(seeds)]


def environment(runs: Path | None, launcher: Any = None) -> RunEnvironment:
    return RunEnvironment(runs, Path("no data"), CPU, launcher=launcher)


def results(runs: Path) -> dict[tuple[str, int], Any]:
    """The content of all records, without times, the state of the checkout, and the seal over all."""
    raws = {(record.hash, record.seed): dict(record.raw) for record in Store(runs)}
    return {
        run: {key: value for key, value in raw.items() if key not in ("seconds", "seal", "commit")}
        for run, raw in raws.items()
    }


def wait_for(condition: Callable[[], object], what: str) -> Any:
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"no {what} after {PATIENCE:g} s")


def workers(cluster: Any) -> dict[int, int]:
    """The processes of a cluster that execute a unit, and the raylet of each, their parent."""
    raylets = {raylet_of(node) for node in cluster.list_all_nodes()}
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(b"ray::RemoteWorker.run"):
                status = (folder / "status").read_text()
                parent = int(status.partition("PPid:")[2].split()[0])
                found |= {int(folder.name): parent} if parent in raylets else {}
        except OSError:  # it has ended
            continue
    return found


def raylet_of(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def process_of(job: Job, runs: Path) -> int | None:
    """The worker that has locked a run and saved a checkpoint of it."""
    run_dir = RunDir.of(job, Store(runs))
    try:
        return int(json.loads(run_dir.lock.note.read_text())["pid"]) if run_dir.checkpoints.latest_step() else None
    except (OSError, ValueError):
        return None


def restore_nodes(cluster: Any) -> None:
    while len(cluster.list_all_nodes()) < 3:
        cluster.add_node(**cluster.node_options)


class Faults:
    """Kills a worker of the head node, and removes another node, each while its worker executes a saved run."""

    def __init__(self, cluster: Any, runs: Path) -> None:
        self.cluster, self.runs = cluster, runs
        self.killed: list[Job] = []
        self.removed: list[Job] = []

    def __bool__(self) -> bool:
        """Whether both faults have happened."""
        return bool(self.killed and self.removed)

    def cause(self, job: Job) -> None:
        record = RunDir.of(job, Store(self.runs)).record
        wait_for(lambda: process_of(job, self.runs) or record.is_file(), "checkpoint")
        process = process_of(job, self.runs)
        if process is None or process not in workers(self.cluster):  # the run has ended; another one is chosen
            return
        with stopped(process):
            if process_of(job, self.runs) != process:
                return
            raylet = workers(self.cluster).get(process, 0)
            nodes = [node for node in self.cluster.worker_nodes if raylet_of(node) == raylet]
            if nodes and not self.removed:
                self.removed.append(job)
                self.cluster.remove_node(nodes[0], allow_graceful=False)
                os.kill(process, signal.SIGKILL)  # a lost machine takes its processes along, a lost raylet does not
            elif not nodes and not self.killed:  # the head has to stay
                self.killed.append(job)
                os.kill(process, signal.SIGKILL)


@contextmanager
def stopped(process: int) -> Iterator[None]:
    """A worker does not proceed meanwhile, so that its run cannot end between a check and the fault."""
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)


def test_runs_survive_the_loss_of_a_worker_and_a_node(cluster: Any, tmp_path: Path, hold: Path) -> None:
    jobs, runs = slow_jobs(tmp_path, hold, ("bn", "gn", "cn", "none"), 6), tmp_path / "runs"
    faults = Faults(cluster, runs)
    begun: dict[Job, list[int]] = {}
    ended: list[Job] = []
    for event in execute(jobs, environment(runs, bench.RayLauncher())):
        if isinstance(event.what, Started):
            begun.setdefault(event.job, []).append(event.what.done)
        if isinstance(event.what, TaskDone) and event.what.task == 0 and hold.exists():
            faults.cause(event.job)
            if faults:
                hold.unlink()
        if isinstance(event.what, Finished) or event.what == "recorded":
            ended.append(event.job)
    assert faults
    assert sorted(ended, key=jobs.index) == jobs  # each once
    for job in (*faults.killed, *faults.removed):
        assert begun[job][0] == 0 and begun[job][-1] > 0  # it went on from its checkpoint
    list(execute(jobs, environment(tmp_path / "local")))
    assert results(runs) == results(tmp_path / "local") and len(results(runs)) == 24
    assert not list(runs.glob(".*")) and not list(runs.glob("*/*.unfinished"))


def test_without_a_shared_folder_a_run_goes_on_on_another_node(
    cluster: Any, tmp_path: Path, hold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore_nodes(cluster)
    monkeypatch.setattr(ray_driver.FolderToken, "write", lambda token: None)  # then no worker sees the folder of runs
    jobs, runs = slow_jobs(tmp_path, hold, ("bn",), 3), tmp_path / "runs"
    begun: dict[Job, list[int]] = {}
    running: set[Job] = set()
    for event in execute(jobs, environment(runs, bench.RayLauncher(upload_every=0))):
        assert event.path == Store(runs).path(event.job.config, event.job.seed)
        if isinstance(event.what, Started):
            begun.setdefault(event.job, []).append(event.what.done)
            running.add(event.job)
        if isinstance(event.what, Finished):
            running.discard(event.job)
        saved = [RunDir.of(job, Store(runs)).checkpoints.latest_step() for job in running]  # by the driver
        processes = {raylet: process for process, raylet in workers(cluster).items()}
        busy = [node for node in cluster.worker_nodes if raylet_of(node) in processes]
        if hold.exists() and busy and saved and all(saved):
            process = processes[raylet_of(busy[0])]
            with stopped(process):
                cluster.remove_node(busy[0], allow_graceful=False)
                os.kill(process, signal.SIGKILL)
            hold.unlink()
    again = [done for starts in begun.values() for done in starts[1:]]
    assert again and all(done > 0 for done in again)
    list(execute(jobs, environment(tmp_path / "local")))
    assert results(runs) == results(tmp_path / "local") and len(results(runs)) == 3
    assert not list(runs.glob("*/*.unfinished"))


STREAM_OPTIONS = [text for key, value in STREAM.items() if key != "name" for text in ("--set", f"stream.{key}={value}")]
RUN = ["run", "--stream", "split-mnist", *STREAM_OPTIONS, "--norm", "cn", "--strategy", "slow.py:Slow"]


def command(cluster: Any, folder: Path, arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Start a command on the cluster, in a process group of its own, as in a terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", "contnorm", *arguments, "--launcher", "ray", "--address", cluster.address],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )


def steps_saved(runs: Path) -> int:
    return max((int(path.stem) for path in runs.glob("*/*/checkpoints/*.json")), default=0)


def interrupt_once_saved(process: subprocess.Popen[str], runs: Path, before: int, signals: Sequence[int]) -> str:
    """Send signals to the process group once a newer checkpoint is saved; returns the output."""
    wait_for(lambda: steps_saved(runs) > before or process.poll() is not None, "checkpoint")
    for i, number in enumerate(signals):
        if i:
            time.sleep(0.2)
        os.killpg(process.pid, number)
    return process.communicate(timeout=PATIENCE)[0]


def test_interrupted_and_killed_commands_go_on(
    cluster: Any, tmp_path: Path, hold: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore_nodes(cluster)
    (tmp_path / "slow.py").write_text(SLOW.format(hold=str(hold)))
    runs = tmp_path / "runs"
    process = command(cluster, tmp_path, RUN)
    output = interrupt_once_saved(process, runs, 0, [signal.SIGINT])
    assert process.returncode == 130, output
    assert "steps, and saved. Run it again to continue." in " ".join(output.split())
    first = steps_saved(runs)
    assert first > 0
    process = command(cluster, tmp_path, RUN)
    wait_for(lambda: workers(cluster), "worker")
    output = interrupt_once_saved(process, runs, first, [signal.SIGINT, signal.SIGINT])
    assert process.returncode == 130 and "at once" in output, output
    wait_for(lambda: not workers(cluster), "end of the workers")
    process = command(cluster, tmp_path, RUN)
    wait_for(lambda: workers(cluster), "worker")
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for(lambda: not workers(cluster), "end of the workers")
    hold.unlink()
    process = command(cluster, tmp_path, RUN)
    output = process.communicate(timeout=PATIENCE)[0]
    assert process.returncode == 0 and output.count("recorded in") == 1, output
    (config,) = {record.config for record in Store(runs)}
    monkeypatch.chdir(tmp_path)
    list(execute([Job(config, 0)], environment(tmp_path / "local")))
    assert results(runs) == results(tmp_path / "local") and len(results(runs)) == 1


def test_sweep_tune_and_table_equal_local_ones(cluster: Any, tmp_path: Path) -> None:
    restore_nodes(cluster)
    stream = bench.load_stream(**STREAM)
    width = 8  # the lambda refers to it

    def sweep(runs: Path, **options: Any) -> bench.SweepResult:
        layers = torch.nn
        make = lambda shape, outputs: layers.Sequential(  # noqa: E731
            layers.Flatten(), layers.Linear(784, width), layers.BatchNorm1d(width), layers.Linear(width, outputs)
        )
        return bench.sweep(stream, model=make, tag="small", lr=[0.1, 1e30], seeds=2, runs=runs, lanes=1, **options)

    on_ray, local = sweep(tmp_path / "ray", launcher="ray"), sweep(tmp_path / "local")
    assert results(tmp_path / "ray") == results(tmp_path / "local") and len(results(tmp_path / "ray")) == 2
    assert [trial.mean for trial in on_ray.trials] == [trial.mean for trial in local.trials]
    assert len(on_ray.trials[1].diverged) == 2 == len(local.trials[1].diverged)
    options = {"norm": ["cn"], "lr": [0.03, 0.1], "seeds": 1, "extensions": 0, "refine": None}
    tuned = bench.tune(stream, **options, launcher=bench.RayLauncher(num_workers=1))
    assert tuned.best["cn"].setting == bench.tune(stream, **options, lanes=1).best["cn"].setting
    (tmp_path / "own.toml").write_text(
        'title = "small"\n[scores]\nacc = "acc"\n[settings]\nmodel = { name = "mlp", width = 8 }\n'
        "stream = { source = 'digits', train_per_task = 60, test_per_task = 40, tasks = 2 }\n"
        '[[runs]]\nstreams = ["split-mnist"]\nstrategies = ["er"]\nnorms = ["bn", "cn"]\n'
    )
    table = paper.TableOptions(1, execution=bench.RunOptions(launcher="ray"), runs=tmp_path / "table")
    done = paper.run_table(paper.find_recipe(str(tmp_path / "own.toml")), table)
    assert all(cell.records for variant in done.variants for cell in variant.cells)


def test_errors_are_reported_with_their_cause(cluster: Any, tmp_path: Path) -> None:
    restore_nodes(cluster)
    stream = bench.load_stream(**STREAM)

    class Exits(bench.ER):
        def loss(self, model: Any, head: Any, stream: Any, memory: Any) -> Any:
            os._exit(1)

    class Fails(bench.ER):
        def loss(self, model: Any, head: Any, stream: Any, memory: Any) -> Any:
            raise KeyError("mistake")

    launcher = bench.RayLauncher(retries=1, num_workers=1)
    with pytest.raises(UserError, match=r"seed 0: its worker was lost 2 times, the last time on .*ActorDiedError"):
        bench.run(stream, strategy=Exits, seeds=1, launcher=launcher)
    with pytest.raises((UserCodeError, RuntimeError), match="mistake"):
        bench.run(stream, strategy=Fails, seeds=1, launcher=launcher)


def test_arguments_are_checked() -> None:
    with pytest.raises(UserError, match="address='ray://head:10001': use auto or host:port"):
        bench.RayLauncher("ray://head:10001")
    with pytest.raises(UserError, match="retries=-1: use a number, 0 or more"):
        bench.RayLauncher(retries=-1)
    with pytest.raises(UserError, match="checkpoints='nothing://x'"):
        bench.RayLauncher(checkpoints="nothing://x")
    with pytest.raises(UserError, match="unknown launcher 'cn'"):
        bench.run(bench.load_stream(**STREAM), launcher="cn")
