#include "memory.h"

#include <sys/mman.h>

#include <new>

namespace sparkgap {

namespace {

constexpr size_t kLargePage = size_t(2) << 20;
constexpr size_t kSlabBytes = size_t(32) << 20;
constexpr std::align_val_t kAlignment{64};

size_t round_up(size_t n, size_t multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

struct WeightMemory::Slab {
  std::byte* mapping;
  size_t mapping_bytes;
  std::byte* next;
  std::byte* end;

  explicit Slab(size_t bytes) : mapping_bytes(round_up(bytes, kLargePage) + kLargePage) {
    void* p = mmap(nullptr, mapping_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    mapping = static_cast<std::byte*>(p);
    next = reinterpret_cast<std::byte*>(round_up(reinterpret_cast<size_t>(mapping), kLargePage));
    end = next + round_up(bytes, kLargePage);
#if defined(MADV_HUGEPAGE)
    (void)madvise(next, size_t(end - next), MADV_HUGEPAGE);  // without large pages it is only slower
#endif
  }
  ~Slab() { munmap(mapping, mapping_bytes); }
  Slab(const Slab&) = delete;
  Slab& operator=(const Slab&) = delete;
};

std::shared_ptr<std::byte> WeightMemory::allocate(size_t bytes) {
  bytes = round_up(bytes, 64);
  std::shared_ptr<Slab> slab = slab_.lock();
  if (!slab || size_t(slab->end - slab->next) < bytes) {
    slab = std::make_shared<Slab>(bytes > kSlabBytes ? bytes : kSlabBytes);
    slab_ = slab;
  }
  std::byte* p = slab->next;
  slab->next += bytes;
  return std::shared_ptr<std::byte>(slab, p);
}

void Workspace::Free::operator()(std::byte* p) const { ::operator delete(p, kAlignment); }

std::byte* Workspace::get(size_t bytes) {
  if (chunks_.empty() || bytes > size_) {
    size_ = round_up(bytes, 4096);
    chunks_.emplace_back(static_cast<std::byte*>(::operator new(size_, kAlignment)));
  }
  return chunks_.back().get();
}

void Workspace::keep_largest_only() {
  if (chunks_.size() > 1) chunks_.erase(chunks_.begin(), chunks_.end() - 1);
}

}  // namespace sparkgap
