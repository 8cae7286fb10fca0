// lamina.gemm._native: the linear layers of linear.h as a Python object. lamina/gemm/_native.pyi documents it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <mutex>
#include <new>
#include <unordered_map>
#include <vector>

#include "engine_object.h"
#include "gemm/linear.h"
#include "pool.h"

namespace {

using namespace lamina;
using namespace lamina::gemm;

constexpr std::size_t kMostJoined = 8;

struct Engine {
  static constexpr const char* kLeast = "AVX2, FMA and F16C";

  Engine(std::size_t threads, const Variant* v) : pool(threads), variant(v), scratch(threads) {}

  // Callers take turns: the buffers below are those of one call. Problems of one type that have the same x, at most
  // kMostJoined, are one job of the threads, for which x is prepared once.
  void linear(const Problem* problems, std::size_t count, const void* x) {
    std::lock_guard<std::mutex> turn(mutex);
    Job job{this, {}, count};
    const Kernel* ready = nullptr;  // which x was prepared for
    std::size_t cols = 0;
    for (std::size_t i = 0; i < count; ++i) cols += problems[i].cols;
    for (std::size_t i = 0, pieces = 0; i < count; ++i) {
      Problem p = problems[i];
      const void* const copy = packed_of(p);
      const Kernel& kernel = copy ? packing(p.type)->kernel : variant->kernels[static_cast<int>(p.type)];
      if (copy) p.w = copy;
      const Plan plan = kernel.plan(p);
      p.x = static_cast<const float*>(x);
      if (plan.x) {
        auto& room = copy ? prepared_packed : prepared;
        p.x = reserve(room, plan.x);
        if (ready != &kernel) kernel.prepare(p, x, const_cast<float*>(p.x));
        ready = &kernel;
      }
      for (auto& s : scratch) reserve(s, plan.scratch);
      const std::size_t each = piece_cols(cols, plan);
      job.parts[i] = {p, kernel.columns, each, pieces};
      pieces += (p.cols + each - 1) / each;
      job.pieces = pieces;
    }
    pool.run(run_piece, &job, job.pieces);
  }

  // Null where the variant takes weights of this type as they lie alone.
  const Packing* packing(Type type) const { return variant->packings[static_cast<int>(type)]; }

  // There is a packing for them.
  void pack(Type type, const Weights& w, void* to) {
    std::lock_guard<std::mutex> turn(mutex);
    PackJob job{packing(type), w, to};
    pool.run(pack_piece, &job, (w.cols + job.packing->cols - 1) / job.packing->cols);
  }

  // Calls with these weights take `copy` in their place, which was packed from them.
  void use(Type type, const Weights& w, const void* copy) {
    std::lock_guard<std::mutex> turn(mutex);
    packed[w.at] = {type, w, copy};
  }

 private:
  struct Packed {
    Type type;
    Weights weights;
    const void* copy;
  };

  struct PackJob {
    const Packing* packing;
    Weights weights;
    void* to;
  };

  const void* packed_of(const Problem& p) const {
    if (packed.empty()) return nullptr;
    const auto found = packed.find(p.w);
    if (found == packed.end()) return nullptr;
    const auto& [type, w, copy] = found->second;
    return type == p.type && w.cols == p.cols && w.k_size == p.k_size && w.ldw == p.ldw ? copy : nullptr;
  }

  static void pack_piece(void* data, std::size_t piece, std::size_t) {
    const auto& job = *static_cast<PackJob*>(data);
    const std::size_t begin = piece * job.packing->cols;
    job.packing->pack(job.weights, job.to, begin, std::min(begin + job.packing->cols, job.weights.cols));
  }

  struct Part {
    Problem problem;
    decltype(Kernel::columns) columns;
    std::size_t cols;   // of a piece
    std::size_t first;  // piece
  };

  struct Job {
    Engine* engine;
    Part parts[kMostJoined];
    std::size_t count, pieces = 0;
  };

  static void run_piece(void* data, std::size_t piece, std::size_t thread) {
    const auto& job = *static_cast<Job*>(data);
    std::size_t i = job.count - 1;
    while (job.parts[i].first > piece) --i;
    const Part& part = job.parts[i];
    const std::size_t begin = (piece - part.first) * part.cols, end = std::min(begin + part.cols, part.problem.cols);
    part.columns(part.problem, begin, end, job.engine->scratch[thread].data());
  }

  // Whole panels, some pieces for each thread: one that lost its core to another process then holds up little.
  std::size_t piece_cols(std::size_t cols, const Plan& plan) const {
    const std::size_t pieces = 4 * pool.size(), panels = (cols + plan.cols * pieces - 1) / (plan.cols * pieces);
    return pool.size() == 1 ? cols : panels * plan.cols;
  }

  // Room for `floats`, at a multiple of 64 bytes.
  static float* reserve(std::vector<float>& memory, std::size_t floats) {
    constexpr std::size_t kAlign = 64;
    if (memory.size() < floats + kAlign / sizeof(float)) memory.resize(floats + kAlign / sizeof(float));
    const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
    return reinterpret_cast<float*>((at + kAlign - 1) / kAlign * kAlign);
  }

  std::mutex mutex;
  Pool pool;
  const Variant* variant;
  std::vector<std::vector<float>> scratch;  // of each thread
  std::vector<float> prepared, prepared_packed;  // x
  std::unordered_map<const void*, Packed> packed;  // by where weights lie
};

using Object = EngineObject<Engine, variants, kVariants>;

// The first `count` of the arguments as numbers of the machine, the one at `type` one of Type's. Whether they are.
bool numbers(const char* name, PyObject* const* args, Py_ssize_t count, Py_ssize_t wanted, Py_ssize_t type,
             unsigned long long* to) {
  if (count != wanted) {
    PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, wanted, count);
    return false;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    to[i] = PyLong_AsUnsignedLongLong(args[i]);
    if (to[i] == static_cast<unsigned long long>(-1) && PyErr_Occurred()) return false;
  }
  if (to[type] > 2) PyErr_Format(PyExc_ValueError, "type %llu is none of 0, 1, 2", to[type]);
  return to[type] <= 2;
}

void* address(unsigned long long number) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(number)); }

PyObject* engine_packed_bytes(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  unsigned long long v[3];  // type, cols, k_size
  if (!numbers("packed_bytes", args, count, 3, 0, v)) return nullptr;
  const Packing* const packing = Object::engine_of(self).packing(static_cast<Type>(v[0]));
  return PyLong_FromSize_t(packing ? packing->size(v[1], v[2]) : 0);
}

// w, copy, type, cols, k_size, ldw
PyObject* packed_call(PyObject* self, PyObject* const* args, Py_ssize_t count, bool fill) {
  unsigned long long v[6];
  if (!numbers(fill ? "pack" : "use", args, count, 6, 2, v)) return nullptr;
  Engine* const engine = &Object::engine_of(self);
  const auto type = static_cast<Type>(v[2]);
  if (!engine->packing(type)) return PyErr_Format(PyExc_ValueError, "weights of type %llu stay as they lie", v[2]);
  const Weights w{address(v[0]), v[3], v[4], v[5]};
  bool fits = true;
  Py_BEGIN_ALLOW_THREADS;
  try {
    if (fill)
      engine->pack(type, w, address(v[1]));
    else
      engine->use(type, w, address(v[1]));
  } catch (const std::bad_alloc&) {
    fits = false;
  }
  Py_END_ALLOW_THREADS;
  if (!fits) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

PyObject* engine_pack(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return packed_call(self, args, count, true);
}

PyObject* engine_use(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return packed_call(self, args, count, false);
}

// x, type, rows, k_size, and of each of the weights that meet x: w, b, y, cols, ldw
PyObject* engine_linear(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  constexpr Py_ssize_t kHead = 4, kEach = 5;
  const Py_ssize_t joined = (count - kHead) / kEach;
  if (joined < 1 || joined > static_cast<Py_ssize_t>(kMostJoined) || count != kHead + joined * kEach)
    return PyErr_Format(PyExc_TypeError, "linear takes 4 arguments and 5 for each of up to 8 weights, not %zd", count);
  unsigned long long v[kHead + kEach * kMostJoined];
  if (!numbers("linear", args, count, count, 1, v)) return nullptr;
  Problem problems[kMostJoined];
  for (Py_ssize_t i = 0; i < joined; ++i) {
    const auto* const each = v + kHead + i * kEach;
    problems[i] = {static_cast<Type>(v[1]),
                   nullptr,
                   address(each[0]),
                   address(each[1]),
                   address(each[2]),
                   v[2],
                   each[3],
                   v[3],
                   each[4]};
  }
  bool fits = true;
  Py_BEGIN_ALLOW_THREADS;
  try {
    Object::engine_of(self).linear(problems, static_cast<std::size_t>(joined), address(v[0]));
  } catch (const std::bad_alloc&) {
    fits = false;
  }
  Py_END_ALLOW_THREADS;
  if (!fits) return PyErr_NoMemory();
  Py_RETURN_NONE;
}

// For compiled code, which calls it with or without the GIL. 0, or 1 where memory ran out.
int run_linear(void* engine, const void* x, const void* w, const void* b, void* y, int type, std::int64_t rows,
               std::int64_t cols, std::int64_t k_size, std::int64_t ldw) {
  const auto size = [](std::int64_t n) { return static_cast<std::size_t>(n); };
  const Problem p{static_cast<Type>(type), nullptr, w, b, y, size(rows), size(cols), size(k_size), size(ldw)};
  PyThreadState* const state = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
  int status = 0;
  try {
    static_cast<Engine*>(engine)->linear(&p, 1, x);
  } catch (const std::bad_alloc&) {
    status = 1;
  }
  if (state) PyEval_RestoreThread(state);
  return status;
}

PyObject* engine_addresses(PyObject* self, PyObject*) {
  const auto engine = reinterpret_cast<std::uintptr_t>(&Object::engine_of(self));
  return Py_BuildValue("KK", static_cast<unsigned long long>(engine),
                       static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(&run_linear)));
}

template <PyObject* (*kCall)(PyObject*, PyObject* const*, Py_ssize_t)>
PyMethodDef fast(const char* name) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(kCall)), METH_FASTCALL, nullptr};
}

PyMethodDef engine_methods[] = {fast<engine_linear>("linear"),
                                fast<engine_packed_bytes>("packed_bytes"),
                                fast<engine_pack>("pack"),
                                fast<engine_use>("use"),
                                {"addresses", engine_addresses, METH_NOARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};

int exec(PyObject* module) { return Object::add_to(module, "lamina.gemm._native.Engine", engine_methods); }

PyMethodDef methods[] = {{"usable", Object::usable, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(exec)}, {0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_native", nullptr, 0, methods, slots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&definition); }
