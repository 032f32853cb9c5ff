// Softmax attention over chunks of positions, for a few rows and the query heads that share one KV head.
//
// A chunk's keys are staged in the order the products read them, once for all queries, and its values as float32 where
// several products read them. Each query gets its largest score, the sum of exponentials and the weighted values of the chunk; chunks are joined in
// order. A row only ever multiplies positions it sees, so what lies elsewhere in the cache cannot reach it.
#pragma once
#include "kernels.h"
#include "rows.h"
#include "simd.h"
#include "tile.h"
#include "transpose.h"

namespace sparkgap {
namespace {

constexpr int64_t kStagePositions = 64;
constexpr int64_t kItemQueries = 48;
constexpr int64_t kFetchDistance = 32;  // positions

SPARKGAP_INLINE int64_t item_rows(int64_t group) { return larger<int64_t>(1, kItemQueries / group); }

// Positions a row sees, relative to a chunk.
struct Range {
  int32_t begin, end;
};

// One thread's memory for one item of work.
struct Stage {
  int64_t head_dim, padded_dim, group;
  float* queries;  // [queries, padded_dim], scaled
  float* keys;     // [4, head_dim, 16], or as many pairs of bfloat16 [4, head_dim / 2, 16]
  float* values;   // [padded_dim / 16, 64, 16]
  float* scores;   // [queries, 128]
  float* part;     // [queries, padded_dim] of the present chunk
  float* total;    // the same, of all chunks so far
  float* part_largest;
  float* part_sum;
  float* total_largest;
  float* total_sum;
  Range* ranges;  // [rows]
  LinesAhead ahead[2];  // what later calls read

  // Where products fetch from.
  SPARKGAP_INLINE LinesAhead& to_fetch() { return ahead[0].end - ahead[0].at >= 64 * kStagePositions ? ahead[0] : ahead[1]; }

  static int64_t most_queries(int64_t group) { return item_rows(group) * group; }

  static size_t bytes(int64_t group, int64_t head_dim) {
    const int64_t n = round_up(most_queries(group), 16), padded = round_up(head_dim, 16);
    return size_t(4 * (n * padded + kStagePositions * (head_dim + 1) + kStagePositions * padded + n * kChunkPositions +
                       2 * n * padded + 4 * n + 2 * n) + 16 * 64);
  }

  Stage(std::byte* memory, int64_t group_size, int64_t dim)
      : head_dim(dim), padded_dim(round_up(dim, 16)), group(group_size) {
    const int64_t n = round_up(most_queries(group), 16);
    auto take = [&](int64_t floats) {
      float* p = reinterpret_cast<float*>(memory);
      memory += round_up(4 * floats, 64);
      return p;
    };
    queries = take(n * padded_dim);
    keys = take(kStagePositions * (head_dim + 1));
    values = take(kStagePositions * padded_dim);
    scores = take(n * kChunkPositions);
    part = take(n * padded_dim);
    total = take(n * padded_dim);
    part_largest = take(n), part_sum = take(n), total_largest = take(n), total_sum = take(n);
    ranges = reinterpret_cast<Range*>(take(2 * n));
    const auto* here = reinterpret_cast<const std::byte*>(queries);  // where there is nothing, what is at hand
    ahead[0] = ahead[1] = {here, here, 0};
  }
};

template <class X>
void load_queries(Stage& s, const HeadRows& from, int64_t row, int64_t rows, int64_t first_head, float scale) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t g = 0; g < s.group; g++) {
      const X* x = static_cast<const X*>(from.data) + (row + r) * from.row_stride + (first_head + g) * from.head_stride;
      float* q = s.queries + (r * s.group + g) * s.padded_dim;
      for (int64_t d = 0; d < s.head_dim; d += kLanes) store(q + d, load_some(x + d, s.head_dim - d) * splat(scale));
    }
  for (int64_t q = 0; q < rows * s.group; q++) s.total_largest[q] = -__builtin_inff(), s.total_sum[q] = 0;
}

// Where a chunk's keys and values lie; places count from the chunk's first.
struct Source {
  HeadRows keys, values;  // rows are slots of the cache, or the block's own rows
  const int32_t* blocks;  // the sequence's block table; null when rows follow each other
  int64_t block_size;
  int64_t first;  // position or row of the chunk's first
  int64_t kv_head;

  // Rows of places begin ... end - 1, at their places in `rows`.
  void find_rows(int64_t begin, int64_t end, int64_t* rows) const {
    if (!blocks) {
      for (int64_t i = begin; i < end; i++) rows[i] = first + i;
      return;
    }
    int64_t block = (first + begin) / block_size, offset = (first + begin) % block_size;
    for (int64_t i = begin; i < end; i++) {
      rows[i] = int64_t(blocks[block]) * block_size + offset;
      if (++offset == block_size) offset = 0, block++;
    }
  }
  template <class C>
  SPARKGAP_INLINE const C* key(int64_t row) const {
    return static_cast<const C*>(keys.data) + row * keys.row_stride + kv_head * keys.head_stride;
  }
  template <class C>
  SPARKGAP_INLINE const C* value(int64_t row) const {
    return static_cast<const C*>(values.data) + row * values.row_stride + kv_head * values.head_stride;
  }
};

SPARKGAP_INLINE Source cache_source(const Cache& cache, const int32_t* blocks, int64_t first, int64_t kv_head) {
  const int64_t row_stride = cache.kv_heads * cache.head_dim;
  return {{cache.keys, row_stride, cache.head_dim, cache.dtype}, {cache.values, row_stride, cache.head_dim, cache.dtype},
          blocks, cache.block_size, first, kv_head};
}

// Keys of 16 rows as [head_dim, 16]; at or past `count` they are zero.
inline void stage_keys(const Stage& s, const float* const* keys, float* out) {
  for (int64_t d = 0; d < s.head_dim; d += 16) {
    const int64_t left = s.head_dim - d;
    Floats rows[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) rows[i] = load_some(keys[i] + d, left);
    if (left >= 16) {
      transpose(rows, out + d * 16);
      continue;
    }
    float columns[16 * 16];
    transpose(rows, columns);
    std::memcpy(out + d * 16, columns, size_t(left) * 16 * 4);
  }
}

// The same in bfloat16, as pairs of features [head_dim / 2, 16]: half the shuffles and stores.
inline void stage_keys(const Stage& s, const BFloat16* const* keys, float* out) {
  for (int64_t d = 0; d < s.head_dim; d += 32) {
    const int64_t left = s.head_dim - d;
    Floats rows[16];
    if (left >= 32) {
#pragma GCC unroll 16
      for (int i = 0; i < 16; i++) std::memcpy(&rows[i], keys[i] + d, sizeof rows[i]);
      transpose(rows, out + d / 2 * 16);
      continue;
    }
    for (int i = 0; i < 16; i++) {
      BFloat16 padded[32] = {};
      std::memcpy(padded, keys[i] + d, size_t(left) * 2);
      std::memcpy(&rows[i], padded, sizeof rows[i]);
    }
    float columns[16 * 16];
    transpose(rows, columns);
    std::memcpy(out + d / 2 * 16, columns, size_t(left + 1) / 2 * 16 * 4);
  }
}

template <class C>
void stage_values(const Stage& s, const Source& source, const int64_t* rows, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; i++) {
    const C* value = source.value<C>(rows[i]);
    for (int64_t d = 0; d < s.head_dim; d += 16)
      store(s.values + d * kStagePositions + i * 16, load_some(value + d, s.head_dim - d));
  }
}

// Rows of one head are too far apart for the hardware to see the pattern.
template <class C>
SPARKGAP_INLINE void fetch_ahead(const C* row, int64_t head_dim) {
  for (int64_t d = 0; d < head_dim; d += int64_t(64 / sizeof(C))) __builtin_prefetch(row + d, 0, 2);
}

template <class C>
void fetch_rows(const Stage& s, const Source& source, const int64_t* rows, int64_t begin, int64_t end, int64_t limit) {
  for (int64_t i = begin; i < smaller(end, limit); i++) {
    fetch_ahead(source.key<C>(rows[i]), s.head_dim);
    fetch_ahead(source.value<C>(rows[i]), s.head_dim);
  }
  asm volatile("");  // GCC 12 drops calls of a function that does nothing but prefetch
}

// Scores to weights for one query; returns its largest score and the sum of weights.
inline void soften(float* scores, Range range, float* largest_out, float* sum_out) {
  const int64_t begin = range.begin / 16 * 16, end = round_up(range.end, 16);
  for (int64_t i = begin; i < range.begin; i++) scores[i] = -__builtin_inff();
  for (int64_t i = range.end; i < end; i++) scores[i] = -__builtin_inff();
  Floats most = splat(-__builtin_inff());
  for (int64_t i = begin; i < end; i += 16) most = larger(most, load(scores + i));
  const float top = largest(most);
  Floats total = splat(0.0f);
  for (int64_t i = begin; i < end; i += 16) {
    const Floats weight = exp(load(scores + i) - splat(top));
    store(scores + i, weight);
    total = total + weight;
  }
  *largest_out = top;
  *sum_out = sum(total);
}

// part += weights * values over positions [begin, end) after the chunk's `first`, of those each row sees. `multiply`
// takes a row, a number of rows and the positions [from, to) that they all see.
template <class Multiply>
SPARKGAP_INLINE void weigh_values(const Stage& s, int64_t rows, int64_t first, int64_t begin, int64_t end, Multiply multiply) {
  auto add = [&](int64_t row, int64_t count, int64_t from, int64_t to) {
    if (from < to) multiply(row, count, from, to);
  };
  auto clip = [&](int64_t position) { return larger(begin, smaller(end, position - first)); };
  int64_t common_begin = begin, common_end = end;
  for (int64_t r = 0; r < rows; r++) {
    common_begin = larger(common_begin, clip(s.ranges[r].begin));
    common_end = smaller(common_end, clip(s.ranges[r].end));
  }
  if (common_begin >= common_end) {
    for (int64_t r = 0; r < rows; r++) add(r, 1, clip(s.ranges[r].begin), clip(s.ranges[r].end));
    return;
  }
  for (int64_t r = 0; r < rows; r++) add(r, 1, clip(s.ranges[r].begin), common_begin);
  add(0, rows, common_begin, common_end);
  for (int64_t r = 0; r < rows; r++) add(r, 1, common_end, clip(s.ranges[r].end));
}

// part += weights * values of one chunk. Values that one product reads are multiplied where they lie; others are staged.
template <class C>
void add_values(Stage& s, const Source& source, const int64_t* places, int64_t rows, int64_t begin, int64_t end) {
  const int64_t blocks = s.padded_dim / 16;
  const auto weights_of = [&](int64_t row, int64_t place) { return s.scores + row * s.group * kChunkPositions + place; };
  const auto part_of = [&](int64_t row) { return s.part + row * s.group * s.padded_dim; };
  if (rows * s.group <= kTileRows && s.head_dim % 16 == 0) {
    weigh_values(s, rows, 0, begin, end, [&](int64_t row, int64_t count, int64_t from, int64_t to) {
      for (int64_t next; from < to; from = next) {
        for (next = from + 1; next < to && places[next] == places[next - 1] + 1;) next++;
        multiply_tiles(count * s.group, weights_of(row, from), kChunkPositions,
                       Columns<C>{source.value<C>(places[from]), 16, source.values.row_stride}, blocks, next - from,
                       part_of(row), s.padded_dim, true);
      }
    });
    return;
  }
  for (int64_t first = begin; first < end; first += kStagePositions) {
    const int64_t count = smaller(kStagePositions, end - first);
    int64_t low = kStagePositions, high = 0;
    for (int64_t r = 0; r < rows; r++) {
      const int64_t b = larger<int64_t>(0, s.ranges[r].begin - first), e = smaller<int64_t>(count, s.ranges[r].end - first);
      if (b < e) low = smaller(low, b), high = larger(high, e);
    }
    if (low >= high) continue;
    stage_values<C>(s, source, places + first, low, high);
    weigh_values(s, rows, first, low, high, [&](int64_t row, int64_t count, int64_t from, int64_t to) {
      multiply_tiles(count * s.group, weights_of(row, first + from), kChunkPositions,
                     Columns<float>{s.values + from * 16, kStagePositions * 16, 16}, blocks, to - from, part_of(row),
                     s.padded_dim, true, s.to_fetch());
    });
  }
}

SPARKGAP_INLINE Columns<float> staged_keys(const Stage& s, float) { return {s.keys, s.head_dim * 16, 16}; }
SPARKGAP_INLINE PairColumns staged_keys(const Stage& s, BFloat16) {
  return {reinterpret_cast<const uint32_t*>(s.keys), (s.head_dim + 1) / 2 * 16};
}

template <class C>
void attend_chunk_in(Stage& s, const Source& source, int64_t rows, bool fetched, const Source* ahead, int64_t ahead_end) {
  const int64_t queries = rows * s.group;
  int64_t begin = kChunkPositions, end = 0;
  for (int64_t r = 0; r < rows; r++)
    if (s.ranges[r].begin < s.ranges[r].end) {
      begin = smaller<int64_t>(begin, s.ranges[r].begin);
      end = larger<int64_t>(end, s.ranges[r].end);
    }
  if (begin >= end) return;
  begin = begin / 16 * 16;
  int64_t places[kChunkPositions];
  source.find_rows(begin, end, places);
  int64_t places_ahead[kChunkPositions];
  if (ahead) ahead->find_rows(0, ahead_end, places_ahead);
  if (!fetched) fetch_rows<C>(s, source, places, begin, begin + kFetchDistance, end);
  alignas(64) static const C zeros[kLargestHeadDim] = {};
  const auto columns = staged_keys(s, C());
  // What comes next is fetched in portions, between products or, where there is only one, between blocks of keys: a burst
  // fills the memory's queues, and all that follows waits behind it.
  const int64_t groups = (queries + kTileRows - 1) / kTileRows;
  for (int64_t first = begin; first < end; first += kStagePositions) {
    const int64_t count = smaller(kStagePositions, end - first), blocks = (count + 15) / 16;
    for (int64_t b = 0; b < blocks; b++) {
      const int64_t at = first + b * 16;
      if (!fetched) fetch_rows<C>(s, source, places, at + kFetchDistance, at + kFetchDistance + 16, end);
      if (ahead && groups == 1) fetch_rows<C>(s, *ahead, places_ahead, at, at + 16, ahead_end);
      const C* keys[16];
      for (int i = 0; i < 16; i++) keys[i] = at + i < end ? source.key<C>(places[at + i]) : zeros;
      stage_keys(s, keys, s.keys + b * columns.block_stride);
    }
    for (int64_t g = 0; g < groups; g++) {
      const int64_t query = g * kTileRows;
      multiply_tiles(smaller<int64_t>(kTileRows, queries - query), s.queries + query * s.padded_dim, s.padded_dim, columns, blocks,
                     columns.block_stride / 16, s.scores + query * kChunkPositions + first, kChunkPositions, false, s.to_fetch());
      if (ahead && groups > 1)
        fetch_rows<C>(s, *ahead, places_ahead, first + kStagePositions * g / groups, first + kStagePositions * (g + 1) / groups,
                      ahead_end);
    }
  }
  for (int64_t r = 0; r < rows; r++)
    if (s.ranges[r].begin < s.ranges[r].end)
      for (int64_t q = r * s.group; q < (r + 1) * s.group; q++)
        soften(s.scores + q * kChunkPositions, s.ranges[r], s.part_largest + q, s.part_sum + q);
  std::memset(s.part, 0, size_t(queries * s.padded_dim) * 4);
  add_values<C>(s, source, places, rows, begin, end);
}

// One chunk for all rows of the item; `s.ranges` says what each sees of it. Gives `part`, `part_largest`, `part_sum`
// of the rows that see any.
//
// `ahead`, when given, is the chunk this thread comes to next, of which `ahead_end` places will be read: they are
// fetched into the cache meanwhile, and `fetched` says that this was done for the present chunk.
SPARKGAP_INLINE void attend_chunk(Stage& s, const Source& source, int64_t rows, bool fetched = false,
                                  const Source* ahead = nullptr, int64_t ahead_end = 0) {
  if (source.keys.dtype == DType::kFloat32) attend_chunk_in<float>(s, source, rows, fetched, ahead, ahead_end);
  else attend_chunk_in<BFloat16>(s, source, rows, fetched, ahead, ahead_end);
}

// total = total joined with part.
inline void join(float* total, float* total_largest, float* total_sum, const float* part, float part_largest,
                          float part_sum, int64_t head_dim) {
  if (*total_sum == 0 && *total_largest == -__builtin_inff()) {
    std::memcpy(total, part, size_t(head_dim) * 4);
    *total_largest = part_largest, *total_sum = part_sum;
    return;
  }
  const float top = larger(*total_largest, part_largest);
  const Floats old_factor = exp(splat(*total_largest - top)), new_factor = exp(splat(part_largest - top));
  float old_lanes[kLanes], new_lanes[kLanes];
  store(old_lanes, old_factor), store(new_lanes, new_factor);
  *total_sum = fma(*total_sum, old_lanes[0], part_sum * new_lanes[0]);
  *total_largest = top;
  for (int64_t d = 0; d < head_dim; d += kLanes)
    store_some(total + d,
               fma(load_some(total + d, head_dim - d), old_factor, load_some(part + d, head_dim - d) * new_factor),
               head_dim - d);
}

SPARKGAP_INLINE void join_rows(Stage& s, int64_t rows) {
  for (int64_t r = 0; r < rows; r++)
    if (s.ranges[r].begin < s.ranges[r].end)
      for (int64_t q = r * s.group; q < (r + 1) * s.group; q++)
        join(s.total + q * s.padded_dim, s.total_largest + q, s.total_sum + q, s.part + q * s.padded_dim, s.part_largest[q],
             s.part_sum[q], s.head_dim);
}

// total / sum; a row that sees nothing gives zeros.
template <class X>
SPARKGAP_INLINE void write_query(X* out, const float* total, float total_largest, float total_sum, int64_t head_dim) {
  const bool empty = total_sum == 0 && total_largest == -__builtin_inff();
  for (int64_t d = 0; d < head_dim; d += kLanes)
    store_some(out + d, empty ? splat(0.0f) : load_some(total + d, head_dim - d) / splat(total_sum), head_dim - d);
}

template <class X>
void write_rows(const Stage& s, const HeadRows& to, int64_t row, int64_t rows, int64_t first_head) {
  for (int64_t r = 0; r < rows; r++)
    for (int64_t g = 0; g < s.group; g++) {
      const int64_t q = r * s.group + g;
      write_query(static_cast<X*>(to.data) + (row + r) * to.row_stride + (first_head + g) * to.head_stride,
                  s.total + q * s.padded_dim, s.total_largest[q], s.total_sum[q], s.head_dim);
    }
}

// True when positions [begin, end) of the sequence lie in blocks that exist; reports a fault otherwise.
SPARKGAP_INLINE bool blocks_exist(const Cache& cache, const int32_t* blocks, int64_t max_blocks, int64_t begin, int64_t end,
                                  Worker worker) {
  if (begin >= end) return true;
  const int64_t last = (end - 1) / cache.block_size;
  if (last >= max_blocks) {
    worker.report(kLengthOutOfRange);
    return false;
  }
  for (int64_t b = begin / cache.block_size; b <= last; b++)
    if (blocks[b] < 0 || blocks[b] >= cache.num_blocks) {
      worker.report(kBlockOutOfRange);
      return false;
    }
  return true;
}

}  // namespace
}  // namespace sparkgap
