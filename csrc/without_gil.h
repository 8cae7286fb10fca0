// Work of native modules during which other threads of Python run. Included after Python.h.
#pragma once

#include <new>

namespace lamina {

// Does `work()` without the GIL. False with an exception where memory is short.
template <class Work>
bool without_gil(Work&& work) {
  bool enough = true;
  Py_BEGIN_ALLOW_THREADS;
  try {
    work();
  } catch (const std::bad_alloc&) {
    enough = false;
  }
  Py_END_ALLOW_THREADS;
  if (!enough) PyErr_NoMemory();
  return enough;
}

}  // namespace lamina
