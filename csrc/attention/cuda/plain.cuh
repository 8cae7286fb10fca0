// The core for everything that tensor cores do not take: queries of fp32, and head sizes other than the multiples of 8
// from 64 on. One query a tile; a lane scores a token, then holds every 32nd number of o. Made to be right, not fast.
#pragma once
#include "attention/cuda/attend.cuh"
#include "attention/cuda/stored.cuh"

namespace lamina::attention::cuda {

template <class T_, class S_ = T_>
struct PlainCore {
  using T = T_;
  using S = S_;
  static constexpr int kNearLevels = 0, kWarps = 16, kQueries = 1, kPipelineBytes = 0;

  using Node = Fragment<1, 256 / kLanes>;
  LAMINA_DEVICE static int number(int) { return 0; }
  LAMINA_DEVICE static int column(int i) { return i * kLanes + lane(); }
  LAMINA_DEVICE static bool first_of_query() { return lane() == 0; }
  LAMINA_DEVICE static void prepare(char*) {}

  // As TensorCore::run.
  template <class Done>
  LAMINA_DEVICE static void run(const Work<T, S>& work, char*, int low, int high, Node& node, Done done) {
    const Score scored(work.call.op);
    const View view = work.view(0, low, high);
    const T* const query = work.call.q + work.row(0) * work.call.op.qk_dim;
    const int qk_dim = work.call.op.qk_dim;
    for (int from = view.low; from < view.high;) {
      const int chunk = from / kChunk, end = least((chunk + 1) * kChunk, view.high);
      Softmax softmax;
      softmax.open();
      node.clear();
      for (int position = from / kLanes * kLanes; position < end; position += kLanes) {
        const int at = position + lane();
        const bool seen = at >= from && at < end;
        const int row = seen ? work.kv_row(at) : 0;
        float product = 0;
        if (seen)
          for (int d = 0; d < qk_dim; ++d)
            product = fmaf(to_float(query[d]), to_float(work.call.k[i64(row) * qk_dim + d]), product);
        const float* const k_scale = work.call.k_scale;
        if (seen && k_scale) product *= k_scale[row];
        const float score = seen ? scored(product, view, at - view.self) : none();
        add(work.call.v, work.call.v_scale, work.call.op.v_dim, seen, row, score, softmax, node);
      }
      const float share = softmax.close(sum(softmax.total), node.lse[0]);
      for (int i = 0; i < Node::kNumbers; ++i) node.o[0][i] *= share;
      from = end;
      done(chunk, end == view.high);
    }
  }

 private:
  // 32 tokens, one with each lane.
  LAMINA_DEVICE static void add(const S* values, const float* scales, int v_dim, bool seen, int row, float score,
                                Softmax& softmax, Node& node) {
    const float factor = softmax.raise(max(score)), weight = softmax.weight(score);
    const float scaled = seen && scales ? weight * scales[row] : weight;
    for (int i = 0; i < Node::kNumbers; ++i) node.o[0][i] *= factor;
    for (int t = 0; t < kLanes; ++t) {
      const float w = shuffle(scaled, t);
      const int from = shuffle(seen ? row : -1, t);
      if (from < 0) continue;  // a weight of 0 does not help against NaN
#pragma unroll
      for (int i = 0; i < Node::kNumbers; ++i)
        if (column(i) < v_dim) node.o[0][i] = fmaf(w, to_float(values[i64(from) * v_dim + column(i)]), node.o[0][i]);
    }
  }

  LAMINA_DEVICE static float max(float x) {
    for (int mask = 16; mask; mask /= 2) x = fmaxf(x, shuffle_xor(x, mask));
    return x;
  }
  LAMINA_DEVICE static float sum(float x) {
    for (int mask = 16; mask; mask /= 2) x += shuffle_xor(x, mask);
    return x;
  }
};

}  // namespace lamina::attention::cuda
