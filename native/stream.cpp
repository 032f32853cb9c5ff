#include "stream.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace nb = nanobind;

namespace sparkgap {

struct StreamState {
  std::mutex mutex;
  std::condition_variable work;      // for the thread: something to do
  std::condition_variable finished;  // for the host: a launch has ended
  std::deque<std::shared_ptr<Launch>> queue;
  // Launches that have ended: what they hold may only be let go under the GIL, which the thread never takes.
  std::vector<std::shared_ptr<Launch>> ended;
  std::string failure;
  bool running = false;
  bool stopping = false;
  pid_t process = getpid();
  std::thread thread;
};

namespace {

// Streams that are alive, so that they can be ended before the interpreter is.
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<StreamState>> streams;
};

Registry& registry() {
  static auto* instance = new Registry;  // never destroyed: streams may outlive static objects
  return *instance;
}

void stop_stream(const std::shared_ptr<StreamState>& shared) {
  std::thread thread;
  {
    const std::lock_guard lock(shared->mutex);
    shared->stopping = true;
    thread = std::move(shared->thread);
  }
  shared->work.notify_all();
  shared->finished.notify_all();
  if (thread.joinable()) thread.join();
}

// Of seconds without bounds, so much as a clock can count; none of a NaN.
std::chrono::duration<double> waiting_time(double timeout_s) {
  constexpr double kLongest_s = 1e8;
  return std::chrono::duration<double>(timeout_s > 0 ? std::min(timeout_s, kLongest_s) : 0.0);
}

// After a fork the thread is the parent's, and it may have held the mutex.
bool is_forked(const std::shared_ptr<StreamState>& shared) { return shared->process != getpid(); }

}  // namespace

Program::Program(std::vector<std::shared_ptr<Graph>> parts) : parts_(std::move(parts)) {
  if (parts_.empty()) throw std::invalid_argument("a program needs at least one graph");
  threads_ = parts_.front()->threads();
  for (const auto& part : parts_) {
    if (!part || !part->size()) throw std::invalid_argument("a graph of the program holds no calls");
    if (part->threads() != threads_) throw std::invalid_argument("the program's graphs use different numbers of threads");
    lists_.push_back(part->calls());
    for (const Call& call : part->calls().calls) scratch_bytes_ = std::max(scratch_bytes_, call.scratch_bytes);
  }
}

uint32_t Program::run(uint32_t* number) const {
  return Pool::shared().run(lists_, threads_, scratch_bytes_, number);
}

void Program::replay() {
  uint32_t fault;
  {
    const nb::gil_scoped_release released;
    fault = run(nullptr);
  }
  if (fault) throw std::out_of_range(describe_fault(fault));
}

bool Launch::done() const {
  const std::lock_guard lock(shared_->mutex);
  return done_;
}

bool Launch::wait(double timeout_s) const {
  const nb::gil_scoped_release released;
  std::unique_lock lock(shared_->mutex);
  return shared_->finished.wait_for(lock, waiting_time(timeout_s), [this] { return done_; });
}

std::string Launch::error() const {
  const std::lock_guard lock(shared_->mutex);
  return error_;
}

uint32_t Launch::run() const {
  const std::lock_guard lock(shared_->mutex);
  return done_ ? run_ : 0;
}

Stream::Stream() : shared_(std::make_shared<StreamState>()) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.streams, [](const auto& stream) { return stream.expired(); });
  all.streams.push_back(shared_);
}

Stream::~Stream() {
  if (!is_forked(shared_)) stop();
  else if (shared_->thread.joinable()) shared_->thread.detach();
}

std::shared_ptr<Launch> Stream::launch(std::shared_ptr<Program> program) {
  if (!program) throw std::invalid_argument("there is no program to launch");
  if (is_forked(shared_)) throw std::runtime_error("the stream belongs to the process that was forked");
  auto launch = std::make_shared<Launch>();
  launch->program_ = std::move(program);
  launch->shared_ = shared_;
  std::vector<std::shared_ptr<Launch>> ended;  // let go after the lock, under the GIL
  {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->stopping) throw std::runtime_error("the stream was stopped");
    ended.swap(shared_->ended);
    // The thread begins with the first launch, so that a process that only loads a model may fork.
    if (!shared_->thread.joinable()) shared_->thread = std::thread(&Stream::work, shared_);
    shared_->queue.push_back(launch);
  }
  shared_->work.notify_one();
  return launch;
}

void Stream::work(std::shared_ptr<StreamState> shared) {
  std::unique_lock lock(shared->mutex);
  for (;;) {
    shared->work.wait(lock, [&] { return shared->stopping || !shared->queue.empty(); });
    if (shared->queue.empty()) return;
    const std::shared_ptr<Launch> launch = std::move(shared->queue.front());
    shared->queue.pop_front();
    std::string error;
    if (shared->stopping) error = "the stream was stopped";
    else if (!shared->failure.empty()) error = "an earlier round failed: " + shared->failure;
    else {
      shared->running = true;
      lock.unlock();
      try {
        if (const uint32_t fault = launch->program_->run(&launch->run_)) error = describe_fault(fault);
      } catch (const std::exception& exception) {
        error = exception.what();
      }
      lock.lock();
      shared->running = false;
      shared->failure = error;
    }
    launch->error_ = std::move(error);
    launch->done_ = true;
    shared->ended.push_back(launch);
    shared->finished.notify_all();
  }
}

bool Stream::reset(double timeout_s) {
  std::vector<std::shared_ptr<Launch>> ended;  // destroyed last, under the GIL again
  const nb::gil_scoped_release released;
  std::unique_lock lock(shared_->mutex);
  const bool idle = shared_->finished.wait_for(lock, waiting_time(timeout_s), [this] {
    return shared_->stopping || (shared_->queue.empty() && !shared_->running);
  });
  if (!idle) return false;
  shared_->failure.clear();
  ended.swap(shared_->ended);
  return true;
}

void Stream::stop() {
  {
    const nb::gil_scoped_release released;
    stop_stream(shared_);
  }
  std::vector<std::shared_ptr<Launch>> ended;
  const std::lock_guard lock(shared_->mutex);
  ended.swap(shared_->ended);
}

void Stream::stop_all() {
  Registry& all = registry();
  std::vector<std::shared_ptr<StreamState>> streams;
  {
    const std::lock_guard lock(all.mutex);
    for (const auto& stream : all.streams)
      if (auto shared = stream.lock()) streams.push_back(std::move(shared));
  }
  for (const auto& shared : streams)
    if (!is_forked(shared)) stop_stream(shared);
}

}  // namespace sparkgap
