#include "pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <new>
#include <optional>
#include <stdexcept>

#include "cpu_info.h"
#include "placement.h"

namespace sparkgap {

namespace {

// Waiting threads spin first, because the next call is usually microseconds away, and sleep when it is not, because
// a thread that spins while another process holds its partner's core only delays them both.
constexpr int kBarrierSpins = 2000;
constexpr int kIdleSpins = 6000;
constexpr size_t kScratchAlignment = 64;

std::atomic<Pool*> shared_pool{nullptr};
std::mutex shared_mutex;

// Of a thread that does nothing but run lists.
thread_local bool is_owned = false, is_placed = false;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waits until `word` differs from `old` and returns its new value.
uint32_t wait_for_change(const std::atomic<uint32_t>& word, uint32_t old, int spins) {
  for (int i = 0; i < spins; i++) {
    if (const uint32_t now = word.load(std::memory_order_acquire); now != old) return now;
    pause();
  }
  uint32_t now;
  while ((now = word.load(std::memory_order_acquire)) == old) word.wait(old);
  return now;
}

struct Scratch {
  std::byte* data = nullptr;
  size_t bytes = 0;

  ~Scratch() { release(); }
  void release() {
    if (data) ::operator delete(data, std::align_val_t{kScratchAlignment});
    data = nullptr;
    bytes = 0;
  }
  void reserve(size_t wanted) {
    if (wanted <= bytes) return;
    release();
    data = static_cast<std::byte*>(::operator new(wanted, std::align_val_t{kScratchAlignment}));
    bytes = wanted;
  }
};

}  // namespace

struct Pool::Job {
  std::span<const CallList> lists;
  int threads;
  Trace* trace;
  uint32_t run;
  std::atomic<uint32_t>* fault;
  const WhenUnderWay* when_under_way;
  const HostTurn* host;  // null where no thread sits out a call
};

struct Pool::Member {
  alignas(64) std::atomic<uint32_t> ticket{0};
  const Job* job = nullptr;  // null with a new ticket: end
  Scratch scratch;
  std::thread thread;
};

Pool& Pool::shared() {
  if (Pool* pool = shared_pool.load(std::memory_order_acquire)) return *pool;
  const std::lock_guard lock(shared_mutex);
  if (Pool* pool = shared_pool.load(std::memory_order_acquire)) return *pool;
  static const int registered = pthread_atfork([] { shared_mutex.lock(); }, [] { shared_mutex.unlock(); },
                                               [] {
                                                 // The parent's threads, and its pool with them, are not here.
                                                 shared_pool.store(nullptr, std::memory_order_release);
                                                 shared_mutex.unlock();
                                               });
  (void)registered;
  auto* pool = new Pool;
  shared_pool.store(pool, std::memory_order_release);
  return *pool;
}

void Pool::grow(int threads, size_t scratch_bytes) {
  if (members_.empty()) {
    cores_ = usable_cores();
    placement_ = Placement(current_affinity());
    members_.push_back(std::make_unique<Member>());
  }
  if (threads > cores_) placement_ = Placement();  // more threads than cores: the kernel's scheduler knows best
  while (static_cast<int>(members_.size()) < threads) {
    const int index = static_cast<int>(members_.size());
    // A member without a thread would be waited for in vain: it joins once its thread runs.
    members_.reserve(members_.size() + 1);
    auto member = std::make_unique<Member>();
    member->thread = std::thread([this, self = member.get(), index, placement = placement_] {
      placement.pin(index);
      work(*self, index);
    });
    members_.push_back(std::move(member));
  }
  for (int i = 0; i < threads; i++) members_[i]->scratch.reserve(scratch_bytes);
  spinning_.store(threads <= cores_ ? 1 : 0, std::memory_order_relaxed);
}

uint32_t Pool::run(const CallList& list, int threads) {
  size_t scratch_bytes = 0;
  for (const Call& call : list.calls) scratch_bytes = call.scratch_bytes > scratch_bytes ? call.scratch_bytes : scratch_bytes;
  return run({&list, 1}, threads, scratch_bytes);
}

uint32_t Pool::run(std::span<const CallList> lists, int threads, size_t scratch_bytes, uint32_t* number,
                   const WhenUnderWay* when_under_way) {
  // The barrier after a call keeps the job alive until every thread has read it: without a call there is none.
  if (std::all_of(lists.begin(), lists.end(), [](const CallList& list) { return list.calls.empty(); })) {
    if (when_under_way) when_under_way->action();
    return 0;
  }
  std::atomic<uint32_t> fault{0};
  const HostTurn* const host = when_under_way ? when_under_way->host : nullptr;
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) {
    if (when_under_way) when_under_way->action();
    when_under_way = nullptr;
    lock.lock();
  }
  grow(threads, scratch_bytes);
  if (trace_) trace_->grow(threads);
  const bool takes_all_cores = threads > 1 && threads >= cores_;
  const Job job{lists, threads, trace_.get(), trace_ ? trace_->begin_run() : 0, &fault, when_under_way,
                takes_all_cores ? host : nullptr};
  if (number) *number = job.run;
  std::optional<Placement::CallerGuard> placed;
  if (is_owned) place_owned_caller(threads);
  else placed.emplace(placement_, threads);
  leave_at_.store(0, std::memory_order_relaxed);
  resume_number_.store(0, std::memory_order_relaxed);
  for (int i = 1; i < threads; i++) {
    Member& member = *members_[i];
    member.job = &job;
    member.ticket.fetch_add(1);  // sequentially consistent: `notify` must not look for sleepers before the store
    member.ticket.notify_one();
  }
  execute(job, 0);
  return fault.load(std::memory_order_relaxed);
}

void Pool::own_caller() { is_owned = true; }

void Pool::place_owned_caller(int threads) const {
  if (is_placed || threads < 2) return;
  placement_.pin(0);
  is_placed = true;
}

std::vector<int64_t> Pool::measure(std::span<const Call> calls, int threads, uint32_t* fault) {
  std::atomic<uint32_t> faults{0};
  size_t scratch_bytes = 0;
  for (const Call& call : calls) scratch_bytes = call.scratch_bytes > scratch_bytes ? call.scratch_bytes : scratch_bytes;
  std::vector<int64_t> times;
  times.reserve(calls.size() * size_t(threads));
  const std::lock_guard lock(mutex_);
  grow(1, scratch_bytes);
  for (const Call& call : calls)
    for (int index = 0; index < threads; index++) {
      const auto started = std::chrono::steady_clock::now();
      call.run(Worker{index, threads, members_[0]->scratch.data, &faults});
      times.push_back(std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - started).count());
    }
  *fault = faults.load(std::memory_order_relaxed);
  return times;
}

// A call of a job.
struct Pool::Place {
  uint32_t list, call;
  uint32_t number;  // among all calls of the job

  Place next(const Job& job) const { return Place{list, call + 1, number + 1}.at_call(job); }
  // The first call from here on: lists may be empty, or not chosen.
  Place at_call(const Job& job) const {
    Place place = *this;
    while (place.list < job.lists.size() &&
           (place.call >= job.lists[place.list].calls.size() || (place.call == 0 && !job.lists[place.list].runs())))
      place.list++, place.call = 0;
    return place;
  }
  // Whether no call follows, whatever is chosen: the last list with calls always runs.
  bool is_last(const Job& job) const {
    if (call + 1 < job.lists[list].calls.size()) return false;
    const auto later = job.lists.subspan(list + 1);
    return std::all_of(later.begin(), later.end(), [](const CallList& other) { return other.calls.empty(); });
  }
};

void Pool::execute(const Job& job, int index) {
  // The job lives on the caller's stack and is gone once the last barrier opens, after which the next may begin.
  const int threads = job.threads;
  const bool may_leave = job.host != nullptr;
  TraceRing* const ring = job.trace ? &job.trace->ring(index) : nullptr;
  const WhenUnderWay* when_under_way = index == 0 ? job.when_under_way : nullptr;
  std::byte* const scratch = members_[index]->scratch.data;
  int team = threads;
  bool announced = false;
  for (Place place = Place{0, 0, 0}.at_call(job);;) {
    const CallList& list = job.lists[place.list];
    const uint32_t seen = resumed_.load(std::memory_order_relaxed);
    const int64_t begin_ns = ring ? now_ns() : 0;
    list.calls[place.call].run(Worker{index, team, scratch, job.fault});
    if (ring)
      ring->add({list.calls[place.call].signature, begin_ns, now_ns(), list.graph, job.run, place.list, place.call,
                 uint32_t(index)});
    if (when_under_way && list.is_long) {
      if (may_leave && !announced) {
        when_under_way->announce();
        announced = true;
      } else {
        when_under_way->action();
        when_under_way = nullptr;
      }
    }
    const bool is_last = place.is_last(job);
    if (index == 0 && may_leave && !is_last) choose_team(job, team, place);
    if (team > 1) barrier(team);
    if (is_last) break;
    // Only now: what the call wrote may decide which list comes next.
    const Place next = place = place.next(job);
    if (!may_leave) continue;
    if (team == threads) {
      if (leave_at_.load(std::memory_order_relaxed) != next.number) continue;
      team--;
      if (index < team) continue;
      place = wait_for_call(seen);
      team++;
    } else if (resume_number_.load(std::memory_order_relaxed) == next.number) {
      team++;
      if (index == 0) call_back();
    }
  }
  if (when_under_way) when_under_way->action();
}

// Says before the barrier of the call before whether the last thread leaves, or comes back, for the call after `place`. What
// decides which list comes next is written by thread 0, which calls this.
void Pool::choose_team(const Job& job, int team, const Place& place) {
  const Place next = place.next(job);
  const bool leaves = next.list + 1 < job.lists.size() && job.host->lasts();
  if (leaves == (team < job.threads)) return;
  if (leaves) {
    // Called back for this very call, the last thread may not even have seen yet that it was to leave: it would miss that,
    // were it told to leave again before the barrier that it comes to.
    if (resume_number_.load(std::memory_order_relaxed) == place.number) return;
    leave_at_.store(next.number, std::memory_order_relaxed);
    return;
  }
  resume_list_.store(next.list, std::memory_order_relaxed);
  resume_call_.store(next.call, std::memory_order_relaxed);
  resume_number_.store(next.number, std::memory_order_relaxed);
}

void Pool::call_back() {
  resumed_.fetch_add(1);  // sequentially consistent, as in `run`
  resumed_.notify_one();
}

// Leaves the core to others until a call is to be run by all threads again; which.
Pool::Place Pool::wait_for_call(uint32_t seen) {
  wait_for_change(resumed_, seen, 0);
  return {resume_list_.load(std::memory_order_relaxed), resume_call_.load(std::memory_order_relaxed),
          resume_number_.load(std::memory_order_relaxed)};
}

void Pool::start_trace(size_t capacity) {
  const std::lock_guard lock(mutex_);
  if (trace_) throw std::runtime_error("a trace is on; one process records one at a time");
  trace_ = std::make_unique<Trace>(capacity);
}

std::unique_ptr<Trace> Pool::stop_trace() {
  const std::lock_guard lock(mutex_);
  return std::move(trace_);
}

void Pool::barrier(int threads) {
  const uint32_t phase = phase_.load(std::memory_order_acquire);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(threads)) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1);  // sequentially consistent, as in `run`
    phase_.notify_all();
  } else {
    wait_for_change(phase_, phase, spinning_.load(std::memory_order_relaxed) * kBarrierSpins);
  }
}

void Pool::work(Member& self, int index) {
  uint32_t ticket = 0;
  for (;;) {
    ticket = wait_for_change(self.ticket, ticket, spinning_.load(std::memory_order_relaxed) * kIdleSpins);
    if (!self.job) return;
    execute(*self.job, index);
  }
}

void Pool::shutdown() {
  const std::lock_guard lock(mutex_);
  for (size_t i = 1; i < members_.size(); i++) {
    Member& member = *members_[i];
    member.job = nullptr;
    member.ticket.fetch_add(1);
    member.ticket.notify_one();
    member.thread.join();
  }
  members_.clear();
}

}  // namespace sparkgap
