// Which blocks rows attend, and how much: the parts of Kernels that Python calls for them.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "attention/engine.h"

namespace lamina::attention {
namespace {

int64_t count_of(const Py_buffer& buffer) { return int64_t(buffer.len) / int64_t(sizeof(int64_t)); }
const int64_t* ints_of(const Py_buffer& buffer) { return static_cast<const int64_t*>(buffer.buf); }

}  // namespace

void select_all(Engine& engine, const Selecting& of, std::size_t choices, int threads) {
  const Operator& op = *of.op;
  const std::lock_guard lock(engine.busy);
  double pairs = 0;
  for (std::size_t i = 0; i < choices; ++i) pairs += double(of.choices[i].high - of.choices[i].low);
  const double ns = pairs * double(op.q_heads * op.qk_dim) / kPairsPerNs;
  const double helpers = std::clamp(std::min(ns / kHelpNs, double(threads) - 1), 0.0, double(choices * op.kv_heads));
  const std::size_t all = threads_of(engine.pool, std::size_t(helpers) + 1);
  if (engine.choosing.size() < all) engine.choosing.resize(all);
  engine.pool.each(choices * std::size_t(op.kv_heads), all, [&](std::size_t i, std::size_t thread) {
    select(*engine.variant, engine.dtype, engine.stored != kAsQueries, of, int64_t(i), engine.choosing[thread]);
  });
}

int64_t tally_all(Engine& engine, const Tallying& of, int64_t* to, int threads) {
  const Operator& op = *of.op;
  const std::lock_guard lock(engine.busy);
  const auto heads = std::size_t(op.kv_heads);
  const auto all = std::min(threads_of(engine.pool, std::size_t(std::max(threads, 1))), heads);
  if (engine.choosing.size() < all) engine.choosing.resize(all);
  for (Choosing& room : engine.choosing) {
    room.queries.resize(std::size_t(op.group() * padded(op.qk_dim)));
    room.scores.resize(std::size_t(op.group() * (of.blocks * of.block_size + 16)));
  }
  std::atomic<int64_t> pairs{0};
  engine.pool.each(heads, all, [&](std::size_t head, std::size_t thread) {
    Choosing& room = engine.choosing[thread];
    pairs += engine.variant->tally[engine.dtype][engine.stored](of, int64_t(head), room.queries.data(),
                                                                room.scores.data(), to + int64_t(head) * of.blocks);
  });
  return pairs;
}

PyObject* kernels_select(PyObject* object, PyObject* args) {
  Engine& engine = *reinterpret_cast<Kernels*>(object)->engine;
  long long q_heads, kv_heads, qk_dim, width;
  float scale;
  int threads;
  unsigned long long q, least, most, table;
  Py_buffer numbers, blocks;
  if (!PyArg_ParseTuple(args, "(LLLf)KKKy*y*KLi", &q_heads, &kv_heads, &qk_dim, &scale, &q, &least, &most, &numbers,
                        &blocks, &table, &width, &threads))
    return nullptr;
  enum { kFine, kWrong, kNoMemory } outcome = kWrong;
  if (kv_heads > 0 && q_heads > 0 && q_heads % kv_heads == 0 && qk_dim > 0 && width > 0) {
    Py_BEGIN_ALLOW_THREADS;
    try {
      std::vector<Choice> choices;
      if (read_choices(ints_of(numbers), count_of(numbers) / 6, ints_of(blocks), count_of(blocks), width, &choices)) {
        const Operator op{q_heads, kv_heads, qk_dim, qk_dim, 0, scale, 0, nullptr, nullptr};
        const Selecting of{
            &op,  pointer<void>(q), pointer<void>(least), pointer<void>(most), choices.data(), pointer<int64_t>(table),
            width};
        select_all(engine, of, choices.size(), threads);
        outcome = kFine;
      }
    } catch (const std::bad_alloc&) {
      outcome = kNoMemory;
    }
    Py_END_ALLOW_THREADS;
  }
  PyBuffer_Release(&numbers), PyBuffer_Release(&blocks);
  if (outcome == kNoMemory) return PyErr_NoMemory();
  if (outcome == kWrong) return PyErr_Format(PyExc_ValueError, "no blocks can be selected so");
  Py_RETURN_NONE;
}

PyObject* kernels_tally(PyObject* object, PyObject* args) {
  Engine& engine = *reinterpret_cast<Kernels*>(object)->engine;
  long long q_heads, kv_heads, qk_dim, block_size;
  float scale, softcap;
  int threads;
  unsigned long long sinks, q, k, k_scale, to;
  Py_buffer ids, seen;
  if (!PyArg_ParseTuple(args, "(LLLffK)KKKy*y*LKi", &q_heads, &kv_heads, &qk_dim, &scale, &softcap, &sinks, &q, &k,
                        &k_scale, &ids, &seen, &block_size, &to, &threads))
    return nullptr;
  const bool sense = kv_heads > 0 && q_heads > 0 && q_heads % kv_heads == 0 && qk_dim > 0 && block_size > 0 &&
                     !k_scale == (engine.stored == kAsQueries);
  bool enough = true;
  int64_t pairs = 0;
  if (sense) {
    Py_BEGIN_ALLOW_THREADS;
    const Operator op{q_heads, kv_heads, qk_dim, qk_dim, 0, scale, softcap, pointer<float>(sinks), nullptr};
    const Tallying of{&op,          pointer<void>(q), pointer<void>(k), pointer<float>(k_scale),
                      ints_of(ids), ints_of(seen),    count_of(seen),   count_of(ids),
                      block_size};
    try {
      pairs = tally_all(engine, of, pointer<int64_t>(to), threads);
    } catch (const std::bad_alloc&) {
      enough = false;
    }
    Py_END_ALLOW_THREADS;
  }
  PyBuffer_Release(&ids), PyBuffer_Release(&seen);
  if (!enough) return PyErr_NoMemory();
  if (!sense) return PyErr_Format(PyExc_ValueError, "no rows can be counted so");
  return PyLong_FromLongLong(pairs);
}

}  // namespace lamina::attention
