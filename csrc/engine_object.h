// An engine of threads as a Python object, `Engine(threads, variant)`. Included after Python.h.
#pragma once

#include <cstddef>
#include <exception>
#include <string>

namespace lamina {

// `Engine` is made from a number of threads and one of the first `count` variants of `variants()`, best first. If none is
// usable, `Engine::kLeast` names what the CPU lacks.
template <class Engine, auto variants, std::size_t count>
class EngineObject {
 public:
  static Engine& engine_of(PyObject* self) { return *reinterpret_cast<EngineObject*>(self)->engine_; }

  // Adds the type `name`, the module's own before it, to `module`. 0, or -1 with an exception.
  static int add_to(PyObject* module, const char* name, PyMethodDef* methods) {
    PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                           {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                           {Py_tp_methods, methods},
                           {0, nullptr}};
    PyType_Spec spec = {name, sizeof(EngineObject), 0, Py_TPFLAGS_DEFAULT, slots};
    PyObject* type = PyType_FromSpec(&spec);
    if (!type) return -1;
    const int status = PyModule_AddObjectRef(module, "Engine", type);
    Py_DECREF(type);
    return status;
  }

  // The names of the variants that this CPU can run.
  static PyObject* usable(PyObject*, PyObject*) {
    PyObject* names = PyList_New(0);
    for (std::size_t i = 0; names && i < count; ++i) {
      if (!variants()[i].usable) continue;
      PyObject* name = PyUnicode_FromString(variants()[i].name);
      if (!name || PyList_Append(names, name) < 0) Py_CLEAR(names);
      Py_XDECREF(name);
    }
    return names;
  }

 private:
  static PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
    Py_ssize_t threads;
    const char* name;
    if (!PyArg_ParseTuple(args, "ns", &threads, &name)) return nullptr;
    if (threads < 1 || threads > 1024)
      return PyErr_Format(PyExc_ValueError, "threads must lie in 1..1024, not %zd", threads);
    std::size_t i = 0;
    while (i < count && !(variants()[i].usable && (!*name || std::string(name) == variants()[i].name))) ++i;
    if (i == count) return PyErr_Format(PyExc_ValueError, "this CPU has no %s", *name ? name : Engine::kLeast);
    auto* self = reinterpret_cast<EngineObject*>(type->tp_alloc(type, 0));
    if (!self) return nullptr;
    try {
      self->engine_ = new Engine(static_cast<std::size_t>(threads), variants() + i);
    } catch (const std::exception& e) {
      Py_DECREF(self);
      return PyErr_Format(PyExc_RuntimeError, "cannot start %zd threads: %s", threads, e.what());
    }
    return reinterpret_cast<PyObject*>(self);
  }

  static void dealloc(PyObject* self) {
    Engine* engine = reinterpret_cast<EngineObject*>(self)->engine_;
    Py_BEGIN_ALLOW_THREADS;
    delete engine;
    Py_END_ALLOW_THREADS;
    PyTypeObject* type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
  }

  PyObject_HEAD Engine* engine_;
};

}  // namespace lamina
