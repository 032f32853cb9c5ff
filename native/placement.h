// Which core each thread of the pool runs on.
#pragma once
#if defined(__linux__)
#include <sched.h>
#endif

#include <vector>

namespace sparkgap {

// Cores the calling thread may run on, in order; empty where the system does not tell.
std::vector<int> current_affinity();

// A core for each thread. Threads that the pool owns are pinned. The caller is a thread of the application: it is pinned
// to the first core while it computes, since the scheduler would leave it for milliseconds on a pinned thread's core,
// and may run anywhere again afterwards.
class Placement {
 public:
  Placement() = default;                       // pins nothing
  explicit Placement(std::vector<int> cores);  // pins nothing when SPARKGAP_PIN_THREADS=0 or there is one core

  void pin(int index) const;

  class CallerGuard {
   public:
    CallerGuard(const Placement& placement, int threads);
    ~CallerGuard();
    CallerGuard(const CallerGuard&) = delete;
    CallerGuard& operator=(const CallerGuard&) = delete;

   private:
    bool moved_ = false;
#if defined(__linux__)
    cpu_set_t before_;
#endif
  };

 private:
  std::vector<int> cores_;  // thread i's core; the first is the caller's
};

}  // namespace sparkgap
