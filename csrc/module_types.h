// What native modules write alike of Python's objects. Included after Python.h.
#pragma once

#include <cstddef>
#include <new>

namespace lamina {

template <class F>
void* slot(F* function) {
  return reinterpret_cast<void*>(function);
}

template <class F>
PyCFunction method(F* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

inline void free_object(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// A Python object that owns a `T`, and up to `count` references to what that refers to.
template <class T, std::size_t count>
struct Holder {
  PyObject_HEAD T* value;
  PyObject* kept[count];

  static Holder* of(PyObject* object) { return reinterpret_cast<Holder*>(object); }

  void keep(std::size_t place, PyObject* object) { Py_XSETREF(kept[place], Py_NewRef(object)); }

  // A new one, whose value `fill(holder)` completes. Null with an exception, where that is false or memory is short.
  template <class Fill>
  static PyObject* make(PyTypeObject* type, Fill fill) {
    PyObject* const object = type->tp_alloc(type, 0);
    if (!object) return nullptr;
    try {
      of(object)->value = new T;
      if (fill(*of(object))) return object;
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
    }
    Py_DECREF(object);
    return nullptr;
  }

  static void dealloc(PyObject* object) {
    delete of(object)->value;
    for (PyObject* each : of(object)->kept) Py_XDECREF(each);
    free_object(object);
  }
};

// The state of a module: its types, in the order in which `add` was given them.
template <std::size_t count>
struct ModuleTypes {
  PyTypeObject* types[count];

  static PyTypeObject** of(PyObject* module) { return static_cast<ModuleTypes*>(PyModule_GetState(module))->types; }
  // Of the module that `type` is of.
  static PyTypeObject** of(PyTypeObject* type) { return static_cast<ModuleTypes*>(PyType_GetModuleState(type))->types; }
  // 0, or -1 with an exception.
  static int add(PyObject* module, PyType_Spec* const (&specs)[count]) {
    for (std::size_t i = 0; i < count; ++i) {
      PyObject* const type = PyType_FromModuleAndSpec(module, specs[i], nullptr);
      of(module)[i] = reinterpret_cast<PyTypeObject*>(type);
      if (!type || PyModule_AddType(module, of(module)[i])) return -1;
    }
    return 0;
  }
  static int traverse(PyObject* module, visitproc visit, void* arg) {
    for (std::size_t i = 0; i < count; ++i) Py_VISIT(of(module)[i]);
    return 0;
  }
  static int clear(PyObject* module) {
    for (std::size_t i = 0; i < count; ++i) Py_CLEAR(of(module)[i]);
    return 0;
  }
  static PyModuleDef definition(const char* doc, PyModuleDef_Slot* slots) {
    return {PyModuleDef_HEAD_INIT, "_native", doc, sizeof(ModuleTypes), nullptr, slots, traverse, clear, nullptr};
  }
};

}  // namespace lamina
