// What the parts of lamina.ops.attention._attention share. Included after Python.h.
#pragma once

#include <algorithm>
#include <mutex>

#include "attention/calls.h"
#include "pool.h"

namespace lamina::attention {

// Work that makes up for waking a thread, in nanoseconds, and what a core does in one of them, about.
constexpr double kHelpNs = 60e3, kPairsPerNs = 30, kBytesPerNs = 15;

struct Engine {
  const Variant* variant;
  Dtype dtype;
  Stored stored;
  // No spins: calls are milliseconds apart. Spinning between two took 57 us more of a core, and no less time (two busy
  // cores, jobs of 70 us).
  Pool pool{1, 0};
  std::vector<Scratch> scratch;
  std::vector<float> parts;
  std::vector<std::atomic<int>> left;
  std::vector<Choosing> choosing;  // of each thread
  std::mutex busy;  // one call at a time
};

struct Kernels {
  PyObject_HEAD Engine* engine;
  Calls calls;
};

// Starts threads until there are ``wanted``, the caller's included; says how many there are, up to ``wanted``.
inline std::size_t threads_of(Pool& pool, std::size_t wanted) {
  try {
    pool.grow(wanted);
  } catch (const std::exception&) {
    // no more threads: those that exist do the work
  }
  return std::min(wanted, pool.size());
}

// As Calls says.
void select_all(Engine&, const Selecting&, std::size_t choices, int threads);
int64_t tally_all(Engine&, const Tallying&, int64_t* to, int threads);

// Of a lamina.ops.attention.Operator. False with an exception.
bool read_operator(PyObject* from, Operator* op);

PyObject* kernels_select(PyObject* kernels, PyObject* args);
PyObject* kernels_tally(PyObject* kernels, PyObject* args);

}  // namespace lamina::attention
