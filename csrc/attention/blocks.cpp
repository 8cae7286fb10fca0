// Which blocks rows attend, and how much: the parts of Kernels that Python calls for them.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "attention/engine.h"
#include "attributes.h"
#include "without_gil.h"

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

bool read_operator(PyObject* from, Operator* op) {
  static const Name q_heads("q_heads"), kv_heads("kv_heads"), qk_dim("qk_dim"), v_dim("v_dim"), spec("spec"),
      window("window"), scale("scale"), softcap("softcap"), sinks("sinks"), slopes("slopes");
  const Attribute of(from), meaning = of[spec];
  op->q_heads = of[q_heads].integer(), op->kv_heads = of[kv_heads].integer();
  op->qk_dim = of[qk_dim].integer(), op->v_dim = of[v_dim].integer();
  op->window = meaning[window].integer(), op->scale = meaning[scale].real(), op->softcap = meaning[softcap].real();
  op->sinks = of[sinks].address_or_null<float>(), op->slopes = of[slopes].address_or_null<float>();
  if (PyErr_Occurred()) return false;
  if (op->kv_heads > 0 && op->q_heads > 0 && op->q_heads % op->kv_heads == 0 && op->qk_dim > 0 && op->v_dim > 0)
    return true;
  PyErr_Format(PyExc_ValueError, "attention of %lld query heads, %lld KV heads, %lld and %lld dims",
               (long long)op->q_heads, (long long)op->kv_heads, (long long)op->qk_dim, (long long)op->v_dim);
  return false;
}

// select(op, bounds, choices, blocks, q, table, width, threads)
PyObject* kernels_select(PyObject* object, PyObject* args) {
  Engine& engine = *reinterpret_cast<Kernels*>(object)->engine;
  PyObject *operand, *q, *least, *most, *table;
  long long width;
  int threads;
  Operator op;
  Py_buffer numbers, blocks;
  if (!PyArg_ParseTuple(args, "OOOy*y*OOLi", &operand, &least, &most, &numbers, &blocks, &q, &table, &width, &threads))
    return nullptr;
  Selecting of{};
  if (read_operator(operand, &op)) {
    of.op = &op, of.width = width, of.q = Attribute(q).address<void>(), of.table = Attribute(table).address<int64_t>();
    of.least = Attribute(least).address<void>(), of.most = Attribute(most).address<void>();
  }
  bool sense = width > 0;
  const bool done = !PyErr_Occurred() && without_gil([&] {
    std::vector<Choice> choices;
    sense = sense &&
            read_choices(ints_of(numbers), count_of(numbers) / 6, ints_of(blocks), count_of(blocks), width, &choices);
    of.choices = choices.data();
    if (sense) select_all(engine, of, choices.size(), threads);
  });
  PyBuffer_Release(&numbers), PyBuffer_Release(&blocks);
  if (!done) return nullptr;
  if (!sense) return PyErr_Format(PyExc_ValueError, "no blocks can be selected so");
  Py_RETURN_NONE;
}

// tally(op, k, k_scale, block_size, blocks, q, seen, to, threads)
PyObject* kernels_tally(PyObject* object, PyObject* args) {
  Engine& engine = *reinterpret_cast<Kernels*>(object)->engine;
  PyObject *operand, *q, *k, *k_scale, *to;
  long long block_size;
  int threads;
  Operator op;
  Py_buffer ids, seen;
  if (!PyArg_ParseTuple(args, "OOOLy*Oy*Oi", &operand, &k, &k_scale, &block_size, &ids, &q, &seen, &to, &threads))
    return nullptr;
  Tallying of{};
  int64_t pairs = 0, *sums = nullptr;
  if (read_operator(operand, &op)) {
    of.op = &op, of.q = Attribute(q).address<void>(), of.k = Attribute(k).address<void>();
    of.k_scale = Attribute(k_scale).address_or_null<float>(), sums = Attribute(to).address<int64_t>();
    of.ids = ints_of(ids), of.seen = ints_of(seen), of.rows = count_of(seen), of.blocks = count_of(ids);
    of.block_size = block_size;
  }
  const bool sense = block_size > 0 && !of.k_scale == (engine.stored == kAsQueries);
  const bool done = !PyErr_Occurred() && without_gil([&] { pairs = sense ? tally_all(engine, of, sums, threads) : 0; });
  PyBuffer_Release(&ids), PyBuffer_Release(&seen);
  if (!done) return nullptr;
  if (!sense) return PyErr_Format(PyExc_ValueError, "no rows can be counted so");
  return PyLong_FromLongLong(pairs);
}

}  // namespace lamina::attention
