#include "cpu_info.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
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

constexpr double kNoQuota = std::numeric_limits<double>::infinity();

// Version 2 writes "quota period" in one file, or "max period" where there is none.
double quota_v2(const std::filesystem::path& directory) {
  std::ifstream file(directory / "cpu.max");
  double quota = 0, period = 0;
  return file >> quota >> period && quota > 0 && period > 0 ? quota / period : kNoQuota;
}

// Version 1 keeps two files, with quota -1 where there is none.
double quota_v1(const std::filesystem::path& directory) {
  std::ifstream quota_file(directory / "cpu.cfs_quota_us"), period_file(directory / "cpu.cfs_period_us");
  double quota = 0, period = 0;
  return quota_file >> quota && period_file >> period && quota > 0 && period > 0 ? quota / period : kNoQuota;
}

// Cores that the quotas of this process's cgroup and of all above it allow. Where the mounted tree starts at
// the process's own group (a container), the path in `membership` may not exist in it; its root still counts.
double cgroup_quota_cores(const std::filesystem::path& root, const std::string& membership) {
  std::filesystem::path group_v2, group_v1;
  std::ifstream lines(membership);
  for (std::string line; std::getline(lines, line);) {  // hierarchy:controllers:path
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const auto group = std::filesystem::path(line.substr(second + 1)).relative_path();
    if (controllers == ",,") group_v2 = group;
    if (controllers.find(",cpu,") != std::string::npos) group_v1 = group;
  }
  double cores = std::min(quota_v2(root), quota_v1(root / "cpu"));
  for (; !group_v2.empty(); group_v2 = group_v2.parent_path()) cores = std::min(cores, quota_v2(root / group_v2));
  for (; !group_v1.empty(); group_v1 = group_v1.parent_path())
    cores = std::min(cores, quota_v1(root / "cpu" / group_v1));
  return cores;
}

}  // namespace

int usable_cores(const std::string& cgroup_root, const std::string& cgroup_membership) {
  int cores = static_cast<int>(std::thread::hardware_concurrency());
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
  if (const double quota = cgroup_quota_cores(cgroup_root, cgroup_membership); quota < cores)
    cores = static_cast<int>(std::ceil(quota));
  return std::max(cores, 1);
}

}  // namespace sparkgap
