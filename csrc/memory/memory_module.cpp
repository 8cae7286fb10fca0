// lamina.workers.memory._memory: rounds of loop.h as Python objects. lamina/workers/memory/_memory.pyi documents them.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <new>

#include "memory/step_tables.h"
#include "module_types.h"

namespace {

using namespace lamina;
using namespace lamina::memory_worker;

struct LoopObject {
  PyObject_HEAD Loop* loop;
  PyObject *kernels, *channels, *steps, *traces;  // kept, as the loop refers to them
};

struct StepObject {
  PyObject_HEAD Step* step;
  PyObject *prepared, *loop;
};

using Types = ModuleTypes<2>;  // loop, step

LoopObject* loop_of(PyObject* object) { return reinterpret_cast<LoopObject*>(object); }
StepObject* step_of(PyObject* object) { return reinterpret_cast<StepObject*>(object); }

PyObject* loop_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *kernels, *channels;
  Py_buffer table;
  double reserve_s;
  PyObject* traces;
  if (!PyArg_ParseTuple(args, "OO!y*dO", &kernels, &PyTuple_Type, &channels, &table, &reserve_s, &traces))
    return nullptr;
  auto* self = reinterpret_cast<LoopObject*>(type->tp_alloc(type, 0));
  bool good = self && (self->loop = new (std::nothrow) Loop);
  if (self && !good) PyErr_NoMemory();
  good = good && or_no_memory([&] {
           Loop& loop = *self->loop;
           self->kernels = Py_NewRef(kernels), self->channels = Py_NewRef(channels);
           self->traces = Py_NewRef(traces);
           loop.reserve_s = reserve_s;
           if (!open_spans(loop.spans, traces)) return false;
           if (!(loop.store.attention = calls_of<const attention::Calls>(kernels))) return false;
           for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(channels); ++i) {
             const auto* calls = calls_of<const ChannelCalls>(PyTuple_GET_ITEM(channels, i));
             if (!calls) return false;
             loop.links.push_back({calls});
           }
           Reader in = reader(table);
           read_store(loop.store, in);
           if (in.failed) return nonsense(in, table) != nullptr;
           return !loop.links.empty() || PyErr_Format(PyExc_ValueError, "a loop without channels");
         });
  PyBuffer_Release(&table);
  if (!good) Py_CLEAR(self);
  return reinterpret_cast<PyObject*>(self);
}

void loop_dealloc(PyObject* object) {
  LoopObject* self = loop_of(object);
  delete self->loop;
  for (PyObject* each : {self->kernels, self->channels, self->steps, self->traces}) Py_XDECREF(each);
  free_object(object);
}

// step(prepared, table, tags)
PyObject* loop_step(PyObject* object, PyObject* args) {
  const Loop& loop = *loop_of(object)->loop;
  PyObject* prepared;
  Py_buffer table;
  const char* tags;
  Py_ssize_t tag_bytes;
  if (!PyArg_ParseTuple(args, "O!y*y#", &PyTuple_Type, &prepared, &table, &tags, &tag_bytes)) return nullptr;
  auto* type = Types::of(Py_TYPE(object))[1];
  auto* self = reinterpret_cast<StepObject*>(type->tp_alloc(type, 0));
  bool good = self && (self->step = new (std::nothrow) Step);
  if (self && !good) PyErr_NoMemory();
  good = good && or_no_memory([&] {
           self->prepared = Py_NewRef(prepared), self->loop = Py_NewRef(object);
           Reader in = reader(table);
           read_step(*self->step, in, loop);
           if (in.failed) return nonsense(in, table) != nullptr;
           if (tag_bytes != kMessageKinds * Py_ssize_t(kKeyBytes))
             return PyErr_Format(PyExc_ValueError, "tags of %zd bytes", tag_bytes) != nullptr;
           self->step->tags = LayerTags(tags);
           return prepare(*self->step, loop.store, prepared);
         });
  PyBuffer_Release(&table);
  if (!good) Py_CLEAR(self);
  return reinterpret_cast<PyObject*>(self);
}

void step_dealloc(PyObject* object) {
  StepObject* self = step_of(object);
  delete self->step;
  Py_XDECREF(self->prepared);
  Py_XDECREF(self->loop);
  free_object(object);
}

PyObject* loop_begin(PyObject* object, PyObject* steps) {
  LoopObject* self = loop_of(object);
  auto* type = Types::of(Py_TYPE(object))[1];
  if (!PyTuple_Check(steps)) return PyErr_Format(PyExc_TypeError, "steps are a tuple");
  const bool good = or_no_memory([&] {
    std::vector<Step*> all;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); ++i) {
      PyObject* step = PyTuple_GET_ITEM(steps, i);
      if (Py_TYPE(step) != type || step_of(step)->loop != object)
        return PyErr_Format(PyExc_TypeError, "a step is one of this loop") != nullptr;
      all.push_back(step_of(step)->step);
    }
    self->loop->begin(std::move(all));
    return true;
  });
  if (!good) return nullptr;
  Py_XSETREF(self->steps, Py_NewRef(steps));
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
  Loop& loop = *loop_of(object)->loop;
  std::size_t entered = 0;
  while (entered < loop.links.size() && loop.links[entered].calls->enter(loop.links[entered].calls->channel)) ++entered;
  bool good = entered == loop.links.size();
  Result result{Outcome::kPause};
  while (good) {
    const std::uint64_t now = now_ns(), overdue = overdue_s > 0 ? deadline_in(overdue_s, now) : overdue_s < 0 ? 0 : now;
    Py_BEGIN_ALLOW_THREADS;
    try {
      result = loop.run(patience_s, overdue, std::size_t(limit));
    } catch (const std::bad_alloc&) {
      good = false;
    }
    Py_END_ALLOW_THREADS;
    if (!good) PyErr_NoMemory();
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
  const Loop& loop = *loop_of(object)->loop;
  return Py_BuildValue("ni", Py_ssize_t(loop.turn()), int(loop.waits_for()));
}

PyObject* loop_counts(PyObject* object, PyObject*) {
  Loop& loop = *loop_of(object)->loop;
  const Counts counts = loop.counts;
  loop.counts = {};
  const auto seconds = [](std::uint64_t ns) { return double(ns) / 1e9; };
  using Number = unsigned long long;
  return Py_BuildValue("KddddKK", Number(counts.turns), seconds(counts.attend_ns), seconds(counts.write_ns),
                       seconds(counts.score_ns), seconds(counts.wait_ns), Number(counts.received_bytes),
                       Number(counts.sent_bytes));
}

PyObject* loop_spans(PyObject* object, PyObject*) { return spans_of(loop_of(object)->loop->spans); }

PyMethodDef loop_methods[] = {{"step", loop_step, METH_VARARGS, nullptr},
                              {"begin", loop_begin, METH_O, nullptr},
                              {"run", loop_run, METH_VARARGS, nullptr},
                              {"at", loop_at, METH_NOARGS, nullptr},
                              {"counts", loop_counts, METH_NOARGS, nullptr},
                              {"spans", loop_spans, METH_NOARGS, nullptr},
                              {nullptr, nullptr, 0, nullptr}};

PyType_Slot loop_slots[] = {
    {Py_tp_new, slot(loop_new)}, {Py_tp_dealloc, slot(loop_dealloc)}, {Py_tp_methods, loop_methods}, {0, nullptr}};
PyType_Slot step_slots[] = {{Py_tp_dealloc, slot(step_dealloc)}, {0, nullptr}};
PyType_Spec loop_spec = {"lamina.workers.memory._memory.Loop", sizeof(LoopObject), 0, Py_TPFLAGS_DEFAULT, loop_slots};
PyType_Spec step_spec = {"lamina.workers.memory._memory.RoundStep", sizeof(StepObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, step_slots};

int exec(PyObject* module) { return Types::add(module, {&loop_spec, &step_spec}); }

PyModuleDef_Slot slots[] = {{Py_mod_exec, slot(exec)}, {0, nullptr}};
PyModuleDef definition = Types::definition("Rounds of a memory worker.", slots);

}  // namespace

PyMODINIT_FUNC PyInit__memory() { return PyModuleDef_Init(&definition); }
