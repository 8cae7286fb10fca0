// The core for bf16 and fp16 on tensor cores, K and V as they are or in 8 bits: tokens are the rows of every product,
// queries its columns.
//
//     scores [16 tokens, 8 queries] = K [16, D] . Q^T [D, 8]        o^T [Dv, 8] += V^T [Dv, 16] . weights [16, 8]
//
// So 8 queries fill an instruction, which takes 16 in the usual orientation, and o takes half the registers. Weights enter
// as the sum of two 16-bit numbers. That keeps the precision of fp32 for twice the products of the second kind; decoding
// is bound by memory. cp.async copies K and V into a ring of `kStages` tiles of 16 tokens. Rows of a tile are an odd
// number of 16-byte units apart, so ldmatrix has no bank conflicts.
//
// Numbers of 8 bits are moved as they are, and widened in registers (stored.cuh). ldmatrix takes them for pairs: where
// it gives a lane two numbers of 16 bits of a token, it gives four of 8, which feed two products. So the numbers of a
// head come in another order; queries are read in that order for the first product, and `column` undoes it for o. A
// token's scales come with its tile: K's multiplies the score, V's the weight.
#pragma once
#include "attention/cuda/attend.cuh"
#include "attention/cuda/stored.cuh"

namespace lamina::attention::cuda {

// The type in which weights and V are multiplied: bf16 with scales, which have the range of fp32.
template <class T, int kStoredBytes>
struct Weight {
  using Type = T;
};
template <class T>
struct Weight<T, 1> {
  using Type = BFloat16;
};

// kColumns: tiles of 8 queries. kWarps_: that a multiprocessor runs at a time, at least, so that a lane has as many
// registers as these leave it. Without that word ptxas may spill some of them, in the hope of more warps than shared
// memory has room for. S_: of K and V; T_, Int8 or Fp8.
template <class T_, int kKeyDim, int kValueDim, int kColumns, int kStages, int kNearLevels_, int kWarps_, class S_ = T_>
struct TensorCore {
  using T = T_;
  using S = S_;
  static constexpr bool kScaled = sizeof(S) == 1;
  using W = typename Weight<T, sizeof(S)>::Type;
  static_assert(kKeyDim % 8 == 0 && kValueDim % 8 == 0 && kStages >= 2);
  static constexpr int kNearLevels = kNearLevels_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kTokens = 16, kQueries = 8 * kColumns;
  // Of 32 bytes of every token of a tile, and products of 16 numbers of a head that one of them feeds.
  static constexpr int kKeyLoads = (kKeyDim * int(sizeof(S)) + 31) / 32;
  static constexpr int kValueLoads = (kValueDim * int(sizeof(S)) + 31) / 32;
  static constexpr int kSteps = 2 / int(sizeof(S));
  static constexpr int kKeySteps = kKeyLoads * kSteps, kValueSteps = kValueLoads * kSteps;
  static constexpr int kKeyRow = (2 * kKeyLoads | 1) * 16, kValueRow = (2 * kValueLoads | 1) * 16;  // bytes
  static constexpr int kValues = kTokens * kKeyRow, kScales = kValues + kTokens * kValueRow;
  static constexpr int kStage = kScales + (kScaled ? 2 * kTokens * int(sizeof(float)) : 0);
  static constexpr int kPipelineBytes = kStages * kStage;

  // A lane holds queries 2t and 2t + 1 of each 8, and every eighth number of their o from g on. If S has 8 bits, it holds
  // numbers 2g and 2g + 1 of each 16.
  using Node = Fragment<2 * kColumns, 2 * kValueSteps>;
  LAMINA_DEVICE static int number(int q) { return q / 2 * 8 + lane() % 4 * 2 + q % 2; }
  LAMINA_DEVICE static int column(int i) { return kScaled ? i / 2 * 16 + lane() / 4 * 2 + i % 2 : i * 8 + lane() / 4; }
  LAMINA_DEVICE static bool first_of_query() { return lane() / 4 == 0; }

  // What no copy ever writes must not be NaN: columns of K that fill the last product up.
  LAMINA_DEVICE static void prepare(char* shared) {
    u32* words = reinterpret_cast<u32*>(shared);
    for (int i = lane(); i < kPipelineBytes / 4; i += kLanes) words[i] = 0;
    sync();
  }

  // Attend positions low .. high chunk by chunk: after each, `node` is that chunk's and `done(chunk, last)` is called.
  template <class Done>
  LAMINA_DEVICE static void run(const Work<T, S>& work, char* shared, int low, int high, Node& node, Done done) {
    if (low >= high) return;
    TensorCore core(work, shared, low, high);
    const int first = low / kTokens, end = parts(high, kTokens);
    constexpr int kPerChunk = kChunk / kTokens;
    Softmax softmax[2 * kColumns];
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) core.fetch(first + i, i);
    int tile = first, stage = 0;
#pragma unroll 1
    while (tile < end) {
      const int chunk = tile / kPerChunk, stop = least((chunk + 1) * kPerChunk, end);
      node.clear();
      for (auto& x : softmax) x.open();
#pragma unroll 1
      for (; tile < stop; ++tile) {
        wait<kStages - 2>();
        sync();  // all lanes' parts of this tile have landed, and no lane reads the previous one, which is overwritten now
        core.fetch(tile + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
        core.add(tile * kTokens, core.ring_ + stage * kStage, node, softmax);
        stage = stage + 1 == kStages ? 0 : stage + 1;
      }
#pragma unroll
      for (int q = 0; q < Node::kQueries; ++q) {
        const float share = softmax[q].close(over_tokens_sum(softmax[q].total), node.lse[q]);
#pragma unroll
        for (int i = 0; i < Node::kNumbers; ++i) node.o[q][i] *= share;
      }
      done(chunk, tile == end);
    }
    wait<0>();
    sync();
  }

 private:
  LAMINA_DEVICE TensorCore(const Work<T, S>& work, char* ring, int low, int high)
      : work_(work), ring_(ring), low_(low), high_(high), score_(work.call.op),
        together_(work.call.stored && 1 << work.call.step.block_shift >= kTokens) {
    const int queries = work.queries(kQueries);
#pragma unroll
    for (int q = 0; q < Node::kQueries; ++q)
      if (number(q) < queries) view_[q] = work.view(number(q), low, high);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int mine = c * 8 + lane() / 4;
      const T* q = work.call.q + (mine < queries ? work.row(mine) : 0) * kKeyDim;
#pragma unroll
      for (int i = 0; i < 2 * kKeySteps; ++i) {
        const int d = kScaled ? i / 2 * 16 + lane() % 4 * 4 + i % 2 * 2 : i * 8 + lane() % 4 * 2;
        query_[c][i / 2][i % 2] = mine < queries && d < kKeyDim ? load_pair(q + d) : 0;
      }
    }
    row_ = row_of(low / kTokens);
  }

  // The row of k and v that this lane knows of a tile: that of token lane % 16.
  LAMINA_DEVICE int row_of(int tile) const {
    const int at = tile * kTokens + lane() % kTokens;
    return seen(at) ? work_.kv_row(at) : 0;
  }
  LAMINA_DEVICE bool seen(int at) const { return at >= low_ && at < high_; }

  // Begin to copy a tile. Tokens that no query sees become zeros, and so do tiles after the last one. Tiles are fetched in
  // order, so the block table is read one tile ahead of its use.
  LAMINA_DEVICE void fetch(int tile, int stage) {
    if (tile * kTokens < high_) {
      char* const to = ring_ + stage * kStage;
      if (together_ && tile * kTokens >= low_ && (tile + 1) * kTokens <= high_) {
        const int first = row_ - lane() % kTokens;
        copy_block<kKeyDim>(work_.call.k, first, to, kKeyRow);
        copy_block<kValueDim>(work_.call.v, first, to + kValues, kValueRow);
      } else {
        copy_rows<kKeyDim>(work_.call.k, tile * kTokens, to, kKeyRow);
        copy_rows<kValueDim>(work_.call.v, tile * kTokens, to + kValues, kValueRow);
      }
      if constexpr (kScaled) {  // a lane's are those of token lane % 16
        const float* const from = lane() < kTokens ? work_.call.k_scale : work_.call.v_scale;
        copy<4>(to + kScales + lane() * 4, from + row_, seen(tile * kTokens + lane() % kTokens));
      }
      row_ = row_of(tile + 1);
    }
    commit();  // also if there is nothing, so that commits count tiles
  }

  // Copy a tile whose tokens are all seen and lie in one block. A lane's pieces have the same distance in every tile, so
  // only its first address is computed.
  template <int kDim>
  LAMINA_DEVICE static void copy_block(const S* from, int first, char* to, int stride) {
    constexpr int kRow = kDim * int(sizeof(S)), kPiece = kRow % 16 ? 8 : 16;  // bytes
    constexpr int kPieces = kRow / kPiece, kAll = kTokens * kPieces;
    const char* const source = reinterpret_cast<const char*>(from + i64(first) * kDim) + lane() * kPiece;
    char* const target = to + lane() / kPieces * stride + lane() % kPieces * kPiece;
#pragma unroll
    for (int i = 0; i < kAll; i += kLanes) {
      const int piece = i + lane();
      char* const at =
          kLanes % kPieces ? to + piece / kPieces * stride + piece % kPieces * kPiece : target + i / kPieces * stride;
      if (i + kLanes <= kAll || piece < kAll) copy<kPiece>(at, source + i * kPiece, true);
    }
  }

  // Copy rows one by one, half of a wide head at a time. The addresses of all rows at once would take more registers than
  // queries and o leave to a lane.
  template <int kDim>
  LAMINA_DEVICE void copy_rows(const S* from, int position, char* to, int stride) {
    constexpr int kRow = kDim * int(sizeof(S)), kPiece = kRow % 16 ? 8 : 16;  // bytes
    constexpr int kPieces = kRow / kPiece, kAll = kTokens * kPieces;
    [[maybe_unused]] constexpr int kTurns = (kAll + kLanes - 1) / kLanes;  // g++ unrolls as it likes
#pragma unroll(kDim > 128 ? (kTurns + 1) / 2 : kTurns)
    for (int i = 0; i < kAll; i += kLanes) {
      const int piece = i + lane(), token = least(piece / kPieces, kTokens - 1), at = piece % kPieces * kPiece;
      const char* const row = reinterpret_cast<const char*>(from + i64(shuffle(row_, token)) * kDim);
      if (piece < kAll) copy<kPiece>(to + token * stride + at, row + at, seen(position + token));
    }
  }

  // The tile of 16 tokens at `position`, into the sums of their chunk.
  LAMINA_DEVICE void add(int position, const char* tile, Node& node, Softmax (&softmax)[2 * kColumns]) {
    float score[kColumns][4];
    multiply_keys(tile, score);
    u32 weight[kColumns][2][2];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      weigh(position, c, reinterpret_cast<const float*>(tile + kScales), score[c], node, softmax);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float a = score[c][2 * h], b = score[c][2 * h + 1];
        const u32 high = pack<W>(a, b);
        const u32 low = pack<W>(a - to_float(W{u16(high)}), b - to_float(W{u16(high >> 16)}));
        weight[c][0][h] = transpose(high), weight[c][1][h] = transpose(low);
      }
    }
    multiply_values(tile + kValues, weight, node);
  }

  // Products of 8 queries become what V is multiplied with; what the chunk's sums shrink by, they shrink by now.
  LAMINA_DEVICE void weigh(int position, int c, const float* scales, float (&score)[4], Node& node,
                           Softmax (&softmax)[2 * kColumns]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const View& view = view_[2 * c + j];
      Softmax& s = softmax[2 * c + j];
      float x[2];
      bool mine[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int token = lane() / 4 + 8 * h, at = position + token;
        const float product = kScaled ? score[2 * h + j] * scales[token] : score[2 * h + j];
        mine[h] = at >= view.low && at < view.high;
        x[h] = mine[h] ? score_(product, view, at - view.self) : none();
      }
      const float factor = s.raise(over_tokens_max(fmaxf(x[0], x[1])));
#pragma unroll
      for (int i = 0; i < Node::kNumbers; ++i) node.o[2 * c + j][i] *= factor;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float weight = s.weight(x[h]);  // 0 does not help against a scale that is NaN
        score[2 * h + j] = kScaled && mine[h] ? weight * scales[kTokens + lane() / 4 + 8 * h] : weight;
      }
    }
  }

  LAMINA_DEVICE void multiply_keys(const char* keys, float (&score)[kColumns][4]) const {
    float odd[kColumns][4];  // two chains of products are done sooner than one
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      for (int i = 0; i < 4; ++i) score[c][i] = odd[c][i] = 0;
    const char* const mine = keys + lane() % 16 * kKeyRow + lane() / 16 * 16;
#pragma unroll
    for (int i = 0; i < kKeyLoads; ++i) {
      u32 loaded[4];
      load_matrices(loaded, mine + i * 32);
#pragma unroll
      for (int half = 0; half < kSteps; ++half) {
        const int step = i * kSteps + half;
        u32 a[4];
        key_numbers(a, loaded, half);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          float (&s)[4] = step % 2 ? odd[c] : score[c];
          multiply<T>(s[0], s[1], s[2], s[3], a, query_[c][step]);
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      for (int i = 0; i < 4; ++i) score[c][i] += odd[c][i];
  }

  LAMINA_DEVICE static void multiply_values(const char* values, const u32 (&weight)[kColumns][2][2], Node& node) {
    const char* const mine = values + (lane() % 8 + lane() / 16 * 8) * kValueRow + lane() / 8 % 2 * 16;
#pragma unroll
    for (int i = 0; i < kValueLoads; ++i) {
      u32 loaded[4];
      load_transposed(loaded, mine + i * 32);
#pragma unroll
      for (int half = 0; half < kSteps; ++half) {
        const int step = i * kSteps + half;
        u32 a[4];
        value_numbers(a, loaded, half);
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          float *x = node.o[2 * c] + 2 * step, *y = node.o[2 * c + 1] + 2 * step;
          multiply<W>(x[0], y[0], x[1], y[1], a, weight[c][0]);
          multiply<W>(x[0], y[0], x[1], y[1], a, weight[c][1]);
        }
      }
    }
  }

  // A product's rows of tokens, as loaded by ldmatrix. With 8 bits, a lane has four numbers of token g and of g + 8, and
  // as many of the next 16 numbers, which are the other half.
  LAMINA_DEVICE static void key_numbers(u32 (&a)[4], const u32 (&loaded)[4], int half) {
    if constexpr (kScaled) {
      const u32 near = loaded[2 * half], far = loaded[2 * half + 1];
      a[0] = widen<T, S, 0, 1>(near), a[1] = widen<T, S, 0, 1>(far);
      a[2] = widen<T, S, 2, 3>(near), a[3] = widen<T, S, 2, 3>(far);
    } else {
      for (int i = 0; i < 4; ++i) a[i] = loaded[i];
    }
  }

  // A product's rows of numbers. With 8 bits, a lane has numbers 2g and 2g + 1 of tokens 2t, 2t + 1, 2t + 8 and 2t + 9.
  LAMINA_DEVICE static void value_numbers(u32 (&a)[4], const u32 (&loaded)[4], int half) {
    if constexpr (kScaled) {
      const u32 near = loaded[half], far = loaded[2 + half];
      a[0] = widen<W, S, 0, 2>(near), a[1] = widen<W, S, 1, 3>(near);
      a[2] = widen<W, S, 0, 2>(far), a[3] = widen<W, S, 1, 3>(far);
    } else {
      for (int i = 0; i < 4; ++i) a[i] = loaded[i];
    }
  }

  // Over the 8 lanes that share a query.
  LAMINA_DEVICE static float over_tokens_max(float x) {
    for (int mask = 4; mask < kLanes; mask *= 2) x = fmaxf(x, shuffle_xor(x, mask));
    return x;
  }
  LAMINA_DEVICE static float over_tokens_sum(float x) {
    for (int mask = 4; mask < kLanes; mask *= 2) x += shuffle_xor(x, mask);
    return x;
  }

  const Work<T, S>& work_;
  char* const ring_;
  const int low_, high_;
  const Score score_;
  const bool together_;  // the tokens of a tile lie in one block of the store
  View view_[2 * kColumns];
  u32 query_[kColumns][kKeySteps][2];
  int row_;
};

}  // namespace lamina::attention::cuda
