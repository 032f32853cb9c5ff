// Which core each thread of the pool runs on.
#pragma once
#include <vector>

namespace sparkgap {

// Cores the calling thread may run on, in order; empty where the system does not tell.
std::vector<int> current_affinity();

// A core for each thread. Threads that the pool owns are pinned. The caller is a thread of the application and stays
// free, except that it must not sit on a pinned thread's core: the guard moves it away, since the scheduler can move
// neither a pinned thread nor, for milliseconds, a running one.
class Placement {
 public:
  Placement() = default;                       // pins nothing
  explicit Placement(std::vector<int> cores);  // pins nothing when SPARKGAP_PIN_THREADS=0 or there is one core

  void pin(int index) const;

  class CallerGuard {
   public:
    CallerGuard(const Placement& placement, int threads);
  };

 private:
  std::vector<int> cores_;  // thread i's core; the first is the caller's
};

}  // namespace sparkgap
