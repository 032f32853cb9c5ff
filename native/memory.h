// Memory of the CPU device.
#pragma once
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace sparkgap {

// Memory for weights, in large pages where the system has them: weights are streamed once a pass, and small pages
// would cost a translation every 4 KB. Slabs are freed when nothing in them is held any longer.
class WeightMemory {
 public:
  // `bytes` of zeros, 64-byte aligned.
  std::shared_ptr<std::byte> allocate(size_t bytes);

 private:
  struct Slab;
  std::weak_ptr<Slab> slab_;
};

// Memory for results that live within one operation. A pointer stays valid until the object dies, and its content
// until the next `get`.
class Workspace {
 public:
  std::byte* get(size_t bytes);
  void keep_largest_only();  // frees what earlier `get`s gave
  size_t bytes() const { return total_; }

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::vector<std::unique_ptr<std::byte, Free>> chunks_;
  size_t size_ = 0;   // of the last chunk
  size_t total_ = 0;  // of all chunks
};

// Memory for what captured calls compute. What a capture has released serves later results of the same graph, and of
// every other graph captured over the arena: they must not run at the same time.
class Arena {
 public:
  std::byte* allocate(size_t bytes);  // 64-byte aligned, not initialized
  void release(std::byte* p);
  std::byte* workspace(size_t bytes);  // see Workspace
  bool contains(const void* p) const;
  size_t bytes() const;  // taken from the system

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  struct Chunk {
    std::unique_ptr<std::byte, Free> memory;
    size_t bytes;
  };
  struct Range {
    size_t bytes;
    size_t chunk;
  };
  using Ranges = std::map<std::byte*, Range>;

  mutable std::mutex mutex_;
  std::vector<Chunk> chunks_;
  Ranges free_, used_;
  Workspace workspace_;
};

}  // namespace sparkgap
