"""Networks of the user in runs: a module, a class, a function, a file, a name; and the norms found in them."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from contnorm import bench
from contnorm.errors import UserError


class Net(nn.Module):
    """A class that creates its norms itself."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int, norm: Any) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(input_shape[0], 8, 3, 4), norm(8), nn.ReLU(), nn.Flatten())
        self.head = nn.LazyLinear(num_outputs)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.features(x))
        return y


class PlainNet(Net):
    """A class that does not know the run's norm."""

    def __init__(self, input_shape: tuple[int, ...], num_outputs: int) -> None:
        super().__init__(input_shape, num_outputs, nn.BatchNorm2d)


class Stubborn(Net):
    def __init__(self, input_shape: tuple[int, ...], num_outputs: int, norm: Any) -> None:
        super().__init__(input_shape, num_outputs, nn.BatchNorm2d)


def make(input_shape: tuple[int, ...], num_outputs: int) -> nn.Module:
    return PlainNet(input_shape, num_outputs)


@pytest.fixture
def stream() -> Any:
    return bench.load_stream("split-mnist", source="digits", tasks=2, train_per_task=30, test_per_task=20)


@pytest.mark.parametrize("kind", ["class", "plain class", "function", "module", "file", "name"])
def test_every_kind_of_network_has_the_norm_of_the_run(
    stream: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("nets.py").write_text(Path(__file__).read_text())
    models: dict[str, Any] = {
        "class": Net,
        "plain class": PlainNet,
        "function": make,
        "module": nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.BatchNorm1d(8), nn.Linear(8, stream.num_outputs)),
        "file": "nets.py:Net",
        "name": "mlp",
    }
    result = bench.run(stream, norm="cn2", model=models[kind])
    dim, count = {"module": (1, 1), "name": (1, 2)}.get(kind, (2, 1))
    assert result.records[0].raw["norms"] == {f"ContinualNorm{dim}d(2)": count}


def test_record_of_a_built_in_network_lists_its_norms(stream: Any) -> None:
    assert bench.run(stream, norm="none").records[0].raw["norms"] == {"NoNorm1d": 2}


def wrapped(input_shape: tuple[int, ...], num_outputs: int, norm: Any) -> nn.Module:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x)
            return y

    return Wrapper(Net(input_shape, num_outputs, lambda channels: Wrapper(norm(channels))))


def test_wrapped_norm_is_found(stream: Any) -> None:
    assert bench.run(stream, norm="cn2", model=wrapped).records[0].raw["norms"] == {"ContinualNorm2d(2)": 1}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Stubborn, "none of its normalization layers is the run's norm 'cn2'; it has features.1 (BatchNorm2d)"),
        (lambda shape, outputs: nn.Sequential(nn.Flatten(), nn.Linear(784, outputs)), "it has none"),
        (lambda: nn.Flatten(), "called with (input_shape, num_outputs): TypeError"),
        (lambda shape, outputs: 3, "must return a torch.nn.Module, not 3"),
        (lambda shape, outputs: nn.Linear(shape, outputs), "TypeError"),
        (lambda shape, outputs, norm: norm(7), "num_groups=2 does not divide the 7 channels"),
        (lambda shape, outputs: nn.Sequential(nn.Flatten(), nn.LSTM(784, outputs)), "not tuple"),
        (lambda shape, outputs: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(784)), "output must have shape (2, "),
        (3, "model.name=3"),
        ("resnet19", "unknown model 'resnet19'"),
    ],
)
def test_bad_network_gets_one_line(stream: Any, model: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        bench.run(stream, norm="cn2", model=model, runs=tmp_path / "runs", tag="bad" if callable(model) else None)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()
