// lamina.workers.compute._compute: the pool of pool.h as a Python object. lamina/workers/compute/_compute.pyi documents
// it.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "attributes.h"
#include "compute/pool.h"
#include "module_types.h"
#include "tables.h"
#include "without_gil.h"

namespace {

using namespace lamina;
using namespace lamina::compute;

struct SendingPool : Pool {
  rows::Send send;
};

enum { kChannels, kTraces, kStep, kKept };
using PoolObject = Holder<SendingPool, kKept>;
using StepObject = Holder<Step, 1>;
using Types = ModuleTypes<2>;  // pool, step

SendingPool& pool_of(PyObject* object) { return *PoolObject::of(object)->value; }
Pool& pool_of(void* self) { return *static_cast<Pool*>(self); }

rows::Send sender(Pool* pool) {
  return {pool,
          [](void* self) {
            if (pool_of(self).step) return pool_of(self).enter();
            return PyErr_Format(PyExc_ValueError, "no step was selected"), false;
          },
          [](void* self) { return pool_of(self).leave(); },
          [](void* self, std::size_t layer, std::int64_t rows, const char* const* q, const std::size_t* row_bytes) {
            return pool_of(self).send(kQ, layer, rows, q, row_bytes);
          },
          [](void* self, std::size_t layer, std::int64_t rows, const char* const* kv, const std::size_t* row_bytes) {
            return pool_of(self).send(kKV, layer, rows, kv, row_bytes);
          }};
}

// Pool(channels, alike, timeout_s, traces)
PyObject* pool_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *channels, *traces;
  Table alike;
  double timeout_s;
  if (!PyArg_ParseTuple(args, "O!y*dO", &PyTuple_Type, &channels, &alike.view, &timeout_s, &traces)) return nullptr;
  return PoolObject::make(type, [&](PoolObject& self) {
    SendingPool& pool = *self.value;
    self.keep(kChannels, channels), self.keep(kTraces, traces);
    pool.send = sender(&pool), pool.timeout_s = timeout_s;
    if (!open_spans(pool.spans, traces)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(channels); ++i) {
      const auto* calls = calls_of<const ChannelCalls>(PyTuple_GET_ITEM(channels, i));
      if (!calls) return false;
      pool.links.push_back(calls);
    }
    return alike.read([&](Reader& in) {
      for (std::int64_t i = 0; in.at != in.end && !in.failed; ++i) pool.alike.push_back(std::size_t(in.next(0, i)));
    });
  });
}

void read_copies(MessageKind kind, std::vector<Copy>& copies, std::size_t bytes, std::int64_t all, Reader& in) {
  const std::int64_t tensors = kind == kQ ? 1 : kind == kKV ? 2 : 1 << 16;
  const std::int64_t count = in.next(0, 1 << 16);
  for (std::int64_t i = 0; i < count && !in.failed; ++i) {
    Copy each{};
    each.tensor = std::size_t(in.next(0, tensors - 1));
    for (std::size_t* x : {&each.row_bytes, &each.offset, &each.width, &each.at}) *x = std::size_t(in.next(0, kMost));
    each.all = in.next(0, 1);
    each.over = in.next(0, kind == kKV);
    if (!each.all) each.rows = in.list(0, kind == kO && each.tensor ? kMost : all - 1);  // others are partial
    const auto rows = __int128(each.all ? all : std::int64_t(each.rows.size()));
    if (each.offset + each.width > each.row_bytes || rows * each.width + each.at > bytes) in.failed = true;
    copies.push_back(std::move(each));
  }
}

void read_step(Step& step, Reader& in, const Pool& pool) {
  const std::size_t layers = pool.alike.size();
  step.pool = &pool;
  step.rows = in.next(0, kMost);
  step.shares.resize(layers);
  const std::int64_t forms = in.next(0, std::int64_t(layers));
  for (std::int64_t i = 0; i < forms; ++i) {
    const auto like = std::size_t(in.next(0, std::int64_t(layers) - 1));
    if (in.failed) return;
    step.shares[like].resize(pool.links.size());
    for (std::size_t l = 0; l < pool.links.size(); ++l) {
      Share& share = step.shares[like][l];
      for (const MessageKind kind : {kQ, kKV, kO}) {
        share.bytes[kind] = std::size_t(in.next(0, kMost));
        read_copies(kind, share.copies[kind], share.bytes[kind], step.rows, in);
        if (kind != kO && share.bytes[kind] > pool.links[l]->slot_bytes) in.failed = true;
      }
    }
  }
  for (const std::size_t like : pool.alike)
    if (step.shares[like].size() != pool.links.size()) in.failed = true;
}

// step(table, tags)
PyObject* pool_step(PyObject* object, PyObject* args) {
  Table table;
  const char* tags;
  Py_ssize_t tag_bytes;
  if (!PyArg_ParseTuple(args, "y*y#", &table.view, &tags, &tag_bytes)) return nullptr;
  return StepObject::make(Types::of(Py_TYPE(object))[1], [&](StepObject& self) {
    return table.read([&](Reader& in) { read_step(*self.value, in, pool_of(object)); }) &&
           self.value->tags.read(tags, tag_bytes);
  });
}

PyObject* pool_select(PyObject* object, PyObject* step) {
  if (Py_TYPE(step) != Types::of(Py_TYPE(object))[1]) return PyErr_Format(PyExc_TypeError, "a step is one of the pool");
  const Step* const chosen = StepObject::of(step)->value;
  if (chosen->pool != &pool_of(object)) return PyErr_Format(PyExc_ValueError, "a step of another pool");
  pool_of(object).step = chosen;
  PoolObject::of(object)->keep(kStep, step);
  Py_RETURN_NONE;
}

PyObject* pool_send(PyObject* object, PyObject*) {
  return PyCapsule_New(&pool_of(object).send, rows::Send::kName, nullptr);
}

// receive(layer, first, out, parts)
PyObject* pool_receive(PyObject* object, PyObject* args) {
  static const Name o("o"), lse("lse");
  Pool& pool = pool_of(object);
  Py_ssize_t layer, first;
  PyObject *out, *parts;
  if (!PyArg_ParseTuple(args, "nnOO!", &layer, &first, &out, &PyList_Type, &parts)) return nullptr;
  const Py_ssize_t rows = PyObject_Size(out);
  std::vector<char*> tensors{Attribute(out).address<char>()};
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parts); ++i)
    for (PyObject* name : {static_cast<PyObject*>(o), static_cast<PyObject*>(lse)})
      tensors.push_back(Attribute(PyList_GET_ITEM(parts, i))[name].address<char>());
  if (PyErr_Occurred()) return nullptr;
  if (!pool.step || layer < 0 || std::size_t(layer) >= pool.alike.size() || first < 0)
    return PyErr_Format(PyExc_ValueError, "layer %zd of %zu", layer, pool.alike.size());
  if (rows != pool.step->rows)
    return PyErr_Format(PyExc_ValueError, "%zd rows of a step of %lld", rows, (long long)pool.step->rows);
  for (const Share& share : pool.step->shares[pool.alike[std::size_t(layer)]])
    for (const Copy& each : share.copies[kO])
      if (each.tensor >= tensors.size()) return PyErr_Format(PyExc_ValueError, "%zu tensors", tensors.size());
  if (!pool.enter()) return nullptr;
  std::size_t came = 0;
  const bool enough = without_gil([&] { came = pool.receive(std::size_t(layer), std::size_t(first), tensors.data()); });
  return pool.leave() && enough ? PyLong_FromSize_t(came) : nullptr;
}

PyObject* pool_send_s(PyObject* object, PyObject*) {
  const Pool& pool = pool_of(object);
  return PyFloat_FromDouble(double(pool.send_ns) / 1e9);
}

PyObject* pool_spans(PyObject* object, PyObject*) { return spans_of(pool_of(object).spans); }

PyMethodDef pool_methods[] = {{"step", pool_step, METH_VARARGS, nullptr},
                              {"select", pool_select, METH_O, nullptr},
                              {"send", pool_send, METH_NOARGS, nullptr},
                              {"receive", pool_receive, METH_VARARGS, nullptr},
                              {"send_s", pool_send_s, METH_NOARGS, nullptr},
                              {"spans", pool_spans, METH_NOARGS, nullptr},
                              {nullptr, nullptr, 0, nullptr}};

PyType_Slot pool_slots[] = {{Py_tp_new, slot(pool_new)},
                            {Py_tp_dealloc, slot(PoolObject::dealloc)},
                            {Py_tp_methods, pool_methods},
                            {0, nullptr}};
PyType_Slot step_slots[] = {{Py_tp_dealloc, slot(StepObject::dealloc)}, {0, nullptr}};
PyType_Spec pool_spec = {"lamina.workers.compute._compute.Pool", sizeof(PoolObject), 0, Py_TPFLAGS_DEFAULT, pool_slots};
PyType_Spec step_spec = {"lamina.workers.compute._compute.StepMessages", sizeof(StepObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, step_slots};

int exec(PyObject* module) { return Types::add(module, {&pool_spec, &step_spec}); }

PyModuleDef_Slot slots[] = {{Py_mod_exec, slot(exec)}, {0, nullptr}};
PyModuleDef definition = Types::definition("Messages of a compute worker.", slots);

}  // namespace

PyMODINIT_FUNC PyInit__compute() { return PyModuleDef_Init(&definition); }
