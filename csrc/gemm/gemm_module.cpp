// lamina.ops.gemm._gemm: the linear layers of linear.h as a Python object. lamina/ops/gemm/_gemm.pyi documents it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

#include "engine_object.h"
#include "gemm/calls.h"
#include "gemm/quantized.h"
#include "pool.h"
#include "without_gil.h"

namespace {

using namespace lamina;
using namespace lamina::gemm;

struct Engine {
  static constexpr const char* kLeast = "AVX2, FMA and F16C";

  Engine(std::size_t threads, const Variant* v) : pool(threads), variant(v), scratch(threads) {
    calls = {this, [](void* e, const Problem& p, const void* x) { static_cast<Engine*>(e)->linear(p, x); },
             [](void* e, Pool::Piece piece, void* job, std::size_t count) {
               auto* const engine = static_cast<Engine*>(e);
               std::lock_guard<std::mutex> turn(engine->mutex);
               engine->pool.run(piece, job, count);
             },
             pool.size(), quantized::row};
  }

  // Callers take turns: the buffers below are those of one call.
  void linear(Problem p, const void* x) {
    std::lock_guard<std::mutex> turn(mutex);
    if (p.form) (p.form->int8_x ? int8_products : float_products).fetch_add(1, std::memory_order_relaxed);
    const Kernel& kernel = kernel_of(p);
    const Plan plan = kernel.plan(p);
    p.x = static_cast<const float*>(x);
    if (plan.x) {
      float* const to = reserve(prepared, plan.x);
      pool.each((p.rows + kRowsPrepared - 1) / kRowsPrepared, SIZE_MAX, [&](std::size_t piece, std::size_t) {
        const std::size_t begin = piece * kRowsPrepared;
        kernel.prepare(p, x, begin, std::min(begin + kRowsPrepared, p.rows), to);
      });
      p.x = to;
    }
    for (auto& s : scratch) reserve(s, plan.scratch);
    each_piece(p, plan, [&](std::size_t begin, std::size_t end, std::size_t thread) {
      kernel.columns(p, begin, end, aligned(scratch[thread]));
    });
  }

  // Bytes of w in the variant's own order; 0 where it has none for the type.
  std::size_t packed_bytes(Type type, std::size_t cols, std::size_t k_size) const {
    return type == Type::kBf16 && variant->packing ? variant->packing->bytes(cols, k_size) : 0;
  }

  void pack(const Problem& p, void* to) {
    std::lock_guard<std::mutex> turn(mutex);
    const Packing& packing = *variant->packing;
    each_piece(p, packing.kernel.plan(p),
               [&](std::size_t begin, std::size_t end, std::size_t) { packing.pack(p, begin, end, to); });
  }

  // Packs quantized weights; every variant takes the same order.
  void pack_quantized(const Form& form, const quantized::Plain& from, std::size_t cols, std::size_t k_size, void* to) {
    std::lock_guard<std::mutex> turn(mutex);
    const std::size_t panels = (cols + quantized::kCols - 1) / quantized::kCols;
    pool.each(panels, SIZE_MAX, [&](std::size_t panel, std::size_t) {
      const std::size_t begin = panel * quantized::kCols, end = std::min(begin + quantized::kCols, cols);
      quantized::pack(form, from, cols, k_size, begin, end, to);
    });
  }

  // Rows ids[0 .. count) of a quantized w, to y [count, k_size].
  void quantized_rows(const Form& form, const std::int64_t* ids, const void* w, std::size_t count, std::size_t k_size,
                      float* y) {
    std::lock_guard<std::mutex> turn(mutex);
    pool.each((count + kRowsPrepared - 1) / kRowsPrepared, SIZE_MAX, [&](std::size_t piece, std::size_t) {
      const std::size_t begin = piece * kRowsPrepared, end = std::min(begin + kRowsPrepared, count);
      for (std::size_t i = begin; i < end; ++i)
        quantized::row(form, w, k_size, static_cast<std::size_t>(ids[i]), y + i * k_size);
    });
  }

  std::mutex mutex;
  Pool pool;
  Calls calls{};
  std::atomic<std::uint64_t> float_products{0}, int8_products{0};  // by quantized weights

 private:
  const Kernel& kernel_of(const Problem& p) const {
    if (p.form) return (p.form->int8_x ? variant->int8_rows : variant->quantized)[static_cast<int>(p.type)];
    return p.packed ? variant->packing->kernel : variant->kernels[static_cast<int>(p.type)];
  }

  // Does `work(begin, end, thread)` for all columns. Pieces are whole panels, some for each thread: one that lost its
  // core to another process then holds up little.
  template <class Work>
  void each_piece(const Problem& p, const Plan& plan, Work work) {
    const std::size_t pieces = 4 * pool.size(), panels = (p.cols + plan.cols * pieces - 1) / (plan.cols * pieces);
    const std::size_t cols = pool.size() == 1 ? p.cols : panels * plan.cols;
    pool.each((p.cols + cols - 1) / cols, SIZE_MAX, [&](std::size_t piece, std::size_t thread) {
      work(piece * cols, std::min((piece + 1) * cols, p.cols), thread);
    });
  }

  static constexpr std::size_t kAlign = 64;

  // Room for `floats`, at a multiple of 64 bytes.
  static float* reserve(std::vector<float>& memory, std::size_t floats) {
    if (memory.size() < floats + kAlign / sizeof(float)) memory.resize(floats + kAlign / sizeof(float));
    return aligned(memory);
  }

  static float* aligned(std::vector<float>& memory) {
    const auto at = reinterpret_cast<std::uintptr_t>(memory.data());
    return reinterpret_cast<float*>((at + kAlign - 1) / kAlign * kAlign);
  }

  const Variant* variant;
  std::vector<std::vector<float>> scratch;  // of each thread
  std::vector<float> prepared;              // x
};

using Object = EngineObject<Engine, variants, kVariants>;

// `count` numbers of `args`, of which number `type` is a Type. False with an error set where they are not.
bool numbers(const char* name, PyObject* const* args, Py_ssize_t given, Py_ssize_t count, int type,
             unsigned long long* v) {
  if (given != count)
    return PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, not %zd", name, count, given), false;
  for (Py_ssize_t i = 0; i < count; ++i) {
    v[i] = PyLong_AsUnsignedLongLong(args[i]);
    if (v[i] == static_cast<unsigned long long>(-1) && PyErr_Occurred()) return false;
  }
  if (v[type] > 2) return PyErr_Format(PyExc_ValueError, "type %llu is none of 0, 1, 2", v[type]), false;
  return true;
}

void* pointer(unsigned long long v) { return reinterpret_cast<void*>(static_cast<std::uintptr_t>(v)); }

PyObject* engine_packed_bytes(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  unsigned long long v[3];
  if (!numbers("packed_bytes", args, count, 3, 0, v)) return nullptr;
  return PyLong_FromSize_t(Object::engine_of(self).packed_bytes(static_cast<Type>(v[0]), v[1], v[2]));
}

PyObject* engine_pack(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  unsigned long long v[6];
  if (!numbers("pack", args, count, 6, 2, v)) return nullptr;
  const Problem p{static_cast<Type>(v[2]), nullptr, pointer(v[0]), nullptr, nullptr, 1, v[3], v[4], v[5]};
  if (!Object::engine_of(self).packed_bytes(p.type, p.cols, p.k_size))
    return PyErr_Format(PyExc_ValueError, "no weights of type %llu are packed here", v[2]);
  return without_gil([&] { Object::engine_of(self).pack(p, pointer(v[1])); }) ? Py_NewRef(Py_None) : nullptr;
}

// A Form by seven numbers: bits, block, by_channel, type of scales, offsets, int8_x, address of 16 floats. False with an
// error set where there is none like that.
bool form_of(const unsigned long long* v, Form* form) {
  *form = {v[0], v[1], v[2] != 0, static_cast<Type>(v[3]), v[4] != 0, {}, v[5] != 0};
  if (v[6]) std::memcpy(form->values, pointer(v[6]), sizeof form->values);
  if (!quantized::is_known(*form) || v[3] > 2)
    return PyErr_Format(PyExc_ValueError, "no weights of %llu bits by blocks of %llu", v[0], v[1]), false;
  return true;
}

PyObject* engine_quantized_bytes(PyObject*, PyObject* const* args, Py_ssize_t count) {
  unsigned long long v[9];
  Form form;
  if (!numbers("quantized_bytes", args, count, 9, 5, v) || !form_of(v + 2, &form)) return nullptr;
  return PyLong_FromSize_t(quantized::bytes(form, v[0], v[1]));
}

PyObject* engine_pack_quantized(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  unsigned long long v[13];
  Form form;
  if (!numbers("pack_quantized", args, count, 13, 9, v) || !form_of(v + 6, &form)) return nullptr;
  const quantized::Plain from{static_cast<const std::uint8_t*>(pointer(v[0])), pointer(v[1]), pointer(v[2])};
  Engine& engine = Object::engine_of(self);
  const bool enough = without_gil([&] { engine.pack_quantized(form, from, v[4], v[5], pointer(v[3])); });
  return enough ? Py_NewRef(Py_None) : nullptr;
}

PyObject* engine_quantized_rows(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  unsigned long long v[13];
  Form form;
  if (!numbers("quantized_rows", args, count, 13, 9, v) || !form_of(v + 6, &form)) return nullptr;
  const auto* const ids = static_cast<const std::int64_t*>(pointer(v[0]));
  for (std::size_t i = 0; i < v[3]; ++i)
    if (ids[i] < 0 || static_cast<unsigned long long>(ids[i]) >= v[4])
      return PyErr_Format(PyExc_IndexError, "there are %llu rows, and not number %lld", v[4],
                          static_cast<long long>(ids[i]));
  Engine& engine = Object::engine_of(self);
  auto* const y = static_cast<float*>(pointer(v[2]));
  const bool enough = without_gil([&] { engine.quantized_rows(form, ids, pointer(v[1]), v[3], v[5], y); });
  return enough ? Py_NewRef(Py_None) : nullptr;
}

// Runs a linear layer without the GIL.
PyObject* run_linear(PyObject* self, const Problem& p, const void* x) {
  return without_gil([&] { Object::engine_of(self).linear(p, x); }) ? Py_NewRef(Py_None) : nullptr;
}

PyObject* engine_linear_quantized(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  unsigned long long v[15];
  Form form;
  if (!numbers("linear_quantized", args, count, 15, 4, v) || !form_of(v + 8, &form)) return nullptr;
  const auto at = [&](int i) { return pointer(v[i]); };
  return run_linear(self, {static_cast<Type>(v[4]), nullptr, at(1), at(2), at(3), v[5], v[6], v[7], 0, true, &form},
                    at(0));
}

PyObject* engine_linear(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  unsigned long long v[9];
  if (!numbers("linear", args, count, 9, 4, v)) return nullptr;
  const auto at = [&](int i) { return pointer(v[i]); };
  const auto type = static_cast<Type>(v[4]);
  const bool packed = !v[8];
  if (packed && !Object::engine_of(self).packed_bytes(type, v[6], v[7]))
    return PyErr_Format(PyExc_ValueError, "no weights of type %llu are packed here", v[4]);
  const Problem p{type, nullptr, at(1), at(2), at(3), v[5], v[6], v[7], v[8], packed};
  return run_linear(self, p, at(0));
}

PyObject* engine_quantized_products(PyObject* self, PyObject*) {
  const Engine& engine = Object::engine_of(self);
  const unsigned long long int8 = engine.int8_products, all = int8 + engine.float_products;
  return Py_BuildValue("KK", all, int8);
}

// What other native modules may do with an engine. The capsule does not keep it alive.
PyObject* engine_calls(PyObject* self, PyObject*) {
  return PyCapsule_New(&Object::engine_of(self).calls, Calls::kName, nullptr);
}

PyCFunction method(PyObject* (*of)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(of));
}

PyMethodDef engine_methods[] = {{"linear", method(engine_linear), METH_FASTCALL, nullptr},
                                {"pack", method(engine_pack), METH_FASTCALL, nullptr},
                                {"packed_bytes", method(engine_packed_bytes), METH_FASTCALL, nullptr},
                                {"quantized_bytes", method(engine_quantized_bytes), METH_FASTCALL, nullptr},
                                {"pack_quantized", method(engine_pack_quantized), METH_FASTCALL, nullptr},
                                {"linear_quantized", method(engine_linear_quantized), METH_FASTCALL, nullptr},
                                {"quantized_rows", method(engine_quantized_rows), METH_FASTCALL, nullptr},
                                {"quantized_products", engine_quantized_products, METH_NOARGS, nullptr},
                                {"calls", engine_calls, METH_NOARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};

int exec(PyObject* module) { return Object::add_to(module, "lamina.ops.gemm._gemm.Engine", engine_methods); }

PyMethodDef methods[] = {{"usable", Object::usable, METH_NOARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef_Slot slots[] = {{Py_mod_exec, reinterpret_cast<void*>(exec)}, {0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_gemm", nullptr, 0, methods, slots, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__gemm() { return PyModuleDef_Init(&definition); }
