#include "sampling/draw.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>
#include <utility>

#include "sampling/random.h"

namespace lamina::sampling {
namespace {

using Wide = unsigned __int128;
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr std::size_t kMostCandidates = 4096;
constexpr std::int64_t kUnknown = -1;

// By logit, the larger first; of equals the lower id.
bool before(const Entry& a, const Entry& b) { return a.x > b.x || (a.x == b.x && a.id < b.id); }

// The last token in the order of ``before`` that is kept.
struct Edge {
  float x = -kInfinity;
  std::int64_t id = std::numeric_limits<std::int64_t>::max();
};

std::uint16_t bin_of(float x) { return static_cast<std::uint16_t>(to_bits(x + 0.0f) >> 16); }  // -0 as 0

template <class T>
class Row {
 public:
  Row(const Kernel* kernels, Type type, const void* x, std::size_t size, Scratch& scratch)
      : kernel_(kernels[static_cast<int>(type)]), float_kernel_(kernels[static_cast<int>(Type::kFloat)]),
        x_(static_cast<const T*>(x)), size_(size), blocks_((size + kBlock - 1) / kBlock), s_(scratch) {
    const std::size_t whole = size / kBlock * kBlock;
    if (whole == size) return;
    T* const tail = reinterpret_cast<T*>(s_.tail);
    std::copy(x_ + whole, x_ + size, tail);
    std::fill(tail + (size - whole), tail + kBlock, minus_infinity());
  }

  std::int64_t draw(const Ask& ask) {
    if (ask.flags & kSomeAllowed) keep(ask.allowed, ask.num_bits);
    if (scan()) return kNoToken;
    const auto top = std::max_element(s_.maxima.begin(), s_.maxima.end());
    scale_ = {*top, ask.factor, kLowest};
    if (!std::isfinite(scale_.best)) return kNoToken;
    if (ask.flags & kGreedy) {
      const std::size_t part = static_cast<std::size_t>(top - s_.maxima.begin());
      return static_cast<std::int64_t>(part * kPart) + __builtin_ctzll(at_least(part, scale_.best));
    }
    if (ask.flags & kMinPFirst) scale_.cut = ask.cut;
    if (ask.top_k < size_ && is_small(ask.top_k)) return draw_few(ask);
    std::int64_t total = kUnknown;
    const Edge edge = ask.top_k < size_ || ask.share < kWhole ? find_edge(ask, &total) : Edge();
    if (scale_.cut != ask.cut) total = kUnknown;
    scale_.cut = ask.cut;
    return walk(edge, total, random_bits(ask.seed, ask.index));
  }

  void best(std::size_t count, std::int64_t* ids) {
    const bool odd = scan();
    if (!odd && is_small(count)) {
      candidates(count);
    } else {
      s_.entries.resize(size_);
      for (std::size_t i = 0; i < size_; ++i) {
        const float x = to_float(x_[i]);
        s_.entries[i] = {x, static_cast<std::int64_t>(i)};
      }
      const auto rank = [](const Entry& a, const Entry& b) {
        const bool odd_a = std::isnan(a.x), odd_b = std::isnan(b.x);
        return odd_a || odd_b ? odd_a && (!odd_b || a.id < b.id) : before(a, b);
      };
      std::partial_sort(s_.entries.begin(), s_.entries.begin() + count, s_.entries.end(), rank);
    }
    for (std::size_t i = 0; i < count; ++i) ids[i] = s_.entries[i].id;
  }

 private:
  // Continues with a copy of the row, with minus infinity for all but the allowed tokens. It stays in a core's cache.
  void keep(const std::uint16_t* bits, std::size_t num_bits) {
    s_.allowed.resize(blocks_ * kBlock * sizeof(T));
    T* const kept = reinterpret_cast<T*>(s_.allowed.data());
    for (std::size_t b = 0; b < blocks_; ++b) {
      if (b * kBlock < num_bits)
        kernel_.keep(block(b), bits + b * kBlock / kBitsOfWord, kept + b * kBlock);
      else
        std::fill(kept + b * kBlock, kept + (b + 1) * kBlock, minus_infinity());
    }
    x_ = kept;
    if (size_ % kBlock) std::memcpy(s_.tail, kept + (blocks_ - 1) * kBlock, kBlock * sizeof(T));
  }

  static T minus_infinity() {
    if constexpr (std::is_same_v<T, float>)
      return -kInfinity;
    else
      return {kMinusInfinity<T>};
  }

  // Values with the upper bits of ``bin``.
  static void bounds(std::uint32_t bin, float* low, float* high) {
    if constexpr (std::is_same_v<T, float>) {
      *low = from_bits(bin << 16);
      *high = from_bits(bin << 16 | 0xffff);
      if (bin & 0x8000) std::swap(*low, *high);
      if (bin == 0x8000) *high = from_bits(0x80000001);  // zeros of both signs are in bin 0
      if (bin == 0xff80) *low = -kInfinity;
    } else {
      *low = *high = to_float(T{static_cast<std::uint16_t>(bin)});
    }
  }

  const T* block(std::size_t b) const {
    return b * kBlock + kBlock <= size_ ? x_ + b * kBlock : reinterpret_cast<const T*>(s_.tail);
  }

  std::uint64_t at_least(std::size_t part, float floor) const {
    return kernel_.at_least(block(part / kParts) + part % kParts * kPart, floor);
  }

  // Fills the maxima of all parts; whether there is a NaN.
  bool scan() {
    s_.maxima.resize(blocks_ * kParts);
    bool odd = false;
    for (std::size_t b = 0; b < blocks_; ++b) odd |= kernel_.scan(block(b), &s_.maxima[b * kParts]);
    return odd;
  }

  bool is_small(std::uint64_t k) const { return k <= kMostCandidates && k <= size_ / kPart / 2; }

  // The k best tokens, in their order, to entries. At least k parts have one that reaches the bound.
  void candidates(std::size_t k) {
    s_.sorted = s_.maxima;
    std::nth_element(s_.sorted.begin(), s_.sorted.begin() + (k - 1), s_.sorted.end(), std::greater<float>());
    const float bound = s_.sorted[k - 1];
    s_.entries.clear();
    for (std::size_t part = 0; part < s_.maxima.size(); ++part)
      if (s_.maxima[part] >= bound) collect(part, at_least(part, bound));
    std::nth_element(s_.entries.begin(), s_.entries.begin() + (k - 1), s_.entries.end(), before);
    s_.entries.resize(k);
    std::sort(s_.entries.begin(), s_.entries.end(), before);
  }

  void collect(std::size_t part, std::uint64_t found) {
    for (; found; found &= found - 1) {
      const std::size_t id = part * kPart + static_cast<std::size_t>(__builtin_ctzll(found));
      if (id < size_) s_.entries.push_back({to_float(x_[id]), static_cast<std::int64_t>(id)});
    }
  }

  // Masses of the first ``count`` entries, of those that reach the cut.
  void entry_masses(std::size_t count, std::vector<std::int64_t>& out) const {
    out.resize(std::max(out.size(), (count + kBlock - 1) / kBlock * kBlock));
    alignas(64) T values[kBlock];
    for (std::size_t from = 0; from < count; from += kBlock) {
      for (std::size_t i = 0; i < kBlock; ++i)
        values[i] = from + i < count ? x_[s_.entries[from + i].id] : minus_infinity();
      kernel_.fill(values, scale_, -kInfinity, &out[from]);
    }
  }

  // The mass that top_p wants of ``total``.
  static std::int64_t wanted(std::uint64_t share, std::int64_t total) {
    return static_cast<std::int64_t>((static_cast<Wide>(share) * static_cast<Wide>(total) + (kWhole - 1)) / kWhole);
  }

  static std::int64_t goal(std::uint64_t random, std::int64_t total) {
    return static_cast<std::int64_t>(static_cast<Wide>(random) * static_cast<Wide>(total) / kWhole);
  }

  // top_k of few: everything else is done among them.
  std::int64_t draw_few(const Ask& ask) {
    candidates(ask.top_k);
    std::size_t kept = s_.entries.size();
    if (ask.share < kWhole) {
      entry_masses(kept, s_.masses);
      std::int64_t total = 0, sum = 0;
      if (ask.flags & kTopKFirst)
        for (std::size_t i = 0; i < kept; ++i) total += s_.masses[i];
      else
        for (std::size_t b = 0; b < blocks_; ++b) total += kernel_.sum(block(b), scale_, -kInfinity);
      const std::int64_t need = wanted(ask.share, total);
      for (std::size_t i = 0; i < kept; ++i)
        if ((sum += s_.masses[i]) >= need) kept = i + 1;
    }
    s_.entries.resize(kept);
    std::sort(s_.entries.begin(), s_.entries.end(), [](const Entry& a, const Entry& b) { return a.id < b.id; });
    scale_.cut = ask.cut;
    entry_masses(kept, s_.masses);
    std::int64_t total = 0;
    for (std::size_t i = 0; i < kept; ++i) total += s_.masses[i];
    std::int64_t left = goal(random_bits(ask.seed, ask.index), total);
    std::size_t at = 0;
    for (; at + 1 < kept && left >= s_.masses[at]; ++at) left -= s_.masses[at];
    return s_.entries[at].id;
  }

  // Of top_k and top_p, whichever ends first; ``total``: the mass up to there.
  Edge find_edge(const Ask& ask, std::int64_t* total) {
    make_bins();
    Edge edge;
    std::int64_t mass = 0;
    if (ask.top_k < size_) edge = find(ask.top_k, std::numeric_limits<std::int64_t>::max(), &mass);
    *total = mass;
    if (ask.share == kWhole) return edge;
    if (ask.top_k >= size_ || !(ask.flags & kTopKFirst)) {
      mass = 0;
      for (const Bin& bin : s_.bins) mass += bin.mass;
    }
    std::int64_t reached = 0;
    const Edge other = find(std::numeric_limits<std::uint64_t>::max(), wanted(ask.share, mass), &reached);
    if (before({edge.x, edge.id}, {other.x, other.id})) return edge;
    *total = reached;
    return other;
  }

  // All tokens in bins, the best first.
  void make_bins() {
    if constexpr (std::is_same_v<T, float>) {
      for (std::size_t b = 0; b < blocks_; ++b) {
        kernel_.fill(block(b), scale_, -kInfinity, s_.masses.data());
        const std::size_t count = std::min(kBlock, size_ - b * kBlock);
        for (std::size_t i = 0; i < count; ++i) {
          const std::uint16_t bin = bin_of(block(b)[i]);
          ++s_.counts[bin];
          s_.bin_masses[bin] += s_.masses[i];
        }
      }
    } else {
      std::size_t i = 0;
      for (; i + 4 <= size_; i += 4) {
        std::uint64_t four;
        std::memcpy(&four, x_ + i, sizeof four);
        ++s_.counts[four & 0xffff];
        ++s_.counts[four >> 16 & 0xffff];
        ++s_.counts[four >> 32 & 0xffff];
        ++s_.counts[four >> 48];
      }
      for (; i < size_; ++i) ++s_.counts[x_[i].bits];
      s_.counts[0] += s_.counts[0x8000];
      s_.counts[0x8000] = 0;
    }
    s_.bins.clear();
    std::size_t left = size_;  // tokens in bins that are not taken yet
    for (std::uint32_t bin = first_bin(); bin > 0 && left; bin -= kRun) left -= take_bins<false>(bin - kRun);
    for (std::uint32_t bin = 0x8000; bin < 0x10000 && left; bin += kRun) left -= take_bins<true>(bin);
    if constexpr (!std::is_same_v<T, float>) weigh_bins();
  }

  // The first bin after that of the best token, at a multiple of kRun.
  std::uint32_t first_bin() const {
    if constexpr (std::is_same_v<T, Half>) return 0x8000;
    return scale_.best < 0.0f ? 0 : (bin_of(scale_.best) / kRun + 1) * kRun;
  }

  static constexpr std::uint32_t kRun = 16;  // bins looked at together: most are empty

  template <bool kUp>
  std::size_t take_bins(std::uint32_t first) {
    std::uint32_t any = 0;
    for (std::uint32_t i = 0; i < kRun; ++i) any |= s_.counts[first + i];
    if (!any) return 0;
    std::size_t taken = 0;
    for (std::uint32_t i = 0; i < kRun; ++i) {
      const std::uint32_t bin = kUp ? first + i : first + kRun - 1 - i;
      if (!s_.counts[bin]) continue;
      Bin found{0.0f, 0.0f, s_.counts[bin], 0};
      bounds(bin, &found.low, &found.high);
      if constexpr (std::is_same_v<T, float>) found.mass = std::exchange(s_.bin_masses[bin], 0);
      s_.bins.push_back(found);
      taken += s_.counts[bin];
      s_.counts[bin] = 0;
    }
    return taken;
  }

  // Where a bin has one value only, its mass is that of one token, so many times.
  void weigh_bins() {
    alignas(64) float values[kBlock];
    for (std::size_t from = 0; from < s_.bins.size(); from += kBlock) {
      const std::size_t count = std::min(kBlock, s_.bins.size() - from);
      for (std::size_t i = 0; i < kBlock; ++i) values[i] = i < count ? s_.bins[from + i].low : -kInfinity;
      float_kernel_.fill(values, scale_, -kInfinity, s_.masses.data());
      for (std::size_t i = 0; i < count; ++i)
        s_.bins[from + i].mass = s_.masses[i] * static_cast<std::int64_t>(s_.bins[from + i].count);
    }
  }

  // The token that, with all before it, makes ``count`` tokens or a mass of at least ``need``; ``sum``: their mass.
  Edge find(std::uint64_t count, std::int64_t need, std::int64_t* sum) {
    std::size_t at = 0;
    for (; at + 1 < s_.bins.size(); ++at) {
      const Bin& bin = s_.bins[at];
      if (bin.count >= count || bin.mass >= need) break;
      count -= bin.count;
      need -= bin.mass;
      *sum += bin.mass;
    }
    gather(s_.bins[at]);
    entry_masses(s_.entries.size(), s_.masses);
    for (std::size_t i = 0; i + 1 < s_.entries.size(); ++i) {
      *sum += s_.masses[i];
      if ((need -= s_.masses[i]) <= 0 || --count == 0) return {s_.entries[i].x, s_.entries[i].id};
    }
    *sum += s_.masses[s_.entries.size() - 1];
    return {s_.entries.back().x, s_.entries.back().id};
  }

  // A bin's tokens, in their order, to entries.
  void gather(const Bin& bin) {
    const float above = std::nextafter(bin.high, kInfinity);
    s_.entries.clear();
    for (std::size_t part = 0; part < s_.maxima.size(); ++part)
      if (s_.maxima[part] >= bin.low) {
        const std::uint64_t found = at_least(part, bin.low);
        if (found) collect(part, found & ~at_least(part, above));
      }
    if (bin.low != bin.high) std::sort(s_.entries.begin(), s_.entries.end(), before);
  }

  // Masses of a block's tokens up to the edge.
  std::int64_t* masses(std::size_t b, const Edge& edge, float above) {
    const std::int64_t first = static_cast<std::int64_t>(b * kBlock), last = first + kBlock - 1;
    std::int64_t* const out = s_.masses.data();
    kernel_.fill(block(b), scale_, edge.id >= first ? edge.x : above, out);
    if (edge.id < first || edge.id >= last) return out;
    kernel_.fill(block(b), scale_, above, out + kBlock);
    for (std::size_t i = static_cast<std::size_t>(edge.id - first) + 1; i < kBlock; ++i) out[i] = out[kBlock + i];
    return out;
  }

  bool reaches(std::size_t b, float floor) const {
    const float* const maxima = &s_.maxima[b * kParts];
    return std::any_of(maxima, maxima + kParts, [&](float m) { return m >= floor; });
  }

  // The mass of a block's tokens up to the edge.
  std::int64_t mass(std::size_t b, const Edge& edge, float above) {
    const std::int64_t first = static_cast<std::int64_t>(b * kBlock), last = first + kBlock - 1;
    std::int64_t sum = 0;
    if (edge.id >= last || edge.id < first) {
      const float floor = edge.id >= last ? edge.x : above;
      return reaches(b, floor) ? kernel_.sum(block(b), scale_, floor) : 0;
    }
    const std::int64_t* const each = masses(b, edge, above);
    for (std::size_t i = 0; i < kBlock; ++i) sum += each[i];
    return sum;
  }

  // Walk by id to the token at the random number's place in the mass of all kept tokens. If that ``total`` is known,
  // blocks after the token are not read.
  std::int64_t walk(const Edge& edge, std::int64_t total, std::uint64_t random) {
    const float above = std::nextafter(edge.x, kInfinity);
    s_.sums.clear();
    if (total == kUnknown) {
      total = 0;
      for (std::size_t b = 0; b < blocks_; ++b) {
        s_.sums.push_back(mass(b, edge, above));
        total += s_.sums.back();
      }
    }
    std::int64_t left = goal(random, total);
    std::size_t b = 0;
    for (; b + 1 < blocks_; ++b) {
      const std::int64_t sum = s_.sums.empty() ? mass(b, edge, above) : s_.sums[b];
      if (left < sum) break;
      left -= sum;
    }
    const std::int64_t* const each = masses(b, edge, above);
    std::size_t at = 0;
    for (; at + 1 < kBlock && left >= each[at]; ++at) left -= each[at];
    return static_cast<std::int64_t>(b * kBlock + at);
  }

  const Kernel& kernel_;
  const Kernel& float_kernel_;
  const T* x_;
  std::size_t size_;
  std::size_t blocks_;
  Scratch& s_;
  Scale scale_{};
};

template <class Do>
void with_row(const Kernel* kernels, Type type, const void* x, std::size_t size, Scratch& scratch, Do run) {
  switch (type) {
    case Type::kFloat: run(Row<float>(kernels, type, x, size, scratch)); break;
    case Type::kBf16: run(Row<Bf16>(kernels, type, x, size, scratch)); break;
    case Type::kHalf: run(Row<Half>(kernels, type, x, size, scratch)); break;
  }
}

}  // namespace

std::int64_t draw(const Kernel* kernels, Type type, const void* x, std::size_t size, const Ask& ask, Scratch& scratch) {
  std::int64_t token = kNoToken;
  with_row(kernels, type, x, size, scratch, [&](auto row) { token = row.draw(ask); });
  return token;
}

void best(const Kernel* kernels, Type type, const void* x, std::size_t size, std::size_t count, std::int64_t* ids,
          Scratch& scratch) {
  with_row(kernels, type, x, size, scratch, [&](auto row) { row.best(count, ids); });
}

}  // namespace lamina::sampling
