// What the parts of lamina.netstack.host._netstack share. netstack/host/_netstack.pyi documents the module.
//
// Ownership: Memory owns a mapping. Every view and every call in progress holds a reference to it. So the mapping is
// freed with the last of them, whatever was closed before. The GIL guards Python's side of a channel.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "engine.h"
#include "module_types.h"

namespace lamina {

class Teller;

// A dataclass of Python with slots, made without a call of its __init__, which would take longer than all the rest.
struct Record {
  PyTypeObject* type;
  Py_ssize_t offsets[3];

  PyObject** field(PyObject* made, std::size_t i) const {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(made) + offsets[i]);
  }
};

struct State {
  Teller* teller;
  PyTypeObject *memory_type, *view_type, *channel_type, *rdma_end_type, *kernel_pair_type;
  PyObject *no_resource, *timeout, *peer_fault, *aborted;               // errors of lamina.netstack.contract.fabric
  Record slot, arrival;                                                 // its dataclasses
  PyObject *name_slots, *name_slot_bytes, *name_timeout_s;  // interned
};

using Number = unsigned long long;  // what the %llu of PyErr_Format and the K of Py_BuildValue take

template <class T>
T* allocate(PyTypeObject* type) {
  return reinterpret_cast<T*>(type->tp_alloc(type, 0));
}

struct Shape {
  std::uint64_t slots, slot_bytes;
};

// Of a Geometry object. False with an exception set.
bool read_geometry(State* state, PyObject* geometry, Shape* shape);
bool check_epoch(Number epoch);
std::uint64_t nanoseconds(double seconds);

// Creates the types of Memory and View. False with an exception set.
bool make_memory_types(State* state, PyObject* module);

// Maps `bytes` of `fd`, or of fresh memory where that is -1. Null with an exception set on failure.
PyObject* map_memory(State* state, int fd, std::uint64_t bytes);
std::uint8_t* memory_base(PyObject* memory);

// A memoryview of a part of `memory`.
PyObject* make_view(State* state, PyObject* memory, std::uint8_t* data, std::uint64_t bytes, bool readonly);

// Looks up class `type` of `module` and its fields, up to a null. False with an exception set.
bool find_record(PyObject* module, const char* type, const char* const (&fields)[3], Record* record);

// Takes over the values, also on failure; a null among them, with its exception, makes the result null.
template <std::size_t count>
PyObject* make_record(const Record& record, PyObject* const (&values)[count]) {
  bool whole = true;
  for (PyObject* value : values) whole = whole && value;
  PyObject* made = whole ? record.type->tp_alloc(record.type, 0) : nullptr;
  for (std::size_t i = 0; i < count; ++i) {
    if (made)
      *record.field(made, i) = values[i];
    else
      Py_XDECREF(values[i]);
  }
  return made;
}

// Takes over `engine` and, also on failure, the reference to `memory`; `outbound` and `inbound` are Geometry objects.
PyObject* make_channel(State* state, Engine* engine, PyObject* memory, PyObject* peer, PyObject* peer_name,
                       std::uint64_t epoch, PyObject* outbound, const Shape& out, PyObject* inbound, const Shape& in);

extern PyType_Spec channel_spec;

PyObject* bounce(PyObject* module, PyObject* args);  // native_bench.cpp
PyObject* flood(PyObject* module, PyObject* args);
bool add_device(PyObject* module);                   // native_device.cpp
bool add_ringer(PyObject* module);                   // native_ringer.cpp

}  // namespace lamina
