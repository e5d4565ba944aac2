"""Duplicate records, and outputs that are links, pipes, devices or full."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from contnorm.bench.config.schema import from_dict
from contnorm.bench.config.sources import read_toml
from contnorm.bench.files import write_output
from contnorm.bench.records import Record, Store, seal_of
from contnorm.cli.main import main
from contnorm.errors import UserError
from contnorm.report import write_report
from contnorm.report.recipe_records import RecordFolders
from contnorm.report.report import collect_report, report_files
from contnorm.report.summaries import summaries_under
from tests.committed_records import contents_of, copy_run

BN, CN = "ba9df79f047e", "85d5f7c04f8c"


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for name in (BN, CN):
        copy_run(name, tmp_path / "runs")
    return tmp_path / "runs"


def call(monkeypatch: pytest.MonkeyPatch, *words: object) -> int:
    monkeypatch.setattr(sys, "argv", ["contnorm", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def rewrite(path: Path, **changes: Any) -> None:
    """Change a record, with a new seal where it has one."""
    raw = {**json.loads(path.read_text()), **changes}
    if "seal" in raw:
        raw["seal"] = seal_of(raw)
    path.write_text(json.dumps(raw))


def worse(path: Path) -> dict[str, Any]:
    """The matrix of a record with one right answer less."""
    matrix: dict[str, Any] = json.loads(path.read_text())["matrix"]
    matrix["correct"][-1][-1] -= 1
    return matrix


def seeds_of(records: list[Record]) -> list[int]:
    return [record.seed for record in records if record.config.hash == BN]


def test_duplicate_record_counts_once(runs: Path) -> None:
    (runs / "link").symlink_to(BN)
    seeds = sorted(contents_of(BN))
    found = Store(runs).load_all()
    assert seeds_of(found.records) == seeds and not found.problems
    assert [one.seed for one in summaries_under(runs).records if one.config.hash == BN] == seeds
    folders = RecordFolders([runs, runs])
    assert seeds_of(folders.records) == seeds and not folders.problems


def test_show_counts_repeated_run_once(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = []
    for words in ([runs / BN], [runs / BN, runs / BN], [runs / BN, runs / BN / "0.json"]):
        assert call(monkeypatch, "show", *words) == 0
        tables.append(capsys.readouterr().out)
    assert len(set(tables)) == 1


def test_contradicting_records_of_a_seed_are_reported(runs: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(runs, other)
    rewrite(other / BN / "1.json", matrix=worse(other / BN / "1.json"))
    folders = RecordFolders([runs, other])
    [problem] = folders.problems
    assert str(other / BN / "1.json") in problem and str(runs / BN / "1.json") in problem
    [counted] = [one for one in folders.records if (one.config.hash, one.seed) == (BN, 1)]
    assert counted.path == runs / BN / "1.json"


@pytest.mark.parametrize("kind", ["pipe", "device", "large"])
def test_endless_record_file_is_reported(runs: Path, kind: str) -> None:
    path = runs / BN / "7.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(2**40)  # without blocks on the disk
    found = Store(runs).load_all()
    [problem] = found.problems
    assert str(path) in problem and ("bytes" if kind == "large" else "regular file") in problem
    assert len(found.records) == len(contents_of(BN)) + len(contents_of(CN))


def test_report_is_written_to_link_and_pipe(tmp_path: Path) -> None:
    link, target, pipe = tmp_path / "link", tmp_path / "target", tmp_path / "pipe"
    link.symlink_to("target")
    write_output(link, b"page")
    assert link.is_symlink() and target.read_bytes() == b"page"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, b"page")
    assert os.read(reader, 10) == b"page" and stat.S_ISFIFO(pipe.stat().st_mode)
    os.close(reader)


@pytest.mark.slow
def test_report_rejects_suffix_of_another_format(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "results.md"
    assert call(monkeypatch, "report", "--runs", runs, "-o", out) == 2
    assert "--format md" in capsys.readouterr().err and not out.exists()
    assert call(monkeypatch, "report", "--runs", runs, "--format", "md", "-o", out) == 0


@pytest.mark.parametrize(("form", "name"), [("html", "report.pdf"), ("csv", "report.XLSX")])
def test_report_rejects_suffix_of_no_format(runs: Path, tmp_path: Path, form: str, name: str) -> None:
    """A page that is named report.pdf would be taken for a damaged file."""
    with pytest.raises(UserError, match=rf"{name}: a report can't be a .* file\. Use a name that ends in \.{form}"):
        write_report(runs, tmp_path / name, form=form)
    assert not (tmp_path / name).exists()


RECIPE = """
title = "BN and CN"
[scores]
acc = "acc"
[[runs]]
streams = ["split-mnist"]
strategies = ["er"]
norms = ["bn"]
"""


@pytest.mark.parametrize("names", [("claims",), ("a/t", "b/t")])
def test_report_rejects_tables_with_equal_file_names(runs: Path, tmp_path: Path, names: tuple[str, ...]) -> None:
    files = [tmp_path / f"{name}.toml" for name in names]
    text = RECIPE.replace("split-mnist", "split-cifar100")
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    report = collect_report(RecordFolders([runs]), [str(file) for file in files])
    assert len(report.sections) == len(files)
    with pytest.raises(UserError, match=files[-1].stem):
        report_files(report, "md")


def test_report_has_repeated_table_once(runs: Path) -> None:
    assert len(collect_report(RecordFolders([runs]), ["table2", "table2"]).sections) == len(
        collect_report(RecordFolders([runs]), ["table2"]).sections
    )


def test_unmeasured_score_is_omitted(runs: Path, tmp_path: Path) -> None:
    """Forward transfer needs the accuracies before the first task, which these runs do not have."""
    path = tmp_path / "own.toml"
    path.write_text(RECIPE.replace("split-mnist", "split-cifar100").replace('"acc"', '"fwt"'))
    report = collect_report(RecordFolders([runs]), [str(path)])
    assert "fwt" not in report_files(report, "csv")["tables.csv"]
    assert "| bn | 0 |" in report_files(report, "md")["own.md"]


def run_module(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "contnorm", *words]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False, **options)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("words", [("--version",), ("ls",)])
def test_full_disk_is_one_line_error(words: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        ended = run_module(*words, stdout=full)
    assert ended.returncode == 2 and ended.stderr.count("\n") == 1
    assert "No space left" in ended.stderr and "Traceback" not in ended.stderr


def test_command_runs_with_closed_stdout() -> None:
    ended = subprocess.run(
        ["/bin/sh", "-c", '"$0" -m contnorm --version >&-', sys.executable],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_report_command_of_run_has_threads(runs: Path) -> None:
    for path in (runs / BN).glob("*.json"):
        rewrite(path, device={"kind": "cpu", "name": "a processor", "threads": 3})
    page = report_files(collect_report(RecordFolders([runs]), ["table2"]), "html")["report.html"]
    assert "--threads 3" in page


def test_quoted_dotted_key_in_settings_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text('"train.lr" = 0.1\n')
    with pytest.raises(UserError, match="without quotes") as raised:
        read_toml(path)
    assert "Did you mean" not in str(raised.value)


def test_settings_file_with_byte_order_mark_is_read(tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_bytes(b"\xef\xbb\xbf[train]\nlr = 0.1\n")
    assert read_toml(path) == {"train": {"lr": 0.1}}


def test_compare_warns_of_different_tasks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    configs = [from_dict({"train": {"max_steps": steps}}) for steps in (5, 100, 101)]
    for config, tasks in zip(configs, (1, 2, 2), strict=True):
        correct = [[9 if j <= i else None for j in range(tasks)] for i in range(tasks)]
        store.save(config, 0, {"matrix": {"correct": correct, "total": [10] * tasks, "before": None}})
    few, more, same = (config.hash for config in configs)
    assert call(monkeypatch, "compare", few, more, "--runs", tmp_path) == 0
    assert "different tasks" in capsys.readouterr().out
    assert call(monkeypatch, "compare", more, same, "--runs", tmp_path) == 0
    assert "different tasks" not in capsys.readouterr().out


def test_compare_warns_of_other_data_of_any_seed(
    runs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert call(monkeypatch, "compare", BN, CN, "--runs", runs) == 0
    assert "warning" not in capsys.readouterr().out
    path = runs / CN / "2.json"
    source = json.loads(path.read_text())["source"]
    rewrite(path, source={**source, "fingerprint": "0" * len(source["fingerprint"])})
    assert call(monkeypatch, "compare", BN, CN, "--runs", runs) == 0
    assert "did not use the same samples" in capsys.readouterr().out
