"""Convolution kernels, in Triton's interpreter or on a GPU, against float64; tables; the layer that uses both."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from contnorm.kernels import convolution
from contnorm.kernels.convolution import (
    DIRECTIONS,
    EMPTY,
    VARIABLE,
    Convolution,
    ConvolutionTable,
    Geometry,
    Key,
    LayerTiles,
    Tiles,
    convolve,
    environment_of_table,
    input_gradient,
    is_aligned,
    table_for,
    using_table,
    weight_gradient,
)
from contnorm.kernels.triton.launcher import can_compile_ahead, can_launch, compiling_ahead

SMALL = Tiles(16, 16, 16, 1, 4, 2)
VARIANTS = {
    "plain": SMALL,
    "split": SMALL._replace(splits=3),
    "by position": SMALL._replace(by_position=True),
    "reordered": SMALL._replace(reordered=True, splits=2),
    "prepared": SMALL._replace(prepared=True),
    "prepared and split": SMALL._replace(prepared=True, splits=3),
}
GEOMETRIES = [
    Geometry(3, 5, 7, 6, 9, 3, 2, 1),  # an odd and an even side
    Geometry(2, 17, 8, 5, 33, 1, 2, 0),
    Geometry(18, 16, 2, 2, 16, 3, 1, 1),  # more samples than rows of a tile; most taps are outside
]
ALIGNED = [
    Geometry(5, 5, 2, 2, 5, 3, 1, 1),  # steps of 16 positions are several images,
    Geometry(2, 5, 8, 8, 5, 3, 1, 1),  # several rows,
    Geometry(2, 5, 3, 32, 5, 3, 1, 1),  # and half a row
]


@pytest.fixture(autouse=True)
def _can_run(device: torch.device) -> Iterator[None]:
    if not can_launch(device):
        pytest.skip("Triton can't run here")
    old = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    yield
    torch.backends.cudnn.allow_tf32 = old


def tensors(g: Geometry, device: torch.device, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and gradient of the output, in channels_last layout."""
    chance = torch.Generator(device).manual_seed(0)
    shapes = (
        (g.samples, g.channels, g.height, g.width),
        (g.filters, g.channels, g.kernel, g.kernel),
        (g.samples, g.filters, g.out_height, g.out_width),
    )
    x, weight, dy = (
        torch.randn(shape, generator=chance, device=device).to(dtype).contiguous(memory_format=torch.channels_last)
        for shape in shapes
    )
    return x, weight, dy


def exact(g: Geometry, x: Tensor, weight: Tensor, dy: Tensor, device: torch.device | str = "cpu") -> LayerTiles:
    """Output and gradients in float64, by direction."""
    a, b = x.to(device).double().requires_grad_(), weight.to(device).double().requires_grad_()
    y = F.conv2d(a, b, None, g.stride, g.padding)
    y.backward(dy.to(device).double())
    return LayerTiles(y.detach(), a.grad, b.grad)  # type: ignore[arg-type]


def tolerance(device: torch.device, dtype: torch.dtype) -> float:
    """Relative to the largest value: half a unit of bfloat16, TF32 inputs on a GPU, float32 sums in the interpreter."""
    if dtype == torch.bfloat16:
        return 2**-8
    return 2**-9 if device.type == "cuda" else 1e-6


def error(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double().cpu() - expected).abs().max() / expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "g"),
    [*((name, GEOMETRIES[0]) for name in VARIANTS), ("split", GEOMETRIES[1]), ("prepared", GEOMETRIES[2]),
     ("by position", GEOMETRIES[2]), ("reordered", GEOMETRIES[2])],
    ids=str,
)  # fmt: skip
def test_kernels_match_float64(g: Geometry, name: str, device: torch.device) -> None:
    tiles = VARIANTS[name]
    x, weight, dy = tensors(g, device)
    expected = exact(g, x, weight, dy)
    results = (
        convolve(x, weight, g, tiles),
        # The gradient of the input is a convolution with a prepared weight for stride 1 only.
        input_gradient(dy, weight, g, tiles._replace(prepared=tiles.prepared and g.stride == 1)),
        weight_gradient(dy, x, g, tiles),
    )
    for direction, actual, target in zip(DIRECTIONS, results, expected, strict=True):
        assert actual.shape == target.shape
        assert actual.is_contiguous(memory_format=torch.channels_last)
        assert error(actual, target) < tolerance(device, x.dtype), direction


@pytest.mark.parametrize(("name", "g"), list(zip(["plain", "split", "reordered"], ALIGNED, strict=True)), ids=str)
def test_weight_gradients_with_aligned_steps_match_float64(g: Geometry, name: str, device: torch.device) -> None:
    x, weight, dy = tensors(g, device)
    assert is_aligned(g, VARIANTS[name]) and not is_aligned(g._replace(width=5, stride=1), VARIANTS[name])
    expected: Tensor = exact(g, x, weight, dy).weight  # type: ignore[assignment]
    assert error(weight_gradient(dy, x, g, VARIANTS[name]), expected) < tolerance(device, x.dtype)


def test_entries_of_the_package_match_float64(device: torch.device) -> None:
    """RMS errors relative to the result: 2.9e-4 of rounded TF32 inputs, 1.7e-3 of bfloat16 results."""
    entries = table_for(device).entries if device.type == "cuda" else {}
    if not entries:
        pytest.skip("the package has no table for this device and these versions")
    with compiling_ahead() if can_compile_ahead() else nullcontext():
        for key, tiles in entries.items():
            compute(key, tiles, *tensors(key[2], device, getattr(torch, key[1])))
    for key, tiles in entries.items():
        x, weight, dy = tensors(key[2], device, getattr(torch, key[1]))
        expected = getattr(exact(key[2], x, weight, dy, device), key[0])
        difference = compute(key, tiles, x, weight, dy).double() - expected
        limit = 4e-4 if key[1] == "float32" else 2.5e-3
        assert difference.norm() < limit * expected.norm(), (key, tiles)


@pytest.mark.gpu
@pytest.mark.slow
def test_entries_of_the_package_give_equal_bits_beside_others(device: torch.device) -> None:
    """Eight streams, 100 launches each: a race in a kernel shows only if others delay its loads or products."""
    entries = table_for(device).entries if device.type == "cuda" else {}
    if not entries:
        pytest.skip("the package has no table for this device and these versions")
    streams = [torch.cuda.Stream() for _ in range(8)]  # type: ignore[no-untyped-call]
    unequal = []
    for key, tiles in entries.items():
        x, weight, dy = tensors(key[2], device, getattr(torch, key[1]))
        expected = compute(key, tiles, x, weight, dy)
        torch.cuda.synchronize()
        differs = torch.zeros(len(streams), dtype=torch.int64, device=device)
        for _ in range(100):
            for number, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    differs[number] += (compute(key, tiles, x, weight, dy) != expected).any()
        torch.cuda.synchronize()
        if differs.any():
            unequal.append((key, tiles, differs.tolist()))
    assert unequal == []


def compute(key: Key, tiles: Tiles, x: Tensor, weight: Tensor, dy: Tensor) -> Tensor:
    direction, _, g = key
    if direction == "forward":
        return convolve(x, weight, g, tiles)
    return input_gradient(dy, weight, g, tiles) if direction == "input" else weight_gradient(dy, x, g, tiles)


def test_bfloat16_is_summed_in_float32(device: torch.device) -> None:
    """In bfloat16, a sum of 9 * 256 terms would have an error of several units."""
    if device.type == "cpu":
        pytest.skip("Triton's interpreter multiplies the bits of bfloat16 numbers")
    g = Geometry(2, 256, 3, 3, 16, 3, 1, 1)
    x, weight, dy = tensors(g, device, torch.bfloat16)
    expected = exact(g, x, weight, dy)
    tiles = SMALL._replace(depth=64, splits=4)
    assert error(convolve(x, weight, g, tiles), expected.forward) < tolerance(device, x.dtype)  # type: ignore[arg-type]


# --- the layer --------------------------------------------------------------------------------------------------------

LAYER = Geometry(3, 8, 5, 4, 12, 3, 1, 1)


def table_of(g: Geometry, dtype: str = "float32", *directions: str) -> ConvolutionTable:
    chosen = directions or DIRECTIONS
    return ConvolutionTable({(name, dtype, g): SMALL for name in DIRECTIONS if name in chosen})


def layer(device: torch.device, **options: object) -> Convolution:
    torch.manual_seed(1)
    made = Convolution(8, 12, 3, **{"padding": 1, "bias": False, **options}).to(device)  # type: ignore[arg-type]
    return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the launched kernels."""
    made: list[str] = []
    for name in ("convolve", "input_gradient", "weight_gradient"):

        def launch(*given: object, name: str = name, original: object = getattr(convolution, name)) -> object:
            made.append(name)
            return original(*given)  # type: ignore[operator]

        monkeypatch.setattr(convolution, name, launch)
    return made


@pytest.mark.parametrize("directions", [(), ("forward", "weight"), ("input",)], ids=str)
def test_layer_launches_the_kernels_of_its_table(
    directions: tuple[str, ...], device: torch.device, calls: list[str]
) -> None:
    module = layer(device)
    x, _, dy = tensors(LAYER, device)
    x.requires_grad_()
    with using_table(table_of(LAYER, "float32", *directions)):
        y = module(x)
    y.backward(dy)
    names = dict(zip(DIRECTIONS, ("convolve", "input_gradient", "weight_gradient"), strict=True))
    assert calls == [names[name] for name in DIRECTIONS if name in (directions or DIRECTIONS)]
    expected = exact(LAYER, x.detach(), module.weight.detach(), dy)
    for actual, target in zip((y.detach(), x.grad, module.weight.grad), expected, strict=True):
        assert actual is not None and error(actual, target) < tolerance(device, x.dtype)
    assert module.weight.grad is not None and module.weight.grad.stride() == module.weight.stride()


def test_frozen_weight_and_input_get_no_gradient(device: torch.device, calls: list[str]) -> None:
    module = layer(device)
    x, _, dy = tensors(LAYER, device)
    with using_table(table_of(LAYER)):
        module(x).backward(dy)  # x needs none, as the images of a stem
        module.weight.requires_grad_(False)
        module(x.requires_grad_()).backward(dy)
    assert calls == ["convolve", "weight_gradient", "convolve", "input_gradient"]


@pytest.mark.parametrize("why", ["no table", "other sizes", "bias", "groups", "nchw", "no tf32", "float64", "vmap"])
def test_unsupported_convolutions_are_torchs(why: str, device: torch.device, calls: list[str]) -> None:
    options: dict[str, dict[str, object]] = {
        "bias": {"bias": True},
        "groups": {"groups": 2},
    }
    module = layer(device, **options.get(why, {}))
    x, _, _ = tensors(LAYER._replace(samples=4) if why == "other sizes" else LAYER, device)
    if why == "float64":
        module, x = module.double(), x.double()
    if why == "nchw":
        x = x.contiguous()
    torch.backends.cudnn.allow_tf32 = why != "no tf32"
    with using_table(EMPTY if why == "no table" else table_of(LAYER)):
        if why == "vmap":
            assert torch.vmap(module)(x[None]).shape == (1, 3, 12, 5, 4)
        else:
            assert torch.equal(module(x), nn.Conv2d.forward(module, x))
    assert calls == []


def test_autocast_casts_input_and_weight(device: torch.device, calls: list[str]) -> None:
    module = layer(device)
    x, _, dy = tensors(LAYER, device)
    with using_table(table_of(LAYER, "bfloat16")), torch.autocast(device.type, torch.bfloat16):
        y = module(x)
    assert y.dtype == torch.bfloat16 and calls == ["convolve"]
    y.backward(dy.bfloat16())
    assert module.weight.grad is not None and module.weight.grad.dtype == torch.float32
    if device.type == "cpu":
        return  # Triton's interpreter multiplies the bits of bfloat16 numbers
    expected = exact(LAYER, x.bfloat16(), module.weight.detach().bfloat16(), dy.bfloat16())
    assert error(module.weight.grad, expected.weight) < tolerance(device, torch.bfloat16)  # type: ignore[arg-type]


def test_double_backward_equals_torchs(device: torch.device, calls: list[str]) -> None:
    """The second derivative of sum(y**3) by weight and input, which depends on both."""

    def second(table: ConvolutionTable) -> tuple[Tensor, ...]:
        module = layer(device)
        x = tensors(LAYER, device)[0].requires_grad_()
        with using_table(table):
            y = module(x)
        first = torch.autograd.grad(y.pow(3).sum(), (x, module.weight), create_graph=True)
        assert set(calls) <= {"convolve"}, "gradients of kernels can't be differentiated"
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, module.weight))  # type: ignore[arg-type]

    torchs, ours = second(EMPTY), second(table_of(LAYER))
    for a, b in zip(ours, torchs, strict=True):  # cubes and squares multiply relative errors by about ten
        assert error(a, b.double().cpu()) < 20 * tolerance(device, torch.float32)


# --- tables -----------------------------------------------------------------------------------------------------------


def test_table_of_other_gpus_and_versions_is_not_used(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = environment_of_table(device)
    others = [{**here, key: "other"} for key in here]
    entries = table_of(LAYER).to_json()
    content = [{"environment": other, "entries": entries} for other in others]
    (tmp_path / "others.json").write_text(json.dumps(content))
    (tmp_path / "mine.json").write_text(json.dumps([*content, {"environment": here, "entries": entries}]))
    monkeypatch.setenv(VARIABLE, str(tmp_path / "others.json"))
    assert table_for(device) == EMPTY
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine.json"))
    assert table_for(device) == table_of(LAYER)


def test_packaged_tables_are_valid() -> None:
    """Sizes of tiles are powers of two of at least 16, which Triton requires."""
    content = json.loads(convolution.FILE.read_text())
    for item in content:
        assert set(item["environment"]) == {"gpu", "torch", "triton"}
        for (direction, dtype, _), tiles in ConvolutionTable.from_json(item["entries"]).entries.items():
            assert direction in DIRECTIONS and dtype in ("float32", "bfloat16")
            assert all(size >= 16 and size & (size - 1) == 0 for size in tiles[:3])
            assert tiles.splits >= 1 and tiles.warps in (1, 2, 4, 8)


# --- compiled code for an H200, which needs no GPU --------------------------------------------------------------------

COMPILE = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from contnorm.kernels.convolution import _launches, read_tables

seen = set()
entries = [entry for _, table in read_tables() for entry in table.entries.items()]
for (direction, dtype, sizes), tiles in entries:
    if dtype != "float32" or not tiles.prepared:
        continue
    forward = direction == "input"  # with a prepared weight, it is a convolution
    launch = _launches("forward" if forward else direction, sizes.mirrored if forward else sizes, tiles, 1)[0]
    options = {name: launch.constants[name] for name in ("num_warps", "num_stages")}
    constants = {name: value for name, value in launch.constants.items() if name not in options}
    key = launch.kernel.__name__, *launch.constants.items()
    if key in seen:
        continue
    seen.add(key)
    if len(seen) > 4:
        break
    names = launch.kernel.arg_names
    types = {name: "*fp32" if name.endswith("_ptr") else "constexpr" if name in constants else "i32" for name in names}
    aligned = [n for n, name in enumerate(names) if name.endswith("_ptr") or name in ("channels", "filters")]
    source = ASTSource(
        launch.kernel, types, {(names.index(name),): value for name, value in constants.items()},
        {(n,): [["tt.divisibility", 16]] for n in aligned},
    )
    code = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    print(json.dumps([str(key), code]), flush=True)
"""


@pytest.mark.slow
def test_a_step_waits_for_products_whose_left_side_is_in_registers() -> None:
    """The next step overwrites these registers, whether or not the tensor cores have read them.

    Triton starts products asynchronously. Where the right side was copied to shared memory, it lets several of them run
    on at the end of a step, unless the sums are used there.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    assert kernels
    with_products = 0
    for name, code in kernels:
        for body in loops(code):
            # Operands: the sums, then the left side as registers in braces, or the descriptor of a tile.
            if re.search(r"wgmma\.mma_async\S+ +\{[^}]*\}, *\{", body):
                with_products += 1
                assert re.findall(r"wgmma\.wait_group\.sync\.aligned +(\d+)", body)[-1] == "0", name
    assert with_products >= 4


def loops(code: str) -> list[str]:
    """Bodies of the innermost loops: from a label to the branch back to it."""
    parts = re.split(r"^(\$L__BB\w+):", code, flags=re.M)
    found = []
    for label, body in zip(parts[1::2], parts[2::2], strict=True):
        if back := re.search(rf"bra(\.uni)?\s+{re.escape(label)};", body):
            found.append(body[: back.start()])
    return found
