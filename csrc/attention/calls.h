// How other native modules use the kernels of lamina.ops.attention. Included after Python.h.
#pragma once

#include "attention/attention.h"

namespace lamina::attention {

// A step's rows, and the tasks of one operator's attention over them.
struct Prepared {
  const Rows* rows;
  const Tasks* tasks;
};

// What the capsule `kName` of Kernels points to. It lives as long as they do.
struct Calls {
  static constexpr const char* kName = "lamina.ops.attention.calls";
  PyObject* kernels;  // borrowed
  void* engine;
  // Of a `Step` of the module, which must outlive the result. Needs the GIL; null rows with an exception.
  Prepared (*prepare)(PyObject* kernels, PyObject* step, bool stored, const Operator&, int threads);
  // Without the GIL; calls take turns. Of `call` everything but rows, tasks and what belongs to them. Throws
  // std::bad_alloc.
  void (*attend)(void* engine, Call call, Prepared, int threads);
  // As `attend`, for select with `choices` choices, and for a tally of all KV heads. A tally adds to `to` [kv_heads,
  // blocks], and returns its number of products of a query and a key.
  void (*select)(void* engine, const Selecting&, std::size_t choices, int threads);
  int64_t (*tally)(void* engine, const Tallying&, int64_t* to, int threads);
  // read_choices and make_tasks, for modules that are not linked with them.
  bool (*choices)(const int64_t* numbers, int64_t count, const int64_t* blocks, int64_t all, int64_t width,
                  std::vector<Choice>* to);
  Tasks (*tasks)(const Rows&, bool stored, const Operator&, int64_t threads);
};

}  // namespace lamina::attention
