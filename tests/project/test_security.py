"""The package executes nothing that a file contains, as SECURITY.md promises, and workflows may not write."""

import ast
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "contnorm"


def dangerous_calls(source: str) -> Iterator[str]:
    """Yield the calls in a module that can execute code or write where a file says."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        last = name.rpartition(".")[2]
        if (
            (name in ("eval", "exec", "os.system", "os.popen"))
            or (last in ("load", "loads", "Unpickler") and "pickle" in name)
            or (name == "torch.load" and options.get("weights_only") != "True")
            or (last == "load" and options.get("allow_pickle") == "True")
            or (last in ("extractall", "unpack_archive", "unsafe_load", "full_load"))
            or (name == "yaml.load")
            or (last in ("CDLL", "LoadLibrary", "load_library", "ExtensionFileLoader"))
            or options.get("shell") == "True"
        ):
            yield name


def test_package_executes_nothing_that_a_file_contains() -> None:
    found = {
        path.relative_to(PACKAGE).as_posix(): sorted(set(calls))
        for path in sorted(PACKAGE.rglob("*.py"))
        if (calls := list(dangerous_calls(path.read_text(encoding="utf-8"))))
    }
    assert found == {
        "bench/components.py": ["exec"],  # a file that the call names; tests/bench/api/test_user_code.py tests this
        "bench/data/registry.py": ["shutil.unpack_archive"],  # with known checksums, and the data filter of tarfile
        "bench/engine/launch.py": ["cloudpickle.loads"],  # messages of processes of the same call
        "kernels/build.py": ["ExtensionFileLoader"],  # a library that this package has compiled
        "kernels/cpp.py": ["ctypes.CDLL"],
        "kernels/triton/eager.py": ["ctypes.CDLL"],  # the driver of the GPU, and torch's own library beside torch
        "testing/module_checks.py": ["pickle.loads", "torch.load"],  # what the check has just saved
    }


def test_only_publishing_jobs_may_write() -> None:
    for workflow in (ROOT / ".github" / "workflows").glob("*.yml"):
        content = yaml.safe_load(workflow.read_text())
        assert content["permissions"] == {"contents": "read"}
        writers = {name for name, job in content["jobs"].items() if "permissions" in job}
        assert writers <= {"deploy", "publish"}
        for name in writers:  # they run actions only, no code of the repository
            assert all("run" not in step for step in content["jobs"][name]["steps"])
