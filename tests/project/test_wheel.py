"""The wheel works where nothing but it and its requirements is installed, and has the commit it was built from.

The environments see the distributions that torch, or the extra ``bench``, requires, by links to those of the present
environment, since torch is large. They see nothing else of it.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
BENCH_ONLY = ("pydantic", "typer", "pandas", "scipy", "matplotlib", "safetensors", "rich", "cloudpickle")


def call(*command: str | Path, cwd: Path) -> str:
    """Return the output of a command that sees neither this checkout nor the variables that point to it."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GIT_", "CONTNORM", "COV_"))
    }
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with the files of the working tree, so that builds leave nothing in it."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("a build has a commit in a git checkout only")
    folder = tmp_path_factory.mktemp("checkout")
    call("git", "clone", "--quiet", "--shared", "--no-checkout", ROOT, folder, cwd=ROOT)
    call("git", "reset", "--quiet", cwd=folder)
    listed = call("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in listed:
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return folder


@pytest.fixture(scope="module")
def commit(checkout: Path) -> str:
    return call("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*", cwd=checkout)


@pytest.fixture(scope="module")
def dist(checkout: Path, commit: str) -> Path:
    """The folder with sdist and wheel; the wheel is built from the sdist, where there is no git."""
    call(sys.executable, "-m", "build", "--no-isolation", cwd=checkout)
    call(sys.executable, "tools/check_dist.py", "dist", cwd=checkout)
    assert call("git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*", cwd=checkout) == commit
    return checkout / "dist"


def closure(*requirements: str) -> set[str]:
    """Return the names of the installed distributions that requirements need, themselves included."""
    names: set[str] = set()
    todo = [Requirement(text) for text in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        requirement = todo.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if (key := (name, frozenset(requirement.extras))) in seen:
            continue
        seen.add(key)
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:  # of another platform
            continue
        names.add(name)
        extras = ["", *requirement.extras]
        todo += [
            r
            for r in map(Requirement, required)
            if not r.marker or any(r.marker.evaluate({"extra": e}) for e in extras)
        ]
    return names


def link(folder: Path, names: set[str]) -> None:
    """Link what distributions have installed into a folder."""
    for name in sorted(names):
        found = distribution(name)
        tops = {Path(str(file)).parts[0] for file in found.files or () if not str(file).startswith("..")}
        for top in sorted(tops - {"__pycache__"}):
            source, target = Path(str(found.locate_file(top))), folder / top
            if source.exists() and not target.exists():
                target.symlink_to(source)


class Environment:
    """An environment of its own: an interpreter, pip, and a folder of linked distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.links = folder, folder / "links"
        call(sys.executable, "-m", "venv", folder, cwd=folder)
        self.bin = folder / "bin"
        call(self.bin / "python", "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools", cwd=folder)
        self.links.mkdir()
        [packages] = folder.glob("lib/python*/site-packages")
        (packages / "links.pth").write_text(f"{self.links}\n")

    def python(self, code: str) -> str:
        return call(self.bin / "python", "-c", code, cwd=self.folder)

    def install(self, requirement: str) -> None:
        """Install from no index: fails unless all that is required is there already."""
        call(self.bin / "python", "-m", "pip", "install", "--quiet", "--no-index", requirement, cwd=self.folder)


@pytest.fixture(scope="module")
def torch_only(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel, torch and what torch requires."""
    environment = Environment(tmp_path_factory.mktemp("torch-only"))
    link(environment.links, closure("torch"))
    [wheel] = dist.glob("*.whl")
    environment.install(str(wheel))
    return environment


@pytest.fixture(scope="module")
def with_bench(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """An environment with the wheel and its extra ``bench``."""
    environment = Environment(tmp_path_factory.mktemp("with-bench"))
    [wheel] = dist.glob("*.whl")
    link(environment.links, closure("torch", *requirements(wheel, "bench")))
    environment.install(f"contnorm[bench] @ {wheel.as_uri()}")
    return environment


def requirements(wheel: Path, extra: str) -> Iterator[str]:
    """Yield the requirements of an extra in the metadata of a wheel."""
    with zipfile.ZipFile(wheel) as file:
        [name] = [name for name in file.namelist() if name.endswith(".dist-info/METADATA")]
        text = file.read(name).decode()
    for line in re.findall(r"^Requires-Dist: (.*)$", text, re.MULTILINE):
        requirement = Requirement(line)
        if requirement.marker and requirement.marker.evaluate({"extra": extra}) and f'"{extra}"' in line:
            yield line.partition(";")[0]


def test_wheel_and_sdist_have_the_commit(dist: Path, commit: str) -> None:
    [wheel], [sdist] = dist.glob("*.whl"), dist.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        assert file.read("contnorm/COMMIT").decode() == f"{commit}\n"
    with tarfile.open(sdist) as tar:
        assert any(name.endswith("/src/contnorm/COMMIT") for name in tar.getnames())


def test_environment_has_torch_alone(torch_only: Environment) -> None:
    found = torch_only.python(
        f"import importlib.util as u, torch; print([n for n in {BENCH_ONLY} + ('numpy',) if u.find_spec(n)])"
    )
    assert found == "[]"


def test_source_of_the_compiled_kernel_is_installed(torch_only: Environment) -> None:
    code = "from contnorm.kernels.cpp import SOURCE; print('contnorm_cn_train' in SOURCE.read_text())"
    assert torch_only.python(code) == "True"


def test_library_is_the_installed_one_and_complete(torch_only: Environment) -> None:
    code = """
import contnorm, contnorm.functional, contnorm.testing
for module in (contnorm, contnorm.functional, contnorm.testing):
    for name in module.__all__:
        getattr(module, name)
print(contnorm.__file__, len(contnorm.__all__))
"""
    file, names = torch_only.python(code).split()
    assert file.startswith(str(torch_only.folder)) and int(names) > 60


def test_first_example_of_the_readme_needs_torch_alone(torch_only: Environment) -> None:
    example = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    torch_only.python(example)


def test_benchmark_without_its_packages_names_the_extra(torch_only: Environment) -> None:
    message = torch_only.python("from contnorm import bench\ntry: bench.run\nexcept ImportError as e: print(e)")
    assert 'pip install "contnorm[bench]"' in message


def test_version_needs_no_extra(torch_only: Environment) -> None:
    """Reports of bugs give it; the other commands name the extra that they need."""
    version = torch_only.python("import contnorm; print(contnorm.__version__)")
    assert call(torch_only.bin / "contnorm", "--version", cwd=torch_only.folder) == f"contnorm {version}"
    done = subprocess.run([torch_only.bin / "contnorm", "show"], capture_output=True, text=True, timeout=240, env={})
    assert done.returncode == 2 and "needs typer. Install it: pip install 'contnorm[bench]'" in done.stderr


def test_record_of_an_installed_package_has_its_commit(with_bench: Environment, commit: str) -> None:
    command = ("run", "--stream", "split-mnist", "--set", "stream.source=digits", "--max-steps", "2", "--runs", "runs")
    call(with_bench.bin / "contnorm", *command, cwd=with_bench.folder)
    [record] = (with_bench.folder / "runs").glob("*/*.json")
    raw = json.loads(record.read_text())
    assert raw["commit"] == commit
    assert raw["versions"]["contnorm"] == with_bench.python("import contnorm; print(contnorm.__version__)")
