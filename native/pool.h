// The threads of the CPU device. One pool a process: engines take turns, call list by call list, so that several
// of them neither fight for cores nor wait for each other in a circle.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "call.h"
#include "placement.h"
#include "trace.h"

namespace sparkgap {

// Calls that run one after another, and the number of the name of the graph that holds them (`intern_name`).
struct CallList {
  std::span<const Call> calls;
  uint32_t graph = 0;
};

// Something for the caller's thread to do once a run is under way: after the first call of list `list`, or before the run
// where that has to wait for another caller's; at the latest at its end.
struct WhenUnderWay {
  std::function<void()> action;
  size_t list = 0;
};

class Pool {
 public:
  // The process's pool. After a fork the child gets a new one: threads do not survive a fork.
  static Pool& shared();

  // Runs a list's calls one after another, each on `threads` threads of which the caller is one; a call begins when all
  // threads have ended the one before. Returns the faults. Blocks while another caller's list runs.
  uint32_t run(const CallList& list, int threads);

  // The same for several lists in a row, whose calls need at most `scratch_bytes`. While a trace is on, `number` gets the
  // run's number there, and else 0.
  uint32_t run(std::span<const CallList> lists, int threads, size_t scratch_bytes, uint32_t* number = nullptr,
               const WhenUnderWay* when_under_way = nullptr);

  // The calling thread does nothing but run lists: it is pinned once, like the pool's own, and not for each run.
  static void own_caller();

  // From here on every run leaves its times in a trace; without one that costs a branch a call. Throws std::runtime_error
  // when a trace is on.
  void start_trace(size_t capacity);
  // Ends the trace and gives it; null when none is on.
  std::unique_ptr<Trace> stop_trace();

  // Runs `calls` on the caller's thread alone, as each of `threads` threads in turn: nanoseconds of every share of every
  // call, `[calls, threads]`. Shares that wait for nobody show what a call costs and how evenly it is cut.
  std::vector<int64_t> measure(std::span<const Call> calls, int threads, uint32_t* fault);

  // Ends and joins all threads; a later `run` starts them again.
  void shutdown();

 private:
  struct Job;
  struct Member;

  void grow(int threads, size_t scratch_bytes);
  void work(Member& self, int index);
  void execute(const Job& job, int index);
  void place_owned_caller(int threads) const;
  void barrier(int threads);

  std::mutex mutex_;
  std::vector<std::unique_ptr<Member>> members_;  // member 0 is whoever calls `run`
  int cores_ = 1;
  Placement placement_;
  std::unique_ptr<Trace> trace_;
  std::atomic<int> spinning_{0};  // 1 where every thread has a core of its own, else 0: sleep at once
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

}  // namespace sparkgap
