#include "placement.h"

#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <string_view>

namespace sparkgap {

namespace {

bool pinning_wanted() {
  const char* value = std::getenv("SPARKGAP_PIN_THREADS");
  return !value || std::string_view(value) != "0";
}

#if defined(__linux__)
void move_to(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  // A refusal (the core went away, or a container forbids it) costs speed only: the thread runs where it is.
  (void)sched_setaffinity(0, sizeof set, &set);
}
#endif

}  // namespace

std::vector<int> current_affinity() {
  std::vector<int> cores;
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int core = 0; core < CPU_SETSIZE; core++)
      if (CPU_ISSET(core, &set)) cores.push_back(core);
#endif
  return cores;
}

Placement::Placement(std::vector<int> cores) : cores_(std::move(cores)) {
  if (cores_.size() < 2 || !pinning_wanted()) {
    cores_.clear();
    return;
  }
#if defined(__linux__)
  // The caller's present core comes first, so that several processes do not all pin onto the same cores.
  if (const auto here = std::find(cores_.begin(), cores_.end(), sched_getcpu()); here != cores_.end())
    std::rotate(cores_.begin(), here, cores_.end());
#endif
}

void Placement::pin(int index) const {
#if defined(__linux__)
  if (index < static_cast<int>(cores_.size())) move_to(cores_[index]);
#else
  (void)index;
#endif
}

Placement::CallerGuard::CallerGuard(const Placement& placement, int threads) {
#if defined(__linux__)
  const auto& cores = placement.cores_;
  if (threads < 2 || cores.empty() || sched_getaffinity(0, sizeof before_, &before_) != 0) return;
  move_to(cores.front());
  moved_ = true;
#else
  (void)placement, (void)threads;
#endif
}

Placement::CallerGuard::~CallerGuard() {
#if defined(__linux__)
  if (moved_) (void)sched_setaffinity(0, sizeof before_, &before_);
#endif
}

}  // namespace sparkgap
