"""Another library that exports KV-write functions under the names of ours must not get our calls.

Dynamic linking looks names up in the order in which libraries were loaded: a library loaded globally before ours would
answer for every function that ours leaves visible.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparkgap import _native

COMPILER = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="there is no C compiler"),
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="names are resolved otherwise"),
]


def mangled(*names: str, arguments: str) -> str:
    return "_ZN" + "".join(f"{len(name)}{name}" for name in names) + "E" + arguments


KERNELS = [
    mangled("sparkgap", variant, function, arguments=f"RKNS_{len(operands)}{operands}ENS_6WorkerE")
    for variant in _native.supported_variants()
    for function, operands in (("kv_write", "KvWrite"), ("rotary_write", "RotaryWrite"))
]
METHODS = [
    mangled("sparkgap", "Executor", "kv_write", arguments="RKNS_6TensorES3_S3_S3_S3_"),
    mangled(
        "sparkgap", "Executor", "rotary_write", arguments="RKNS_6TensorERKSt8optionalIS1_ES7_fS3_S3_S3_S3_S3_S3_S3_"
    ),
]
PLAIN = ["kv_write", "rotary_write", "kv_cache_write", "reshape_and_cache"]
NAMES = [*KERNELS, *METHODS, *PLAIN]

RUN = """
import ctypes, sys
decoy = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
calls = ctypes.c_int.in_dll(decoy, "decoy_calls")
# The decoy works: it gets the calls of a library that leaves its functions visible.
victim = ctypes.CDLL(sys.argv[2])
victim.call_all()
assert calls.value == int(sys.argv[3]), f"the decoy got {calls.value} calls of the control"
calls.value = 0

import torch
from sparkgap.ops import KVCache, RotaryTable, make_kernels
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    kernels = make_kernels(torch.device("cpu"), dtype, threads=2)
    qkv = torch.randn(3, 3, 16).to(dtype)
    table = RotaryTable(torch.ones(8, 8), torch.zeros(8, 8))  # turns nothing
    slots, positions = torch.tensor([5, -1, 2]), torch.arange(3)
    for fused in (False, True):
        cache = KVCache(torch.zeros(2, 4, 1, 16, dtype=dtype), torch.zeros(2, 4, 1, 16, dtype=dtype))
        if fused:
            kernels.rotary_kv_write(qkv, positions, table, cache, slots)
        else:
            kernels.kv_write(qkv[:, 1:2], qkv[:, 2:], cache, slots)
        for stored, part in ((cache.keys, qkv[:, 1]), (cache.values, qkv[:, 2])):
            expected = torch.zeros(8, 16, dtype=dtype)
            expected[slots[[0, 2]]] = part[[0, 2]]
            assert torch.equal(stored.view(8, 16), expected), (dtype, fused)
assert calls.value == 0, f"the decoy got {calls.value} of our calls"
"""


def compile_library(source: str, path: Path) -> Path:
    path.with_suffix(".c").write_text(source)
    command = [str(COMPILER), "-shared", "-fPIC", "-O0", "-o", str(path), str(path.with_suffix(".c"))]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return path


@pytest.mark.parametrize("variant", _native.supported_variants())
def test_a_decoy_loaded_first_gets_no_calls(tmp_path: Path, variant: str) -> None:
    functions = "".join(f"void {name}(void) {{ decoy_calls++; }}\n" for name in NAMES)
    decoy = compile_library(f"int decoy_calls;\n{functions}", tmp_path / "libdecoy.so")
    calls = "".join(f"  {name}();\n" for name in NAMES)
    ours = "".join(f"void {name}(void) {{}}\n" for name in NAMES)
    victim = compile_library(f"{ours}void call_all(void) {{\n{calls}}}\n", tmp_path / "libvictim.so")
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(decoy), str(victim), str(len(NAMES))],
        env={**os.environ, "SPARKGAP_ISA": variant, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("nm") is None, reason="there is no nm")
def test_only_the_entry_point_is_visible() -> None:
    listed = subprocess.run(
        ["nm", "--dynamic", "--defined-only", str(_native.__file__)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert [line.split()[-1] for line in listed.stdout.splitlines()] == ["PyInit__native"]
