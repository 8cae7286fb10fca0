// lamina.ops.sampling._sampling: draw.h as a Python object. lamina/ops/sampling/_sampling.pyi documents it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <atomic>
#include <mutex>
#include <new>
#include <vector>

#include "engine_object.h"
#include "pool.h"
#include "sampling/draw.h"
#include "sampling/random.h"
#include "without_gil.h"

namespace {

using namespace lamina;
using namespace lamina::sampling;

constexpr std::size_t kMostTokens = std::size_t{1} << 22;  // so that sums of masses stay below 2^63
constexpr std::size_t kWorthThreads = 1 << 18;             // logits, below which one thread is as fast
constexpr std::size_t kSizes[kTypes] = {4, 2, 2};

struct Logits {
  const unsigned char* x;
  Type type;
  std::size_t rows, size, stride;  // in logits

  const void* row(std::size_t i) const { return x + i * stride * kSizes[static_cast<int>(type)]; }
};

struct Engine {
  static constexpr const char* kLeast = "variant";  // there always is a portable one

  Engine(std::size_t threads, const Variant* v) : pool(threads), variant(v), scratch(threads) {}

  // Rows are pieces: which thread takes which changes no token. Throws std::bad_alloc.
  template <class Do>
  void each(std::size_t count, std::size_t size, Do work) {
    std::lock_guard<std::mutex> turn(mutex);
    std::atomic<bool> fits{true};
    pool.each(count, count * size < kWorthThreads ? 1 : SIZE_MAX, [&](std::size_t i, std::size_t thread) {
      try {
        work(i, scratch[thread]);
      } catch (const std::bad_alloc&) {
        fits = false;
      }
    });
    if (!fits) throw std::bad_alloc();
  }

  std::mutex mutex;
  Pool pool;
  const Variant* variant;
  std::vector<Scratch> scratch;  // of each thread
};

using Object = EngineObject<Engine, variants, kVariants>;

// False, with an exception.
template <class... Values>
bool refuse(const char* format, Values... values) {
  PyErr_Format(PyExc_ValueError, format, values...);
  return false;
}

bool check(const Logits& logits) {
  if (logits.size < 1 || logits.size > kMostTokens)
    return refuse("a vocabulary has 1 to %zu tokens, not %zu", kMostTokens, logits.size);
  if (logits.rows > 1 && logits.stride < logits.size)
    return refuse("rows of %zu logits overlap at a stride of %zu", logits.size, logits.stride);
  return true;
}

bool check(const Ask& ask, const Logits& logits) {
  const bool fine = ask.row < logits.rows && ask.top_k && ask.share && ask.share <= kWhole && ask.cut <= 0 &&
                    ask.factor > 0.0f && ask.factor <= std::numeric_limits<float>::max() && ask.num_bits % kBlock == 0;
  return fine || refuse("the draw of row %u of %zu has a field out of range", ask.row, logits.rows);
}

bool parse(unsigned long long x, int type, Py_ssize_t rows, Py_ssize_t size, Py_ssize_t stride, Logits* out) {
  if (type < 0 || type >= kTypes) return refuse("type %d is none of 0, 1, 2", type);
  const auto whole = [](Py_ssize_t n) { return n < 0 ? 0 : static_cast<std::size_t>(n); };
  *out = {reinterpret_cast<const unsigned char*>(static_cast<std::uintptr_t>(x)), static_cast<Type>(type), whole(rows),
          whole(size), whole(stride)};
  return check(*out);
}

PyObject* list_of(const std::vector<std::int64_t>& values) {
  PyObject* list = PyList_New(static_cast<Py_ssize_t>(values.size()));
  for (std::size_t i = 0; list && i < values.size(); ++i) {
    PyObject* value = PyLong_FromLongLong(values[i]);
    if (!value)
      Py_CLEAR(list);
    else
      PyList_SET_ITEM(list, static_cast<Py_ssize_t>(i), value);
  }
  return list;
}

PyObject* engine_draw(PyObject* self, PyObject* args) {
  unsigned long long x;
  int type;
  Py_ssize_t rows, size, stride;
  Py_buffer buffer;
  if (!PyArg_ParseTuple(args, "Kinnny*", &x, &type, &rows, &size, &stride, &buffer)) return nullptr;
  Logits logits{};
  bool fine = parse(x, type, rows, size, stride, &logits);
  if (fine && buffer.len % static_cast<Py_ssize_t>(sizeof(Ask)))
    fine = refuse("%zd bytes are no whole number of draws", buffer.len);
  const std::size_t count = static_cast<std::size_t>(buffer.len) / sizeof(Ask);
  std::vector<Ask> asks(fine ? count : 0);
  if (fine) std::memcpy(asks.data(), buffer.buf, count * sizeof(Ask));
  PyBuffer_Release(&buffer);
  for (const Ask& ask : asks) fine = fine && check(ask, logits);
  if (!fine) return nullptr;
  std::vector<std::int64_t> tokens(count);
  Engine& engine = Object::engine_of(self);
  const auto one = [&](std::size_t i, Scratch& scratch) {
    tokens[i] = draw(engine.variant->kernels, logits.type, logits.row(asks[i].row), logits.size, asks[i], scratch);
  };
  return without_gil([&] { engine.each(count, logits.size, one); }) ? list_of(tokens) : nullptr;
}

PyObject* engine_best(PyObject* self, PyObject* args) {
  unsigned long long x, out;
  int type;
  Py_ssize_t rows, size, stride, count;
  if (!PyArg_ParseTuple(args, "KinnnnK", &x, &type, &rows, &size, &stride, &count, &out)) return nullptr;
  Logits logits{};
  if (!parse(x, type, rows, size, stride, &logits)) return nullptr;
  if (count < 1 || count > size)
    return PyErr_Format(PyExc_ValueError, "%zd of %zd logits cannot be chosen", count, size);
  auto* const ids = reinterpret_cast<std::int64_t*>(static_cast<std::uintptr_t>(out));
  const auto width = static_cast<std::size_t>(count);
  Engine& engine = Object::engine_of(self);
  const auto one = [&](std::size_t i, Scratch& scratch) {
    best(engine.variant->kernels, logits.type, logits.row(i), logits.size, width, ids + i * width, scratch);
  };
  return without_gil([&] { engine.each(logits.rows, logits.size, one); }) ? Py_NewRef(Py_None) : nullptr;
}

PyObject* engine_masses(PyObject* self, PyObject* args) {
  unsigned long long x;
  int type, cut;
  Py_ssize_t size;
  float top, factor;
  if (!PyArg_ParseTuple(args, "Kinffi", &x, &type, &size, &top, &factor, &cut)) return nullptr;
  Logits logits{};
  if (!parse(x, type, 1, size, size, &logits)) return nullptr;
  if (logits.size % kBlock) return PyErr_Format(PyExc_ValueError, "masses come in blocks of %zu", kBlock);
  std::vector<std::int64_t> masses(logits.size);
  const Kernel& kernel = Object::engine_of(self).variant->kernels[type];
  const std::size_t bytes = kSizes[type];
  for (std::size_t i = 0; i < logits.size; i += kBlock)
    kernel.fill(logits.x + i * bytes, {top, factor, cut}, -std::numeric_limits<float>::infinity(), &masses[i]);
  return list_of(masses);
}

PyObject* random_of(PyObject*, PyObject* args) {
  unsigned long long seed, index;
  if (!PyArg_ParseTuple(args, "KK", &seed, &index)) return nullptr;
  return PyLong_FromUnsignedLongLong(lamina::sampling::random_bits(seed, index));
}

PyMethodDef engine_methods[] = {{"draw", engine_draw, METH_VARARGS, nullptr},
                                {"best", engine_best, METH_VARARGS, nullptr},
                                {"masses", engine_masses, METH_VARARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};

int exec(PyObject* module) { return Object::add_to(module, "lamina.ops.sampling._sampling.Engine", engine_methods); }

PyMethodDef methods[] = {{"usable", Object::usable, METH_NOARGS, nullptr},
                         {"random_bits", random_of, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(exec)}, {0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_sampling", nullptr, 0, methods, slots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__sampling() { return PyModuleDef_Init(&definition); }
