// Operations on each row by itself.
#include "kernels.h"
#include "simd.h"
#include "variant.h"

namespace sparkgap::SPARKGAP_VARIANT {
namespace {

template <class F>
SPARKGAP_INLINE void with_type(DType dtype, F f) {
  if (dtype == DType::kFloat32) f(float());
  else f(BFloat16());
}

template <class T>
SPARKGAP_INLINE T* head_of(const HeadRows& rows, int64_t row, int64_t head) {
  return static_cast<T*>(rows.data) + row * rows.row_stride + head * rows.head_stride;
}

// This thread's share of `n` items: consecutive ones.
struct Share {
  int64_t begin, end;
};

SPARKGAP_INLINE Share share(int64_t n, Worker worker) {
  return {n * worker.index / worker.count, n * (worker.index + 1) / worker.count};
}

// A value as the dtype would keep it.
SPARKGAP_INLINE Floats rounded(Floats x, float) { return x; }
SPARKGAP_INLINE Floats rounded(Floats x, BFloat16) {
  BFloat16 lanes[kLanes];
  store(lanes, x);
  return load(lanes);
}

template <class X, class W>
void norm_heads(const RmsNorm& args, Worker worker) {
  const int64_t features = args.features;
  const W* weight = static_cast<const W*>(args.weight.data);
  const Share mine = share(args.rows * args.heads, worker);
  for (int64_t item = mine.begin; item < mine.end; item++) {
    const int64_t row = item / args.heads, head = item % args.heads;
    const X* x = head_of<X>(args.x, row, head);
    Floats squares = splat(0.0f);
    if (args.residual.data) {
      const X* residual = head_of<X>(args.residual, row, head);
      X* total = head_of<X>(args.sum, row, head);
      for (int64_t k = 0; k < features; k += kLanes) {
        const Floats s = rounded(load_some(x + k, features - k) + load_some(residual + k, features - k), X());
        store_some(total + k, s, features - k);
        squares = fma(s, s, squares);
      }
      x = total;
    } else {
      for (int64_t k = 0; k < features; k += kLanes) {
        const Floats v = load_some(x + k, features - k);
        squares = fma(v, v, squares);
      }
    }
    const Floats factor = splat(1.0f / __builtin_sqrtf(sum(squares) / float(features) + args.eps));
    X* out = head_of<X>(args.out, row, head);
    for (int64_t k = 0; k < features; k += kLanes)
      store_some(out + k, load_some(x + k, features - k) * factor * load_some(weight + k, features - k), features - k);
  }
}

template <class X>
void rotate(const Rotary& args, Worker worker) {
  const Share mine = share(args.rows, worker);
  const int64_t half = args.half;
  for (int64_t row = mine.begin; row < mine.end; row++) {
    const int64_t position = args.positions[row];
    if (position < 0 || position >= args.max_positions) {
      worker.report(kPositionOutOfRange);
      continue;
    }
    const float *cos = args.cos + position * half, *sin = args.sin + position * half;
    for (int64_t head = 0; head < args.heads; head++) {
      const X* x = head_of<X>(args.x, row, head);
      X* out = head_of<X>(args.out, row, head);
      for (int64_t k = 0; k < half; k += kLanes) {
        const int64_t left = half - k;
        const Floats a = load_some(x + k, left), b = load_some(x + half + k, left);
        const Floats c = load_some(cos + k, left), s = load_some(sin + k, left);
        store_some(out + k, a * c - b * s, left);
        store_some(out + half + k, b * c + a * s, left);
      }
      for (int64_t k = 2 * half; k < args.features; k++) out[k] = x[k];
    }
  }
}

template <class From, class To>
SPARKGAP_INLINE void copy(const From* from, To* to, int64_t n) {
  for (int64_t k = 0; k < n; k += kLanes) store_some(to + k, load_some(from + k, n - k), n - k);
}

template <class From, class To>
void write_cache(const KvWrite& args, Worker worker) {
  const Cache& cache = args.cache;
  const Share mine = share(args.rows, worker);
  for (int64_t row = mine.begin; row < mine.end; row++) {
    const int64_t slot = args.slots[row];
    if (slot == -1) continue;
    if (slot < -1 || slot >= cache.num_blocks * cache.block_size) {
      worker.report(kSlotOutOfRange);
      continue;
    }
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
    const Floats g = load_some(x + k, left), up = load_some(x + args.features + k, left);
    const Floats activated = g / (splat(1.0f) + exp(splat(0.0f) - g));
    store_some(static_cast<Out*>(args.out.data) + row * args.out.stride + k, activated * up, left);
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
