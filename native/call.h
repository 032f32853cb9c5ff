// One kernel call as data: what to run, and where its operands lie. Eager execution builds a call and runs it at
// once; a graph keeps a list of them.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace sparkgap {

// Bits of the fault word: an index read from device memory was out of its range, and the row was left out.
enum Fault : uint32_t {
  kTokenOutOfRange = 1,
  kPositionOutOfRange = 2,
  kSlotOutOfRange = 4,
  kBlockOutOfRange = 8,
  kLengthOutOfRange = 16,
  kSourceOutOfRange = 32,
};

// One thread's part of a call.
struct Worker {
  int index;                     // this thread, 0 ... count - 1
  int count;                     // threads that run the call together
  std::byte* scratch;            // this thread's own memory, at least `Call::scratch_bytes`, 64-byte aligned
  std::atomic<uint32_t>* fault;  // faults are or-ed in

  void report(Fault bit) const { fault->fetch_or(bit, std::memory_order_relaxed); }
};

template <class Args>
using Kernel = void (*)(const Args&, Worker);

struct Call {
  static constexpr size_t kArgsBytes = 256;

  void (*entry)(const Call&, Worker);
  void (*kernel)();
  size_t scratch_bytes;
  const char* signature;  // of a function templated on the operands' type, see `kind`
  alignas(16) std::byte args[kArgsBytes];

  void run(Worker worker) const { entry(*this, worker); }
};

// Names the operands' type, and so the kind of call, at no cost to the kernels' headers.
template <class Args>
const char* signature_of() {
  return __PRETTY_FUNCTION__;
}

template <class Args>
Call make_call(Kernel<Args> kernel, const Args& args, size_t scratch_bytes = 0) {
  static_assert(sizeof(Args) <= Call::kArgsBytes && std::is_trivially_copyable_v<Args>);
  Call call;
  call.entry = [](const Call& self, Worker worker) {
    reinterpret_cast<Kernel<Args>>(self.kernel)(*reinterpret_cast<const Args*>(self.args), worker);
  };
  call.kernel = reinterpret_cast<void (*)()>(kernel);
  call.scratch_bytes = scratch_bytes;
  call.signature = signature_of<Args>();
  std::memcpy(call.args, &args, sizeof(Args));
  return call;
}

}  // namespace sparkgap
