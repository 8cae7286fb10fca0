// lamina.workers.memory._memory: rounds of loop.h as Python objects. lamina/workers/memory/_memory.pyi documents them.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "memory/step_tables.h"
#include "module_types.h"
#include "without_gil.h"

namespace {

using namespace lamina;
using namespace lamina::memory_worker;

enum { kKernels, kChannels, kTraces, kSteps, kKeptByLoop };
enum { kPrepared, kLoop, kKeptByStep };
using LoopObject = Holder<Loop, kKeptByLoop>;
using StepObject = Holder<Step, kKeptByStep>;
using Types = ModuleTypes<2>;  // loop, step

Loop& loop_of(PyObject* object) { return *LoopObject::of(object)->value; }

PyObject* loop_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *kernels, *channels, *traces;
  Table table;
  double reserve_s;
  if (!PyArg_ParseTuple(args, "OO!y*dO", &kernels, &PyTuple_Type, &channels, &table.view, &reserve_s, &traces))
    return nullptr;
  return LoopObject::make(type, [&](LoopObject& self) {
    Loop& loop = *self.value;
    self.keep(kKernels, kernels), self.keep(kChannels, channels), self.keep(kTraces, traces);
    loop.reserve_s = reserve_s;
    if (!open_spans(loop.spans, traces)) return false;
    if (!(loop.store.attention = calls_of<const attention::Calls>(kernels))) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(channels); ++i) {
      const auto* calls = calls_of<const ChannelCalls>(PyTuple_GET_ITEM(channels, i));
      if (!calls) return false;
      loop.links.push_back({calls});
    }
    if (!table.read([&](Reader& in) { read_store(loop.store, in); })) return false;
    return !loop.links.empty() || PyErr_Format(PyExc_ValueError, "a loop without channels");
  });
}

// step(prepared, table, tags)
PyObject* loop_step(PyObject* object, PyObject* args) {
  const Loop& loop = loop_of(object);
  PyObject* prepared;
  Table table;
  const char* tags;
  Py_ssize_t tag_bytes;
  if (!PyArg_ParseTuple(args, "O!y*y#", &PyTuple_Type, &prepared, &table.view, &tags, &tag_bytes)) return nullptr;
  return StepObject::make(Types::of(Py_TYPE(object))[1], [&](StepObject& self) {
    Step& step = *self.value;
    self.keep(kPrepared, prepared), self.keep(kLoop, object);
    return table.read([&](Reader& in) { read_step(step, in, loop); }) && step.tags.read(tags, tag_bytes) &&
           prepare(step, loop.store, prepared);
  });
}

PyObject* loop_begin(PyObject* object, PyObject* steps) {
  auto* type = Types::of(Py_TYPE(object))[1];
  if (!PyTuple_Check(steps)) return PyErr_Format(PyExc_TypeError, "steps are a tuple");
  const bool good = or_no_memory([&] {
    std::vector<Step*> all;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); ++i) {
      PyObject* step = PyTuple_GET_ITEM(steps, i);
      if (Py_TYPE(step) != type || StepObject::of(step)->kept[kLoop] != object)
        return PyErr_Format(PyExc_TypeError, "a step is one of this loop") != nullptr;
      all.push_back(StepObject::of(step)->value);
    }
    loop_of(object).begin(std::move(all));
    return true;
  });
  if (!good) return nullptr;
  LoopObject::of(object)->keep(kSteps, steps);
  Py_RETURN_NONE;
}

// A put that a signal has interrupted goes on, unless Python wants to stop. False with an exception.
bool resume(Loop& loop, std::size_t link) {
  const ChannelCalls& calls = *loop.links[link].calls;
  for (Status status = Status::pending; status != Status::ready;) {
    if (PyErr_CheckSignals()) return calls.engine->give_up("a put was interrupted half-way"), false;
    Py_BEGIN_ALLOW_THREADS;
    status = loop.resume(link);
    Py_END_ALLOW_THREADS;
    if (status != Status::ready && status != Status::pending)
      return calls.raise(calls.channel, Role::sender, status, "put_signal", 0.0), false;
  }
  return true;
}

// run(patience_s, overdue_s, limit)
PyObject* loop_run(PyObject* object, PyObject* args) {
  double patience_s, overdue_s;
  Py_ssize_t limit;
  if (!PyArg_ParseTuple(args, "ddn", &patience_s, &overdue_s, &limit)) return nullptr;
  Loop& loop = loop_of(object);
  std::size_t entered = 0;
  while (entered < loop.links.size() && loop.links[entered].calls->enter(loop.links[entered].calls->channel)) ++entered;
  bool good = entered == loop.links.size();
  Result result{Outcome::kPause};
  while (good) {
    const std::uint64_t now = now_ns(), overdue = overdue_s > 0 ? deadline_in(overdue_s, now) : overdue_s < 0 ? 0 : now;
    good = without_gil([&] { result = loop.run(patience_s, overdue, std::size_t(limit)); });
    const ChannelCalls& calls = *loop.links[result.link].calls;
    if (good && result.outcome == Outcome::kOver) {
      good = false;
      calls.raise(calls.channel, result.role, result.status, result.operation, loop.reserve_s);
    } else if (good && result.outcome == Outcome::kOther) {
      calls.unread(calls.channel, result.message);
    } else if (good && result.outcome == Outcome::kSentHalf) {
      if ((good = resume(loop, result.link))) continue;
    }
    break;
  }
  for (std::size_t i = 0; i < entered; ++i) {
    Link& link = loop.links[i];
    link.calls->leave(link.calls->channel, link.held);
  }
  if (!good) return nullptr;
  return PyLong_FromLong(result.outcome == Outcome::kDone ? 0 : result.outcome == Outcome::kPause ? 1 : 2);
}

PyObject* loop_at(PyObject* object, PyObject*) {
  const Loop& loop = loop_of(object);
  return Py_BuildValue("ni", Py_ssize_t(loop.turn()), int(loop.waits_for()));
}

PyObject* loop_counts(PyObject* object, PyObject*) {
  Loop& loop = loop_of(object);
  const Counts counts = loop.counts;
  loop.counts = {};
  const auto seconds = [](std::uint64_t ns) { return double(ns) / 1e9; };
  using Number = unsigned long long;
  return Py_BuildValue("KddddKK", Number(counts.turns), seconds(counts.attend_ns), seconds(counts.write_ns),
                       seconds(counts.score_ns), seconds(counts.wait_ns), Number(counts.received_bytes),
                       Number(counts.sent_bytes));
}

PyObject* loop_spans(PyObject* object, PyObject*) { return spans_of(loop_of(object).spans); }

PyMethodDef loop_methods[] = {{"step", loop_step, METH_VARARGS, nullptr},
                              {"begin", loop_begin, METH_O, nullptr},
                              {"run", loop_run, METH_VARARGS, nullptr},
                              {"at", loop_at, METH_NOARGS, nullptr},
                              {"counts", loop_counts, METH_NOARGS, nullptr},
                              {"spans", loop_spans, METH_NOARGS, nullptr},
                              {nullptr, nullptr, 0, nullptr}};

PyType_Slot loop_slots[] = {{Py_tp_new, slot(loop_new)},
                            {Py_tp_dealloc, slot(LoopObject::dealloc)},
                            {Py_tp_methods, loop_methods},
                            {0, nullptr}};
PyType_Slot step_slots[] = {{Py_tp_dealloc, slot(StepObject::dealloc)}, {0, nullptr}};
PyType_Spec loop_spec = {"lamina.workers.memory._memory.Loop", sizeof(LoopObject), 0, Py_TPFLAGS_DEFAULT, loop_slots};
PyType_Spec step_spec = {"lamina.workers.memory._memory.RoundStep", sizeof(StepObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, step_slots};

int exec(PyObject* module) { return Types::add(module, {&loop_spec, &step_spec}); }

PyModuleDef_Slot slots[] = {{Py_mod_exec, slot(exec)}, {0, nullptr}};
PyModuleDef definition = Types::definition("Rounds of a memory worker.", slots);

}  // namespace

PyMODINIT_FUNC PyInit__memory() { return PyModuleDef_Init(&definition); }
