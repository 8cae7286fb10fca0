// The core for bf16 and fp16 on tensor cores: tokens are the rows of every product, queries its columns.
//
//     scores [16 tokens, 8 queries] = K [16, D] . Q^T [D, 8]        o^T [Dv, 8] += V^T [Dv, 16] . weights [16, 8]
//
// So 8 queries fill an instruction where the other way round takes 16, and o takes half the registers. Weights enter as
// the sum of two 16-bit numbers, which keeps the precision of fp32 for twice the products of the second kind; decode is
// bound by memory. K and V come through a ring of `kStages` tiles of 16 tokens by cp.async; a tile's rows are an odd
// number of 16-byte units apart, so ldmatrix meets no bank twice.
#pragma once
#include "attention/cuda/attend.cuh"

namespace lamina::attention::cuda {

// kColumns: tiles of 8 queries.
template <class T_, int kKeyDim, int kValueDim, int kColumns, int kStages, int kNearLevels_>
struct TensorCore {
  using T = T_;
  using S = T_;
  static_assert(kKeyDim % 8 == 0 && kValueDim % 8 == 0 && kStages >= 2);
  static constexpr int kNearLevels = kNearLevels_;
  static constexpr int kTokens = 16, kQueries = 8 * kColumns;
  static constexpr int kKeySteps = (kKeyDim + 15) / 16, kValueSteps = (kValueDim + 15) / 16;
  static constexpr int kKeyRow = (2 * kKeySteps | 1) * 8, kValueRow = (2 * kValueSteps | 1) * 8;  // elements
  static constexpr int kValues = kTokens * kKeyRow, kStage = kValues + kTokens * kValueRow;
  static constexpr int kPipelineBytes = kStages * kStage * int(sizeof(T));

  // A lane holds queries 2t and 2t + 1 of each 8, and of their o every eighth number from g on.
  using Node = Fragment<2 * kColumns, 2 * kValueSteps>;
  LAMINA_DEVICE static int number(int q) { return q / 2 * 8 + lane() % 4 * 2 + q % 2; }
  LAMINA_DEVICE static int column(int i) { return i * 8 + lane() / 4; }
  LAMINA_DEVICE static bool first_of_query() { return lane() / 4 == 0; }

  // What no copy ever writes must not be NaN: columns of K that fill the last product up.
  LAMINA_DEVICE static void prepare(char* shared) {
    u32* words = reinterpret_cast<u32*>(shared);
    for (int i = lane(); i < kPipelineBytes / 4; i += kLanes) words[i] = 0;
    sync();
  }

  // Attend positions low .. high chunk by chunk: after each, `node` is that chunk's and `done(chunk, last)` is called.
  template <class Done>
  LAMINA_DEVICE static void run(const Work<T>& work, char* shared, int low, int high, Node& node, Done done) {
    if (low >= high) return;
    TensorCore core(work, reinterpret_cast<T*>(shared), low, high);
    const int first = low / kTokens, end = parts(high, kTokens);
    constexpr int kPerChunk = kChunk / kTokens;
    Softmax softmax[2 * kColumns];
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) core.fetch(first + i, i);
    int stage = 0;
#pragma unroll 1
    for (int tile = first; tile < end; ++tile) {
      if (tile == first || tile % kPerChunk == 0) {
        node.clear();
        for (auto& x : softmax) x.open();
      }
      wait<kStages - 2>();
      sync();  // everybody's part of this tile has landed, and nobody reads the one before, which is overwritten now
      core.fetch(tile + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
      core.add(tile * kTokens, core.ring_ + stage * kStage, node, softmax);
      stage = stage + 1 == kStages ? 0 : stage + 1;
      if ((tile + 1) % kPerChunk && tile + 1 < end) continue;
#pragma unroll
      for (int q = 0; q < Node::kQueries; ++q) {
        const float share = softmax[q].close(over_tokens_sum(softmax[q].total), node.lse[q]);
#pragma unroll
        for (int i = 0; i < Node::kNumbers; ++i) node.o[q][i] *= share;
      }
      done(tile / kPerChunk, tile + 1 == end);
    }
    wait<0>();
    sync();
  }

 private:
  LAMINA_DEVICE TensorCore(const Work<T>& work, T* ring, int low, int high)
      : work_(work), ring_(ring), low_(low), high_(high), score_(work.call.op) {
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
        const int d = i * 8 + lane() % 4 * 2;
        query_[c][i / 2][i % 2] = mine < queries && d < kKeyDim ? *reinterpret_cast<const u32*>(q + d) : 0;
      }
    }
    row_ = row_of(low / kTokens);
  }

  // The row of k and v that this lane knows of a tile: that of token lane % 16.
  LAMINA_DEVICE int row_of(int tile) const {
    const int at = tile * kTokens + lane() % kTokens;
    return at >= low_ && at < high_ ? work_.kv_row(at) : 0;
  }

  // Begin to copy a tile; tokens that nobody sees become zeros, and so do tiles behind the last one. Tiles are fetched
  // one after the other, so that the block table is read one tile ahead of its use.
  LAMINA_DEVICE void fetch(int tile, int stage) {
    if (tile * kTokens < high_) {
      T* const to = ring_ + stage * kStage;
      copy_rows<kKeyDim>(work_.call.k, tile * kTokens, to, kKeyRow);
      copy_rows<kValueDim>(work_.call.v, tile * kTokens, to + kValues, kValueRow);
      row_ = row_of(tile + 1);
    }
    commit();  // also if there is nothing, so that commits count tiles
  }

  template <int kDim>
  LAMINA_DEVICE void copy_rows(const T* from, int position, T* to, int stride) {
    constexpr int kPieces = kDim / 8, kAll = kTokens * kPieces;  // of 16 bytes
#pragma unroll
    for (int i = 0; i < kAll; i += kLanes) {
      const int piece = i + lane(), token = least(piece / kPieces, kTokens - 1), d = piece % kPieces * 8;
      const int row = shuffle(row_, token);
      if (piece < kAll)
        copy16(to + token * stride + d, from + i64(row) * kDim + d, position + token >= low_ && position + token < high_);
    }
  }

  // The tile of 16 tokens at `position`, into the sums of their chunk.
  LAMINA_DEVICE void add(int position, const T* tile, Node& node, Softmax (&softmax)[2 * kColumns]) {
    float score[kColumns][4];
    multiply_keys(tile, score);
    u32 weight[kColumns][2][2];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      weigh(position, c, score[c], node, softmax);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float a = score[c][2 * h], b = score[c][2 * h + 1];
        const u32 high = pack<T>(a, b);
        const u32 low = pack<T>(a - to_float(T{u16(high)}), b - to_float(T{u16(high >> 16)}));
        weight[c][0][h] = transpose(high), weight[c][1][h] = transpose(low);
      }
    }
    multiply_values(tile + kValues, weight, node);
  }

  // Products of 8 queries become weights; what the chunk's sums shrink by, they shrink by now.
  LAMINA_DEVICE void weigh(int position, int c, float (&score)[4], Node& node, Softmax (&softmax)[2 * kColumns]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const View& view = view_[2 * c + j];
      Softmax& s = softmax[2 * c + j];
      float x[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int at = position + lane() / 4 + 8 * h;
        x[h] = score_(score[2 * h + j], view, at - view.self);
        if (at < view.low || at >= view.high) x[h] = none();
      }
      const float factor = s.raise(over_tokens_max(fmaxf(x[0], x[1])));
#pragma unroll
      for (int i = 0; i < Node::kNumbers; ++i) node.o[2 * c + j][i] *= factor;
      score[j] = s.weight(x[0]), score[2 + j] = s.weight(x[1]);
    }
  }

  LAMINA_DEVICE void multiply_keys(const T* keys, float (&score)[kColumns][4]) const {
    float odd[kColumns][4];  // two chains of products are done sooner than one
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      for (int i = 0; i < 4; ++i) score[c][i] = odd[c][i] = 0;
    const T* const mine = keys + lane() % 16 * kKeyRow + lane() / 16 * 8;
#pragma unroll
    for (int i = 0; i < kKeySteps; ++i) {
      u32 a[4];
      load_matrices(a, mine + i * 16);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float(&s)[4] = i % 2 ? odd[c] : score[c];
        multiply<T>(s[0], s[1], s[2], s[3], a, query_[c][i]);
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      for (int i = 0; i < 4; ++i) score[c][i] += odd[c][i];
  }

  LAMINA_DEVICE static void multiply_values(const T* values, const u32 (&weight)[kColumns][2][2], Node& node) {
    const T* const mine = values + (lane() % 8 + lane() / 16 * 8) * kValueRow + lane() / 8 % 2 * 8;
#pragma unroll
    for (int i = 0; i < kValueSteps; ++i) {
      u32 a[4];
      load_transposed(a, mine + i * 16);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        float *x = node.o[2 * c] + 2 * i, *y = node.o[2 * c + 1] + 2 * i;
        multiply<T>(x[0], y[0], x[1], y[1], a, weight[c][0]);
        multiply<T>(x[0], y[0], x[1], y[1], a, weight[c][1]);
      }
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

  const Work<T>& work_;
  T* const ring_;
  const int low_, high_;
  const Score score_;
  View view_[2 * kColumns];
  u32 query_[kColumns][kKeySteps][2];
  int row_;
};

}  // namespace lamina::attention::cuda
