// Python's lock, while native code runs.
#pragma once
#include <Python.h>

#include <chrono>
#include <thread>

namespace sparkgap {

// Gives the GIL up for its lifetime.
//
// Until Python 3.14, a daemon thread that wants it back once the interpreter ends is unwound (`pthread_exit`) instead.
// nanobind's functions are `noexcept`, so that this would abort the process: such a thread sleeps here until the end.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;

 private:
  PyThreadState* state_;
};

}  // namespace sparkgap
