"""Shell blocks of the documentation: their commands run, in order, in a folder of their own; or are marked."""

import functools
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from contnorm.bench.streams.tasks import STREAMS
from tests.docs.pages import PAGES, ROOT, SHELLS, blocks, commands, page_name, shell_lines
from tests.docs.reader_folder import installed_package, prepare_folder
from tests.docs.shell import Shell, call_program

# Words of the marker <!-- needs: WORD --> before a block that is not run, and what a block with it must contain.
NEEDS = {
    "gpu": r"cuda",
    "data": r"--coco|--nus|mammoth|cocoseq",
    "cluster": r"\bray\b|srun|kubectl",
    "network": r"--fetch|torchvision:|git clone",
    "time": r"contnorm (?:paper|tune|report)|\bpython ",  # more than a minute on two cores
}


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_markers_are_known_and_needed_and_console_blocks_have_prompts(page: Path) -> None:
    """Lines without a prompt are output, so that a console block without any would not be run."""
    for block in blocks(page):
        assert block.language != "console" or shell_lines(block), f"{page_name(page)}:{block.line}: use '$ ', or sh"
        if block.comment.startswith("needs"):
            where = f"{page_name(page)}:{block.line}"
            if block.language == "python":  # the module that the block, or one before it, imports
                assert re.search(rf"^(?:from|import) {block.needs}\b", page.read_text(), re.MULTILINE), where
                continue
            assert block.language in SHELLS, f"{where}: only shell and Python blocks have markers"
            assert block.needs in NEEDS, f"{where}: needs: {block.needs!r} is none of {', '.join(NEEDS)}"
            assert re.search(NEEDS[block.needs], block.text), f"{where}: nothing here needs {block.needs}"


SLOW = {
    "docs/features.md",
    "docs/howto/bring-your-own-data.md",
    "docs/howto/diagnose-a-model.md",
    "docs/howto/long-tail.md",
    "docs/howto/moments-from-memory.md",
    "docs/howto/plugins.md",
    "docs/howto/run-the-bench.md",
    "docs/howto/run-the-paper.md",
    "docs/howto/sweeps.md",
    "docs/index.md",
    "docs/results/tables.md",
}


@pytest.fixture
def _short_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The default stream has 2,000 samples per task; the small MNIST here has fewer."""
    monkeypatch.setitem(STREAMS["permuted-mnist"].defaults["stream"], "train_per_task", 20)
    _clear_caches()
    yield
    _clear_caches()


def _clear_caches() -> None:
    """Forget what functions of the package have cached, since it may depend on the defaults of the stream."""
    slow = ("contnorm.kernels", "contnorm.bench.sequential", "contnorm.bench.stats")  # they compile and integrate
    for name, module in list(sys.modules.items()):
        if name.startswith("contnorm.") and not name.startswith(slow):
            for function in vars(module).values():
                if isinstance(function, functools._lru_cache_wrapper):
                    function.cache_clear()


@pytest.mark.usefixtures("_short_stream")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page_name(page), marks=[pytest.mark.slow] if page_name(page) in SLOW else [])
        for page in PAGES
        if commands(page)
    ],
)
def test_commands_of_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_folder(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("CONTNORM_DATA", raising=False)
    monkeypatch.setattr("contnorm.bench.engine.run.cores", lambda: 1)  # seeds run in this process

    def in_this_process(words: list[str]) -> tuple[int, str, str]:
        return call_program(words, capsys, monkeypatch)

    def in_another(words: list[str]) -> tuple[int, str, str]:
        done = subprocess.run([sys.executable, "-m", "contnorm", *words], capture_output=True, text=True, timeout=240)
        return done.returncode, done.stdout, done.stderr

    installed = installed_package(page, tmp_path)
    if installed:
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT / 'src'}")
    shell = Shell(in_another if installed else in_this_process, monkeypatch)
    for line in commands(page):
        shell.run(line)
