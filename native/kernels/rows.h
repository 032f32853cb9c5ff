// How threads share rows.
#pragma once
#include "../call.h"
#include "simd.h"

namespace sparkgap {
namespace {

// This thread's share of `n` items: consecutive ones.
struct Share {
  int64_t begin, end;
};

SPARKGAP_INLINE Share share(int64_t n, Worker worker) {
  return {n * worker.index / worker.count, n * (worker.index + 1) / worker.count};
}

}  // namespace
}  // namespace sparkgap
