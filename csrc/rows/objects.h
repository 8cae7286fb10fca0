// What the Python objects of lamina.rows._native have in common. Included behind Python.h.
#pragma once

#include "rows/table.h"

namespace lamina::rows {

struct ProgramObject {
  PyObject_HEAD Program* program;
  PyObject* engine;  // kept for its threads
};

// Adds the type Chain. 0, or -1 with an exception.
int add_chain(PyObject* module, PyTypeObject* program_type);

}  // namespace lamina::rows
