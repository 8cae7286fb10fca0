// What lamina.netstack.host._netstack has of ringer.h. On its own, as native_device.cpp is.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>
#include <system_error>
#include <utility>

#include "netstack/proxy/ringer.h"

namespace lamina {
namespace {

using mlx5::Ringer;

// Its calls wait for the thread, which may not run just then: so they leave the GIL, and hold what another thread may
// close meanwhile.
struct RingerObject {
  PyObject_HEAD std::shared_ptr<Ringer> ringer;
};

std::shared_ptr<Ringer> ringer_of(PyObject* object) {
  std::shared_ptr<Ringer> ringer = reinterpret_cast<RingerObject*>(object)->ringer;
  if (!ringer) PyErr_SetString(PyExc_ValueError, "the ringer was closed");
  return ringer;
}

PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* list;
  if (!PyArg_ParseTuple(args, "O!", &PyList_Type, &list)) return nullptr;
  std::vector<int> cores;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    cores.push_back(int(PyLong_AsLong(PyList_GET_ITEM(list, i))));
    if (PyErr_Occurred()) return nullptr;
  }
  PyObject* object = type->tp_alloc(type, 0);
  if (!object) return nullptr;
  auto* self = reinterpret_cast<RingerObject*>(object);
  new (&self->ringer) std::shared_ptr<Ringer>;
  try {
    self->ringer = std::make_shared<Ringer>(cores);
  } catch (const std::system_error& error) {
    PyErr_SetString(PyExc_OSError, error.what());
    Py_CLEAR(object);
  }
  return object;
}

PyObject* add(PyObject* object, PyObject* args) {
  unsigned long long mailbox, doorbell;
  unsigned alternate;
  std::shared_ptr<Ringer> ringer = ringer_of(object);
  if (!ringer || !PyArg_ParseTuple(args, "KKI", &mailbox, &doorbell, &alternate)) return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  ringer->add(reinterpret_cast<const mlx5::u64*>(mailbox), reinterpret_cast<mlx5::u64*>(doorbell), alternate);
  ringer.reset();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* remove(PyObject* object, PyObject* mailbox) {
  const unsigned long long at = PyLong_AsUnsignedLongLong(mailbox);
  std::shared_ptr<Ringer> ringer = PyErr_Occurred() ? nullptr : ringer_of(object);
  if (!ringer) return nullptr;
  Py_BEGIN_ALLOW_THREADS;
  ringer->remove(reinterpret_cast<const mlx5::u64*>(at));
  ringer.reset();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyObject* rung(PyObject* object, PyObject*) {
  const std::shared_ptr<Ringer> ringer = ringer_of(object);
  return ringer ? PyLong_FromUnsignedLongLong(ringer->rung()) : nullptr;
}

PyObject* close(PyObject* object, PyObject*) {
  std::shared_ptr<Ringer> ringer = std::move(reinterpret_cast<RingerObject*>(object)->ringer);
  Py_BEGIN_ALLOW_THREADS;
  ringer.reset();
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

void dealloc(PyObject* object) {
  reinterpret_cast<RingerObject*>(object)->ringer.~shared_ptr();
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyMethodDef methods[] = {{"add", add, METH_VARARGS, nullptr},
                         {"remove", remove, METH_O, nullptr},
                         {"rung", rung, METH_NOARGS, nullptr},
                         {"close", close, METH_NOARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                       {Py_tp_methods, methods},
                       {0, nullptr}};
PyType_Spec spec = {"lamina.netstack.host._netstack.Ringer", sizeof(RingerObject), 0, Py_TPFLAGS_DEFAULT, slots};

}  // namespace

bool add_ringer(PyObject* module) {
  PyObject* type = PyType_FromModuleAndSpec(module, &spec, nullptr);
  return type && !PyModule_AddObject(module, "Ringer", type);
}

}  // namespace lamina
