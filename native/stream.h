// An ordered stream of launches on a thread of its own: what is launched runs in order, without the GIL and without
// the host.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "executor.h"
#include "pool.h"

namespace sparkgap {

// Graphs that are replayed one after another by one launch.
class Program {
 public:
  // `long_parts`: the graphs in which the host may be told of launches that ended before: until the first call of one of
  // them has run, nothing shall come between a launch and the next. None named: all are.
  // `selectors`, with `choices`: int64 [1] each, written by graphs of the program; one for each part, or none at all. A part
  // that has one runs only where that has the value of the part's choice when the part before has ended. The first and the
  // last part have none. Thread 0 must be the one that writes it: operations of rounds run on that thread.
  explicit Program(std::vector<std::shared_ptr<Graph>> parts, const std::vector<size_t>& long_parts = {},
                   const std::vector<std::optional<Tensor>>& selectors = {}, const std::vector<int64_t>& choices = {});
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  size_t size() const { return parts_.size(); }
  void replay();  // on the caller's thread, GIL released

 private:
  friend class Stream;

  uint32_t run(uint32_t* number, const WhenUnderWay* when_under_way) const;

  std::vector<std::shared_ptr<Graph>> parts_;
  std::vector<PyObject*> selectors_;
  std::vector<CallList> lists_;
  size_t scratch_bytes_ = 0;
  int threads_ = 1;
};

struct StreamState;  // what a stream's thread and its users share
struct QueuedLaunch;

// One launch of a program. Made by `Stream::launch`.
class Launch {
 public:
  bool done() const;
  // Waits for the end; false when it has not come after `timeout_s` seconds. GIL released. In a child of a fork it throws
  // std::runtime_error for one that has not ended.
  bool wait(double timeout_s) const;
  // Why it failed; empty when it did not, or is not done.
  std::string error() const;
  // Its run's number in the trace that was on when it ran; 0 without one, or before it is done.
  uint32_t run() const;

 private:
  friend class Stream;

  std::shared_ptr<Program> program_;
  std::shared_ptr<StreamState> shared_;
  std::string error_;  // this and the following belong to the stream's thread until `done_`
  uint32_t run_ = 0;
  std::atomic<bool> done_{false};
};

// Belongs to its process: a child of a fork has no threads but one. There, what would wait for a launch throws
// std::runtime_error, and nothing is left to stop.
//
// Runs launches first in, first out. After one that fails, those behind it fail without running, until `reset`: they
// would begin from what it left half done.
//
// Between two launches the thread takes no lock and makes no system call. Whoever waits for one is woken when the next
// is under way, since the system may give the core that wakes a thread to that thread.
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  // Takes a program; returns at once. Throws std::runtime_error after `stop`.
  std::shared_ptr<Launch> launch(std::shared_ptr<Program> program);
  // Waits until nothing runs or waits, and forgets a failure; false when that takes longer. GIL released.
  bool reset(double timeout_s);
  // Fails what waits, lets what runs end, and ends the thread. Launches after it are refused.
  void stop();
  static void stop_all();  // every stream of this process

 private:
  static void work(std::shared_ptr<StreamState> shared, QueuedLaunch* last);

  std::shared_ptr<StreamState> shared_;
};

}  // namespace sparkgap
