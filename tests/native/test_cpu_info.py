"""What the native module says about the machine, against the kernel's own files."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from sparkgap import _native

FLAGS = {
    "avx2": {"avx2", "fma"},
    "avx_vnni": {"avx_vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_vnni": {"avx512_vnni"},
    "avx512_bf16": {"avx512_bf16"},
}
"""Feature name -> the flags in /proc/cpuinfo that make it up."""


def unlimited(tmp_path: Path) -> dict[str, str]:
    """Arguments that name an empty cgroup tree."""
    return {"cgroup_root": str(tmp_path), "cgroup_membership": str(tmp_path / "membership")}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86-64")
def test_cpu_features_agree_with_the_kernel() -> None:
    line = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    flags = set(line.partition(":")[2].split())
    assert _native.cpu_features() == {name: needed <= flags for name, needed in FLAGS.items()}


def test_usable_cores_without_a_quota_is_the_affinity_mask(tmp_path: Path) -> None:
    assert _native.usable_cores(**unlimited(tmp_path)) == len(os.sched_getaffinity(0))


def test_usable_cores_follows_a_smaller_affinity_mask() -> None:
    code = (
        "import os; from sparkgap import _native; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "print(_native.usable_cores())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"


@pytest.mark.parametrize(
    ("membership", "files", "limit"),
    [
        ("0::/\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "10000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "100001 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": ""}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "100000 100000\n"}, 1),
        ("0::/a/b\n", {"a/b/cpu.max": "50000 100000\n", "a/cpu.max": "9900000 100000\n"}, 1),
        ("0::/not/mounted\n", {"cpu.max": "100000 100000\n"}, 1),
        ("0::/a\n", {"b/cpu.max": "100000 100000\n"}, None),
        ("4:cpu,cpuacct:/c\n", {"cpu/c/cpu.cfs_quota_us": "50000", "cpu/c/cpu.cfs_period_us": "100000"}, 1),
        ("4:cpuset:/c\n", {"cpu/c/cpu.cfs_quota_us": "50000", "cpu/c/cpu.cfs_period_us": "100000"}, None),
        ("4:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("garbage\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
    ],
)
def test_usable_cores_is_cut_by_the_cgroup_quota(
    tmp_path: Path, membership: str, files: dict[str, str], limit: int | None
) -> None:
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "membership").write_text(membership)
    available = len(os.sched_getaffinity(0))
    expected = available if limit is None else min(limit, available)
    assert _native.usable_cores(**unlimited(tmp_path)) == expected
