// lamina.memory._native: rounds of loop.h as Python objects. lamina/memory/_native.pyi documents them.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <new>

#include "memory/loop.h"
#include "reader.h"

namespace {

using namespace lamina;
using namespace lamina::memory_worker;

constexpr std::int64_t kMost = std::int64_t{1} << 40;  // of whatever is counted

struct LoopObject {
  PyObject_HEAD Loop* loop;
  PyObject *kernels, *channels, *steps;  // kept, as the loop refers to them
};

struct StepObject {
  PyObject_HEAD Step* step;
  PyObject *prepared, *loop;
};

struct State {
  PyTypeObject *loop, *step;
};

LoopObject* loop_of(PyObject* object) { return reinterpret_cast<LoopObject*>(object); }
StepObject* step_of(PyObject* object) { return reinterpret_cast<StepObject*>(object); }

template <class T>
T* pointer(std::int64_t address) {
  return reinterpret_cast<T*>(static_cast<std::uintptr_t>(address));
}

template <class T>
T* from_capsule(PyObject* object, const char* name) {
  PyObject* const capsule = PyObject_CallMethod(object, "calls", nullptr);
  T* const calls = capsule ? static_cast<T*>(PyCapsule_GetPointer(capsule, name)) : nullptr;
  Py_XDECREF(capsule);
  return calls;
}

void read_store(Store& store, Reader& in) {
  store.threads = int(in.next(1, 1 << 10));
  store.item = std::size_t(in.next(1, 8));
  store.block_size = in.next(1, kMost);
  store.overlap = in.next(0, 1);
  store.num_blocks = in.list(0, kMost);
  const std::int64_t layers = in.next(1, 1 << 16);
  for (std::int64_t i = 0; i < layers && !in.failed; ++i) {
    Layer layer{};
    layer.like = std::size_t(in.next(0, i));
    const std::int64_t pieces = in.next(0, 1 << 16);
    for (std::int64_t j = 0; j < pieces && !in.failed; ++j) {
      Piece piece{};
      piece.group = std::size_t(in.next(0, std::int64_t(store.num_blocks.size()) - 1));
      auto& op = piece.op;
      for (std::int64_t* x : {&op.q_heads, &op.kv_heads, &op.qk_dim, &op.v_dim}) *x = in.next(1, 1 << 20);
      op.window = in.next(0, kMost);
      op.scale = float(in.real()), op.softcap = float(in.real());
      op.sinks = pointer<float>(in.next()), op.slopes = pointer<float>(in.next());
      piece.k = pointer<char>(in.next()), piece.v = pointer<char>(in.next());
      if (!in.failed && op.q_heads % op.kv_heads) in.failed = true;
      layer.pieces.push_back(piece);
    }
    if (!in.failed && store.layers.size() > layer.like && store.layers[layer.like].pieces.size() != layer.pieces.size())
      in.failed = true;
    store.layers.push_back(std::move(layer));
  }
  if (in.at != in.end) in.failed = true;
}

void read_places(Places& places, Reader& in, const Store& store, std::size_t group) {
  places.rows = in.list(0, kMost);
  places.blocks = in.list(0, store.num_blocks[group] - 1);
  places.offsets = in.list(0, store.block_size - 1);
  if (places.blocks.size() != places.rows.size() || places.offsets.size() != places.rows.size()) in.failed = true;
}

// Rows in a tensor, at most; what tensors begin behind.
struct Bounds {
  std::int64_t whole, other_q, other_kv;
};

// Whether the rows of each piece lie in the messages.
bool fits(const Store& store, const Step& step, const std::vector<Bounds>& bounds) {
  for (std::size_t i = 0; i < store.layers.size(); ++i) {
    const Layer& layer = store.layers[i];
    const Form& form = step.forms[layer.like];
    if (!form.there || form.pieces.size() != layer.pieces.size()) return false;
    for (std::size_t p = 0; p < layer.pieces.size(); ++p) {
      const Piece& piece = layer.pieces[p];
      const Parts& at = form.pieces[p].parts;
      const Bounds& rows = bounds[piece.group];
      const GroupRows& group = step.groups[piece.group];
      const auto within = [](std::size_t start, std::int64_t count, std::int64_t numbers, std::size_t item,
                             std::size_t end) {
        return !count || __int128(count) * numbers * std::int64_t(item) + std::int64_t(start) <= std::int64_t(end);
      };
      const auto& op = piece.op;
      const std::int64_t q = op.q_heads * op.qk_dim, k = op.kv_heads * op.qk_dim, v = op.kv_heads * op.v_dim;
      const auto results = std::int64_t(group.nodes.size() + group.fresh.size());
      const std::size_t item = store.item;
      const bool all =
          within(at.q, rows.whole, q, item, form.bytes[kQ]) &&
          within(at.other_q, rows.other_q, q, item, form.bytes[kQ]) &&
          within(at.k, rows.whole, k, item, form.bytes[kKV]) && within(at.v, rows.whole, v, item, form.bytes[kKV]) &&
          within(at.other_k, rows.other_kv, k, item, form.bytes[kKV]) &&
          within(at.other_v, rows.other_kv, v, item, form.bytes[kKV]) &&
          within(at.o, results, op.q_heads * op.v_dim, sizeof(float), form.partial_bytes) &&
          within(at.lse, results, op.q_heads, sizeof(float), form.partial_bytes) &&
          within(form.partial_bytes + at.final, std::int64_t(group.whole), op.q_heads * op.v_dim, item, form.bytes[kO]);
      if (!all) return false;
    }
  }
  return true;
}

// One behind the largest of the numbers.
std::int64_t behind(const Numbers& numbers) {
  return numbers.empty() ? 0 : *std::max_element(numbers.begin(), numbers.end()) + 1;
}

void read_step(Step& step, Reader& in, const Loop& loop) {
  const Store& store = loop.store;
  std::vector<Bounds> bounds;
  step.groups.resize(store.num_blocks.size());
  for (std::size_t g = 0; g < step.groups.size() && !in.failed; ++g) {
    GroupRows& rows = step.groups[g];
    rows.whole = std::size_t(in.next(0, kMost));
    rows.nodes = in.list(0, kMost), rows.fresh = in.list(0, kMost), rows.fresh_kv = in.list(0, kMost);
    read_places(rows.whole_places, in, store, g), read_places(rows.other_places, in, store, g);
    if (rows.fresh.size() != rows.fresh_kv.size()) in.failed = true;
    bounds.push_back({std::max(std::int64_t(rows.whole), behind(rows.whole_places.rows)),
                      std::max(behind(rows.nodes), behind(rows.fresh)),
                      std::max(behind(rows.fresh_kv), behind(rows.other_places.rows))});
  }
  step.forms.resize(store.layers.size());
  const std::int64_t forms = in.next(1, std::int64_t(step.forms.size()));
  for (std::int64_t i = 0; i < forms && !in.failed; ++i) {
    const auto like = std::size_t(in.next(0, std::int64_t(step.forms.size()) - 1));
    if (in.failed) break;
    Form& form = step.forms[like];
    form.there = true;
    for (auto& bytes : form.bytes) bytes = std::size_t(in.next(0, kMost));
    form.partial_bytes = std::size_t(in.next(0, std::int64_t(form.bytes[kO])));
    form.pieces.resize(store.layers[like].pieces.size());
    for (PieceForm& piece : form.pieces) {
      Parts& at = piece.parts;
      for (std::size_t* x : {&at.q, &at.other_q, &at.k, &at.v, &at.other_k, &at.other_v, &at.o, &at.lse, &at.final})
        *x = std::size_t(in.next(0, kMost));
    }
  }
  for (auto* links : {&step.sources, &step.replies})
    for (std::size_t i = 0; i < store.layers.size(); ++i)
      links->push_back(std::size_t(in.next(0, std::int64_t(loop.links.size()) - 1)));
  if (in.at != in.end) in.failed = true;
  if (!in.failed && !fits(store, step, bounds)) in.failed = true;
  for (std::size_t i = 0; i < store.layers.size() && !in.failed; ++i)
    if (step.forms[store.layers[i].like].bytes[kO] > loop.links[step.replies[i]].calls->slot_bytes) in.failed = true;
}

// The tasks of each piece. `prepared`: of each group, whole, nodes and fresh, or None. False with an exception.
bool prepare(Step& step, const Store& store, PyObject* prepared) {
  if (!PyList_Check(prepared) || PyList_GET_SIZE(prepared) != 3 * Py_ssize_t(step.groups.size()))
    return PyErr_Format(PyExc_ValueError, "three steps of attention for each group"), false;
  for (std::size_t i = 0; i < step.forms.size(); ++i) {
    if (!step.forms[i].there) continue;
    for (std::size_t p = 0; p < step.forms[i].pieces.size(); ++p) {
      const Piece& piece = store.layers[i].pieces[p];
      PieceForm& of = step.forms[i].pieces[p];
      const GroupRows& rows = step.groups[piece.group];
      const auto one = [&](Py_ssize_t which, std::size_t count, bool stored, attention::Prepared* to) {
        if (!count) return true;
        PyObject* const object = PyList_GET_ITEM(prepared, 3 * Py_ssize_t(piece.group) + which);
        *to = store.attention->prepare(store.attention->kernels, object, stored, piece.op, store.threads);
        if (!to->rows) return false;
        std::int64_t all = 0;
        for (std::int64_t s = 0; s < to->rows->sequences; ++s) all += to->rows->count[s];
        if (all == std::int64_t(count)) return true;
        return PyErr_Format(PyExc_ValueError, "%lld rows of attention where there are %zu", (long long)all, count),
               false;
      };
      if (!one(0, rows.whole, true, &of.whole_stored) || !one(0, rows.whole, false, &of.whole_fresh) ||
          !one(1, rows.nodes.size(), true, &of.nodes_stored) || !one(2, rows.fresh.size(), false, &of.fresh))
        return false;
    }
  }
  return true;
}

PyObject* nonsense(const Reader& in, const Py_buffer& table) {
  return PyErr_Format(PyExc_ValueError, "number %zd of the table makes no sense",
                      Py_ssize_t(in.at - static_cast<const std::int64_t*>(table.buf)));
}

Reader reader(const Py_buffer& table) {
  const auto* numbers = static_cast<const std::int64_t*>(table.buf);
  return {numbers, numbers + table.len / 8};
}

PyObject* loop_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *kernels, *channels;
  Py_buffer table;
  int traces;
  if (!PyArg_ParseTuple(args, "OO!y*p", &kernels, &PyTuple_Type, &channels, &table, &traces)) return nullptr;
  auto* self = reinterpret_cast<LoopObject*>(type->tp_alloc(type, 0));
  bool good = self && (self->loop = new (std::nothrow) Loop);
  if (self && !good) PyErr_NoMemory();
  if (good) {
    Loop& loop = *self->loop;
    self->kernels = Py_NewRef(kernels), self->channels = Py_NewRef(channels);
    loop.traces = traces;
    good = (loop.store.attention = from_capsule<const attention::Calls>(kernels, attention::Calls::kName));
    for (Py_ssize_t i = 0; good && i < PyTuple_GET_SIZE(channels); ++i) {
      const auto* calls = from_capsule<const ChannelCalls>(PyTuple_GET_ITEM(channels, i), ChannelCalls::kName);
      good = calls;
      loop.links.push_back({calls, {}, 0});
    }
    Reader in = reader(table);
    if (good) read_store(loop.store, in);
    if (good && in.failed) good = nonsense(in, table);
  }
  PyBuffer_Release(&table);
  if (!good) Py_CLEAR(self);
  return reinterpret_cast<PyObject*>(self);
}

void loop_dealloc(PyObject* object) {
  LoopObject* self = loop_of(object);
  delete self->loop;
  for (PyObject* each : {self->kernels, self->channels, self->steps}) Py_XDECREF(each);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

// step(prepared, table, tags)
PyObject* loop_step(PyObject* object, PyObject* args) {
  const Loop& loop = *loop_of(object)->loop;
  PyObject* prepared;
  Py_buffer table;
  const char* tags;
  Py_ssize_t tag_bytes;
  if (!PyArg_ParseTuple(args, "Oy*y#", &prepared, &table, &tags, &tag_bytes)) return nullptr;
  auto* type = static_cast<State*>(PyType_GetModuleState(Py_TYPE(object)))->step;
  auto* self = reinterpret_cast<StepObject*>(type->tp_alloc(type, 0));
  bool good = self && (self->step = new (std::nothrow) Step);
  if (self && !good) PyErr_NoMemory();
  if (good) {
    self->prepared = Py_NewRef(prepared), self->loop = Py_NewRef(object);
    Reader in = reader(table);
    read_step(*self->step, in, loop);
    if (in.failed) good = nonsense(in, table);
    if (good && tag_bytes != kKinds * Py_ssize_t(kKeyBytes))
      good = PyErr_Format(PyExc_ValueError, "tags of %zd bytes", tag_bytes);
    for (std::size_t kind = 0; good && kind < kKinds; ++kind)
      std::memcpy(self->step->tags[kind].data(), tags + kind * kKeyBytes, kKeyBytes);
    good = good && prepare(*self->step, loop.store, prepared);
  }
  PyBuffer_Release(&table);
  if (!good) Py_CLEAR(self);
  return reinterpret_cast<PyObject*>(self);
}

void step_dealloc(PyObject* object) {
  StepObject* self = step_of(object);
  delete self->step;
  Py_XDECREF(self->prepared);
  Py_XDECREF(self->loop);
  PyTypeObject* type = Py_TYPE(object);
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* loop_begin(PyObject* object, PyObject* steps) {
  LoopObject* self = loop_of(object);
  auto* type = static_cast<State*>(PyType_GetModuleState(Py_TYPE(object)))->step;
  if (!PyTuple_Check(steps)) return PyErr_Format(PyExc_TypeError, "steps are a tuple");
  std::vector<const Step*> all;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); ++i) {
    PyObject* step = PyTuple_GET_ITEM(steps, i);
    if (Py_TYPE(step) != type || step_of(step)->loop != object)
      return PyErr_Format(PyExc_TypeError, "a step is one of this loop");
    all.push_back(step_of(step)->step);
  }
  self->loop->begin(std::move(all));
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
      return calls.raise(calls.channel, Role::sender, status, 0.0), false;
  }
  return true;
}

// run(patience_s, overdue_s)
PyObject* loop_run(PyObject* object, PyObject* args) {
  double patience_s, overdue_s;
  if (!PyArg_ParseTuple(args, "dd", &patience_s, &overdue_s)) return nullptr;
  Loop& loop = *loop_of(object)->loop;
  std::size_t entered = 0;
  while (entered < loop.links.size() && loop.links[entered].calls->enter(loop.links[entered].calls->channel)) ++entered;
  bool good = entered == loop.links.size();
  Result result{Outcome::kPause};
  while (good) {
    const std::uint64_t now = now_ns(), deadline = patience_s > 0 ? now + std::uint64_t(patience_s * 1e9) : 0;
    const std::uint64_t overdue = overdue_s >= 0 ? now + std::uint64_t(overdue_s * 1e9) : 0;
    Py_BEGIN_ALLOW_THREADS;
    try {
      result = loop.run(deadline, overdue);
    } catch (const std::bad_alloc&) {
      good = false;
    }
    Py_END_ALLOW_THREADS;
    if (!good) PyErr_NoMemory();
    const ChannelCalls& calls = *loop.links[result.link].calls;
    if (good && result.outcome == Outcome::kOver) {
      good = false;
      calls.raise(calls.channel, result.role, result.status, 60.0);
    } else if (good && result.outcome == Outcome::kOther) {
      calls.unread(calls.channel, result.message);
    } else if (good && result.outcome == Outcome::kSentHalf) {
      if ((good = resume(loop, result.link))) continue;
    }
    break;
  }
  for (std::size_t i = 0; i < entered; ++i) {
    Link& link = loop.links[i];
    link.calls->leave(link.calls->channel, link.traffic, link.held);
    link.traffic = {};
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
  return Py_BuildValue("dddK", double(counts.attend_ns) / 1e9, double(counts.write_ns) / 1e9,
                       double(counts.wait_ns) / 1e9, (unsigned long long)counts.turns);
}

PyObject* loop_spans(PyObject* object, PyObject*) {
  Loop& loop = *loop_of(object)->loop;
  static_assert(sizeof(Span) == 5 * sizeof(std::int64_t));
  PyObject* bytes = PyBytes_FromStringAndSize(reinterpret_cast<const char*>(loop.spans.data()),
                                              Py_ssize_t(loop.spans.size() * sizeof(Span)));
  loop.spans.clear();
  return bytes;
}

PyMethodDef loop_methods[] = {{"step", loop_step, METH_VARARGS, nullptr},
                              {"begin", loop_begin, METH_O, nullptr},
                              {"run", loop_run, METH_VARARGS, nullptr},
                              {"at", loop_at, METH_NOARGS, nullptr},
                              {"counts", loop_counts, METH_NOARGS, nullptr},
                              {"spans", loop_spans, METH_NOARGS, nullptr},
                              {nullptr, nullptr, 0, nullptr}};

template <class F>
void* slot(F* function) {
  return reinterpret_cast<void*>(function);
}

PyType_Slot loop_slots[] = {
    {Py_tp_new, slot(loop_new)}, {Py_tp_dealloc, slot(loop_dealloc)}, {Py_tp_methods, loop_methods}, {0, nullptr}};
PyType_Slot step_slots[] = {{Py_tp_dealloc, slot(step_dealloc)}, {0, nullptr}};
PyType_Spec loop_spec = {"lamina.memory._native.Loop", sizeof(LoopObject), 0, Py_TPFLAGS_DEFAULT, loop_slots};
PyType_Spec step_spec = {"lamina.memory._native.Step", sizeof(StepObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, step_slots};

int exec(PyObject* module) {
  auto* state = static_cast<State*>(PyModule_GetState(module));
  const auto add = [&](PyType_Spec* spec) {
    auto* type = reinterpret_cast<PyTypeObject*>(PyType_FromModuleAndSpec(module, spec, nullptr));
    if (type && PyModule_AddType(module, type)) Py_CLEAR(type);
    return type;
  };
  return (state->loop = add(&loop_spec)) && (state->step = add(&step_spec)) ? 0 : -1;
}

int traverse(PyObject* module, visitproc visit, void* arg) {
  auto* state = static_cast<State*>(PyModule_GetState(module));
  Py_VISIT(state->loop);
  Py_VISIT(state->step);
  return 0;
}

int clear(PyObject* module) {
  auto* state = static_cast<State*>(PyModule_GetState(module));
  Py_CLEAR(state->loop);
  Py_CLEAR(state->step);
  return 0;
}

PyModuleDef_Slot slots[] = {{Py_mod_exec, slot(exec)}, {0, nullptr}};
PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", nullptr, sizeof(State), nullptr, slots, traverse, clear, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModuleDef_Init(&definition); }
