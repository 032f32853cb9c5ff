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
  const int64_t* selector = nullptr;  // the list runs where this is `choice`; null: always
  int64_t choice = 0;
  bool is_long = true;  // among short lists, one in which something else may be done meanwhile, see `WhenUnderWay`

  bool runs() const { return !selector || *selector == choice; }
};

// Whether the host has work that the device's next results wait for. It needs a core for that: where every core has a
// compute thread, a run with one thread less is slower than one with all, and faster than one whose threads wait for the
// one that the host's thread has taken the core from.
class HostTurn {
 public:
  void begin() { until_ns_.store(now_ns() + kLongest_ns, std::memory_order_relaxed); }
  void end() { until_ns_.store(0, std::memory_order_relaxed); }
  bool lasts() const {
    const int64_t until_ns = until_ns_.load(std::memory_order_relaxed);
    return until_ns && now_ns() < until_ns;
  }

 private:
  // A host that takes longer waits for something else, and is not waited for.
  static constexpr int64_t kLongest_ns = 1'000'000;

  std::atomic<int64_t> until_ns_{0};
};

// Something for the caller's thread to do once a run is under way: after the first call of a long list, or before the run
// where that has to wait for another caller's; at the latest at its end.
struct WhenUnderWay {
  std::function<void()> action;
  std::function<void()> announce;  // where a core can be left to the host, a call earlier: it is free by then
  const HostTurn* host = nullptr;  // left a core to while it lasts, see `Pool::run`
};

class Pool {
 public:
  // The process's pool. After a fork the child gets a new one: threads do not survive a fork.
  static Pool& shared();

  // Runs a list's calls one after another, each on `threads` threads of which the caller is one; a call begins when all
  // threads have ended the one before. Returns the faults. Blocks while another caller's list runs.
  uint32_t run(const CallList& list, int threads);

  // The same for several lists in a row, whose calls need at most `scratch_bytes`. While a trace is on, `number` gets the
  // run's number there, and else 0. Where the threads take all cores, the last of them sits out the calls that begin
  // while the host's turn lasts, those of the last list apart. What a call writes decides whether later lists run; the
  // first and the last list that have calls run always.
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
  struct Place;

  void grow(int threads, size_t scratch_bytes);
  void work(Member& self, int index);
  void execute(const Job& job, int index);
  void place_owned_caller(int threads) const;
  void barrier(int threads);
  void choose_team(const Job& job, int team, const Place& place);
  void call_back();
  Place wait_for_call(uint32_t seen);

  std::mutex mutex_;
  std::vector<std::unique_ptr<Member>> members_;  // member 0 is whoever calls `run`
  int cores_ = 1;
  Placement placement_;
  std::unique_ptr<Trace> trace_;
  std::atomic<int> spinning_{0};  // 1 where every thread has a core of its own, else 0: sleep at once
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  // Of the run: the number of the call before which its last thread leaves, and the call for which it comes back. Neither
  // changes before all threads that take part have read it: a thread that was called back has, once it was at a barrier.
  // Number 0, the first call, stands for none.
  std::atomic<uint32_t> leave_at_{0}, resume_list_{0}, resume_call_{0}, resume_number_{0};
  alignas(64) std::atomic<uint32_t> resumed_{0};  // how often it was called back
};

}  // namespace sparkgap
