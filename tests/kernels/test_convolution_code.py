"""The compiled code of convolutions for an H200, which needs no GPU to compile."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

# In a process without Triton's interpreter, whose kernels are not compiled. Prints the PTX code of the kernel of the
# first entries of the package's table in TF32, and its name and constants, one object per line.
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
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
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
