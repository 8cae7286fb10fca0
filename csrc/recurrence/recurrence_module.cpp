// lamina.ops.recurrence._recurrence: recurrence.h as a Python object. lamina/ops/recurrence/_recurrence.pyi documents it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <vector>

#include "engine_object.h"
#include "pool.h"
#include "recurrence/recurrence.h"
#include "without_gil.h"

namespace {

using namespace lamina;
using namespace lamina::recurrence;

constexpr const char* kLayer = "lamina.recurrence.layer";
constexpr std::int64_t kStreamed = 1 << 18;  // numbers of states that a call writes, from which they leave the caches
constexpr std::int64_t kWorthThreads = 1 << 14;  // numbers of states times tokens, below which one thread is as fast

template <class T = char>
T* pointer(unsigned long long v) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(v));
}

struct Engine {
  static constexpr const char* kLeast = "variant";  // there always is a portable one

  Engine(std::size_t threads, const Variant* v) : pool(threads), kernel(*v->kernel), scratch(threads) {}

  // Callers take turns: the pool and scratch are those of one call.
  void update(Call call, std::int64_t count) {
    std::lock_guard<std::mutex> turn(mutex);
    const Layer& layer = *call.layer;
    std::int64_t rows = 0;
    for (std::int64_t i = 0; i < count; ++i) rows += call.segments[i].rows;
    const std::size_t threads = rows * layer.state < kWorthThreads ? 1 : pool.size();
    const std::vector<Task> tasks = make_tasks(layer, call.segments, count, threads);
    call.stream = count * layer.state >= kStreamed;
    std::int64_t most = 1;
    for (const Task& task : tasks) most = std::max(most, task.end - task.head);
    for (Scratch& each : scratch) each.reserve(scratch_size(layer, most));  // memory may be short here, and not below
    pool.each(tasks.size(), threads,
              [&](std::size_t i, std::size_t thread) { kernel.run(call, tasks[i], scratch[thread]); });
  }

  void copy(const float* from, float* to, std::int64_t n) {
    std::lock_guard<std::mutex> turn(mutex);
    constexpr std::int64_t kPiece = 1 << 18;
    pool.each(std::size_t((n + kPiece - 1) / kPiece), SIZE_MAX, [&](std::size_t i, std::size_t) {
      const std::int64_t at = std::int64_t(i) * kPiece;
      kernel.copy(from + at, to + at, std::min(kPiece, n - at));
    });
  }

  std::mutex mutex;
  Pool pool;
  const Kernel& kernel;
  std::vector<Scratch> scratch;  // of each thread
};

using Object = EngineObject<Engine, variants, kVariants>;

void delete_layer(PyObject* capsule) { delete static_cast<Layer*>(PyCapsule_GetPointer(capsule, kLayer)); }

// Checked by lamina.ops.recurrence.spec and check_operands.
PyObject* layer_of(PyObject*, PyObject* args) {
  int kind, silu, normalised, softplus;
  Py_ssize_t heads, groups, per_group, first_head, keys, values, width, channels, q, k, v, history, state;
  float scale, least, most;
  unsigned long long weight, bias, a, d, dt_bias;
  if (!PyArg_ParseTuple(args, "innnnnnnpppfffnnnnnnKKKKK", &kind, &heads, &groups, &per_group, &first_head, &keys,
                        &values, &width, &silu, &normalised, &softplus, &scale, &least, &most, &channels, &q, &k, &v,
                        &history, &state, &weight, &bias, &a, &d, &dt_bias))
    return nullptr;
  if (kind < 0 || kind > 3) return PyErr_Format(PyExc_ValueError, "kind %d is none of 0 to 3", kind);
  try {
    const auto numbers = [](unsigned long long at, Py_ssize_t n) {
      const float* const p = pointer<const float>(at);
      return p ? std::vector<float>(p, p + n) : std::vector<float>();
    };
    auto* const layer = new Layer{Kind(kind),
                                  heads,
                                  groups,
                                  per_group,
                                  first_head,
                                  keys,
                                  values,
                                  width,
                                  silu != 0,
                                  normalised != 0,
                                  softplus != 0,
                                  scale,
                                  least,
                                  most,
                                  channels,
                                  q,
                                  k,
                                  v,
                                  history,
                                  state,
                                  numbers(weight, width * channels),
                                  numbers(bias, channels),
                                  numbers(a, heads),
                                  numbers(d, heads),
                                  numbers(dt_bias, heads)};
    PyObject* const capsule = PyCapsule_New(layer, kLayer, delete_layer);
    if (!capsule) delete layer;
    return capsule;
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

PyObject* engine_update(PyObject* self, PyObject* args) {
  PyObject* capsule;
  unsigned long long x, a, b, out, segments, states;
  int types[3];
  Py_ssize_t strides[3], count, slot;
  if (!PyArg_ParseTuple(args, "OKinKinKinKKnKn", &capsule, &x, &types[0], &strides[0], &a, &types[1], &strides[1], &b,
                        &types[2], &strides[2], &out, &segments, &count, &states, &slot))
    return nullptr;
  auto* const layer = static_cast<const Layer*>(PyCapsule_GetPointer(capsule, kLayer));
  if (!layer) return nullptr;
  for (int type : types)
    if (type < 0 || type > 2) return PyErr_Format(PyExc_ValueError, "type %d is none of 0, 1, 2", type);
  const auto rows = [&](unsigned long long at, int i) { return Rows{pointer(at), Type(types[i]), strides[i]}; };
  const Call call{
      layer, rows(x, 0), rows(a, 1), rows(b, 2), pointer(out), pointer<const Segment>(segments), pointer<float>(states),
      slot,  false};
  Engine& engine = Object::engine_of(self);
  return without_gil([&] { engine.update(call, count); }) ? Py_NewRef(Py_None) : nullptr;
}

PyObject* engine_copy(PyObject* self, PyObject* args) {
  unsigned long long from, to;
  Py_ssize_t n;
  if (!PyArg_ParseTuple(args, "KKn", &from, &to, &n)) return nullptr;
  if (from % 64 || to % 64 || n < 0 || n % 16)
    return PyErr_Format(PyExc_ValueError, "copies are of whole lines of 64 bytes");
  Engine& engine = Object::engine_of(self);
  const auto work = [&] { engine.copy(pointer<const float>(from), pointer<float>(to), n); };
  return without_gil(work) ? Py_NewRef(Py_None) : nullptr;
}

PyMethodDef engine_methods[] = {{"update", engine_update, METH_VARARGS, nullptr},
                                {"copy", engine_copy, METH_VARARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};

int exec(PyObject* module) {
  return Object::add_to(module, "lamina.ops.recurrence._recurrence.Engine", engine_methods);
}

PyMethodDef methods[] = {{"usable", Object::usable, METH_NOARGS, nullptr},
                         {"layer", layer_of, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(exec)}, {0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_recurrence", nullptr, 0, methods, slots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__recurrence() { return PyModuleDef_Init(&definition); }
