// The work of a call, in pieces for threads.
#include <algorithm>

#include "cpu.h"
#include "recurrence/recurrence.h"

namespace lamina::recurrence {

constexpr std::int64_t kTaskNumbers =
    1 << 16;  // of S that scratch keeps, unless one head has more: the second cache has room

std::size_t scratch_size(const Layer& layer, std::int64_t heads) {
  const std::int64_t kept = layer.width - 1;
  if (layer.kind == Kind::kConvolution) return std::size_t((3 * kept + 3 * kTokens) * padded(heads));
  const std::int64_t keys = padded(layer.key_dim), values = padded(layer.value_dim);
  const std::int64_t groups = (heads + layer.heads_per_group - 2) / layer.heads_per_group + 1;
  const std::int64_t before = kept * (2 * groups * keys + heads * values);
  const std::int64_t tokens =
      (kept + kTokens) * std::max(keys, values) + kTokens * (5 * keys + 2 * values + 3) + 3 * values;
  return std::size_t(before + tokens + heads * layer.key_dim * values + 16 * kPad);
}

std::vector<Task> make_tasks(const Layer& layer, const Segment* segments, std::int64_t count, std::size_t threads) {
  std::vector<std::int64_t> begins;  // of segments that continue each other
  bool kept = false;  // S of some head
  for (std::int64_t i = 0; i < count; ++i) {
    if (i == 0 || segments[i].read != segments[i - 1].write) begins.push_back(i);
    kept = kept || segments[i].rows > 1;
  }
  begins.push_back(count);
  std::int64_t most = kChannels;
  if (layer.kind != Kind::kConvolution) {
    const std::int64_t all = layer.heads * std::int64_t(begins.size() - 1);
    most = all / (8 * std::int64_t(threads));
    if (kept) most = std::min(most, kTaskNumbers / layer.head_size());
    most = std::max(most, std::int64_t{1});
    if (most > layer.heads_per_group) most -= most % layer.heads_per_group;
  }
  std::vector<Task> tasks;
  for (std::size_t i = 0; i + 1 < begins.size(); ++i)
    for (std::int64_t head = 0; head < layer.heads; head += most)
      tasks.push_back({begins[i], begins[i + 1], head, std::min(head + most, layer.heads)});
  return tasks;
}

const Variant* variants() {
#if defined(__x86_64__)
  static const Variant all[kVariants] = {
      {"avx512", avx512_usable(), &kAvx512}, {"avx2", avx2_usable(), &kAvx2}, {"portable", true, &kPortable}};
#else
  static const Variant all[kVariants] = {{"portable", true, &kPortable}, {"", false, nullptr}, {"", false, nullptr}};
#endif
  return all;
}

}  // namespace lamina::recurrence
