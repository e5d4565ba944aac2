"""A command that has used a GPU skips the teardown of Python alone: threads end, exit functions are called."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from contnorm import __version__
from contnorm.cli import process_end

# Stands for a command that has used a GPU; says on stderr when the teardown is skipped.
SCRIPT = """
import atexit, os, sys, threading, time, types
{first}
from contnorm import __main__ as entry
torch = sys.modules["torch"] = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: {gpu})
atexit.register(lambda: print("exit function"))
threading.Thread(target=lambda: (time.sleep(0.3), print("thread"))).start()
end = os._exit
os._exit = lambda status: (os.write(2, b"skipped"), end(status))
sys.argv = ["contnorm", *{arguments!r}]
{then}
entry.main()
"""
USUAL = {"first": "", "gpu": True, "arguments": ["--version"], "then": ""}


def ended(environment: dict[str, str] | None = None, **changes: object) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.format(**{**USUAL, **changes})
    without = {
        name: value for name, value in os.environ.items() if name not in (*process_end.TOOLS, "PYTHONUNBUFFERED")
    }
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**without, **(environment or {})}
    )


def test_threads_end_and_exit_functions_are_called() -> None:
    done = ended()
    assert sorted(done.stdout.splitlines()[:2]) == [f"contnorm {__version__}", "thread"]
    assert done.stdout.splitlines()[2:] == ["exit function"]
    assert (done.returncode, done.stderr) == (0, "skipped")


def test_status_of_an_error_is_kept() -> None:
    done = ended(arguments=["no-such-command"])
    assert done.returncode == 2 and "no-such-command" in done.stderr and "skipped" in done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu": False},
        {"first": "atexit.register(print, 'an earlier exit function')"},
        {"then": "import contnorm.bench.user_code; sys.modules['contnorm_own_net'] = torch"},
        {"then": "from contnorm.bench import user_code, components; components._components['model', 'mine'] = None"},
        {"then": "entry.run_command = lambda: sys.exit('a message')"},
        {"environment": {"CUDA_INJECTION64_PATH": "profiler.so"}},
    ],
    ids=["no GPU", "earlier exit function", "user code", "registered model", "message as status", "profiler"],
)
def test_other_processes_are_torn_down(changes: dict[str, object]) -> None:
    done = ended(**changes)  # type: ignore[arg-type]
    assert "skipped" not in done.stderr and "exit function" in done.stdout and "Traceback" not in done.stderr


def test_error_ends_with_a_traceback() -> None:
    done = ended(then="entry.run_command = lambda: 1 / 0")
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr and "skipped" not in done.stderr


def test_unwritable_output_is_reported_by_python() -> None:
    done = ended(then="entry.run_command = lambda: (print('text'), os.close(1), sys.exit(0))")
    assert done.returncode == 120 and "skipped" not in done.stderr
