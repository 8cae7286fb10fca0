#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "attention.h"

namespace lamina::attention {
namespace {

constexpr float kInfinite = std::numeric_limits<float>::infinity();

float or_infinite(float x) { return std::isnan(x) ? kInfinite : x; }  // who has a NaN is to see it

}  // namespace

bool read_choices(const int64_t* at, int64_t count, const int64_t* blocks, int64_t all, int64_t width,
                  std::vector<Choice>* to) {
  for (int64_t i = 0; i < count; ++i, at += 6) {
    const Choice one{at[0], at[1], at[2], at[3], at[4], blocks + at[5]};
    const int64_t free = one.high - one.low, kept = one.total - free + one.best;
    const bool ordered = one.row >= 0 && 0 <= one.low && one.low <= one.high && one.high <= one.total;
    const bool inside = at[5] >= 0 && one.total <= all && at[5] <= all - one.total;
    if (!ordered || !inside || one.best < 0 || one.best > free || kept > width) return false;
    to->push_back(one);
  }
  return true;
}

void select(const Variant& variant, Dtype dtype, bool scaled, const Selecting& of, int64_t number, Choosing& room) {
  const Operator& op = *of.op;
  const Choice& row = of.choices[number / op.kv_heads];
  const int64_t head = number % op.kv_heads, count = row.high - row.low, group = op.group();
  room.queries.resize(std::size_t(group * padded(op.qk_dim)));
  room.scores.resize(std::size_t(group * count));
  variant.bound[dtype][scaled](of, row, head, room.queries.data(), room.scores.data());
  room.near.assign(std::size_t(count), -kInfinite);
  for (int64_t g = 0; g < group; ++g) {
    float* const scores = room.scores.data() + g * count;
    float top = -kInfinite;
    for (int64_t b = 0; b < count; ++b) top = std::max(top, scores[b] = or_infinite(scores[b]));
    for (int64_t b = 0; b < count; ++b) {
      float& near = room.near[std::size_t(b)];
      near = std::max(near, or_infinite(scores[b] - top));
    }
  }
  room.order.resize(std::size_t(count));
  std::iota(room.order.begin(), room.order.end(), 0);
  std::nth_element(room.order.begin(), room.order.begin() + row.best, room.order.end(), [&](int64_t a, int64_t b) {
    const float x = room.near[std::size_t(a)], y = room.near[std::size_t(b)];
    return x != y ? x > y : a > b;
  });
  std::sort(room.order.begin(), room.order.begin() + row.best);
  int64_t* to = of.table + number * of.width;
  const auto put = [&](int64_t at) { *to++ = row.blocks[at] * op.kv_heads + head; };
  for (int64_t at = 0; at < row.low; ++at) put(at);
  for (int64_t i = 0; i < row.best; ++i) put(row.low + room.order[std::size_t(i)]);
  for (int64_t at = row.high; at < row.total; ++at) put(at);
}

}  // namespace lamina::attention
