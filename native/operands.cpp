#include "operands.h"

#include "gil.h"

namespace sparkgap {

bool same_shape(const Tensor& a, const Tensor& b) {
  bool same = a.dims == b.dims;
  for (int i = 0; same && i < a.dims; i++) same = a.shape[i] == b.shape[i];
  return same;
}

Cache as_cache(const Tensor& keys, const Tensor& values) {
  require(keys.is_float() && keys.dims == 4 && keys.contiguous_from(0), "cache keys",
          "contiguous float32 or bfloat16 [num_blocks, block_size, kv_heads, head_dim]", keys);
  require(values.type == keys.type && same_shape(keys, values) && values.contiguous_from(0), "cache values",
          "of the keys' shape and dtype, contiguous", values);
  require(keys.size(3) <= kLargestHeadDim, "cache keys", "of a head_dim of at most 1024", keys);
  return {keys.data, values.data, keys.size(0), keys.size(1), keys.size(2), keys.size(3), keys.dtype()};
}

RotaryAngles rotary_angles(const Tensor& positions, const Tensor& cos, const Tensor& sin, int64_t rows, int64_t features) {
  const float *cosines = as_floats(cos, "cos"), *sines = as_floats(sin, "sin");
  require(cos.dims == 2 && 2 * cos.size(1) <= features, "cos", "[max_positions, half of the rotated features]", cos);
  require(same_shape(cos, sin), "sin", "of cos' shape", sin);
  return {as_int64(positions, "positions", rows), cosines, sines, cos.size(0), cos.size(1)};
}

std::unique_lock<std::mutex> lock_without_gil(std::mutex& mutex) {
  std::unique_lock lock(mutex, std::try_to_lock);
  if (!lock.owns_lock()) {
    const GilRelease released;
    lock.lock();
  }
  return lock;
}

}  // namespace sparkgap
