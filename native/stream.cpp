#include "stream.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <thread>

#include "gil.h"

namespace sparkgap {

// A place in the queue. The thread goes from one to the next, and `launch` is the host's to let go once it is done.
struct QueuedLaunch {
  std::shared_ptr<Launch> launch;
  std::atomic<QueuedLaunch*> next{nullptr};
};

struct StreamState {
  std::mutex mutex;  // the queue, among those who launch and reset; the thread never takes it
  std::deque<QueuedLaunch> queue = std::deque<QueuedLaunch>(1);  // begins with the one that the thread took last
  uint64_t num_dropped = 0;              // places before the queue's first
  std::thread thread;

  std::atomic<uint64_t> num_launched{0}, num_taken{0}, num_ended{0};
  std::atomic<bool> stopping{false};
  std::string failure;  // the thread's, and the host's while the thread has nothing to do

  std::mutex waiting;  // taken by a thread to sleep, and to wake one that sleeps
  std::condition_variable work;      // for the thread: something to do
  std::condition_variable finished;  // for the host: a launch has ended
  std::atomic<bool> is_idle{false};  // the thread sleeps, or is about to
  std::atomic<int> num_waiting{0};   // hosts that do
  HostTurn host;                     // from what a host waited for to its next wait

  pid_t process = getpid();

  // What has ended; what it holds may only be let go under the GIL, which the thread never takes. Under `mutex`.
  std::vector<std::shared_ptr<Launch>> take_ended();
  void wake_thread();
  void tell_hosts();
  template <class Condition>
  bool wait(double timeout_s, Condition condition);
  QueuedLaunch* wait_for_work(QueuedLaunch* last);
};

namespace {

// Streams that are alive, so that they can be ended before the interpreter is.
struct Registry {
  std::mutex mutex;
  std::vector<std::weak_ptr<StreamState>> streams;
  // Of the parent, in a child. Their threads can neither be joined nor detached here, nor can be destroyed what these
  // seem to wait for.
  std::vector<std::shared_ptr<StreamState>> left_by_fork;
};

Registry& registry() {
  static auto* instance = new Registry;  // never destroyed: streams may outlive static objects
  // A child begins without streams, and with a mutex that nobody holds.
  static const int registered = pthread_atfork([] { instance->mutex.lock(); }, [] { instance->mutex.unlock(); },
                                               [] {
                                                 instance->streams.clear();
                                                 instance->mutex.unlock();
                                               });
  (void)registered;
  return *instance;
}

// Of seconds without bounds, so much as a clock can count; none of a NaN.
std::chrono::duration<double> waiting_time(double timeout_s) {
  constexpr double kLongest_s = 1e8;
  return std::chrono::duration<double>(timeout_s > 0 ? std::min(timeout_s, kLongest_s) : 0.0);
}

// After a fork the thread is the parent's, and it may have held the mutex.
bool is_forked(const std::shared_ptr<StreamState>& shared) { return shared->process != getpid(); }

void refuse_forked(const std::shared_ptr<StreamState>& shared) {
  if (is_forked(shared))
    throw std::runtime_error("the stream belongs to the process that this one was forked from; load the model here");
}

void stop_stream(StreamState& shared) {
  std::thread thread;
  {
    const std::lock_guard lock(shared.mutex);
    shared.stopping = true;
    thread = std::move(shared.thread);
  }
  shared.wake_thread();
  shared.tell_hosts();
  if (thread.joinable()) thread.join();
}

}  // namespace

std::vector<std::shared_ptr<Launch>> StreamState::take_ended() {
  std::vector<std::shared_ptr<Launch>> ended;
  const auto take = [&](QueuedLaunch& place) {
    if (place.launch) ended.push_back(std::move(place.launch));
  };
  // The thread still reads `next` of the place that it took last.
  for (; num_dropped < num_taken.load(std::memory_order_acquire); num_dropped++) {
    take(queue.front());
    queue.pop_front();
  }
  if (queue.front().launch && queue.front().launch->done()) take(queue.front());
  return ended;
}

// Orders in both directions are sequentially consistent: whoever goes to sleep says so before it looks for the last time,
// and whoever has news looks for sleepers afterwards.
void StreamState::wake_thread() {
  if (!is_idle) return;
  { const std::lock_guard lock(waiting); }
  work.notify_one();
}

void StreamState::tell_hosts() {
  if (!num_waiting) return;
  { const std::lock_guard lock(waiting); }
  finished.notify_all();
}

template <class Condition>
bool StreamState::wait(double timeout_s, Condition condition) {
  if (condition()) {
    host.begin();
    return true;
  }
  host.end();
  std::unique_lock lock(waiting);
  num_waiting++;
  const bool holds = finished.wait_for(lock, waiting_time(timeout_s), condition);
  num_waiting--;
  return holds;
}

// Null when the stream is stopped and nothing is left.
QueuedLaunch* StreamState::wait_for_work(QueuedLaunch* last) {
  if (QueuedLaunch* next = last->next) return next;
  tell_hosts();
  std::unique_lock lock(waiting);
  is_idle = true;
  work.wait(lock, [&] { return stopping || last->next.load(); });
  is_idle = false;
  return last->next;
}

Program::Program(std::vector<std::shared_ptr<Graph>> parts, const std::vector<size_t>& long_parts,
                 const std::vector<std::optional<Tensor>>& selectors, const std::vector<int64_t>& choices)
    : parts_(std::move(parts)) {
  if (parts_.empty()) throw std::invalid_argument("a program needs at least one graph");
  if (selectors.size() != choices.size()) throw std::invalid_argument("selectors and choices go together");
  if (!selectors.empty() && (selectors.size() != parts_.size() || selectors.front() || selectors.back()))
    throw std::invalid_argument("there is a condition, or none, for each graph, and the first and the last one run always");
  threads_ = parts_.front()->threads();
  for (const auto& part : parts_) {
    if (!part || !part->size()) throw std::invalid_argument("a graph of the program holds no calls");
    if (part->threads() != threads_) throw std::invalid_argument("the program's graphs use different numbers of threads");
    lists_.push_back(part->calls());
    lists_.back().is_long = long_parts.empty();
    if (const size_t number = lists_.size() - 1; number < selectors.size() && selectors[number]) {
      lists_.back().selector = as_int64(*selectors[number], "selector", 1);
      lists_.back().choice = choices[number];
    }
    for (const Call& call : part->calls().calls) scratch_bytes_ = std::max(scratch_bytes_, call.scratch_bytes);
  }
  for (const size_t part : long_parts) {
    if (part >= lists_.size()) throw std::invalid_argument("the program has no such graph");
    lists_[part].is_long = true;
  }
  for (const auto& selector : selectors)
    if (selector) selectors_.push_back(Py_NewRef(selector->object));
}

Program::~Program() {
  for (PyObject* selector : selectors_) Py_DECREF(selector);
}

uint32_t Program::run(uint32_t* number, const WhenUnderWay* when_under_way) const {
  return Pool::shared().run(lists_, threads_, scratch_bytes_, number, when_under_way);
}

void Program::replay() {
  uint32_t fault;
  {
    const GilRelease released;
    fault = run(nullptr, nullptr);
  }
  if (fault) throw std::out_of_range(describe_fault(fault));
}

bool Launch::done() const { return done_; }

bool Launch::wait(double timeout_s) const {
  if (!done_) refuse_forked(shared_);
  const GilRelease released;
  return shared_->wait(timeout_s, [this] { return done_.load(); });
}

std::string Launch::error() const { return done_ ? error_ : std::string(); }

uint32_t Launch::run() const { return done_ ? run_ : 0; }

Stream::Stream() : shared_(std::make_shared<StreamState>()) {
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.streams, [](const auto& stream) { return stream.expired(); });
  all.streams.push_back(shared_);
}

Stream::~Stream() {
  if (!is_forked(shared_)) {
    stop();
    return;
  }
  Registry& all = registry();
  const std::lock_guard lock(all.mutex);
  all.left_by_fork.push_back(shared_);
}

std::shared_ptr<Launch> Stream::launch(std::shared_ptr<Program> program) {
  if (!program) throw std::invalid_argument("there is no program to launch");
  refuse_forked(shared_);
  auto launch = std::make_shared<Launch>();
  launch->program_ = std::move(program);
  launch->shared_ = shared_;
  std::vector<std::shared_ptr<Launch>> ended;  // let go after the lock, under the GIL
  {
    const std::lock_guard lock(shared_->mutex);
    if (shared_->stopping) throw std::runtime_error("the stream was stopped");
    ended = shared_->take_ended();
    // The thread begins with the first launch, so that a process that only loads a model may fork.
    if (!shared_->thread.joinable()) shared_->thread = std::thread(&Stream::work, shared_, &shared_->queue.front());
    QueuedLaunch& before = shared_->queue.back();
    shared_->queue.emplace_back().launch = launch;
    shared_->num_launched++;
    before.next = &shared_->queue.back();
  }
  shared_->wake_thread();
  return launch;
}

void Stream::work(std::shared_ptr<StreamState> shared, QueuedLaunch* last) {
  Pool::own_caller();
  const WhenUnderWay tell{[&shared] { shared->tell_hosts(); },
                          [&shared] {
                            if (shared->num_waiting) shared->host.begin();
                          },
                          &shared->host};
  while (QueuedLaunch* place = shared->wait_for_work(last)) {
    Launch& launch = *place->launch;
    shared->num_taken++;
    last = place;
    std::string& failure = shared->failure;
    if (shared->stopping) launch.error_ = "the stream was stopped";
    else if (!failure.empty()) launch.error_ = "an earlier round failed: " + failure;
    else {
      try {
        if (const uint32_t fault = launch.program_->run(&launch.run_, &tell)) failure = describe_fault(fault);
      } catch (const std::exception& exception) {
        failure = exception.what();
      }
      launch.error_ = failure;
    }
    launch.done_ = true;  // from here on it may be gone
    shared->num_ended++;
  }
}

bool Stream::reset(double timeout_s) {
  refuse_forked(shared_);
  std::vector<std::shared_ptr<Launch>> ended;  // destroyed last, under the GIL again
  const GilRelease released;
  StreamState& shared = *shared_;
  const auto has_ended = [&] { return shared.num_ended == shared.num_launched; };
  if (!shared.wait(timeout_s, [&] { return shared.stopping || has_ended(); })) return false;
  const std::lock_guard lock(shared.mutex);
  if (has_ended()) shared.failure.clear();
  ended = shared.take_ended();
  return true;
}

void Stream::stop() {
  if (is_forked(shared_)) return;
  {
    const GilRelease released;
    stop_stream(*shared_);
  }
  std::vector<std::shared_ptr<Launch>> ended;
  const std::lock_guard lock(shared_->mutex);
  ended = shared_->take_ended();
}

void Stream::stop_all() {
  Registry& all = registry();
  std::vector<std::shared_ptr<StreamState>> streams;
  {
    const std::lock_guard lock(all.mutex);
    for (const auto& stream : all.streams)
      if (auto shared = stream.lock()) streams.push_back(std::move(shared));
  }
  for (const auto& shared : streams) stop_stream(*shared);
}

}  // namespace sparkgap
