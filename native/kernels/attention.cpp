#include "attention.h"

#include "variant.h"

namespace sparkgap::SPARKGAP_VARIANT {
namespace {

// The positions that the row at `position` sees, cut to a chunk.
SPARKGAP_INLINE Range visible(int64_t position, int64_t end, int64_t window, int64_t chunk_first) {
  const int64_t begin = window > 0 ? larger<int64_t>(0, position - window + 1) : 0;
  const int64_t low = larger<int64_t>(0, smaller(kChunkPositions, begin - chunk_first));
  const int64_t high = larger<int64_t>(0, smaller(kChunkPositions, end - chunk_first));
  return {int32_t(low), int32_t(high)};
}

SPARKGAP_INLINE float* partial_of(const PagedAttention& args, int64_t row, int64_t head, int64_t chunk) {
  return args.partial + ((row * args.heads + head) * args.max_chunks + chunk) * (args.cache.head_dim + 2);
}

// Consecutive rows of one sequence and the chunks that any of them sees.
struct Item {
  int64_t sequence, row, rows, first_chunk, end_chunk, begin, end;
};

SPARKGAP_INLINE Item make_item(const PagedAttention& args, int64_t sequence, int64_t row, int64_t rows) {
  Item item{sequence, row, rows, 0, 0, INT64_MAX, 0};
  for (int64_t r = row; r < row + rows; r++) {
    const int64_t position = args.positions[r];
    item.begin = smaller(item.begin, args.window > 0 ? larger<int64_t>(0, position - args.window + 1) : 0);
    item.end = larger(item.end, position + 1);
  }
  item.first_chunk = item.begin / kChunkPositions;
  item.end_chunk = (item.end + kChunkPositions - 1) / kChunkPositions;
  return item;
}

template <class X>
void attend_item(const PagedAttention& args, Stage& stage, const Item& item, int64_t kv_head, int64_t first_chunk,
                 int64_t end_chunk, int64_t turns_ahead, bool fetched) {
  // `turns_ahead` counts pairs of chunk and KV head, heads first, to the next one of this thread.
  const int64_t first_head = kv_head * stage.group;
  load_queries<X>(stage, args.queries, item.row, item.rows, first_head, args.scale);
  for (int64_t chunk = first_chunk; chunk < end_chunk; chunk++) {
    for (int64_t r = 0; r < item.rows; r++) {
      const int64_t position = args.positions[item.row + r];
      stage.ranges[r] = visible(position, position + 1, args.window, chunk * kChunkPositions);
    }
    const int32_t* blocks = args.block_tables + item.sequence * args.max_blocks;
    const int64_t kv_heads = args.cache.kv_heads, next = chunk * kv_heads + kv_head + turns_ahead;
    const Source ahead = cache_source(args.cache, blocks, next / kv_heads * kChunkPositions, next % kv_heads);
    const int64_t ahead_end = smaller(kChunkPositions, item.end - ahead.first);
    const bool more = next / kv_heads < item.end_chunk;
    attend_chunk(stage, cache_source(args.cache, blocks, chunk * kChunkPositions, kv_head), item.rows, fetched,
                 more ? &ahead : nullptr, ahead_end);
    fetched = more;
    if (!args.partial) {
      join_rows(stage, item.rows);
      continue;
    }
    for (int64_t r = 0; r < item.rows; r++)
      if (stage.ranges[r].begin < stage.ranges[r].end)
        for (int64_t g = 0; g < stage.group; g++) {
          const int64_t q = r * stage.group + g;
          float* partial = partial_of(args, item.row + r, first_head + g, chunk);
          partial[0] = stage.part_largest[q], partial[1] = stage.part_sum[q];
          std::memcpy(partial + 2, stage.part + q * stage.padded_dim, size_t(stage.head_dim) * 4);
        }
  }
  if (!args.partial) write_rows<X>(stage, args.out, item.row, item.rows, first_head);
}

template <class X>
SPARKGAP_INLINE void zero_rows(const HeadRows& out, int64_t begin, int64_t end, int64_t heads, int64_t head_dim) {
  for (int64_t row = begin; row < end; row++)
    for (int64_t head = 0; head < heads; head++)
      std::memset(static_cast<X*>(out.data) + row * out.row_stride + head * out.head_stride, 0, size_t(head_dim) * sizeof(X));
}

// So much of what comes next as stays in the second-level cache beside what is in use.
constexpr int64_t kFollowingBytes = 384 << 10;

void plan_fetches(const PagedAttention& args, Stage& stage, Worker worker) {
  int64_t left = kFollowingBytes;
  for (int i = 0; i < 2; i++) {
    const Following& following = args.following[i];
    if (!following.data) continue;
    const Share mine = share(following.bytes / 64, worker);
    const int64_t bytes = smaller(left, (mine.end - mine.begin) * 64);
    stage.ahead[i] = {following.data + mine.begin * 64, following.data + mine.begin * 64 + bytes, 0};
    left -= bytes;
  }
}

template <class X>
void attend(const PagedAttention& args, Worker worker) {
  const int64_t group = args.heads / args.cache.kv_heads, most_rows = item_rows(group);
  Stage stage(worker.scratch, group, args.cache.head_dim);
  plan_fetches(args, stage, worker);
  int64_t turn = 0;  // work goes round the threads; all count alike
  for (int64_t sequence = 0; sequence < args.sequences; sequence++) {
    const int64_t first_row = args.row_starts[sequence], end_row = smaller<int64_t>(args.row_starts[sequence + 1], args.rows);
    for (int64_t row = larger<int64_t>(first_row, 0); row < end_row; row += most_rows) {
      const Item item = make_item(args, sequence, row, smaller(most_rows, end_row - row));
      const int32_t* blocks = args.block_tables + sequence * args.max_blocks;
      bool valid = blocks_exist(args.cache, blocks, args.max_blocks, item.begin, item.end, worker);
      if (args.partial && item.end_chunk > args.max_chunks) worker.report(kLengthOutOfRange), valid = false;
      if (!valid) {
        if (worker.index == 0) zero_rows<X>(args.out, row, row + item.rows, args.heads, args.cache.head_dim);
        continue;
      }
      if (!args.partial) {
        for (int64_t kv_head = 0; kv_head < args.cache.kv_heads; kv_head++)
          if (turn++ % worker.count == worker.index)
            attend_item<X>(args, stage, item, kv_head, item.first_chunk, item.end_chunk, args.cache.kv_heads, false);
        continue;
      }
      // A position's heads lie side by side in memory: they are read one soon after the other.
      bool fetched = false;
      for (int64_t chunk = item.first_chunk; chunk < item.end_chunk; chunk++)
        for (int64_t kv_head = 0; kv_head < args.cache.kv_heads; kv_head++)
          if (turn++ % worker.count == worker.index) {
            attend_item<X>(args, stage, item, kv_head, chunk, chunk + 1, worker.count, fetched);
            fetched = true;
          }
    }
  }
  const int64_t used = larger<int64_t>(0, args.row_starts[args.sequences]);
  if (worker.index == 0) zero_rows<X>(args.out, used, args.rows, args.heads, args.cache.head_dim);
}

template <class X>
void join_partials(const PagedAttention& args, Worker worker) {
  const int64_t head_dim = args.cache.head_dim, used = smaller<int64_t>(args.rows, args.row_starts[args.sequences]);
  Stage stage(worker.scratch, args.heads / args.cache.kv_heads, head_dim);
  for (int64_t item = used * args.heads * worker.index / worker.count; item < used * args.heads * (worker.index + 1) / worker.count;
       item++) {
    const int64_t row = item / args.heads, head = item % args.heads, position = args.positions[row];
    float top = -__builtin_inff(), sum = 0;
    const int64_t begin = args.window > 0 ? larger<int64_t>(0, position - args.window + 1) : 0;
    const int64_t end_chunk = position / kChunkPositions + 1;
    if (end_chunk > args.max_chunks) continue;  // reported, and zero already
    for (int64_t chunk = begin / kChunkPositions; position >= 0 && chunk < end_chunk; chunk++) {
      const float* partial = partial_of(args, row, head, chunk);
      join(stage.total, &top, &sum, partial + 2, partial[0], partial[1], head_dim);
    }
    write_query(static_cast<X*>(args.out.data) + row * args.out.row_stride + head * args.out.head_stride, stage.total, top, sum,
                head_dim);
  }
}

template <class X>
void attend_block_rows(const BlockAttention& args, Stage& stage, int64_t sequence, int64_t kv_head, int64_t first, int64_t rows,
                       int64_t length) {
  const int64_t row = sequence * args.block_rows + first, first_head = kv_head * stage.group;
  load_queries<X>(stage, args.queries, row, rows, first_head, args.scale);
  const int32_t* blocks = args.block_tables + sequence * args.max_blocks;
  const int64_t begin = args.window > 0 ? larger<int64_t>(0, length + first - args.window + 1) : 0;
  for (int64_t chunk = begin / kChunkPositions * kChunkPositions; chunk < length; chunk += kChunkPositions) {
    for (int64_t r = 0; r < rows; r++) stage.ranges[r] = visible(length + first + r, length, args.window, chunk);
    attend_chunk(stage, cache_source(args.cache, blocks, chunk, kv_head), rows);
    join_rows(stage, rows);
  }
  for (int64_t chunk = 0; chunk < args.block_rows; chunk += kChunkPositions) {
    for (int64_t r = 0; r < rows; r++)
      stage.ranges[r] = visible(first + r, args.causal ? first + r + 1 : args.block_rows, args.window, chunk);
    attend_chunk(stage, {args.keys, args.values, nullptr, 0, sequence * args.block_rows + chunk, kv_head}, rows);
    join_rows(stage, rows);
  }
  write_rows<X>(stage, args.out, row, rows, first_head);
}

template <class X>
void attend_blocks(const BlockAttention& args, Worker worker) {
  const int64_t group = args.heads / args.cache.kv_heads, heads = args.sequences * args.cache.kv_heads;
  Stage stage(worker.scratch, group, args.cache.head_dim);
  // Few heads that threads cannot share evenly are cut by rows: keys are staged more often, and nobody waits.
  constexpr int64_t kManyItems = 8;
  const bool uneven = heads % worker.count != 0 && heads < kManyItems * worker.count;
  const int64_t parts = uneven ? worker.count : 1;
  const int64_t most_rows = smaller(item_rows(group), (args.block_rows + parts - 1) / parts);
  int64_t turn = 0;
  for (int64_t sequence = 0; sequence < args.sequences; sequence++) {
    const int64_t length = larger<int64_t>(0, args.context_lengths[sequence]);
    if (!blocks_exist(args.cache, args.block_tables + sequence * args.max_blocks, args.max_blocks, 0, length, worker)) {
      if (worker.index == 0)
        zero_rows<X>(args.out, sequence * args.block_rows, (sequence + 1) * args.block_rows, args.heads, args.cache.head_dim);
      continue;
    }
    for (int64_t first = 0; first < args.block_rows; first += most_rows)
      for (int64_t kv_head = 0; kv_head < args.cache.kv_heads; kv_head++)
        if (turn++ % worker.count == worker.index)
          attend_block_rows<X>(args, stage, sequence, kv_head, first, smaller(most_rows, args.block_rows - first), length);
  }
}

}  // namespace

void paged_attention(const PagedAttention& args, Worker worker) {
  if (args.queries.dtype == DType::kFloat32) attend<float>(args, worker);
  else attend<BFloat16>(args, worker);
}

void paged_attention_join(const PagedAttention& args, Worker worker) {
  if (args.queries.dtype == DType::kFloat32) join_partials<float>(args, worker);
  else join_partials<BFloat16>(args, worker);
}

void block_attention(const BlockAttention& args, Worker worker) {
  if (args.queries.dtype == DType::kFloat32) attend_blocks<float>(args, worker);
  else attend_blocks<BFloat16>(args, worker);
}

size_t attention_scratch_bytes(int64_t heads, int64_t kv_heads, int64_t head_dim) {
  return Stage::bytes(heads / kv_heads, head_dim);
}

}  // namespace sparkgap::SPARKGAP_VARIANT
