// The native module: what this machine's CPU offers. Kernels of the CPU device are added beside this file.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include "cpu_info.h"

namespace nb = nanobind;

NB_MODULE(_native, m) {
  m.doc() = "Sparkgap's native CPU code.";
  m.def("cpu_features", &sparkgap::cpu_features,
        "Instruction sets the kernels care about, by name: true when CPU and operating system offer them.");
  m.def("usable_cores", &sparkgap::usable_cores, nb::arg("cgroup_root") = "/sys/fs/cgroup",
        nb::arg("cgroup_membership") = "/proc/self/cgroup",
        "Number of cores this process may use: its affinity mask, cut by the cgroup's CPU quota (at least 1).");
}
