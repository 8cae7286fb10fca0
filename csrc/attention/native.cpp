// lamina.ops.attention._attention: the kernels as Python objects. lamina/ops/attention/_attention.pyi documents them.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <map>
#include <mutex>
#include <new>

#include "attention/engine.h"
#include "attributes.h"
#include "module_types.h"
#include "without_gil.h"

namespace {

using namespace lamina::attention;

// The fastest first.
const Variant* const kVariants[] = {
#if defined(__x86_64__)
    &kAmxBf16, &kAvx512Bf16, &kAvx512, &kAvx2,
#endif
    &kPortable};

constexpr const char* kDtypeNames[kDtypes] = {"float32", "bfloat16", "float16"};
constexpr const char* kStoredNames[kStored] = {"", "int8", "fp8"};
constexpr int64_t kDtypeBytes[kDtypes] = {4, 2, 2};
constexpr int kTables = 7;

// Whether of stored tokens, query and KV heads, threads.
using Plans = std::map<std::array<int64_t, 4>, Tasks>;

struct Step {
  PyObject_HEAD Rows rows;
  Py_buffer tables[kTables];
  int held;
  Plans* tasks;  // by what they depend on besides the rows
};

using lamina::Attribute;
using lamina::free_object;
using lamina::ModuleTypes;
using lamina::Name;
using lamina::slot;
using lamina::without_gil;
using Types = ModuleTypes<2>;  // kernels, step

void step_dealloc(PyObject* object) {
  auto* self = reinterpret_cast<Step*>(object);
  for (int i = 0; i < self->held; ++i) PyBuffer_Release(&self->tables[i]);
  delete self->tasks;
  free_object(object);
}

// Step(rows), of a lamina.kv.paged_cache.RowTable.
PyObject* step_new(PyTypeObject* type, PyObject* args, PyObject*) {
  static const Name names[kTables] = {Name("row"),  Name("first"),  Name("count"), Name("seen"),
                                      Name("stop"), Name("origin"), Name("table")},
                    block_size("block_size");
  PyObject* rows;
  if (!PyArg_ParseTuple(args, "O", &rows)) return nullptr;
  auto* self = reinterpret_cast<Step*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  const int64_t size_of_block = Attribute(rows)[block_size].integer();
  if (PyErr_Occurred()) return Py_DECREF(self), nullptr;
  for (const Name& name : names) {
    PyObject* const array = PyObject_GetAttr(rows, name);
    Py_buffer& table = self->tables[self->held];
    const bool failed = !array || PyObject_GetBuffer(array, &table, PyBUF_C_CONTIGUOUS);
    Py_XDECREF(array);
    if (failed) return Py_DECREF(self), nullptr;
    ++self->held;
    if (table.itemsize != sizeof(int64_t)) {
      PyErr_SetString(PyExc_TypeError, "the tables of a step are int64");
      return Py_DECREF(self), nullptr;
    }
  }
  const auto numbers = [&](int i) { return static_cast<const int64_t*>(self->tables[i].buf); };
  const auto size = [&](int i) { return int64_t(self->tables[i].len) / int64_t(sizeof(int64_t)); };
  const int64_t sequences = size(0);
  for (int i = 1; i < kTables - 1; ++i)
    if (size(i) != sequences) {
      PyErr_SetString(PyExc_ValueError, "the tables of a step have one entry for each sequence");
      return Py_DECREF(self), nullptr;
    }
  const int64_t width = sequences ? size(kTables - 1) / sequences : 0;
  self->rows = {numbers(0), numbers(1), numbers(2), numbers(3), numbers(4),
                numbers(5), numbers(6), sequences,  width,      size_of_block};
  self->tasks = new (std::nothrow) Plans;
  if (!self->tasks) return Py_DECREF(self), PyErr_NoMemory();
  return reinterpret_cast<PyObject*>(self);
}

const Tasks& tasks_of(Step* step, bool stored, const Operator& op, int threads) {
  // A window is that of the layer group, and a step is of one group.
  const Plans::key_type key{stored, op.q_heads, op.kv_heads, threads};
  const auto found = step->tasks->find(key);
  if (found != step->tasks->end()) return found->second;
  return step->tasks->emplace(key, make_tasks(step->rows, stored, op, threads)).first->second;
}

// Threads besides the caller's for which there is work enough.
int helpers_for(const Operator& op, const Tasks& tasks, int64_t item, int threads) {
  const double dims = double(op.kv_heads * (op.qk_dim + op.v_dim));
  const double ns = dims * std::max(double(tasks.pairs) / kPairsPerNs, double(tasks.tokens * item) / kBytesPerNs);
  const double most = std::min(ns / kHelpNs, double(tasks.tasks.size()) - 1);
  return int(std::min(double(threads) - 1, most));
}

void attend(Engine& engine, Call call, const Tasks& tasks, int threads) {
  const Operator& op = *call.op;
  const std::lock_guard lock(engine.busy);
  const int helpers = std::max(0, helpers_for(op, tasks, engine.stored ? 1 : kDtypeBytes[engine.dtype], threads));
  const std::size_t all = threads_of(engine.pool, std::size_t(helpers) + 1);
  if (engine.scratch.size() < all) engine.scratch.resize(all);
  for (Scratch& scratch : engine.scratch) scratch.reserve(Scratch::needed(op, tasks.chunks));
  if (!tasks.splits.empty()) {
    const std::size_t parts = tasks.tasks.size() * std::size_t(node_size(op, kTile)), splits = tasks.splits.size();
    if (engine.parts.size() < parts) engine.parts.resize(parts);
    if (engine.left.size() < splits) engine.left = std::vector<std::atomic<int>>(splits);
    for (std::size_t i = 0; i < splits; ++i) engine.left[i] = int(tasks.splits[i].tasks);
  }
  call.parts = engine.parts.data(), call.left = engine.left.data();
  call.tasks = tasks.tasks.data(), call.splits = tasks.splits.data();
  const auto run = engine.variant->run[engine.dtype][engine.stored];
  engine.pool.each(tasks.tasks.size(), all,
                   [&](std::size_t i, std::size_t thread) { run(call, int64_t(i), engine.scratch[thread]); });
}

Prepared prepare(PyObject* kernels, PyObject* of, bool stored, const Operator& op, int threads) {
  if (Py_TYPE(of) != Types::of(Py_TYPE(kernels))[1])
    return PyErr_Format(PyExc_TypeError, "a step of attention is a Step"), Prepared{};
  auto* step = reinterpret_cast<Step*>(of);
  try {
    return {&step->rows, &tasks_of(step, stored, op, threads)};
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory(), Prepared{};
  }
}

PyObject* kernels_new(PyTypeObject* type, PyObject* args, PyObject*) {
  const char *name, *dtype, *stored = kStoredNames[kAsQueries];
  if (!PyArg_ParseTuple(args, "ss|s", &name, &dtype, &stored)) return nullptr;
  const auto variant = std::find_if(std::begin(kVariants), std::end(kVariants),
                                    [&](const Variant* v) { return !std::strcmp(v->name, name) && v->usable(); });
  if (variant == std::end(kVariants)) return PyErr_Format(PyExc_ValueError, "this CPU does not run variant '%s'", name);
  const auto find = [](const auto& names, const char* name) {
    return std::find_if(std::begin(names), std::end(names),
                        [&](const char* known) { return !std::strcmp(known, name); });
  };
  const auto kind = find(kDtypeNames, dtype), kept = find(kStoredNames, stored);
  if (kind == std::end(kDtypeNames)) return PyErr_Format(PyExc_ValueError, "no kernels for '%s'", dtype);
  if (kept == std::end(kStoredNames)) return PyErr_Format(PyExc_ValueError, "no kernels for stored '%s'", stored);
  auto* self = reinterpret_cast<Kernels*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->engine = new (std::nothrow) Engine;
  if (!self->engine) return Py_DECREF(self), PyErr_NoMemory();
  self->engine->variant = *variant, self->engine->dtype = Dtype(kind - kDtypeNames);
  self->engine->stored = Stored(kept - kStoredNames);
  self->calls = {reinterpret_cast<PyObject*>(self),
                 self->engine,
                 prepare,
                 [](void* engine, Call call, Prepared step, int threads) {
                   call.rows = step.rows;
                   attend(*static_cast<Engine*>(engine), call, *step.tasks, threads);
                 },
                 [](void* engine, const Selecting& of, std::size_t choices, int threads) {
                   select_all(*static_cast<Engine*>(engine), of, choices, threads);
                 },
                 [](void* engine, const Tallying& of, int64_t* to, int threads) {
                   return tally_all(*static_cast<Engine*>(engine), of, to, threads);
                 },
                 read_choices,
                 make_tasks};
  return reinterpret_cast<PyObject*>(self);
}

void kernels_dealloc(PyObject* object) {
  delete reinterpret_cast<Kernels*>(object)->engine;
  free_object(object);
}

// The attributes of a lamina.ops.attention.merge.Partial.
Partial read_partial(PyObject* of) {
  static const Name o("o"), lse("lse");
  const Attribute part(of);
  return {part[o].address<float>(), part[lse].address<float>()};
}

// attend(step, op, stored, q, kv, part, out, threads)
PyObject* kernels_attend(PyObject* object, PyObject* args) {
  static const Name k("k"), v("v"), scales("scales");
  Engine& engine = *reinterpret_cast<Kernels*>(object)->engine;
  PyObject *of, *operand, *q, *kv, *part, *out;
  int stored, threads;
  Operator op;
  if (!PyArg_ParseTuple(args, "OOpOOOOi", &of, &operand, &stored, &q, &kv, &part, &out, &threads) ||
      !read_operator(operand, &op))
    return nullptr;
  const Attribute rows(kv), factors = rows[scales];
  const Partial result = read_partial(part);
  Call call{};
  call.op = &op, call.stored = stored;
  call.q = Attribute(q).address<void>(), call.k = rows[k].address<void>(), call.v = rows[v].address<void>();
  if (!factors.is_none()) call.k_scale = factors[k].address<float>(), call.v_scale = factors[v].address<float>();
  call.o = result.o, call.lse = result.lse, call.out = Attribute(out).address_or_null<void>();
  if (PyErr_Occurred()) return nullptr;
  if (engine.stored && !(call.k_scale && call.v_scale))
    return PyErr_Format(PyExc_ValueError, "k and v of '%s' without scales", kStoredNames[engine.stored]);
  // With the GIL: other threads may ask the same step.
  const Prepared prepared = prepare(object, of, stored, op, threads);
  if (!prepared.rows) return nullptr;
  call.rows = prepared.rows;
  return without_gil([&] { attend(engine, call, *prepared.tasks, threads); }) ? Py_NewRef(Py_None) : nullptr;
}

PyObject* kernels_read(PyObject* object, PyObject* args) {
  Engine& engine = *reinterpret_cast<Kernels*>(object)->engine;
  unsigned long long address, bytes, piece = 4 << 20;
  int threads;
  if (!PyArg_ParseTuple(args, "KKi", &address, &bytes, &threads)) return nullptr;
  std::atomic<unsigned long long> all{0};
  Py_BEGIN_ALLOW_THREADS;
  const std::lock_guard lock(engine.busy);
  const std::size_t pieces = std::size_t((bytes + piece - 1) / piece);
  engine.pool.each(pieces, threads_of(engine.pool, std::size_t(std::max(threads, 1))), [&](std::size_t i, std::size_t) {
    const unsigned long long at = i * piece;
    all ^= engine.variant->read(reinterpret_cast<char*>(std::uintptr_t(address + at)), std::min(piece, bytes - at));
  });
  Py_END_ALLOW_THREADS;
  return PyLong_FromUnsignedLongLong(all);
}

// merge(parts, left, right, pairs, q_heads, v_dim)
PyObject* kernels_merge(PyObject* object, PyObject* args) {
  const Engine& engine = *reinterpret_cast<Kernels*>(object)->engine;
  PyObject *parts, *left, *right;
  long long pairs, q_heads, v_dim;
  if (!PyArg_ParseTuple(args, "OOOLLL", &parts, &left, &right, &pairs, &q_heads, &v_dim)) return nullptr;
  const Partial all = read_partial(parts);
  const auto *to = Attribute(left).address<int64_t>(), *from = Attribute(right).address<int64_t>();
  if (PyErr_Occurred()) return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  const auto row = [&](int64_t at) { return Partial{all.o + at * q_heads * v_dim, all.lse + at * q_heads}; };
  for (int64_t i = 0; i < pairs; ++i) engine.variant->merge(row(to[i]), row(from[i]), q_heads, v_dim);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

// close(stored, fresh, sinks, queries, q_heads, v_dim, out)
PyObject* kernels_close(PyObject* object, PyObject* args) {
  const Engine& engine = *reinterpret_cast<Kernels*>(object)->engine;
  PyObject *stored, *fresh, *sinks, *out;
  long long queries, q_heads, v_dim;
  if (!PyArg_ParseTuple(args, "OOOLLLO", &stored, &fresh, &sinks, &queries, &q_heads, &v_dim, &out)) return nullptr;
  const Partial a = read_partial(stored), b = read_partial(fresh);
  const auto* const sink = Attribute(sinks).address_or_null<float>();
  void* const to = Attribute(out).address<void>();
  if (PyErr_Occurred()) return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  engine.variant->finish[engine.dtype](a, b, sink, queries, q_heads, v_dim, to);
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* kernels_calls(PyObject* object, PyObject*) {
  return PyCapsule_New(&reinterpret_cast<Kernels*>(object)->calls, Calls::kName, nullptr);
}

PyMethodDef kernels_methods[] = {
    {"attend", kernels_attend, METH_VARARGS, nullptr}, {"merge", kernels_merge, METH_VARARGS, nullptr},
    {"close", kernels_close, METH_VARARGS, nullptr},   {"read", kernels_read, METH_VARARGS, nullptr},
    {"select", kernels_select, METH_VARARGS, nullptr}, {"tally", kernels_tally, METH_VARARGS, nullptr},
    {"calls", kernels_calls, METH_NOARGS, nullptr},    {nullptr, nullptr, 0, nullptr}};

PyType_Slot kernels_slots[] = {{Py_tp_new, slot(kernels_new)},
                               {Py_tp_dealloc, slot(kernels_dealloc)},
                               {Py_tp_methods, kernels_methods},
                               {0, nullptr}};
PyType_Slot step_slots[] = {{Py_tp_new, slot(step_new)}, {Py_tp_dealloc, slot(step_dealloc)}, {0, nullptr}};
PyType_Spec kernels_spec = {"lamina.ops.attention._attention.Kernels", sizeof(Kernels), 0, Py_TPFLAGS_DEFAULT,
                            kernels_slots};
PyType_Spec step_spec = {"lamina.ops.attention._attention.Step", sizeof(Step), 0, Py_TPFLAGS_DEFAULT, step_slots};

int module_exec(PyObject* module) {
  if (Types::add(module, {&kernels_spec, &step_spec})) return -1;
  PyObject* names = PyList_New(0);
  if (!names) return -1;
  for (const Variant* variant : kVariants) {
    if (!variant->usable()) continue;
    PyObject* name = PyUnicode_FromString(variant->name);
    const bool failed = !name || PyList_Append(names, name);
    Py_XDECREF(name);
    if (failed) return Py_DECREF(names), -1;
  }
  PyObject* variants = PyList_AsTuple(names);
  Py_DECREF(names);
  const int failed = variants ? PyModule_AddObjectRef(module, "VARIANTS", variants) : -1;
  Py_XDECREF(variants);
  return failed;
}

PyModuleDef_Slot module_slots[] = {{Py_mod_exec, slot(module_exec)}, {0, nullptr}};
PyModuleDef module_definition = Types::definition("Attention of stored and new tokens on CPUs.", module_slots);

}  // namespace

PyMODINIT_FUNC PyInit__attention() { return PyModuleDef_Init(&module_definition); }
