// Helpers that native modules share: they read Python's tables, and each other's capsules. Included after Python.h.
#pragma once

#include <cstring>
#include <new>

#include "reader.h"
#include "spans.h"

namespace lamina {

constexpr std::int64_t kMost = std::int64_t{1} << 40;  // of whatever a table counts

// An argument y* of 64-bit numbers.
struct Table {
  Py_buffer view{};

  ~Table() { PyBuffer_Release(&view); }

  // Whether `read(reader)` takes all numbers, and they make sense to it; else an exception is set.
  template <class Read>
  bool read(Read read) const {
    const auto* const numbers = static_cast<const std::int64_t*>(view.buf);
    Reader in{numbers, numbers + view.len / 8};
    read(in);
    if (!in.failed && in.at == in.end) return true;
    PyErr_Format(PyExc_ValueError, "number %zd of the table makes no sense", Py_ssize_t(in.at - numbers));
    return false;
  }
};

// The addresses that `count` numbers of Python are. False with an exception.
inline bool read_addresses(PyObject* const* numbers, Py_ssize_t count, std::vector<char*>* to) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    to->push_back(static_cast<char*>(PyLong_AsVoidPtr(numbers[i])));
    if (!to->back() && PyErr_Occurred()) return false;
  }
  return true;
}

// What the capsule of `object.calls()` points to; null with an exception.
template <class Calls>
Calls* calls_of(PyObject* object) {
  PyObject* const capsule = PyObject_CallMethod(object, "calls", nullptr);
  auto* const calls = capsule ? static_cast<Calls*>(PyCapsule_GetPointer(capsule, Calls::kName)) : nullptr;
  Py_XDECREF(capsule);
  return calls;
}

// `traces`: None = no spans; else a buffer, empty or a Tripwire, which the caller keeps. False with an exception.
inline bool open_spans(Spans& spans, PyObject* traces) {
  if (traces == Py_None) return true;
  Py_buffer view;
  if (PyObject_GetBuffer(traces, &view, PyBUF_SIMPLE)) return false;
  const bool good = !view.len || (view.len == sizeof(Tripwire) && !view.readonly);
  if (view.len && good) spans.tripwire = static_cast<Tripwire*>(view.buf);
  PyBuffer_Release(&view);
  spans.on = true;
  return good || PyErr_Format(PyExc_ValueError, "%zd bytes are no tripwire", view.len);
}

// The spans as bytes, which are taken away.
inline PyObject* spans_of(Spans& spans) {
  static_assert(sizeof(Span) == 6 * sizeof(std::int64_t));
  PyObject* bytes = PyBytes_FromStringAndSize(reinterpret_cast<const char*>(spans.all.data()),
                                              Py_ssize_t(spans.all.size() * sizeof(Span)));
  spans.all.clear();
  return bytes;
}

// What `f` gives; false with an exception where memory is short.
template <class F>
bool or_no_memory(F f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
    return false;
  }
}

template <class T>
T* pointer(std::int64_t address) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

}  // namespace lamina
