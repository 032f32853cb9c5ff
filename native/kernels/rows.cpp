// Operations on each row by itself.
#include "kernels.h"
#include "quantize.h"
#include "rows.h"
#include "simd.h"
#include "variant.h"

namespace sparkgap::SPARKGAP_VARIANT {
namespace {

template <class X, class W>
void norm_heads(const RmsNorm& args, Worker worker) {
  const W* weight = static_cast<const W*>(args.weight.data);
  const Share mine = share(args.rows * args.heads, worker);
  for (int64_t item = mine.begin; item < mine.end; item++) {
    const int64_t row = item / args.heads, head = item % args.heads;
    const bool adds = args.residual.data != nullptr;
    norm_row(head_of<X>(args.x, row, head), adds ? head_of<X>(args.residual, row, head) : nullptr,
             adds ? head_of<X>(args.sum, row, head) : nullptr, weight, args.features, args.eps, head_of<X>(args.out, row, head));
  }
}

template <class X, class W>
void norm_to_bytes(const NormQuantize& args, Worker worker) {
  X* normed = reinterpret_cast<X*>(worker.scratch);
  const auto row_of = [](const Matrix& m, int64_t row) { return m.data ? static_cast<X*>(m.data) + row * m.stride : nullptr; };
  const Share mine = share(args.rows, worker);
  for (int64_t row = mine.begin; row < mine.end; row++) {
    norm_row<X>(row_of(args.x, row), row_of(args.residual, row), row_of(args.sum, row),
                static_cast<const W*>(args.weight.data), args.features, args.eps, normed);
    quantize_to(args.to, row, normed, args.features);
  }
}

// False, and reported, when the row's position has no angles.
SPARKGAP_INLINE bool find_angles(const RotaryAngles& angles, int64_t row, const float** cos, const float** sin, Worker worker) {
  const int64_t position = angles.positions[row];
  if (position < 0 || position >= angles.max_positions) {
    worker.report(kPositionOutOfRange);
    return false;
  }
  *cos = angles.cos + position * angles.half, *sin = angles.sin + position * angles.half;
  return true;
}

// The head, or the head normed, which then lies in `normed`.
template <class X>
SPARKGAP_INLINE const X* norm_head(const X* x, const Vector& norm, int64_t features, float eps, X* normed) {
  if (!norm.data) return x;
  if (norm.dtype == DType::kFloat32)
    norm_row<X>(x, nullptr, nullptr, static_cast<const float*>(norm.data), features, eps, normed);
  else norm_row<X>(x, nullptr, nullptr, static_cast<const BFloat16*>(norm.data), features, eps, normed);
  return normed;
}

template <class X>
void rotate(const Rotary& args, Worker worker) {
  X normed[kLargestHeadDim];
  const Share mine = share(args.rows * args.heads, worker);
  for (int64_t item = mine.begin; item < mine.end; item++) {
    const int64_t row = item / args.heads, head = item % args.heads;
    const float *cos, *sin;
    if (!find_angles(args.angles, row, &cos, &sin, worker)) continue;
    const X* x = norm_head(head_of<X>(args.x, row, head), args.norm, args.features, args.eps, normed);
    rotate_head(x, cos, sin, args.angles.half, args.features, head_of<X>(args.out, row, head));
  }
}

// True when the row has a place in the cache; a slot out of range is reported.
SPARKGAP_INLINE bool has_slot(const Cache& cache, int64_t slot, Worker worker) {
  if (slot == -1) return false;
  if (slot >= 0 && slot < cache.num_blocks * cache.block_size) return true;
  worker.report(kSlotOutOfRange);
  return false;
}

template <class X, class C>
void rotate_and_write(const RotaryWrite& args, Worker worker) {
  const Cache& cache = args.cache;
  const int64_t features = cache.head_dim, half = args.angles.half, heads = args.heads + cache.kv_heads;
  X normed[kLargestHeadDim];
  const Share mine = share(args.rows * heads, worker);
  for (int64_t item = mine.begin; item < mine.end; item++) {
    const int64_t row = item / heads, head = item % heads, kv_head = head - args.heads;
    const float *cos, *sin;
    if (!find_angles(args.angles, row, &cos, &sin, worker)) continue;
    if (kv_head < 0) {
      const X* query = norm_head(head_of<X>(args.qkv, row, head), args.query_norm, features, args.eps, normed);
      rotate_head(query, cos, sin, half, features, head_of<X>(args.queries, row, head));
      continue;
    }
    if (!has_slot(cache, args.slots[row], worker)) continue;
    const int64_t at = (args.slots[row] * cache.kv_heads + kv_head) * features;
    const X* key = norm_head(head_of<X>(args.qkv, row, head), args.key_norm, features, args.eps, normed);
    rotate_head(key, cos, sin, half, features, static_cast<C*>(cache.keys) + at);
    copy(head_of<X>(args.qkv, row, head + cache.kv_heads), static_cast<C*>(cache.values) + at, features);
  }
}

template <class From, class To>
void write_cache(const KvWrite& args, Worker worker) {
  const Cache& cache = args.cache;
  const Share mine = share(args.rows, worker);
  for (int64_t row = mine.begin; row < mine.end; row++) {
    const int64_t slot = args.slots[row];
    if (!has_slot(cache, slot, worker)) continue;
    for (int64_t head = 0; head < cache.kv_heads; head++) {
      const int64_t at = (slot * cache.kv_heads + head) * cache.head_dim;
      copy(head_of<From>(args.keys, row, head), static_cast<To*>(cache.keys) + at, cache.head_dim);
      copy(head_of<From>(args.values, row, head), static_cast<To*>(cache.values) + at, cache.head_dim);
    }
  }
}

template <class X, class Out>
void gate(const SiluMul& args, Worker worker) {
  // One row is long enough to share: threads split the columns.
  const int64_t vectors = (args.features + kLanes - 1) / kLanes;
  const Share mine = share(args.rows * vectors, worker);
  for (int64_t item = mine.begin; item < mine.end; item++) {
    const int64_t row = item / vectors, k = item % vectors * kLanes, left = args.features - k;
    const X* x = static_cast<const X*>(args.gate_up.data) + row * args.gate_up.stride;
    store_some(static_cast<Out*>(args.out.data) + row * args.out.stride + k,
               gated(load_some(x + k, left), load_some(x + args.features + k, left)), left);
  }
}

template <class X>
void gate_to_bytes(const SiluQuantize& args, Worker worker) {
  X* activated = reinterpret_cast<X*>(worker.scratch);
  const Share mine = share(args.rows, worker);
  for (int64_t row = mine.begin; row < mine.end; row++) {
    const X* x = static_cast<const X*>(args.gate_up.data) + row * args.gate_up.stride;
    each_vector(args.features, [&](int64_t k, int64_t left) SPARKGAP_INLINE_LAMBDA {
      store_some(activated + k, gated(load_some(x + k, left), load_some(x + args.features + k, left)), left);
    });
    quantize_to(args.to, row, activated, args.features);
  }
}

template <class From, class To>
void look_up(const Embed& args, Worker worker) {
  const Share mine = share(args.rows, worker);
  for (int64_t row = mine.begin; row < mine.end; row++) {
    const int64_t token = args.token_ids[row];
    if (token < 0 || token >= args.vocab_size) {
      worker.report(kTokenOutOfRange);
      continue;
    }
    copy(static_cast<const From*>(args.table.data) + token * args.table.stride,
         static_cast<To*>(args.out.data) + row * args.out.stride, args.features);
  }
}

template <class X>
void find_largest(const Argmax& args, Worker worker) {
  const Share mine = share(args.rows, worker);
  for (int64_t row = mine.begin; row < mine.end; row++) {
    const X* x = static_cast<const X*>(args.x.data) + row * args.x.stride;
    const int64_t whole = args.features / kLanes * kLanes;
    Floats most = splat(-__builtin_inff());
    bool nan = false;
    for (int64_t k = 0; k < whole; k += kLanes) most = larger(most, load(x + k));
    float best = largest(most);
    for (int64_t k = whole; k < args.features; k++) best = larger(best, to_float(x[k]));
    // The first place of the largest value; a NaN, as in torch, is larger than every number.
    int64_t place = args.features;
    for (int64_t k = 0; k < args.features; k++) {
      const float v = to_float(x[k]);
      nan = v != v;
      if (nan || (v == best && place == args.features)) place = k;
      if (nan) break;
    }
    args.out[row] = place;
  }
}

}  // namespace

void rms_norm(const RmsNorm& args, Worker worker) {
  with_type(args.x.dtype, [&](auto x) {
    with_type(args.weight.dtype, [&](auto w) { norm_heads<decltype(x), decltype(w)>(args, worker); });
  });
}

void norm_quantize(const NormQuantize& args, Worker worker) {
  with_type(args.x.dtype, [&](auto x) {
    with_type(args.weight.dtype, [&](auto w) { norm_to_bytes<decltype(x), decltype(w)>(args, worker); });
  });
}

void rotary_write(const RotaryWrite& args, Worker worker) {
  with_type(args.qkv.dtype, [&](auto x) {
    with_type(args.cache.dtype, [&](auto c) { rotate_and_write<decltype(x), decltype(c)>(args, worker); });
  });
}

void silu_quantize(const SiluQuantize& args, Worker worker) {
  with_type(args.gate_up.dtype, [&](auto x) { gate_to_bytes<decltype(x)>(args, worker); });
}

void rotary(const Rotary& args, Worker worker) {
  with_type(args.x.dtype, [&](auto x) { rotate<decltype(x)>(args, worker); });
}

void kv_write(const KvWrite& args, Worker worker) {
  with_type(args.keys.dtype, [&](auto from) {
    with_type(args.cache.dtype, [&](auto to) { write_cache<decltype(from), decltype(to)>(args, worker); });
  });
}

void silu_mul(const SiluMul& args, Worker worker) {
  with_type(args.gate_up.dtype, [&](auto x) { gate<decltype(x), decltype(x)>(args, worker); });
}

void embed(const Embed& args, Worker worker) {
  with_type(args.table.dtype, [&](auto from) {
    with_type(args.out.dtype, [&](auto to) { look_up<decltype(from), decltype(to)>(args, worker); });
  });
}

void argmax(const Argmax& args, Worker worker) {
  with_type(args.x.dtype, [&](auto x) { find_largest<decltype(x)>(args, worker); });
}

}  // namespace sparkgap::SPARKGAP_VARIANT
