// Memory of the CPU device.
#pragma once
#include <cstddef>
#include <memory>
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

 private:
  struct Free {
    void operator()(std::byte* p) const;
  };
  std::vector<std::unique_ptr<std::byte, Free>> chunks_;
  size_t size_ = 0;  // of the last chunk
};

}  // namespace sparkgap
