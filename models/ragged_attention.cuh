// Attention of a few queries a row over caches that are filled to a length of each row's own.
//
// A block of 256 threads takes one row, one query head, up to QUERIES of its queries and a share of
// the keys, which it goes over in tiles. What takes time is waiting for memory, so in each tile a
// thread asks for all it will need at once: a piece of 64 elements of one key, and pieces of 16
// bytes of several values. DIM / 64 neighbouring threads score all queries against a key; then the
// threads that hold pieces of values add them up by those scores. Sums and scores are float32; the
// softmax is the usual running one, in powers of two.

struct RaggedRows {
  int heads, key_heads, width;  // width: queries of each row
  int start;                    // tokens of this row before its first query
  int window, ring;             // 0: none; see ragged_attention.py
  float scale;
};

struct RaggedSpan {
  int begin, end;
};

constexpr int RAGGED_THREADS = 256;
constexpr int RAGGED_WARPS = RAGGED_THREADS / 32;
constexpr int RAGGED_PIECE = 64;         // elements of a key that a thread reads
constexpr float RAGGED_LOWEST = -1e30f;  // finite, so that differences of two are

// The keys of this block among the filled ones: whole tiles, shared by the blocks of a grid's y.
template <int DIM>
__device__ inline RaggedSpan ragged_span(int slots, int filled) {
  constexpr int TILE = RAGGED_THREADS * RAGGED_PIECE / DIM;
  const int keys = min(slots, filled), parts = gridDim.y;
  const int share = (keys + parts * TILE - 1) / (parts * TILE) * TILE;
  const int begin = min(keys, static_cast<int>(blockIdx.y) * share);
  return {begin, min(keys, begin + share)};
}

// Whether slot `slot` holds a key that query number `query` sees.
template <bool CAUSAL>
__device__ inline bool ragged_visible(int slot, int query, const RaggedRows& rows) {
  const int last = rows.start + rows.width - 1;
  if (!CAUSAL) return slot <= last;
  const int position = rows.start + query;
  if (rows.window == 0) return slot <= position;
  int key = slot;
  if (rows.ring != 0) {
    // A slot of a ring holds the newest position with its remainder.
    const int behind = (last - slot) % rows.ring;
    key = last - (behind < 0 ? behind + rows.ring : behind);
  }
  return key >= 0 && key <= position && key > position - rows.window;
}

// Sums over the lanes whose numbers differ in the bits from `from` up to `below`.
__device__ inline float ragged_sum(float value, int from, int below) {
  for (int lane = from; lane < below; lane *= 2) value += __shfl_xor_sync(0xffffffff, value, lane);
  return value;
}

__device__ inline float ragged_max(float value) {
  for (int lane = 1; lane < 32; lane *= 2)
    value = fmaxf(value, __shfl_xor_sync(0xffffffff, value, lane));
  return value;
}

// `first` is the block's first query, `span` its keys. `out` has one vector a query, `out_query`
// apart. With PARTIAL they are float32 sums, not yet divided, and `bounds` gets each query's
// greatest score and sum of weights; without, they are the attention.
template <typename T, typename Out, int DIM, int QUERIES, bool CAUSAL, bool PARTIAL>
__device__ void ragged_attend(
    const T* queries, long long query_stride,
    const T* keys, const T* values, long long key_stride, long long value_stride,
    const RaggedRows& rows, int first, RaggedSpan span,
    Out* out, long long out_query, float* bounds) {
  constexpr int LOAD = 16 / sizeof(T);                  // elements of one read
  constexpr int READS = RAGGED_PIECE / LOAD;            // of a thread and tile: keys, and values
  constexpr int SHARERS = DIM / RAGGED_PIECE;           // threads of a key
  constexpr int TILE = RAGGED_THREADS / SHARERS;        // keys of a tile
  constexpr int PIECES = DIM / LOAD;                    // threads of a value
  constexpr int GROUPS = RAGGED_THREADS / PIECES;       // values that are read side by side
  constexpr int SPREAD = PIECES > 32 ? PIECES : 32;     // threads that share one sum at the end
  __shared__ __align__(16) float shared_queries[QUERIES][DIM];
  __shared__ __align__(16) float weights[TILE][QUERIES];
  __shared__ float across_warps[RAGGED_WARPS][QUERIES];
  __shared__ float sums[RAGGED_THREADS / SPREAD][DIM];

  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int own_key = thread / SHARERS, own_part = thread % SHARERS;
  const int group = thread / PIECES, piece = thread % PIECES;
  const int count = min(QUERIES, rows.width - first);
  const float scale = rows.scale * 1.44269504f;  // log2 e
  for (int at = thread; at < QUERIES * DIM; at += RAGGED_THREADS) {
    const int query = at / DIM, dim = at % DIM;
    shared_queries[query][dim] =
        query < count ? scale * static_cast<float>(queries[query * query_stride + dim]) : 0.f;
  }
  __syncthreads();

  float greatest[QUERIES], total[QUERIES], attended[QUERIES][LOAD];
  #pragma unroll
  for (int q = 0; q < QUERIES; ++q) {
    greatest[q] = RAGGED_LOWEST;
    total[q] = 0.f;
    #pragma unroll
    for (int i = 0; i < LOAD; ++i) attended[q][i] = 0.f;
  }

  for (int tile = span.begin; tile < span.end; tile += TILE) {
    const int slot = tile + own_key;
    uint4 key_reads[READS], value_reads[READS];
    #pragma unroll
    for (int r = 0; r < READS; ++r) {
      key_reads[r] = value_reads[r] = uint4{0, 0, 0, 0};
      if (slot < span.end)
        key_reads[r] = *reinterpret_cast<const uint4*>(
            keys + slot * key_stride + (r * SHARERS + own_part) * LOAD);
      const int held = tile + r * GROUPS + group;
      if (held < span.end)
        value_reads[r] = *reinterpret_cast<const uint4*>(
            values + held * value_stride + piece * LOAD);
    }
    float score[QUERIES];
    #pragma unroll
    for (int q = 0; q < QUERIES; ++q) score[q] = 0.f;
    #pragma unroll
    for (int r = 0; r < READS; ++r) {
      const T* items = reinterpret_cast<const T*>(&key_reads[r]);
      const int at = (r * SHARERS + own_part) * LOAD;
      #pragma unroll
      for (int i = 0; i < LOAD; ++i) {
        const float item = static_cast<float>(items[i]);
        #pragma unroll
        for (int q = 0; q < QUERIES; ++q) score[q] += item * shared_queries[q][at + i];
      }
    }
    #pragma unroll
    for (int q = 0; q < QUERIES; ++q) {
      score[q] = ragged_sum(score[q], 1, SHARERS);
      if (slot >= span.end || !ragged_visible<CAUSAL>(slot, first + q, rows))
        score[q] = RAGGED_LOWEST;
      const float best = ragged_max(score[q]);
      if (lane == 0) across_warps[warp][q] = best;
    }
    __syncthreads();
    #pragma unroll
    for (int q = 0; q < QUERIES; ++q) {
      float best = greatest[q];
      for (int w = 0; w < RAGGED_WARPS; ++w) best = fmaxf(best, across_warps[w][q]);
      const float kept = exp2f(greatest[q] - best);
      const float weight = score[q] == RAGGED_LOWEST ? 0.f : exp2f(score[q] - best);
      greatest[q] = best;
      total[q] *= kept;
      if (own_part == 0) {
        total[q] += weight;
        weights[own_key][q] = weight;
      }
      #pragma unroll
      for (int i = 0; i < LOAD; ++i) attended[q][i] *= kept;
    }
    __syncthreads();
    #pragma unroll
    for (int r = 0; r < READS; ++r) {
      const T* items = reinterpret_cast<const T*>(&value_reads[r]);
      #pragma unroll
      for (int q = 0; q < QUERIES; ++q) {
        const float weight = weights[r * GROUPS + group][q];
        #pragma unroll
        for (int i = 0; i < LOAD; ++i) attended[q][i] += weight * static_cast<float>(items[i]);
      }
    }
    // No barrier here: the next tile's maxima are not what is read above, and its weights are
    // written behind the barrier that all reach when they are done.
  }

  __syncthreads();
  #pragma unroll
  for (int q = 0; q < QUERIES; ++q) {
    const float part = ragged_sum(total[q], 1, 32);
    if (lane == 0) across_warps[warp][q] = part;
  }
  #pragma unroll
  for (int q = 0; q < QUERIES; ++q) {
    if (q >= count) break;
    #pragma unroll
    for (int i = 0; i < LOAD; ++i) {
      const float sum = ragged_sum(attended[q][i], PIECES, 32);
      if (PIECES >= 32 || lane < PIECES) sums[thread / SPREAD][piece * LOAD + i] = sum;
    }
    __syncthreads();
    float weight = 0.f;
    for (int w = 0; w < RAGGED_WARPS; ++w) weight += across_warps[w][q];
    for (int dim = thread; dim < DIM; dim += RAGGED_THREADS) {
      float sum = 0.f;
      for (int g = 0; g < RAGGED_THREADS / SPREAD; ++g) sum += sums[g][dim];
      out[q * out_query + dim] = static_cast<Out>(PARTIAL ? sum : sum / weight);
    }
    if (PARTIAL && thread == 0) {
      bounds[2 * q] = greatest[q];
      bounds[2 * q + 1] = weight;
    }
    __syncthreads();
  }
}
