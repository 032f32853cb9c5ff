#include "cpu_info.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <thread>

namespace sparkgap {

std::map<std::string, bool> cpu_features() {
  std::map<std::string, bool> features;
#if defined(__x86_64__)
  __builtin_cpu_init();
  features["avx2"] = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  features["avx_vnni"] = __builtin_cpu_supports("avxvnni");
  features["avx512"] = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  features["avx512_vnni"] = __builtin_cpu_supports("avx512vnni");
  features["avx512_bf16"] = __builtin_cpu_supports("avx512bf16");
#endif
  return features;
}

namespace {

// Cores that the cgroup's quota allows, or a negative number when there is no quota. Version 2 writes
// "quota period" (or "max period") in cpu.max, version 1 keeps two files.
double cgroup_quota_cores() {
  if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); v2) {
    std::string quota;
    double period = 0;
    if (v2 >> quota >> period && quota != "max" && period > 0) return std::stod(quota) / period;
    return -1;
  }
  std::ifstream quota_file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), period_file("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double quota = -1, period = 0;
  if (quota_file >> quota && period_file >> period && quota > 0 && period > 0) return quota / period;
  return -1;
}

}  // namespace

int usable_cores() {
  int cores = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
  if (const double quota = cgroup_quota_cores(); quota > 0) cores = std::min(cores, static_cast<int>(std::ceil(quota)));
  return std::max(cores, 1);
}

}  // namespace sparkgap
