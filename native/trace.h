// What ran when: kernel calls as the pool's threads run them, kept in rings of fixed size while a trace is on.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "call.h"

namespace sparkgap {

// Nanoseconds of the steady clock that all times here are of.
int64_t now_ns();

// The name of a call's operands' type, such as `RmsNorm`.
std::string kind_of(const Call& call);
std::string kind_of(const char* signature);

// A number for a graph's name, the same for the same name; 0 is the empty one.
uint32_t intern_name(const std::string& name);
std::string interned_name(uint32_t number);

// One thread's part of one call. What a thread waits for the others afterwards is not part of it.
struct TraceRecord {
  const char* signature;
  int64_t begin_ns, end_ns;
  uint32_t graph;  // its name's number; 0 for an operation that ran at once
  uint32_t run;    // counts from 1 what the pool was given: a graph, a program or an operation
  uint32_t list, call;  // the graph's place in the program, and the call's in the graph
  uint32_t thread;
};

// The latest records of one thread. Memory is taken when it is made.
class TraceRing {
 public:
  explicit TraceRing(size_t capacity) : records_(capacity) {}

  void add(const TraceRecord& record) { records_[added_++ % records_.size()] = record; }
  uint64_t dropped() const { return added_ > records_.size() ? added_ - records_.size() : 0; }
  void append_to(std::vector<TraceRecord>& out) const;  // oldest first

 private:
  std::vector<TraceRecord> records_;
  uint64_t added_ = 0;
};

class Trace {
 public:
  // `capacity`: most records of each thread; the oldest are given up for new ones. At least 1.
  explicit Trace(size_t capacity);

  void grow(int threads);
  TraceRing& ring(int thread) { return *rings_[size_t(thread)]; }
  uint32_t begin_run() { return ++runs_; }
  std::vector<TraceRecord> records() const;  // by their begin
  uint64_t dropped() const;

 private:
  size_t capacity_;
  std::vector<std::unique_ptr<TraceRing>> rings_;
  uint32_t runs_ = 0;
};

}  // namespace sparkgap
