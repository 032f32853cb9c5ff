// Checks and views of operands that several operations take.
#pragma once
#include <mutex>

#include "kernels/kernels.h"
#include "tensor.h"

namespace sparkgap {

bool same_shape(const Tensor& a, const Tensor& b);
Cache as_cache(const Tensor& keys, const Tensor& values);
RotaryAngles rotary_angles(const Tensor& positions, const Tensor& cos, const Tensor& sin, int64_t rows, int64_t features);

// Whoever holds the mutex may be waiting for the GIL, so nobody may wait for the mutex while holding the GIL.
std::unique_lock<std::mutex> lock_without_gil(std::mutex& mutex);

inline size_t aligned(size_t bytes) { return (bytes + 63) / 64 * 64; }

}  // namespace sparkgap
