// Causal convolutions and recurrences of layers with a fixed state. lamina/ops/recurrence/spec.py says what they compute.
//
// Bits: each number of a state takes one token after the other, in one chain of operations, and each sum has one order.
// So neither the cut of a sequence into segments nor what else is computed has an influence. AVX2 and AVX-512 give the
// same bits; the portable variant rounds products before it adds them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lamina::recurrence {

enum class Kind { kConvolution, kGatedDelta, kKimiDelta, kMamba2 };
enum class Type { kFloat, kBf16, kHalf };
constexpr std::size_t kSizes[] = {4, 2, 2};  // by Type, in bytes

constexpr std::int64_t kTokens = 32;  // that are convolved before a head's state takes them
constexpr std::int64_t kPad = 16;  // numbers to whose multiples rows of scratch are padded
constexpr std::int64_t kChannels = 256;  // of a piece of work, where there are no heads
constexpr float kEpsilon = 1e-6f;  // of normalised q and k

inline std::int64_t padded(std::int64_t n) { return (n + kPad - 1) / kPad * kPad; }

// What all tokens share. Made once.
struct Layer {
  Kind kind;
  std::int64_t heads, groups, heads_per_group, first_head, key_dim, value_dim, width;
  bool silu, normalised, softplus;
  float scale, least, most;  // of q; bounds of dt in prompts
  std::int64_t channels, q, k, v;  // the first channels of q, k and v
  std::int64_t history, state;  // the numbers of a state before S, and all
  std::vector<float> weight;  // [width, channels]
  std::vector<float> bias;  // [channels]; empty for none, as the others are
  std::vector<float> a, d, dt_bias;  // [heads]

  std::int64_t group_of(std::int64_t head) const { return (first_head + head) / heads_per_group; }
  std::int64_t head_size() const { return key_dim * value_dim; }
};

// Rows of an input, `stride` elements apart.
struct Rows {
  const char* at;
  Type type;
  std::int64_t stride;

  const char* element(std::int64_t row, std::int64_t column) const {
    return at + std::size_t(row * stride + column) * kSizes[int(type)];
  }
};

// As lamina.ops.recurrence.segments.Segment.
struct Segment {
  std::int64_t first, rows, prompt, read, write;
};

struct Call {
  const Layer* layer;
  Rows x, a, b;  // a, b: g and beta, or dt
  char* out;  // [rows, heads * V] of x's type
  const Segment* segments;
  float* states;
  std::int64_t slot;  // numbers from one slot to the next
  bool stream;  // if what is written is not soon read again

  float* state(std::int64_t number) const { return states + number * slot; }
};

// A piece of work: heads `head .. end` (convolution: channels) of segments that continue each other.
struct Task {
  std::int64_t segment, segments_end, head, end;
};

// A thread's memory.
class Scratch {
 public:
  void reserve(std::size_t floats) {
    if (memory_.size() < floats + kPad) memory_.resize(floats + kPad);
    const auto at = reinterpret_cast<std::uintptr_t>(memory_.data());
    next_ = reinterpret_cast<float*>((at + 63) / 64 * 64);
  }
  // The next `n` numbers, at a multiple of 64 bytes.
  float* take(std::int64_t n) {
    float* const at = next_;
    next_ += padded(n);
    return at;
  }

 private:
  std::vector<float> memory_;
  float* next_ = nullptr;
};

// The most numbers of scratch that a task of `heads` needs.
std::size_t scratch_size(const Layer& layer, std::int64_t heads);
std::vector<Task> make_tasks(const Layer& layer, const Segment* segments, std::int64_t count, std::size_t threads);

// One instruction set's code. Known when this is compiled: nothing of these instructions runs to make it.
struct Kernel {
  void (*run)(const Call& call, const Task& task, Scratch& scratch);
  // Copies `n` numbers, whole lines of 64 bytes, past the caches: what reading and writing takes at least.
  void (*copy)(const float* from, float* to, std::int64_t n);
};

extern const Kernel kPortable;
#if defined(__x86_64__)
extern const Kernel kAvx2, kAvx512;
#endif

struct Variant {
  const char* name;
  bool usable;
  const Kernel* kernel;
};

constexpr std::size_t kVariants = 3;
const Variant* variants();  // best first

}  // namespace lamina::recurrence
