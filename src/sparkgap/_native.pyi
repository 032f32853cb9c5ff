"""Sparkgap's native CPU code."""

def cpu_features() -> dict[str, bool]:
    """Instruction sets the kernels care about, by name: true when CPU and operating system offer them.

    Keys on x86-64: `avx2` (with FMA), `avx_vnni`, `avx512` (F, BW, DQ and VL), `avx512_vnni`, `avx512_bf16`;
    none on other architectures.
    """

def usable_cores(cgroup_root: str = "/sys/fs/cgroup", cgroup_membership: str = "/proc/self/cgroup") -> int:
    """Cores this process may use: its affinity mask, cut by its cgroups' CPU quota; at least 1.

    Args:
        cgroup_root: where the cgroup file system is mounted (versions 1 and 2).
        cgroup_membership: the file that names the process's cgroups, in the form of `/proc/[pid]/cgroup`.
    """
