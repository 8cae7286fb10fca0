// Reads and checks Python's tables of a store and of a step. Included after Python.h.
#pragma once

#include "memory/loop.h"
#include "tables.h"

namespace lamina::memory_worker {

// `in.failed` where the numbers are none of lamina/workers/memory/layer_loop/native_loop.py.
void read_store(Store& store, Reader& in);
void read_step(Step& step, Reader& in, const Loop& loop);

// The tasks of each piece. `prepared`: of each group, whole, nodes, fresh and rest, or None. False with an exception.
bool prepare(Step& step, const Store& store, PyObject* prepared);

}  // namespace lamina::memory_worker
