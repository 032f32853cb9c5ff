// The threads of the CPU device. One pool a process: engines take turns, call list by call list, so that several
// of them neither fight for cores nor wait for each other in a circle.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "call.h"
#include "placement.h"

namespace sparkgap {

// When lists and calls ran, in nanoseconds of steady time: begin and end of each. A call's end is when all threads have
// ended it.
struct Timeline {
  std::vector<int64_t> lists, calls;
};

class Pool {
 public:
  // The process's pool. After a fork the child gets a new one: threads do not survive a fork.
  static Pool& shared();

  // Runs `calls` one after another, each on `threads` threads of which the caller is one; a call begins when all
  // threads have ended the one before. Returns the faults. Blocks while another caller's list runs.
  uint32_t run(std::span<const Call> calls, int threads);

  // The same for several lists in a row, whose calls need at most `scratch_bytes`. Times go to `timeline` unless it is
  // null, which costs a branch a call.
  uint32_t run(std::span<const std::span<const Call>> lists, int threads, size_t scratch_bytes, Timeline* timeline = nullptr);
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
  void barrier(int threads);

  std::mutex mutex_;
  std::vector<std::unique_ptr<Member>> members_;  // member 0 is whoever calls `run`
  int cores_ = 1;
  Placement placement_;
  std::atomic<int> spinning_{0};  // 1 where every thread has a core of its own, else 0: sleep at once
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
};

}  // namespace sparkgap
