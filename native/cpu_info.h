#pragma once
#include <map>
#include <string>

namespace sparkgap {

std::map<std::string, bool> cpu_features();
int usable_cores(const std::string& cgroup_root = "/sys/fs/cgroup",
                 const std::string& cgroup_membership = "/proc/self/cgroup");

}  // namespace sparkgap
