#include "memory.h"

#include <sys/mman.h>

#include <iterator>
#include <new>
#include <utility>

namespace sparkgap {

namespace {

constexpr size_t kLargePage = size_t(2) << 20;
constexpr size_t kSlabBytes = size_t(32) << 20;
constexpr size_t kArenaChunkBytes = size_t(1) << 20;
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
    total_ += size_;
  }
  return chunks_.back().get();
}

void Workspace::keep_largest_only() {
  if (chunks_.size() > 1) chunks_.erase(chunks_.begin(), chunks_.end() - 1);
  total_ = size_;
}

void Arena::Free::operator()(std::byte* p) const { ::operator delete(p, kAlignment); }

std::byte* Arena::allocate(size_t bytes) {
  bytes = round_up(bytes ? bytes : 1, 64);
  const std::lock_guard lock(mutex_);
  auto place = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it)  // the tightest fit leaves the large ranges whole
    if (it->second.bytes >= bytes && (place == free_.end() || it->second.bytes < place->second.bytes)) place = it;
  if (place == free_.end()) {
    const size_t chunk_bytes = bytes > kArenaChunkBytes ? bytes : kArenaChunkBytes;
    std::unique_ptr<std::byte, Free> memory(static_cast<std::byte*>(::operator new(chunk_bytes, kAlignment)));
    place = free_.emplace(memory.get(), Range{chunk_bytes, chunks_.size()}).first;
    chunks_.push_back({std::move(memory), chunk_bytes});
  }
  std::byte* p = place->first;
  const Range range = place->second;
  free_.erase(place);
  if (range.bytes > bytes) free_.emplace(p + bytes, Range{range.bytes - bytes, range.chunk});
  used_.emplace(p, Range{bytes, range.chunk});
  return p;
}

void Arena::release(std::byte* p) {
  const std::lock_guard lock(mutex_);
  const auto used = used_.find(p);
  if (used == used_.end()) return;
  auto place = free_.emplace(p, used->second).first;
  used_.erase(used);
  const auto follows = [](Ranges::iterator a, Ranges::iterator b) {
    return a->second.chunk == b->second.chunk && a->first + a->second.bytes == b->first;
  };
  if (const auto next = std::next(place); next != free_.end() && follows(place, next)) {
    place->second.bytes += next->second.bytes;
    free_.erase(next);
  }
  if (place == free_.begin()) return;
  if (const auto previous = std::prev(place); follows(previous, place)) {
    previous->second.bytes += place->second.bytes;
    free_.erase(place);
  }
}

std::byte* Arena::workspace(size_t bytes) {
  const std::lock_guard lock(mutex_);
  return workspace_.get(bytes);
}

bool Arena::contains(const void* p) const {
  const std::lock_guard lock(mutex_);
  const auto* place = static_cast<const std::byte*>(p);
  for (const Chunk& chunk : chunks_)
    if (place >= chunk.memory.get() && place < chunk.memory.get() + chunk.bytes) return true;
  return false;
}

size_t Arena::bytes() const {
  const std::lock_guard lock(mutex_);
  size_t total = workspace_.bytes();
  for (const Chunk& chunk : chunks_) total += chunk.bytes;
  return total;
}

}  // namespace sparkgap
