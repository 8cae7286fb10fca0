// What the parts of lamina.netstack._native share. netstack/_native.pyi documents the module.
//
// Ownership: Memory owns a mapping; every view handed out and every call in progress holds a reference to it, so the
// mapping goes when the last of them does, whatever was closed before. Python's side of a channel is guarded by the
// GIL.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "engine.h"

namespace lamina {

class Teller;

struct State {
  Teller* teller;
  PyTypeObject *memory_type, *view_type, *channel_type;
  PyObject *no_resource, *timeout, *peer_fault, *aborted;               // errors of lamina.netstack.fabric
  PyObject *slot, *arrival, *region, *stats;                            // its dataclasses
  PyObject *name_data, *name_slots, *name_slot_bytes, *name_timeout_s;  // interned
};

using Number = unsigned long long;  // what the %llu of PyErr_Format and the K of Py_BuildValue take

template <class T>
T* allocate(PyTypeObject* type) {
  return reinterpret_cast<T*>(type->tp_alloc(type, 0));
}

inline void free_object(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

struct Shape {
  std::uint64_t slots, slot_bytes;
};

// Maps `bytes` of `fd`, or of fresh memory where that is -1. Null with an exception set on failure.
PyObject* map_memory(State* state, int fd, std::uint64_t bytes);
std::uint8_t* memory_base(PyObject* memory);

// A memoryview of a part of `memory`.
PyObject* make_view(State* state, PyObject* memory, std::uint8_t* data, std::uint64_t bytes, bool readonly);

// Takes over `engine` and, also on failure, the reference to `memory`; `outbound` and `inbound` are Geometry objects.
PyObject* make_channel(State* state, Engine* engine, PyObject* memory, PyObject* peer, std::uint64_t epoch,
                       PyObject* outbound, const Shape& out, PyObject* inbound, const Shape& in);

extern PyType_Spec channel_spec;

}  // namespace lamina
