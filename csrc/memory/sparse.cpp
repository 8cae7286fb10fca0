// Rows that attend the best blocks of their sequence alone, and rows whose attention is counted.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>

#include "memory/loop.h"

namespace lamina::memory_worker {

void Loop::attend_chosen(const Piece& piece, PieceForm& of, const GroupRows& rows, const char* q, float* to) {
  const attention::Operator& op = piece.op;
  ByHead& heads = *of.by_head;
  const attention::Selecting selecting{&op,        q, piece.least, piece.most, rows.choices.data(), heads.table.data(),
                                       heads.width};
  store.attention->select(store.attention->engine, selecting, rows.choices.size(), store.threads);

  Piece one = piece;
  one.op.q_heads = op.group(), one.op.kv_heads = 1, one.op.sinks = one.op.slopes = nullptr;
  const NewRows blocks{piece.k, piece.v, piece.k_scale, piece.v_scale};
  const auto numbers = std::size_t(op.q_heads * op.v_dim), each = std::size_t(op.q_heads);
  float* const lse = to + rows.whole * numbers;
  if (rows.rest.empty()) {
    attend(one, {&heads.rows, &heads.tasks}, true, q, blocks, to, lse, nullptr);
    return;
  }
  const std::size_t row_bytes = each * std::size_t(op.qk_dim) * store.item;
  const std::size_t most = std::max(rows.choices.size(), rows.rest.size()) * (numbers + each);
  if (chosen_.size() < most) chosen_.resize(most);
  const auto some = [&](const Piece& by, attention::Prepared prepared, const Numbers& which) {
    float *const o = chosen_.data(), *const o_lse = o + which.size() * numbers;
    attend(by, prepared, true, gather(q, which, row_bytes, 0), blocks, o, o_lse, nullptr);
    for (std::size_t i = 0; i < which.size(); ++i) {
      const auto row = std::size_t(which[i]);
      std::copy_n(o + i * numbers, numbers, to + row * numbers);
      std::copy_n(o_lse + i * each, each, lse + row * each);
    }
  };
  Numbers choosing;
  for (const attention::Choice& choice : rows.choices) choosing.push_back(choice.row);
  some(one, {&heads.rows, &heads.tasks}, choosing);
  some(piece, of.rest_stored, rows.rest);
}

void Loop::count() {
  const Layer& layer = store.layers[this->layer()];
  for (std::size_t i = 0; i < layer.pieces.size(); ++i) {
    const Piece& piece = layer.pieces[i];
    const attention::Operator& op = piece.op;
    for (const Counting& each : step().countings) {
      if (each.group != piece.group) continue;
      const std::size_t row_bytes = std::size_t(op.q_heads * op.qk_dim) * store.item, blocks = each.ids.size();
      const char* q = reinterpret_cast<const char*>(q_.data) + form().pieces[i].parts.q + each.row * row_bytes;
      const attention::Tallying tallying{&op,
                                         q,
                                         piece.k,
                                         piece.k_scale,
                                         each.ids.data(),
                                         each.seen.data(),
                                         std::int64_t(each.seen.size()),
                                         std::int64_t(blocks),
                                         store.block_size};
      counted_.assign(blocks * std::size_t(op.kv_heads), 0);
      store.attention->tally(store.attention->engine, tallying, counted_.data(), store.threads);
      for (std::size_t n = 0; n < counted_.size(); ++n) each.to[n % blocks] += counted_[n];
    }
  }
}

}  // namespace lamina::memory_worker
